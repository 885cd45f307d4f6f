"""A mixture of several clusters' models and a local expert, as a LightningModule."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedmoe_pl.checks import MOST_EXPERTS, InvalidArgumentError, check_at_least
from fedmoe_pl.models.copies import check_copies
from fedmoe_pl.models.gates import FixedGate, Gate, checked_gate
from fedmoe_pl.models.inputs import Inputs, call
from fedmoe_pl.models.layers import draw_anew, layer_without_reset
from fedmoe_pl.models.mixtures.mixing import Mixing
from fedmoe_pl.models.mixtures.mixture import MixtureOfExperts
from fedmoe_pl.trees import copy_module


class ClusteredMoE(MixtureOfExperts):
    """Mixes the models of several clusters of clients and a local expert; a gate weighs them for every sample.

    The output is ``p(x) = sum_j g_j(x) p_j(x) + g_local(x) p_local(x)`` with probabilities ``p``, or what ``mixing``
    says (Isaksson et al. 2022, https://arxiv.org/abs/2206.07832). The initial parameters of all experts are drawn
    independently, unless ``clusters_share_fc``.

    Args:
        global_expert: architecture of the clusters' models; maps inputs (B, ...) to logits (B, C). Initial parameters
            are drawn for each cluster, with the layers' ``reset_parameters``.
        num_clusters: number of clusters, J.
        local_expert: maps the same inputs to logits of the same shape; None for the clusters' architecture.
        gate: weighs the experts, the local one last; None for ``EqualWeights``.
        mixing: what is mixed, see :data:`~fedmoe_pl.models.mixtures.mixing.Mixing`; None for ``probabilities`` or, in
            ``regression`` and ``causal_lm``, outputs.
        clusters_share_fc: whether the clusters' models start with the same linear layers, as in the official code: they
            are equal except for the weights of convolutions.
        **kwargs: arguments of :class:`~fedmoe_pl.models.MixtureOfExperts`.

    Attributes:
        global_experts: the clusters' models, in their order.
        local_expert: the client's own model.

    Raises:
        MisconfigurationException: if the parts do not fit together, or all clusters would start equal.

    Example:
        >>> import torch
        >>> from fedmoe_pl.models import ClusteredMoE, GateCNN, LeNet5, NetworkGate
        >>> gate = NetworkGate(GateCNN(in_channels=1, num_experts=4))
        >>> scores, gate_weights = ClusteredMoE(LeNet5(), num_clusters=3, gate=gate).mix(torch.zeros(5, 1, 32, 32))
        >>> scores.shape, gate_weights.shape
        (torch.Size([5, 10]), torch.Size([5, 4]))
    """

    sized_by = "global_expert"

    def __init__(
        self,
        global_expert: nn.Module,
        num_clusters: int = 6,
        local_expert: nn.Module | None = None,
        gate: Gate | None = None,
        mixing: Mixing | None = None,
        clusters_share_fc: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(mixing=mixing or "probabilities", **kwargs)
        if mixing is None and self.task in ("regression", "causal_lm"):
            self.mixing = "logits"
        if (layer := layer_without_reset(global_expert)) is not None:
            reason = f"its {type(layer).__name__} has no reset_parameters, so that all clusters would start equal"
            raise InvalidArgumentError(self, "global_expert", global_expert, "one that can be drawn anew", reason)
        if clusters_share_fc and not _convolutions(global_expert):
            reason = "without convolutions, all clusters would start equal"
            raise InvalidArgumentError(self, "clusters_share_fc", True, "False", reason)
        check_at_least(self, "num_clusters", num_clusters, 1, MOST_EXPERTS)
        check_copies(global_expert)
        self.num_clusters = num_clusters
        self.clusters_share_fc = clusters_share_fc
        self.global_experts = nn.ModuleList(copy_module(global_expert) for _ in range(num_clusters))
        self.draw_clusters()
        if local_expert is None:
            draw_anew(local_expert := copy_module(global_expert))
        self.local_expert = local_expert
        self.gate_width = num_clusters + 1  # the clusters' models and the local expert
        self.gate = checked_gate(self, gate)
        self.check_parts()

    @property
    def global_expert(self) -> nn.Module:
        """The first cluster's model; all clusters have its architecture."""
        return self.global_experts[0]

    @property
    def weighed_parts(self) -> list[str]:
        """The clusters' models and the local expert."""
        return [*(f"global_experts.{cluster}" for cluster in range(self.num_clusters)), "local_expert"]

    def draw_clusters(self) -> None:
        """Draws new initial parameters of the clusters' models, in place."""
        draw_anew(self.global_experts)
        if self.clusters_share_fc:
            drawn = {f"{name}.weight" for name in _convolutions(self.global_expert)}
            shared = {name: tensor for name, tensor in self.global_expert.state_dict().items() if name not in drawn}
            for expert in self.global_experts[1:]:
                expert.load_state_dict(shared, strict=False)

    def check_parts(self) -> None:
        """Refuses parts that do not fit together."""
        if self.gate.reads_features:
            reason = "each cluster's model has its own features"
            raise InvalidArgumentError(self, "gate", self.gate, "one that reads the input", reason)
        super().check_parts()

    def mix(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Scores (B, C) and weights (B, J + 1) of inputs (B, ...): the clusters' in their order, the local one last.

        Experts to which a ``FixedGate`` gives the weight 0 are not computed.
        """
        weights = self.gate(x)
        self.check_gate_width(weights.shape[1])
        experts = [*self.global_experts, self.local_expert]
        active = self.gate.active if isinstance(self.gate, FixedGate) else [*range(len(experts))]
        outputs = [call(experts[index], x) for index in active]
        if len(active) == 1:
            return self.scores_of(outputs[0]), weights
        self.check_outputs(outputs)  # compares the first and the last; all clusters' models have one architecture
        used = weights if len(active) == len(experts) else weights[:, active]
        return self.mix_outputs(outputs, used), weights


def _convolutions(expert: nn.Module) -> list[str]:
    """Names of the expert's convolutions."""
    return [name for name, layer in expert.named_modules() if isinstance(layer, _ConvNd)]
