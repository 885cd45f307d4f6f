"""Federated learning using a mixture of experts: Listo Zec et al. 2020 (https://arxiv.org/abs/2010.02056).

Clients may keep all or part of their data out of the federated training. Every client then fine-tunes the global model
on all its data, and trains this specialist together with a gate. The paper's tables come from four phases: ``Local``,
:class:`OptInFedAvg`, :class:`~fedmoe_pl.algorithms.FineTuning` and :class:`SpecialistMixture`. Where the paper
and the official code differ, an asterisk marks what the configurations in ``configs`` use:

===================  ==========================  ================================  ===================================
topic                paper                       official code                     here
===================  ==========================  ================================  ===================================
what is mixed        softmax outputs *           log-softmax; FMNIST: softmax      ``mixing`` of the model
                                                 without logarithm in the loss
FedAvg's result      best validated round *      last client at that validation    ``select.monitor``
early stopping       best epoch *                last epoch, by mistake            ``BestEpoch``
its checks           not mentioned               after epochs 1, 6, 11, ...        ``check_val_every_n_epoch``, after
                                                                                   epochs 5, 10, 15, ... *
dropout              not mentioned               0.5 *                             ``dropout`` of ``TwoConvCNN``
FMNIST's widths      6, 16, 120, 84 *            6, 12, 84, 42                     ``conv2_channels``, ``hidden1``, ...
rate of fine-tuning  1e-5 *                      5e-5                              ``optimizer`` of its phase
rates, AG News       5e-4, fine-tuning and       5e-5, mixture 1e-6                ``optimizer``
                     mixture 1e-6 *
validation           every 50 rounds *           every 40 rounds, AG News 50       ``evaluate.every_n_rounds``
frozen dropout       not mentioned               active                            ``frozen_train_mode``
===================  ==========================  ================================  ===================================

Here the federated model is validated after aggregation, on all participants, and a copy of it is kept. The official
code validates the model that the round began with, on the clients of the round, and keeps the weights of the client
that it trained last; that is not offered here.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedmoe_pl.algorithms.algorithm import Algorithm, Parts
from fedmoe_pl.algorithms.consent import OptOut
from fedmoe_pl.algorithms.pfl_moe import missing_expert, missing_local_expert
from fedmoe_pl.checks import check_number


class OptInFedAvg(Algorithm):
    """FedAvg in which some clients, or a share of every client's samples, do not take part.

    Clients that opt out receive the model and are personalized like the others. A round has as many clients as if all
    took part. If both shares are 0, the results are those of FedAvg, bit for bit.

    Training and validation samples that opt out influence nothing that leaves a client: neither its model, nor the
    mean and standard deviation of images or the vocabulary, nor the round that ``select`` chooses. Test samples
    never opt out; a ``select.monitor`` on them selects on test data.

    Args:
        shared: glob patterns of the parameters and buffers that are averaged, weighted by the numbers of samples that
            opt in.
        opt_out_clients: share q of the clients that opt out with all their data: floor(q N) of N clients. The draw
            depends on the run's seed only.
        opt_out_data: share of its training samples, and of its validation samples, that every client keeps out; both
            numbers are rounded down. The draws depend on the run's seed and the client only.
    """

    def __init__(self, shared: str | list[str] = "*", opt_out_clients: float = 0.0, opt_out_data: float = 0.0) -> None:
        check_number(self, "opt_out_clients", opt_out_clients, least=0, below=1)
        check_number(self, "opt_out_data", opt_out_data, least=0, below=1)
        super().__init__(shared)
        self.opt_out = OptOut(opt_out_clients, opt_out_data)


class SpecialistMixture(Algorithm):
    """Every client trains its specialist and its gate together; the global expert is frozen.

    It starts from a ``FineTuning`` phase on all of the client's samples. Every client draws a new gate.

    Args:
        frozen_train_mode: whether the global expert stays in train mode, with active dropout, as in the official code.
    """

    federated = False
    parts = Parts(needed=("local_expert",), new_gate=True)

    def __init__(self, frozen_train_mode: bool = False) -> None:
        super().__init__()
        self.frozen_train_mode = frozen_train_mode

    def missing_start(self, earlier: Sequence[Algorithm], part: str = "") -> str:
        """The specialists that were fine-tuned on all samples; as a part, any, which go on to learn from them."""
        return missing_local_expert(earlier) if part else missing_expert(earlier, 0)

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """The specialist and the gate."""
        return name.startswith(("local_expert.", "gate."))
