"""A client's personalized mixture of a global and a local expert, as a LightningModule."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedmoe_pl.checks import check_kind, with_article
from fedmoe_pl.models.copies import check_copies
from fedmoe_pl.models.experts import check_split
from fedmoe_pl.models.gates import FixedGate, Gate, checked_gate
from fedmoe_pl.models.inputs import Inputs, call
from fedmoe_pl.models.mixtures.mixture import Architectures, MixtureOfExperts
from fedmoe_pl.trees import copy_module


class PersonalizedMoE(MixtureOfExperts):
    """Mixes a global and a local expert, which a gate weighs for every sample.

    The output is ``y = g(x) * global_expert(x) + (1 - g(x)) * local_expert(x)`` with logits, or what ``mixing`` says
    (PFL-MoE, Guo et al. 2021, Algorithm 2; https://arxiv.org/abs/2012.15589).

    Args:
        global_expert: maps a batch of inputs to logits (B, C), or to other outputs (B, ...) of the task, or to an
            output with ``logits``, as a model of transformers does. The values of a dict are its keyword arguments.
        local_expert: maps the same inputs to logits of the same shape; None, or the global expert itself, for a copy of
            that. In a list, client k of a federation has the expert k modulo its length, so that clients differ in
            architecture; a plain ``Trainer`` uses the first one.
        gate: weighs the experts; None for ``EqualWeights``.
        **kwargs: arguments of :class:`~fedmoe_pl.models.MixtureOfExperts`.

    Raises:
        MisconfigurationException: if the parts do not fit together, or ``gate_lr`` is below 0.

    Example:
        >>> import torch
        >>> from fedmoe_pl.models import FeatureGate, LeNet5, PersonalizedMoE
        >>> module = PersonalizedMoE(LeNet5(), gate=FeatureGate())
        >>> logits, gate_weights = module.mix(torch.zeros(4, 1, 32, 32))
        >>> logits.shape, gate_weights.shape
        (torch.Size([4, 10]), torch.Size([4, 2]))
    """

    gate: Gate
    gate_width = 2
    sized_by = "global_expert"

    def __init__(
        self,
        global_expert: nn.Module,
        local_expert: nn.Module | list[nn.Module] | None = None,
        gate: Gate | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_kind(self, "global_expert", global_expert, nn.Module)
        is_list = isinstance(local_expert, list) and local_expert != []
        check_kind(self, "local_expert", None if is_list else local_expert, nn.Module, ", or a list of such")
        gate = checked_gate(self, gate)
        self.global_expert = global_expert
        if isinstance(local_expert, list):
            local_expert = Architectures([self._apart(expert) for expert in local_expert])
        else:
            local_expert = self._apart(local_expert)
        self.local_expert = local_expert
        self.gate = gate
        self.check_parts()

    def _apart(self, local_expert: nn.Module | None) -> nn.Module:
        """The local expert, as a copy if it is the global one."""
        if local_expert is not None and local_expert is not self.global_expert:
            return local_expert
        check_copies(self.global_expert)
        return copy_module(self.global_expert)

    @property
    def weighed_parts(self) -> tuple[str, str]:
        """The two experts."""
        return "global_expert", "local_expert"

    def check_parts(self) -> None:
        """Refuses parts that do not fit together."""
        if self.gate.reads_features:
            because = f"{with_article(type(self.gate).__name__)} reads the features in between"
            check_split(self, "global_expert", self.global_expert, because)
        super().check_parts()

    def client_architecture(self, client_id: int) -> int:
        """Index of the client's local expert; 0 if all clients have the same one."""
        return client_id % len(self.local_expert) if isinstance(self.local_expert, Architectures) else 0

    def keep_architecture(self, architecture: int) -> None:
        """Removes all local experts except this one, which keeps its name ``local_expert.<architecture>``."""
        if isinstance(self.local_expert, Architectures):
            self.local_expert.keep(architecture)

    def mix(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Scores (B, C) and weights (B, 2) of inputs (B, ...), index 0 for the global, 1 for the local expert.

        An expert to which a ``FixedGate`` gives the weight 0 is not computed.
        """
        if isinstance(self.gate, FixedGate) and len(self.gate.active) == 1:
            expert = self.local_expert if self.gate.active[0] else self.global_expert
            return self.scores_of(call(expert, x)), self.gate(x)
        if self.gate.reads_features:
            features = call(self.global_expert.extractor, x)  # pyright: ignore[reportArgumentType]
            weights = self.gate(features)
            global_logits = self.global_expert.classifier(features)  # pyright: ignore[reportCallIssue]
        else:
            weights = self.gate(x)
            global_logits = call(self.global_expert, x)
        local_logits = call(self.local_expert, x)
        self.check_outputs((global_logits, local_logits))
        self.check_gate_width(weights.shape[1])
        return self.mix_outputs((global_logits, local_logits), weights), weights
