"""A client's own expert with the classifiers of all clients, as a LightningModule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedmoe_pl.checks import MOST_EXPERTS, check_at_least
from fedmoe_pl.models.copies import check_copies
from fedmoe_pl.models.experts import check_split
from fedmoe_pl.models.gates import Gate, checked_gate
from fedmoe_pl.models.inputs import Inputs, call
from fedmoe_pl.models.mixtures.mixture import MixtureOfExperts
from fedmoe_pl.trees import copy_module


class PooledMoE(MixtureOfExperts):
    """Mixes the classifiers of all clients on the features of the client's own extractor (PM-MoE, WWW 2025).

    The output is ``sum_j g_j(z) * pool_j(z)`` over the ``top_k`` classifiers with the largest weights, where ``z =
    local_expert.extractor(x)``. As in the official code, the weights are not normalized again, so that they may add up
    to less than 1. Logits are mixed. The classifier of ``local_expert`` is not computed: the client's own is in the
    pool, too. The algorithm ``PMMoE`` fills the pool; until then, it has copies of the expert's classifier.

    Args:
        local_expert: the client's own expert, with an ``extractor`` and a ``classifier``.
        num_experts: number of classifiers in the pool, one per client of the federation.
        gate: weighs them, such as ``MLPGate``; None for ``EqualWeights``.
        top_k: how many of them a sample uses; None for all.
        **kwargs: arguments of :class:`~fedmoe_pl.models.MixtureOfExperts`.

    Raises:
        MisconfigurationException: if ``top_k`` or ``gate_lr`` is out of range, or the gate weighs another number.
    """

    gate: Gate
    has_global_expert = False
    mixes_logits = True
    sized_by = "local_expert"

    def __init__(
        self,
        local_expert: nn.Module,
        num_experts: int,
        gate: Gate | None = None,
        top_k: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_at_least(self, "num_experts", num_experts, 1, MOST_EXPERTS)
        check_at_least(self, "top_k", top_k, 1, num_experts)
        self.num_experts = self.gate_width = num_experts
        self.top_k = top_k
        self.local_expert = local_expert
        check_split(self, "local_expert", local_expert, "clients share their classifiers")
        classifier: nn.Module = local_expert.classifier  # pyright: ignore[reportAssignmentType]
        check_copies(classifier)
        self.pool = nn.ModuleList(copy_module(classifier) for _ in range(num_experts))
        self.gate = checked_gate(self, gate)
        self.check_parts()

    def mix(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Logits (B, C) of inputs (B, ...), and the classifiers' weights (B, num_experts), 0 for those left out."""
        features = call(self.local_expert.extractor, x)  # pyright: ignore[reportArgumentType]
        weights = self.gate(features if self.gate.reads_features else x)
        self.check_gate_width(weights.shape[1])
        if self.top_k is not None:
            largest = weights.topk(self.top_k, dim=1)
            weights = torch.zeros_like(weights).scatter(1, largest.indices, largest.values)
        return self.mix_outputs([classifier(features) for classifier in self.pool], weights), weights
