"""Federated learning using a mixture of experts: Listo Zec et al. 2020 (https://arxiv.org/abs/2010.02056).

Clients may keep all their data, or a part of it, out of the federated training; every client then fine-tunes the global
model on all its data, and trains this specialist together with a gate. Four phases make the paper's tables: ``Local``,
:class:`OptInFedAvg`, :class:`~fedmoe_pl.algorithms.PersonalizedExpert` and :class:`SpecialistMixture`. Where paper and
official code differ (METHODS sections 7.4 and 9), the configurations in ``configs`` take the values marked with *:

===================  ==========================  ================================  ===================================
topic                paper                       official code                     here
===================  ==========================  ================================  ===================================
what is mixed        softmax outputs *           log-softmax; FMNIST: softmax      ``mixing`` of the model
                                                 without logarithm in the loss
FedAvg's result      best validated round *      last client at that validation    ``monitor: validation_loss``
best epoch           best epoch *                last epoch, by an alias           ``BestEpoch``
dropout              not mentioned               0.5 *                             ``dropout`` of ``TwoConvCNN``
FMNIST's widths      6, 16, 120, 84 *            6, 12, 84, 42                     ``conv2_channels``, ``hidden1``, ...
rate of fine-tuning  1e-5 *                      5e-5                              ``optimizer`` of its phase
validation           every 50 rounds *           every 40 rounds                   ``evaluate_every_n_rounds``
frozen dropout       not mentioned               active                            ``frozen_train_mode``
===================  ==========================  ================================  ===================================

The federated model is validated after aggregation and on all participants, in the code before it and on those of the
round. The code's kept model, that of one client, is not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Client, Update
from fedmoe_pl.algorithms.pfl_moe import PersonalizedExpert
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.seeds import derive_seed
from fedmoe_pl.trees import Patterns, Tree

_OPT_OUT = 7  # tells the stream that draws who opts out from those of clients, cohorts and splits


class OptInFedAvg(Algorithm):
    """FedAvg in which clients, or a share of every client's samples, do not take part.

    Clients that opt out receive the model and are personalized like the others. A round has as many clients as if all
    took part. With both fractions 0 it is FedAvg, to the bit.

    Args:
        shared: glob patterns of the parameters and buffers that are averaged, weighted by opt-in samples.
        opt_out_clients: share q of the clients that opt out with all their data, floor(q N) of them, drawn by the
            run's seed alone.
        opt_out_data: share of every client's training samples that it keeps out, rounded down, drawn by the run's seed
            and the client alone.

    Raises:
        MisconfigurationException: if a share is not at least 0 and below 1.
    """

    def __init__(self, shared: str | list[str] = "*", opt_out_clients: float = 0.0, opt_out_data: float = 0.0) -> None:
        for name, share in (("opt_out_clients", opt_out_clients), ("opt_out_data", opt_out_data)):
            if not 0 <= share < 1:
                raise MisconfigurationException(
                    f"algorithm.init_args.{name} is {share}, but must be at least 0 and below 1, so that somebody "
                    "takes part."
                )
        self.shared = Patterns(shared)
        self.opt_out_clients = opt_out_clients
        self.opt_out_data = opt_out_data

    def check(self, module: LightningModule) -> None:
        """Refuses patterns that match nothing."""
        self.shared.check(module.state_dict(), "algorithm.init_args.shared")

    def participants(self, clients: Sequence[int], seed: int) -> Sequence[int]:
        """The clients that opt in, in their order."""
        number = _floor(self.opt_out_clients, len(clients))
        rng = np.random.default_rng(derive_seed(seed, _OPT_OUT))
        out = set(rng.choice(len(clients), number, replace=False).tolist())
        return [client for place, client in enumerate(clients) if place not in out]

    def is_shared(self, name: str) -> bool:
        """Whether ``shared`` matches the name."""
        return name in self.shared

    def client_samples(self, client: Client) -> Tensor:
        """The samples that opt in."""
        number = _floor(self.opt_out_data, len(client.samples))
        return client.shuffled_samples()[number:] if number else client.samples

    def client_final(self, client: Client, const: dict[str, Any]) -> Update:
        """Weighs the update by the number of opt-in samples."""
        update = super().client_final(client, const)
        return Update(update.sent, len(self.client_samples(client)), update.kept)


class SpecialistMixture(Algorithm):
    """Every client trains its specialist and its gate together; the global expert stays as it is.

    Starts from a ``PersonalizedExpert`` phase, on all of the client's samples. Every client's gate starts anew.

    Args:
        frozen_train_mode: keep the global expert in train mode (dropout active), as in the official code.
    """

    federated = False

    def __init__(self, frozen_train_mode: bool = False) -> None:
        self.frozen_train_mode = frozen_train_mode

    def follows(self, earlier: Algorithm) -> bool:
        """Starts from the specialists that were fine-tuned on all samples."""
        return isinstance(earlier, PersonalizedExpert) and not earlier.gate_fraction

    def check(self, module: LightningModule) -> None:
        """Refuses a module without a local expert and a gate."""
        if not (isinstance(module, MixtureOfExperts) and hasattr(module, "local_expert")):
            raise MisconfigurationException(
                f"model is a {type(module).__name__}, but SpecialistMixture trains `local_expert` and `gate` of a "
                "MixtureOfExperts, such as PersonalizedMoE."
            )

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """The specialist and the gate."""
        return name.startswith(("local_expert.", "gate."))

    def client_init(self, client: Client, sent: Tree) -> dict[str, Any]:
        """Draws the client's own initial gate before the first round."""
        const = super().client_init(client, sent)
        if client.round == 0:
            client.module.gate.reset_parameters()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        return const


def _floor(share: float, number: int) -> int:
    return min(int(share * number + 1e-9), number - 1)  # 0.29 * 100 is 28.999999999999996
