"""pFedMoE: Yi, Yu, Shi, Wang, Liu, 2024, Algorithm 1 (https://arxiv.org/abs/2402.01350).

FedAvg averages a small extractor that all clients have. A large extractor, the header and the gate never leave their
client. All are trained at the same time, with one loss. No official code is known. Where the paper is unclear, other
repositories of its authors were the guide:

===================  ==========================  ===============================  ====================================
topic                paper                       authors' other code              here
===================  ==========================  ===============================  ====================================
weights              n_k / n                     all of a client's samples        its training samples
evaluated extractor  not said                    own copy, before aggregation     ``eval_extractor``
evaluated clients    all                         those of the round               all; ``monitor`` for the best round
optimizer            SGD                         one for all clients, with the    a new one for every client and round
                                                 momentum of the client before
gradient clipping    not mentioned               norm 50, of each module          ``trainer.gradient_clip_val: 50``, of
                                                                                  all parameters together
gate learning rate   separate                    the same as the rest             ``gate_lr`` of ``RepresentationMoE``
gate hidden width    unknown                     -                                ``hidden`` of ``SwitchNormGate``, 50
===================  ==========================  ===============================  ====================================

Standalone is ``Local`` with ``LocalOnly``; LG-FedAvg is ``FedAvg(shared="header.*")`` with the same gate.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms.algorithm import Algorithm, Client, Update
from fedmoe_pl.trees import Tree, load_tree

EvaluatedExtractor = Literal["own", "global"]


class PFedMoE(Algorithm):
    """FedAvg of the shared extractor; each client also keeps the copy that it trained last.

    The client's model uses that copy, because its local parts were trained together with it. The next training starts
    with the tensors that the server sends. So does the model of a client that has not been trained.

    Args:
        shared: glob patterns of the parameters and buffers that are averaged, weighted by the clients' numbers of
            samples.
        eval_extractor: ``own`` evaluates a client with its own copy of the shared tensors; ``global`` with the
            server's, as in ``FedAvg(shared)``.

    Raises:
        MisconfigurationException: if ``eval_extractor`` is neither of these.
    """

    def __init__(
        self, shared: str | list[str] = "shared_extractor.*", eval_extractor: EvaluatedExtractor = "own"
    ) -> None:
        if eval_extractor not in get_args(EvaluatedExtractor):
            raise MisconfigurationException(
                f"PFedMoE: eval_extractor is '{eval_extractor}', but must be 'own' or 'global'."
            )
        super().__init__(shared)
        self.eval_extractor = eval_extractor

    @property
    def moment(self) -> str:
        """After local training for a client's own copy, which has not been aggregated."""
        return "after local training" if self.eval_extractor == "own" else super().moment

    def client_init(self, client: Client, sent: Tree) -> dict[str, Any]:
        """Algorithm 1, line 4: the server's tensors replace the client's own copy."""
        load_tree(client.module, {**client.kept, **sent})
        return {}

    def client_final(self, client: Client, const: dict[str, Any]) -> Update:
        """Also keeps a copy of the sent tensors, if they are to be evaluated."""
        update = super().client_final(client, const)
        own_copy = update.sent if self.eval_extractor == "own" else {}
        return Update(update.sent, update.weight, {**update.kept, **own_copy})
