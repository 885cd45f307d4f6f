"""A common embedding and several experts; a gate sends every sample to one of them, or fixed weights mix all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedmoe_pl.checks import MOST_EXPERTS, InvalidArgumentError, check_at_least, check_number, with_article
from fedmoe_pl.models.copies import check_copies
from fedmoe_pl.models.gates import ConstantGate, FixedGate, Gate, ProxyGate, checked_gate
from fedmoe_pl.models.inputs import Inputs, call
from fedmoe_pl.models.layers import draw_anew, has_batch_norm, layer_without_reset
from fedmoe_pl.models.mixtures.mixture import Batch, MixtureOfExperts
from fedmoe_pl.trees import copy_module

_DENSE: ContextVar[bool] = ContextVar("dense", default=False)


@contextmanager
def dense_experts() -> Iterator[None]:
    """In this context, every expert computes all samples; its outputs for samples of other experts are dropped.

    The result and its gradients are the same. ``vmap`` needs this, because it depends on the data which samples an
    expert receives.
    """
    token = _DENSE.set(True)
    try:
        yield
    finally:
        _DENSE.reset(token)


class SparseMoE(MixtureOfExperts):
    """Sends every sample to the expert with the largest gate weight, and multiplies its logits by that weight.

    The output is ``y = G_k(z) * expert_k(z)`` with ``z = embedding(x)`` and ``k = argmax G(z)``, as in FedMoE-DA (Zhan
    et al. 2024). The chosen expert's weight is not normalized to 1; otherwise the gate would have no gradient. Each
    expert computes only the samples that it receives. An expert without samples in a batch has gradients of zero, not
    None, so that the optimizer's momentum and weight decay still act on it.

    A ``FixedGate`` makes it a dense model, whose experts' logits or probabilities are mixed: ``GlobalOnly`` uses only
    the first expert after the embedding, ``EqualWeights`` the mean of all experts, ``MixtureWeights`` weights of each
    client.

    Args:
        embedding: maps inputs (B, ...) to values (B, ...) for the gate and the experts.
        expert: the first expert, which maps these values to logits (B, C). The others are copies of it with newly drawn
            parameters, by the layers' ``reset_parameters``.
        num_experts: number of experts. In a list, client i of a federation has the i-th number; the list repeats if it
            is too short. A client with fewer experts has the first ones.
        load_balancing: weight of the balancing loss of the Switch Transformer (Fedus et al. 2022, Eq. 4), which a
            fixed gate does without; FedMoE-DA has no such loss.
        gate: reads the embedded values and gives every sample a weight for each expert; None for a ``ProxyGate``.
        **kwargs: arguments of :class:`~fedmoe_pl.models.MixtureOfExperts`.

    Raises:
        MisconfigurationException: if an argument is out of range, ``expert`` has a layer without ``reset_parameters``
            or, unless the gate is fixed, batch normalization, or embedding, gate and expert do not fit together.

    Example:
        >>> import torch
        >>> from fedmoe_pl.models import ConvBlock, ConvExpert, SparseMoE
        >>> logits, gate_weights = SparseMoE(ConvBlock(), ConvExpert()).mix(torch.zeros(2, 3, 32, 32))
        >>> logits.shape, gate_weights.shape
        (torch.Size([2, 10]), torch.Size([2, 4]))
    """

    has_global_expert = False
    sized_by = "embedding"

    def __init__(
        self,
        embedding: nn.Module,
        expert: nn.Module,
        num_experts: int | list[int] = 4,
        load_balancing: float = 0.0,
        gate: Gate | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        numbers = num_experts if isinstance(num_experts, list) else [num_experts]
        for number in numbers or [num_experts]:
            check_at_least(self, "num_experts", number, 1, MOST_EXPERTS)
        check_number(self, "load_balancing", load_balancing, least=0)
        if any(map(is_lazy, expert.parameters())) or layer_without_reset(expert) is not None:
            reason = "every expert draws its own, by the layers' reset_parameters"
            raise InvalidArgumentError(self, "expert", expert, "one whose parameters can be drawn anew", reason)
        self.num_experts = num_experts
        self.load_balancing = load_balancing
        self.embedding = embedding
        check_copies(expert)
        self.experts = nn.ModuleList([expert, *(copy_module(expert) for _ in range(max(numbers) - 1))])
        draw_anew(self.experts[1:])
        self.gate_width = max(numbers)
        self.gate = checked_gate(self, ProxyGate(self.gate_width) if gate is None else gate)
        self.check_parts()

    @property
    def expert(self) -> nn.Module:
        """The first expert."""
        return self.experts[0]

    @property
    def weighed_parts(self) -> list[str]:
        """The experts."""
        return [f"experts.{expert}" for expert in range(len(self.experts))]

    def check_parts(self) -> None:
        """Refuses parts that do not fit together, also what only a gate that chooses experts cannot have."""
        if not isinstance(self.gate, FixedGate):
            if self.mixing != "logits":
                reason = f"{with_article(type(self.gate).__name__)} chooses one expert; MixtureWeights mix them"
                raise InvalidArgumentError(self, "mixing", self.mixing, "logits", reason)
            if has_batch_norm(self.expert):
                reason = "each expert gets a part of a batch"
                raise InvalidArgumentError(self, "expert", self.expert, "one without batch normalization", reason)
        super().check_parts()

    def client_architecture(self, client_id: int) -> int:
        """The client's number of experts."""
        numbers = self.num_experts if isinstance(self.num_experts, list) else [self.num_experts]
        return numbers[client_id % len(numbers)]

    def keep_architecture(self, architecture: int) -> None:
        """Keeps only the first experts and their part of the gate; ``architecture`` is their number."""
        self.num_experts = self.gate_width = architecture
        if "num_experts" in self.hparams:  # checkpoints have what a subclass has saved there
            self.hparams["num_experts"] = architecture
        self.experts = self.experts[:architecture]  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(self.gate, ProxyGate):
            self.gate.proxies = self.gate.proxies[:architecture]  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(self.gate, ConstantGate):
            weights = self.gate.weights[:architecture]
            self.gate = ConstantGate([weight / (sum(weights) or 1) for weight in weights])
        elif isinstance(self.gate, FixedGate):
            self.gate.fit_to(architecture)

    def mix(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Logits (B, C) of the expert of each input (B, ...), multiplied by its weight, and weights (B, experts)."""
        z = call(self.embedding, x)
        weights = self.gate(z)
        self.check_gate_width(weights.shape[1])
        if isinstance(self.gate, FixedGate):
            active = self.gate.active
            return self.mix_outputs([self.experts[index](z) for index in active], weights[:, active]), weights
        weight, chosen = weights.max(dim=1, keepdim=True)  # (B, 1)
        logits = self._all_experts(z, chosen) if _DENSE.get() else self._chosen_experts(z, chosen.flatten())
        return weight.reshape(-1, *[1] * (logits.dim() - 1)) * logits, weights

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the weighted logits, plus the balancing loss of a gate that chooses experts; see the base."""
        loss, metrics = super().loss(batch)
        if not self.load_balancing or isinstance(self.gate, FixedGate):
            return loss, metrics
        weights = metrics["gate_weights"]
        indices = torch.arange(weights.shape[1], device=weights.device)
        sent = (weights.argmax(dim=1, keepdim=True) == indices).to(weights.dtype).mean(dim=0)  # (experts,)
        balance = weights.shape[1] * (sent * weights.mean(dim=0)).sum()
        return loss + self.load_balancing * balance, metrics

    def _chosen_experts(self, z: Tensor, chosen: Tensor) -> Tensor:
        """Logits (B, C) of each sample's chosen expert, an index (B,); experts compute only their own samples."""
        samples = [(chosen == index).nonzero().flatten() for index in range(len(self.experts))]
        outputs = [expert(z[sent]) for expert, sent in zip(self.experts, samples, strict=True) if len(sent)]
        logits = torch.cat(outputs)[torch.cat(samples).argsort()]
        for expert, sent in zip(self.experts, samples, strict=True):
            if torch.is_grad_enabled() and not len(sent):  # gradients are to be zero, not None
                trained = (parameter for parameter in expert.parameters() if parameter.requires_grad)
                logits = logits + sum((parameter.flatten()[0] * 0 for parameter in trained), 0.0)
        return logits

    def _all_experts(self, z: Tensor, chosen: Tensor) -> Tensor:
        """The same, but every expert computes all samples; ``chosen`` has shape (B, 1)."""
        outputs = torch.stack([expert(z) for expert in self.experts], dim=1)  # (B, experts, C)
        is_chosen = chosen == torch.arange(len(self.experts), device=chosen.device)  # (B, experts)
        is_chosen = is_chosen.reshape(*is_chosen.shape, *[1] * (outputs.dim() - 2))  # (B, experts, 1, ...)
        return torch.where(is_chosen, outputs, 0).sum(dim=1)
