"""Mixtures of adapters in one frozen base, as LightningModules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fedmoe_pl.checks import MOST_EXPERTS, InvalidArgumentError, check_at_least, check_choice
from fedmoe_pl.models.adapters import AdaptedBase, Look, LoRA, Pass, Weigh
from fedmoe_pl.models.gates import FixedGate, Gate, checked_gate
from fedmoe_pl.models.inputs import batch_size_of, rows_of
from fedmoe_pl.models.layers import evaluating
from fedmoe_pl.models.mixtures.mixture import MixtureOfExperts
from fedmoe_pl.models.routers import AdaptiveTokenGate, TokenGate

Pooling = Literal["mean", "last"]
"""The features of a sequence (B, T, F): the mean over its tokens that are no padding, or those of the last such one.

In the task ``causal_lm``, each token has features and weights of its own, of the sequence up to this token.
"""


class AdapterMoE(MixtureOfExperts):
    """Mixes the outputs of a frozen base with a global and with a local adapter; a gate weighs them for every sample.

    It is a ``PersonalizedMoE`` whose experts are adapters (LoRA) and copies of the layers in ``lora.modules_to_save``,
    such as the classifier: the base is in memory once, no client trains or sends anything of it, and it computes a
    batch once for each expert. In a federation, the base is in eval mode where nothing of it is trained, without its
    dropout, unless the algorithm keeps frozen modules in train mode.

    Args:
        base: any module that maps inputs to outputs, or to an object with ``logits``, as those of transformers. It
            gets dicts as keyword arguments. Its parameters are frozen; it must not be used elsewhere. In the task
            ``causal_lm``, it must be causal: a federation refuses one whose outputs for a token change with later
            tokens.
        lora: which layers get adapters, and the layers that experts have copies of.
        gate: weighs the experts; None for ``EqualWeights``. The features that a ``FeatureGate`` reads are what the
            first of ``modules_to_save`` reads with the global expert or, without any, the output layer of a language
            model of transformers.
        pooling: the features of a sequence, see :data:`Pooling`.
        pad_token_id: the token in inputs that are no dicts that is padding: the base gets ``input_ids`` and an
            ``attention_mask``. None calls it with the inputs alone. In the task ``causal_lm``, the labels of padding
            must be -100, because the mask of such inputs leaves no label out of the loss.
        **kwargs: arguments of :class:`~fedmoe_pl.models.MixtureOfExperts`.

    Attributes:
        base: the frozen base, whose tensors have the names that they have in it.
        global_expert: the adapters and layers that clients share, by the paths of their layers in the base.
        local_expert: those of the client, drawn independently of the global ones.
        scaling: the scale of all adapters, alpha / r.
        blocks: names of the modules of the base that each expert computes as a whole; none here.
        has_one_head: whether the experts have the layers in ``lora.modules_to_save`` together.

    Raises:
        MisconfigurationException: if the parts do not fit together, or peft is not installed.

    Example:
        >>> base = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> lora = LoRA(target_modules=["0"], r=2, modules_to_save=["2"])  # doctest: +SKIP
        >>> logits, gate_weights = AdapterMoE(base, lora).mix(torch.zeros(5, 4))  # doctest: +SKIP
        >>> logits.shape, gate_weights.shape  # doctest: +SKIP
        (torch.Size([5, 3]), torch.Size([5, 2]))
    """

    gate: Gate
    gate_width = 2
    blocks: Sequence[str] = ()
    has_one_head: bool = False

    def __init__(
        self,
        base: nn.Module,
        lora: LoRA,
        gate: Gate | None = None,
        pooling: Pooling = "mean",
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(base, nn.Module) or hasattr(base, "peft_config"):
            allowed = "a module without adapters of peft, such as one of fedmoe_pl.models.experts"
            raise InvalidArgumentError(self, "base", base, allowed)
        if not isinstance(lora, LoRA):
            raise InvalidArgumentError(self, "lora", lora, "a fedmoe_pl.models.LoRA")
        check_choice(self, "pooling", pooling, get_args(Pooling))
        self.lora = lora
        self.pooling: Pooling = pooling
        self.pad_token_id = pad_token_id
        self.scaling = lora.scaling
        self.base = base
        self._of_features = Look()
        number = len(self.weighed_parts)
        self._adapted = AdaptedBase(base, lora, number, self.prepared, self.blocks, self.has_one_head)
        self.name_experts(self._adapted.experts)
        self.gate = checked_gate(self, gate)
        self.check_parts()

    def plain_base(self) -> nn.Module:
        """A copy of the base that computes without experts."""
        return self._adapted.plain_base()

    def name_experts(self, experts: Sequence[nn.Module]) -> None:
        """Makes the experts parts of this module."""
        self.global_expert, self.local_expert = experts

    @property
    def layers_outside_blocks(self) -> Sequence[str]:
        """The paths of the adapted layers that have the first expert only, whatever the gate."""
        return self._adapted.outside

    @property
    def idle_parts(self) -> list[str]:
        """As in any mixture, but without the first expert if layers outside of the blocks have it."""
        used = self.weighed_parts[:1] if self.layers_outside_blocks else ()
        return [part for part in super().idle_parts if part not in used]

    @property
    def weighed_parts(self) -> Sequence[str]:
        """The two experts."""
        return "global_expert", "local_expert"

    def mix(self, x: Any) -> tuple[Tensor, Tensor]:
        """Scores (B, C) and weights (B, 2) of inputs, index 0 for the global, 1 for the local expert.

        An expert to which a ``FixedGate`` gives the weight 0 is not computed.
        """
        if isinstance(self.gate, FixedGate) and len(self.gate.active) == 1:
            return self.scores_of(self._adapted(x, self.gate.active).logits), self.gate(x)
        outputs = [self._adapted(x, [expert]) for expert in (0, 1)]
        weights = self._weights(outputs[0] if self.gate.reads_features else None, x)
        return self.mix_outputs([output.logits for output in outputs], weights), self._of_samples(weights, x)

    @property
    def gate_is_causal(self) -> bool:
        """Whether the gate is fixed, or reads features, which are those of the tokens so far."""
        return self.gate.reads_features or super().gate_is_causal

    def _weights(self, output: Pass | None, x: Any) -> Tensor:
        """The gate's weights (B, 2), in ``causal_lm`` (B, T, 2); of ``output``, it may read the features."""
        if output is None:
            weights = self.gate(x)
        elif self.task != "causal_lm":
            weights = self.gate(self.features_of(output, x))
        else:
            features = self._features_so_far(output, x)
            weights = self.gate(features.flatten(0, 1)).unflatten(0, features.shape[:2])
        self.check_gate_width(weights.shape[-1])
        return weights

    def _of_samples(self, weights: Tensor, x: Any) -> Tensor:
        """Weights (B, experts) of samples: of weights (B, T, experts), the means over tokens that are no padding."""
        return weights if weights.dim() == 2 else _mean_of_tokens(weights, self.mask_of(x, weights))

    def features_of(self, output: Pass, x: Any) -> Tensor:
        """Features (B, F) of samples, or (B, C, H, W) of images, from what the base computed of them."""
        if (features := self._features(output, x)).dim() != 3:  # no sequence
            return features
        mask = self.mask_of(x, features)
        if self.pooling == "mean":
            return _mean_of_tokens(features, mask)
        places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        last = places.where(mask > 0, 0).amax(1)
        return features[torch.arange(len(features), device=last.device), last]

    def _features_so_far(self, output: Pass, x: Any) -> Tensor:
        """Features (B, T, F) of samples up to each token."""
        if (features := self._features(output, x)).dim() != 3:
            allowed = "with a first layer in modules_to_save that reads tokens of shape (B, T, F)"
            raise InvalidArgumentError(self, "lora", self.lora, allowed, "the gate reads features of the tokens so far")
        if self.pooling == "last":
            return features
        counts = self.mask_of(x, features).to(features.dtype)[..., None]
        return (features * counts).cumsum(1) / counts.cumsum(1).clamp_min(1)

    def _features(self, output: Pass, x: Any) -> Tensor:
        if output.features is None:
            allowed = "with a layer in modules_to_save, whose inputs are the features"
            raise InvalidArgumentError(self, "lora", self.lora, allowed, "the gate reads features")
        if not self._of_features.is_done and batch_size_of(x) > 1:  # a single sample cannot be mistaken for another
            with torch.no_grad(), evaluating(self):
                alone: Any = self._adapted(rows_of(x, slice(1)), [0]).features
            if alone.shape[0] != 1:
                allowed = "with a first layer in modules_to_save that keeps the samples apart, in the first dimension"
                because = f"it reads a single sample in the shape {tuple(alone.shape)}"
                raise InvalidArgumentError(self, "lora", self.lora, allowed, because)
            self._of_features.is_done = True
        return output.features

    def mask_of(self, x: Any, like: Tensor) -> Tensor:
        """Which tokens of the inputs are no padding, shape (B, T); all if nothing says it."""
        inputs = self.prepared(x)
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        return like.new_ones(like.shape[:2]) if mask is None or mask.shape != like.shape[:2] else mask

    def prepared(self, x: Any) -> Any:
        """The inputs as the base gets them."""
        if self.pad_token_id is None or not isinstance(x, Tensor):
            return x
        return {"input_ids": x, "attention_mask": (x != self.pad_token_id).long()}


class LayerwiseAdapterMoE(AdapterMoE):
    """Mixes a global and a local adapter inside the layers of a frozen base: ``h = W x + s sum_e g_e B_e A_e x``.

    A :class:`TokenGate` weighs the experts in each layer for every token (FedALT, AAAI 2026; CoMiGS, ICML 2025), any
    other gate for whole samples in all layers alike (FedDPA, NeurIPS 2024). The base computes a batch once, and the
    experts have the layers in ``lora.modules_to_save`` together: they are the part ``head``. Only logits can be mixed.

    Args:
        base: as in ``AdapterMoE``.
        lora: which layers get adapters, and which are trained as a whole.
        gate: weighs the experts; None for ``EqualWeights``. For a gate that reads features, the base first computes the
            batch with the local expert alone, without gradients, as in FedDPA.
        blocks: names of modules of the base, or their ends after a dot, such as ``mlp``, that each expert computes as a
            whole, so that their outputs are mixed, as in CoMiGS; adapted layers elsewhere have the global expert alone,
            whatever the gate. Empty mixes in every adapted layer.
        **kwargs: other arguments of ``AdapterMoE``.

    Attributes:
        head: the layers that are trained as a whole.
    """

    mixes_logits = True
    has_one_head = True

    def __init__(
        self, base: nn.Module, lora: LoRA, gate: Gate | None = None, blocks: Sequence[str] = (), **kwargs: Any
    ) -> None:
        self.blocks = [*blocks]
        self._layout = Look()
        super().__init__(base, lora, gate, **kwargs)
        self.head = self._adapted.head

    def check_parts(self) -> None:
        """Refuses parts that do not fit together, and gives a ``TokenGate`` a router for each layer."""
        if isinstance(self.gate, TokenGate):
            self.gate.fit_to_layers(self, self._adapted.widths, len(self._adapted.experts))
            if not type(self.gate).__module__.startswith("fedmoe_pl."):
                self._check_token_gate(self.gate)
        super().check_parts()

    def _check_token_gate(self, gate: TokenGate) -> None:
        """Refuses weights of random tokens that are no shares, or that depend on other tokens or samples."""
        number, device = len(self._adapted.experts), next(self.parameters()).device
        for path, width in self._adapted.widths.items():
            x = torch.rand(2, 3, width, generator=torch.Generator().manual_seed(0)).to(device)
            with torch.no_grad(), evaluating(self):
                weights = gate.weights(path, x)
                alone = [gate.weights(path, token[None, None]).flatten() for token in x.flatten(0, 1)]
            if weights.shape != (*x.shape[:2], number):
                allowed = f"one that returns weights of shape (samples, tokens, experts), here (2, 3, {number})"
                raise InvalidArgumentError(self, "gate", gate, allowed, f"they have shape {tuple(weights.shape)}")
            self.check_shares(weights.flatten(0, 1))
            if not torch.stack(alone).allclose(weights.flatten(0, 1), atol=1e-3):
                because = "the weights of a token change with the others"
                raise InvalidArgumentError(self, "gate", gate, "one that weighs each token by itself", because)

    def mix(self, x: Any) -> tuple[Tensor, Tensor]:
        """Scores (B, C) and weights (B, 2), those of a ``TokenGate`` as means over layers and tokens."""
        if isinstance(self.gate, TokenGate):
            output, weights = self.mix_layers(x)
            return output, self._mean_weights(weights, x)
        if isinstance(self.gate, FixedGate) and len(self.gate.active) == 1:
            return self._adapted(x, self.gate.active).logits, self.gate(x)
        with torch.no_grad():
            output = self._adapted(x, [1]) if self.gate.reads_features else None
        weights = self._weights(output, x)
        return self.mix_by(x, weights), self._of_samples(weights, x)

    @property
    def gate_is_causal(self) -> bool:
        """Whether the gate is fixed, weighs tokens, or reads features, which are those of the tokens so far."""
        return isinstance(self.gate, TokenGate) or super().gate_is_causal

    def forward(self, x: Any, weights: Tensor | None = None) -> Tensor:
        """Scores (B, C) of inputs; ``weights`` (B, 2) take the place of the gate's."""
        return self.mix(x)[0] if weights is None else self.mix_by(x, weights)

    def local_features(self, x: Any) -> Tensor:
        """Features (B, F) of inputs with the local expert alone."""
        return self.features_of(self._adapted(x, [1]), x)

    def mix_by(self, x: Any, weights: Tensor) -> Tensor:
        """Scores (B, C) of inputs, with given weights (B, experts) or, of tokens, (B, T, experts) in all layers."""
        return self._mixed(x, lambda path, inputs: weights).logits

    def mix_layers(self, x: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores (B, C) of inputs, and a ``TokenGate``'s weights (B, ..., experts) by the path of the layer."""
        output = self._mixed(x, self.gate.weights)  # pyright: ignore[reportArgumentType]
        return output.logits, output.weights

    def _mixed(self, x: Any, weigh: Weigh) -> Pass:
        """What the base computes with all experts; at first, it looks where layers have a single sample."""
        experts = range(len(self._adapted.experts))

        def look(path: str, inputs: Tensor) -> Tensor:
            if inputs.shape[0] != 1:
                allowed = "a layer that keeps the samples apart, in the first dimension"
                because = f"it reads a single sample in the shape {tuple(inputs.shape)}"
                raise InvalidArgumentError("LoRA", "target_modules", path, allowed, because)
            return torch.ones(1, len(experts), device=inputs.device)

        if not self._layout.is_done and batch_size_of(x) > 1:  # a single sample cannot be mistaken for another
            with torch.no_grad(), evaluating(self):
                self._adapted(rows_of(x, slice(1)), experts, look)
            self._layout.is_done = True
        return self._adapted(x, experts, weigh)

    def tokens_of(self, weights: Mapping[str, Tensor], x: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """For each layer that ``mix_layers`` gives weights of, these (B, T, experts), and which tokens are no padding.

        The latter is 1 or 0, shape (B, T). A layer whose inputs have no tokens has T = 1.
        """
        for of_layer in weights.values():
            tokens = of_layer.reshape(of_layer.shape[0], -1, of_layer.shape[-1])  # len() would be a constant in exports
            yield tokens, self.mask_of(x, tokens).to(tokens.dtype)

    def _mean_weights(self, weights: Mapping[str, Tensor], x: Any) -> Tensor:
        return torch.stack([_mean_of_tokens(*tokens) for tokens in self.tokens_of(weights, x)]).mean(0)


class ClusteredAdapterMoE(LayerwiseAdapterMoE):
    """Mixes the adapters of several clusters of clients inside the layers of a frozen base, as FedLEASE (NeurIPS 2025).

    A client has its own cluster's expert in the first place. Which of the other places have an expert, the
    :class:`AdaptiveTokenGate` knows.

    Args:
        base: as in ``AdapterMoE``.
        lora: which layers get adapters, and which are trained as a whole.
        gate: weighs the experts; None for ``AdaptiveTokenGate``. It cannot be one that reads features.
        max_clusters: the number of places, at least 2.
        blocks: as in ``LayerwiseAdapterMoE``; adapted layers elsewhere have the first expert alone.
        **kwargs: other arguments of ``AdapterMoE``.

    Attributes:
        global_experts: the experts, drawn independently.
        head: the layers that are trained as a whole.
    """

    has_global_expert = False

    def __init__(
        self,
        base: nn.Module,
        lora: LoRA,
        gate: Gate | None = None,
        max_clusters: int = 4,
        blocks: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        check_at_least(self, "max_clusters", max_clusters, 2, MOST_EXPERTS)
        self.max_clusters = self.gate_width = max_clusters
        super().__init__(base, lora, AdaptiveTokenGate() if gate is None else gate, blocks, **kwargs)

    def name_experts(self, experts: Sequence[nn.Module]) -> None:
        """Makes the experts parts of this module."""
        self.global_experts = nn.ModuleList(experts)

    def check_parts(self) -> None:
        """Refuses gates that read features, because no expert is the client's own."""
        if self.gate.reads_features:
            raise InvalidArgumentError(self, "gate", self.gate, "one that does not read features")
        super().check_parts()

    @property
    def weighed_parts(self) -> Sequence[str]:
        """All experts."""
        return [f"global_experts.{place}" for place in range(self.max_clusters)]


def _mean_of_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """The means (B, F) of values (B, T, F) over the tokens that are no padding, of which the mask (B, T) says it."""
    counts = mask.to(values.dtype)
    return (values * counts[..., None]).sum(1) / counts.sum(1, keepdim=True).clamp_min(1)
