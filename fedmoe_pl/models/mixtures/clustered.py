"""A mixture of several clusters' models and a local expert, as a LightningModule."""

from __future__ import annotations

import copy

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from fedmoe_pl.models.gates.fixed import EqualWeights, FixedGate
from fedmoe_pl.models.gates.gate import Gate
from fedmoe_pl.models.layers import draw_anew, layer_without_reset
from fedmoe_pl.models.mixtures.mixture import Mixing, MixtureOfExperts, mix_outputs, run_once


class ClusteredMoE(MixtureOfExperts):
    """Mixes the models of several clusters of clients and a local expert; a gate weighs them for every sample.

    The output is ``p(x) = sum_j g_j(x) p_j(x) + g_local(x) p_local(x)`` with probabilities ``p``, or what ``mixing``
    says (Isaksson et al. 2022, https://arxiv.org/abs/2206.07832). The initial parameters of all experts are drawn
    independently. In the official code, the linear layers of the clusters' models start with the same weights.

    Args:
        global_expert: architecture of the clusters' models; maps inputs (B, ...) to logits (B, C). Initial parameters
            are drawn for each cluster, with the layers' ``reset_parameters``.
        num_clusters: number of clusters, J.
        local_expert: maps the same inputs to logits of the same shape; None for the clusters' architecture.
        gate: weighs the experts, the local one last; None for ``EqualWeights``.
        mixing: what is mixed, see :data:`~fedmoe_pl.models.mixtures.mixture.Mixing`.
        optimizer: makes the optimizer from the parameters.
        lr_scheduler: makes a scheduler, stepped once per epoch, from the optimizer; None for a constant rate.

    Attributes:
        global_experts: the clusters' models, in their order.
        local_expert: the client's own model.

    Raises:
        MisconfigurationException: if there is no cluster, a layer with parameters has no ``reset_parameters``, the
            gate reads features or weighs another number of experts, or the experts differ in their number of outputs.

    Example:
        >>> import torch
        >>> from fedmoe_pl.models import ClusteredMoE, GateCNN, LeNet5, NetworkGate
        >>> gate = NetworkGate(GateCNN(in_channels=1, num_experts=4))
        >>> scores, gate_weights = ClusteredMoE(LeNet5(), num_clusters=3, gate=gate).mix(torch.zeros(5, 1, 32, 32))
        >>> scores.shape, gate_weights.shape
        (torch.Size([5, 10]), torch.Size([5, 4]))
    """

    def __init__(
        self,
        global_expert: nn.Module,
        num_clusters: int = 6,
        local_expert: nn.Module | None = None,
        gate: Gate | None = None,
        mixing: Mixing = "probabilities",
        optimizer: OptimizerCallable = torch.optim.SGD,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, mixing)
        if num_clusters < 1:
            raise MisconfigurationException(f"ClusteredMoE: num_clusters is {num_clusters}, but must be at least 1.")
        self.num_clusters = num_clusters
        self.global_experts = nn.ModuleList(_drawn_anew(global_expert) for _ in range(num_clusters))
        self.local_expert = _drawn_anew(global_expert) if local_expert is None else local_expert
        self.gate_width = num_clusters + 1  # the clusters' models and the local expert
        self.gate = EqualWeights() if gate is None else gate
        self.check_parts()

    @property
    def global_expert(self) -> nn.Module:
        """The first cluster's model; all clusters have its architecture."""
        return self.global_experts[0]

    def check_parts(self) -> None:
        """Refuses parts that do not fit together; some misfits are found only if the expert has an ``input_shape``."""
        if self.gate.reads_features:
            raise MisconfigurationException(
                f"ClusteredMoE: gate is a {type(self.gate).__name__}, which reads features, but must read the input as "
                "a NetworkGate does, because each cluster's model has its own features."
            )
        super().check_parts()
        run_once(self, self.global_expert)

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture's scores and the gate's weights of every sample.

        Args:
            x: inputs (B, ...).

        Returns:
            Scores (B, C) and weights (B, J + 1), the clusters' in their order and the local expert's last. Experts to
            which a ``FixedGate`` gives the weight 0 are not computed.
        """
        weights = self.gate(x)
        self.check_gate_width(weights.shape[1])
        experts = [*self.global_experts, self.local_expert]
        active = self.gate.active if isinstance(self.gate, FixedGate) else [*range(len(experts))]
        outputs = [experts[index](x) for index in active]
        if len(active) == 1:
            return self.scores_of(outputs[0]), weights
        self.check_outputs(outputs)  # compares the first and the last; all clusters' models have one architecture
        used = weights if len(active) == len(experts) else weights[:, active]
        return mix_outputs(outputs, used, self.mixing), weights


def _drawn_anew(expert: nn.Module) -> nn.Module:
    """A copy of the expert with newly drawn initial parameters."""
    if (layer := layer_without_reset(expert)) is not None:
        raise MisconfigurationException(
            f"ClusteredMoE: global_expert has a {type(layer).__name__}, which must have a method reset_parameters, "
            "because initial parameters are drawn for each cluster."
        )
    drawn = copy.deepcopy(expert)
    draw_anew(drawn)
    return drawn
