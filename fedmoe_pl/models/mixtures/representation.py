"""pFedMoE's model: a mixture of representations; clients' local networks may differ in architecture."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models.copies import check_copies
from fedmoe_pl.models.gates import FixedGate, Gate, checked_gate
from fedmoe_pl.models.inputs import Inputs, call
from fedmoe_pl.models.mixtures.mixing import mix_outputs
from fedmoe_pl.models.mixtures.mixture import Architectures, MixtureOfExperts
from fedmoe_pl.trees import copy_module


class Representations(NamedTuple):
    """The representations of some inputs, each (B, F): the mixed one, the shared and the local extractor's."""

    mixed: Tensor
    shared: Tensor
    local: Tensor


class RepresentationMoE(MixtureOfExperts):
    """Mixes the representations of a shared and a local extractor; a header computes logits from the mixture.

    The output is ``y = header(a_G(x) * shared_extractor(x) + a_F(x) * local_expert(x))`` (pFedMoE, Yi et al. 2024,
    section 4; https://arxiv.org/abs/2402.01350). Only representations are mixed, never logits or probabilities:
    ``mixing`` keeps its default. Each client holds the parameters of only one of the ``local_experts``. A plain
    ``Trainer`` uses the first one.

    An expert's ``classifier`` is removed, so that its ``extractor`` is left. The header has the same shape for all
    clients. In pFedMoE it is private; in LG-FedAvg only the header is shared (``FedAvg(shared="header.*")``). With a
    ``LocalOnly`` gate, only the local expert is computed and trained (Standalone).

    Args:
        shared_extractor: maps inputs to representations (B, F), or an expert with ``extractor`` and ``classifier``.
        local_experts: the clients' architectures, each like ``shared_extractor`` and with the same F.
        header: maps representations (B, F) to logits (B, C); None for the first ``classifier`` of a local expert.
        gate: gives every sample two weights, for the shared and the local extractor; None for ``EqualWeights``.
        architectures: index of each client's local expert; None gives client k the index ``k % len(local_experts)``.
        **kwargs: arguments of :class:`~fedmoe_pl.models.MixtureOfExperts`.

    Raises:
        MisconfigurationException: if there is no header, the parts do not fit together, or ``gate_lr`` is below 0.

    Example:
        >>> import torch
        >>> from fedmoe_pl.models import CNN, SwitchNormGate
        >>> module = RepresentationMoE(CNN(5), [CNN(1), CNN(2)], gate=SwitchNormGate())
        >>> logits, gate_weights = module.mix(torch.zeros(4, 3, 32, 32))
        >>> logits.shape, gate_weights.shape, module.client_architecture(7)
        (torch.Size([4, 10]), torch.Size([4, 2]), 1)
    """

    gate_width = 2
    mixes_logits = True
    sized_by = "shared_extractor"

    def __init__(
        self,
        shared_extractor: nn.Module,
        local_experts: list[nn.Module],
        header: nn.Module | None = None,
        gate: Gate | None = None,
        architectures: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not local_experts:
            raise InvalidArgumentError(self, "local_experts", local_experts, "a list of at least one module")
        classifiers = (getattr(expert, "classifier", None) for expert in local_experts)
        header = next((part for part in (header, *classifiers) if part is not None), None)
        if header is None:
            raise InvalidArgumentError(self, "header", header, "given", "no local expert has a `classifier`")
        self.shared_extractor = _without_classifier(shared_extractor)
        self.local_experts = Architectures(_without_classifier(expert) for expert in local_experts)
        check_copies(header)
        self.header = copy_module(header)
        self.gate = checked_gate(self, gate)
        self.architectures = architectures
        self.check_parts()

    @property
    def weighed_parts(self) -> tuple[str, str]:
        """The two extractors."""
        return "shared_extractor", "local_experts"

    def client_architecture(self, client_id: int) -> int:
        """Index of the client's local expert."""
        if self.architectures is None:
            return client_id % len(self.local_experts)
        if client_id >= len(self.architectures) or not 0 <= self.architectures[client_id] < len(self.local_experts):
            allowed = f"an index from 0 to {len(self.local_experts) - 1} for each client"
            raise InvalidArgumentError(self, "architectures", self.architectures, allowed)
        return self.architectures[client_id]

    def keep_architecture(self, architecture: int) -> None:
        """Removes all local experts except this one, which keeps its name ``local_experts.<architecture>``."""
        self.local_experts.keep(architecture)

    def mix(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Logits (B, C) and weights (B, 2) of inputs (B, ...), index 0 for the shared, 1 for the local extractor.

        An extractor to which a ``FixedGate`` gives the weight 0 is not computed.
        """
        index, local_expert = next(iter(self.local_experts.present.items()))
        if isinstance(self.gate, FixedGate) and len(self.gate.active) == 1:
            extractor = local_expert if self.gate.active[0] else self.shared_extractor
            return self.header(call(extractor, x)), self.gate(x)
        shared, local = call(self.shared_extractor, x), call(local_expert, x)  # (B, F)
        if local.shape != shared.shape:
            allowed = f"experts with representations of shape {tuple(shared.shape[1:])}, as shared_extractor's"
            reason = f"those of number {index} have shape {tuple(local.shape[1:])}"
            raise InvalidArgumentError(self, "local_experts", self.local_experts, allowed, reason)
        weights = self.gate(shared if self.gate.reads_features else x)  # (B, 2)
        self.check_gate_width(weights.shape[1])
        return self.header(mix_outputs((shared, local), weights, "logits")), weights

    def representations(self, x: Inputs) -> Representations:
        """The representations of both extractors, and those mixed with the gate's weights, of inputs (B, ...)."""
        shared, local = call(self.shared_extractor, x), call(self.local_experts, x)
        weights = self.gate(shared if self.gate.reads_features else x)
        return Representations(mix_outputs((shared, local), weights, "logits"), shared, local)


def _without_classifier(expert: nn.Module) -> nn.Module:
    """A copy of an expert that returns its extractor's output; a module without a classifier is only copied."""
    check_copies(expert)
    extractor = copy_module(expert)
    if hasattr(extractor, "extractor") and hasattr(extractor, "classifier"):
        extractor.classifier = nn.Identity()
    return extractor
