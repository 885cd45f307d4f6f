"""PM-MoE: Feng et al., WWW 2025 (https://arxiv.org/abs/2502.00354).

Stage 1 is any method that makes private classifiers. Stage 2 is here:

==================  ========================================================  =====================================
topic               official code                                             here
==================  ========================================================  =====================================
experts             private heads, extractors or mean vectors, whatever the   private classifiers, on the client's
                    base method has                                           own features
denoising           absent; in the paper, experts are left out by energy      absent
result              largest mean accuracy after any client's tuning or        after the last epoch
                    before the first
==================  ========================================================  =====================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Algorithm, Messages, Parts
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.shared.parts import trains
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models.mixtures.pooled import PooledMoE
from fedmoe_pl.trees import Tree, subtree, with_prefix

_CLASSIFIER = "local_expert.classifier."


class PMMoE(Algorithm):
    """Stage 2 of PM-MoE: each client's gate learns to weigh the frozen classifiers of all clients.

    It starts from any phase in which clients kept ``local_expert.classifier.*``, such as FedPer, and needs the model
    ``PooledMoE``. Clients send their classifiers once, and the server sends all of them to
    each client. Nothing is aggregated, so that one round is enough: a further one sends the pool again. Every client
    draws a new gate. Newcomers receive the pool and train a gate; their own classifiers are not in it.
    """

    needs = ("all_clients", "every_client")
    parts = Parts(needed=("local_expert",), new_gate=True)
    messages = Messages(combined=False, request=(_CLASSIFIER,))  # the server only hands the classifiers on

    def __init__(self) -> None:
        super().__init__(shared=[], trainable="gate.*")

    def missing_start(self, earlier: Sequence[Algorithm], part: str = "") -> str:
        """Classifiers that clients trained and kept."""
        kept = (trains(other, _CLASSIFIER) and not other.is_shared(f"{_CLASSIFIER}any") for other in earlier)
        return "" if any(kept) else f"a phase that trains {_CLASSIFIER}* and does not share it"

    def server_init(self, module: LightningModule) -> Tree:
        """Nothing before ``server_begin``; refuses other models than ``PooledMoE``."""
        if not isinstance(module, PooledMoE):
            raise InvalidArgumentError(self, "model", module, "a PooledMoE")
        return super().server_init(module)

    def server_begin(self, server: Tree, clients: Iterable[Client]) -> Tree:
        """The pool: the classifier of each client; refused if no client has one of its own."""
        pool, is_trained = Tree(), False
        for client in clients:
            classifier = subtree({**client.module.state_dict(), **client.state}, _CLASSIFIER)
            copied = {name: tensor.detach().clone() for name, tensor in classifier.items()}
            pool |= with_prefix(copied, f"pool.{client.id}.")
            is_trained = is_trained or bool(subtree(client.state, _CLASSIFIER))
        if not is_trained:
            raise MisconfigurationException(
                f"PMMoE: no client kept {_CLASSIFIER}*; `start` must be a phase that trains it and does not share it."
            )
        return pool
