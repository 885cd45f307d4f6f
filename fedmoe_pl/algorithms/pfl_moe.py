"""PFL-MoE: Guo, Mei, Xiong, Wang, APWeb-WAIM 2021, Algorithms 1 and 2 (https://arxiv.org/abs/2012.15589).

Both halves of the method follow a federated phase and run on every client once, alone. Where the paper and the official
code differ (METHODS section 7.1), the configurations in ``configs`` follow the code, with these arguments:

==================  =======================  ===========================  ==========================================
topic               paper                    official code                here
==================  =======================  ===========================  ==========================================
gate data           "divide"                 1/4 gate, 3/4 expert         ``gate_fraction=0.25``
gate optimizer      SGD, 0.001               Adam, 0.001, decay 5e-4      ``optimizer`` of the gate's phase
schedule            expert, gate by turns    expert to its end, gate      ``interleaved``
FedAvg weights      uniform                  uniform                      ``FedAvg(weighting="uniform")``
augmentation        not mentioned            crop and flip, always        ``augmentation`` of the data
Local               300 epochs, SGD or Adam  Adam                         ``optimizer`` of Local's phase
gate's input        defined by the method    flags swapped in README      ``LinearGate`` is MF, ``FeatureGate`` is MFE
frozen dropout      not mentioned            active                       ``frozen_train_mode``
FedAvg's round      best on the test set     best on the test set         ``monitor: global_test`` of FedAvg's phase
PFL-FB's data       not mentioned            3/4                          ``gate_fraction`` of ``PersonalizedExpert``
==================  =======================  ===========================  ==========================================
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Client
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.trees import Patterns, Tree


class PersonalizedExpert(Algorithm):
    """Stage 2: the local expert starts as a copy of the global one and is fine-tuned: PFL-FT, or PFL-FB in part.

    Args:
        trainable: glob patterns of the parameters that are trained: ``local_expert.*`` is PFL-FT,
            ``local_expert.classifier.*`` is PFL-FB.
        gate_fraction: share of the client's samples that is left for the gate; 0 trains on all of them.
        frozen_train_mode: keep frozen modules in train mode.

    Raises:
        MisconfigurationException: if ``gate_fraction`` is not at least 0 and below 1.
    """

    federated = False

    def __init__(
        self,
        trainable: str | list[str] = "local_expert.*",
        gate_fraction: float = 0.0,
        frozen_train_mode: bool = False,
    ) -> None:
        _check_fraction(gate_fraction, lowest=0)
        self.trainable = Patterns(trainable)
        self.gate_fraction = gate_fraction
        self.frozen_train_mode = frozen_train_mode

    def follows(self, earlier: Algorithm) -> bool:
        """Starts from the federated model."""
        return earlier.federated

    def check(self, module: LightningModule) -> None:
        """Refuses a module without two experts of one architecture, and patterns that match nothing."""
        _copy_of_global_expert(module)
        self.trainable.check(module.state_dict(), "algorithm.init_args.trainable")

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """Whether ``trainable`` matches the name."""
        return name in self.trainable

    def server_init(self, module: LightningModule) -> Tree:
        """Algorithm 1, line 2: every local expert starts as the global one."""
        return _copy_of_global_expert(module)

    def client_loss(
        self, module: LightningModule, batch: Any, const: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of the local expert alone, whatever the gate (Algorithm 2, line 7)."""
        return _local_expert_loss(module, batch)

    def client_samples(self, client: Client) -> Tensor:
        """The samples that are not the gate's."""
        return _split(client, self.gate_fraction)[1] if self.gate_fraction else client.samples


class PFLMoE(Algorithm):
    """Stage 3: the gate learns to weigh the frozen experts: PFL-MF with ``LinearGate``, PFL-MFE with ``FeatureGate``.

    Starts from a ``PersonalizedExpert`` phase with the same ``gate_fraction``. Every client's gate starts anew.

    Args:
        gate_fraction: share of the client's samples that trains the gate, from the same split as the expert's.
        interleaved: the paper's schedule in place of the code's: the phase starts from the federated one itself, even
            rounds train the local expert on its samples, odd rounds the gate on its own. Use as many ``rounds`` as
            the two have epochs together, with ``max_epochs: 1``. One optimizer serves both and starts anew in every
            round, which is the paper's plain SGD; momentum would not last from one epoch to the next.
        trainable: glob patterns of the local expert's trained parameters, where ``interleaved``.
        frozen_train_mode: keep frozen modules in train mode.

    Raises:
        MisconfigurationException: if ``gate_fraction`` is not between 0 and 1.
    """

    federated = False

    def __init__(
        self,
        gate_fraction: float = 0.25,
        interleaved: bool = False,
        trainable: str | list[str] = "local_expert.classifier.*",
        frozen_train_mode: bool = False,
    ) -> None:
        _check_fraction(gate_fraction, lowest=1e-9)
        self.gate_fraction = gate_fraction
        self.interleaved = interleaved
        self.trainable = Patterns(trainable)
        self.frozen_train_mode = frozen_train_mode

    def follows(self, earlier: Algorithm) -> bool:
        """Starts from the personalized experts, where interleaved from the federated model."""
        if self.interleaved:
            return earlier.federated
        return isinstance(earlier, PersonalizedExpert) and earlier.gate_fraction == self.gate_fraction

    def check(self, module: LightningModule) -> None:
        """Refuses a module without two experts of one architecture, and patterns that match nothing."""
        _copy_of_global_expert(module)
        if self.interleaved:
            self.trainable.check(module.state_dict(), "algorithm.init_args.trainable")

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """The gate; in even rounds of the interleaved schedule, the local expert."""
        return name in self.trainable if self._trains_expert(round) else name.startswith("gate.")

    def server_init(self, module: LightningModule) -> Tree:
        """Algorithm 1, line 2, where the schedule is interleaved; else the expert's phase has done it."""
        return _copy_of_global_expert(module) if self.interleaved else {}

    def client_samples(self, client: Client) -> Tensor:
        """The gate's samples, or the expert's in its turn."""
        gate_samples, expert_samples = _split(client, self.gate_fraction)
        return expert_samples if self._trains_expert(client.round) else gate_samples

    def client_init(self, client: Client, sent: Tree) -> dict[str, Any]:
        """Draws the client's own initial gate before the first round; tells the loss whose turn it is."""
        super().client_init(client, sent)
        if client.round == 0:
            client.module.gate.reset_parameters()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        return {"trains_expert": self._trains_expert(client.round)}

    def client_loss(
        self, module: LightningModule, batch: Any, const: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of the mixture; in the expert's turn of the local expert alone (Algorithm 2, line 7)."""
        if not const["trains_expert"]:
            return super().client_loss(module, batch, const)
        return _local_expert_loss(module, batch)

    def _trains_expert(self, round: int) -> bool:
        return self.interleaved and round % 2 == 0


def _local_expert_loss(module: LightningModule, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy, but where the model mixes probabilities without a logarithm: minus the probability, as there."""
    x, y = batch
    logits = module.local_expert(x)  # pyright: ignore[reportCallIssue]
    if isinstance(module, MixtureOfExperts):
        return module.loss_of(module.scores_of(logits), y), {}
    return F.cross_entropy(logits, y), {}


def _check_fraction(gate_fraction: float, lowest: float) -> None:
    if not lowest <= gate_fraction < 1:
        allowed = "at least 0 and below 1" if lowest == 0 else "above 0 and below 1"
        raise MisconfigurationException(f"algorithm.init_args.gate_fraction is {gate_fraction}, but must be {allowed}.")


def _split(client: Client, gate_fraction: float) -> tuple[Tensor, Tensor]:
    """The samples for the gate, floor(n * gate_fraction) but at least one where there are two, and for the expert."""
    samples = client.shuffled_samples()
    size = max(int(len(samples) * gate_fraction + 1e-9), min(1, len(samples) - 1))  # 0.29 * 100 is 28.999999999999996
    return samples[:size], samples[size:]


def _copy_of_global_expert(module: LightningModule) -> Tree:
    """The global expert's tensors under the local expert's names."""
    state = module.state_dict()
    copied = {
        f"local_expert.{name.removeprefix('global_expert.')}": tensor.detach()
        for name, tensor in state.items()
        if name.startswith("global_expert.")
    }
    shapes = {name: tensor.shape for name, tensor in state.items() if name.startswith("local_expert.")}
    if not copied or shapes != {name: tensor.shape for name, tensor in copied.items()}:
        raise MisconfigurationException(
            "model.init_args.local_expert must have the architecture of model.init_args.global_expert, because PFL-MoE "
            "starts it as a copy of the global one; leave it out to get that."
        )
    return copied
