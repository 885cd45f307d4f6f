"""pFedMoE: Yi, Yu, Shi, Wang, Liu, 2024, Algorithm 1 (https://arxiv.org/abs/2402.01350).

FedAvg of a small extractor that all clients have; a large extractor, the header and the gate never leave their client.
All of them are trained at the same time, by one loss. There is no official code; what the paper leaves open follows the
authors' other repositories (METHODS sections 7.2 and 9):

===================  ==========================  ===============================  ====================================
topic                paper                       authors' other code              here
===================  ==========================  ===============================  ====================================
weights              n_k / n                     all of a client's samples        its training samples
evaluated extractor  not said                    own copy, before aggregation     ``eval_extractor``
evaluated clients    all                         those of the round               all; ``monitor`` for the best round
optimizer            SGD                         one for all clients, momentum    anew for every client and round
                                                 leaks from client to client
gradient clipping    not mentioned               norm 50, of each module          ``trainer.gradient_clip_val: 50``, of
                                                                                  all parameters together
gate learning rate   one of its own              the same                         ``gate_lr`` of ``RepresentationMoE``
gate hidden width    lost                        -                                ``hidden`` of ``SwitchNormGate``, 50
===================  ==========================  ===============================  ====================================

Standalone is ``Local`` with ``ConstantGate(0)``; LG-FedAvg is ``FedAvg(shared="header.*")`` with the same gate.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Algorithm, Client, Update
from fedmoe_pl.trees import Patterns, Tree, load_tree

EvaluatedExtractor = Literal["own", "global"]


class PFedMoE(Algorithm):
    """FedAvg of the shared extractor, of which each client also keeps the copy that it has trained last.

    That copy belongs to the model that the client uses, beside the local parts that were trained with it; training goes
    on from what the server sends. A client that was never trained uses the server's.

    Args:
        shared: glob patterns of the parameters and buffers that are averaged, by the clients' numbers of samples.
        eval_extractor: ``own`` evaluates a client with its last trained copy of what is shared, ``global`` with the
            server's, which is then ``FedAvg(shared)``.

    Raises:
        MisconfigurationException: if ``eval_extractor`` is neither.
    """

    def __init__(
        self, shared: str | list[str] = "shared_extractor.*", eval_extractor: EvaluatedExtractor = "own"
    ) -> None:
        if eval_extractor not in get_args(EvaluatedExtractor):
            raise MisconfigurationException(
                f"algorithm.init_args.eval_extractor is '{eval_extractor}', but must be 'own' or 'global'."
            )
        self.shared = Patterns(shared)
        self.eval_extractor = eval_extractor

    @property
    def moment(self) -> str:
        """``own`` copies are those of before the aggregation."""
        return "after local training" if self.eval_extractor == "own" else super().moment

    def check(self, module: LightningModule) -> None:
        """Refuses patterns that match nothing."""
        self.shared.check(module.state_dict(), "algorithm.init_args.shared")

    def is_shared(self, name: str) -> bool:
        """Whether ``shared`` matches the name."""
        return name in self.shared

    def client_init(self, client: Client, sent: Tree) -> dict[str, Any]:
        """Algorithm 1, line 4: what was sent takes the place of the client's own copy."""
        load_tree(client.module, {**client.kept, **sent})
        return {}

    def client_final(self, client: Client, const: dict[str, Any]) -> Update:
        """Keeps a copy of what is sent, too, where it is evaluated."""
        update = super().client_final(client, const)
        own = update.sent if self.eval_extractor == "own" else {}
        return Update(update.sent, update.weight, {**update.kept, **own})
