"""Low-rank adapters (LoRA) of a frozen base: experts that change what some of its layers compute.

peft makes the adapters and finds their layers; the base itself is not changed, so that its tensors keep their names. An
expert is a tree of adapters with the paths of their layers: the tensors of ``global_expert`` are named
``global_expert.<path of the layer>.lora_A.weight``, which is also how peft's files name them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_number, reason_of, with_article
from fedmoe_pl.models.inputs import call
from fedmoe_pl.models.layers import plant
from fedmoe_pl.models.mixtures.mixing import mix_outputs
from fedmoe_pl.trees import copy_module

_ADAPTER = "adapter"  # the name under which peft makes adapters
HEADS = ("classifier", "score")
"""Ends of the names of layers that peft trains as a whole wherever the task is to classify."""


@dataclass
class LoRA:
    """Adapters of a base's layers: ``h = W x + s B A dropout(x)`` with ``s = lora_alpha / r`` (Hu et al., ICLR 2022).

    The arguments are those of peft's ``LoraConfig`` and ``get_peft_model`` with the same names
    (https://arxiv.org/abs/2106.09685).

    Args:
        target_modules: the layers that get adapters: a list of names, each the whole one or its end after a dot, such
            as ``q_proj``; a regular expression that matches whole names; or ``all-linear``. They may be linear,
            convolutions, embeddings and transformers' ``Conv1D``.
        r: the rank: A has r rows and B has r columns.
        lora_alpha: numerator of the scale s.
        lora_dropout: probability of dropping a value of the adapters' input. Where adapters of several experts are
            mixed in a layer, they read the same values.
        use_rslora: whether the scale is ``lora_alpha / sqrt(r)``.
        exclude_modules: layers that get none, in the words of ``target_modules``.
        modules_to_save: layers that are trained as a whole, such as a ``classifier``: each expert has a copy of its
            own, or all of them one together. They keep the base's type. None for none.
        autocast_adapter_dtype: whether A and B are float32 if the base is in bfloat16 or float16, in which small steps
            of an optimizer are rounded away; otherwise they have the base's type.

    Raises:
        MisconfigurationException: if a number is out of its range.
    """

    target_modules: str | list[str]
    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    exclude_modules: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    autocast_adapter_dtype: bool = True

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_at_least("LoRA", "r", self.r, 1)
        check_number("LoRA", "lora_alpha", self.lora_alpha, above=0)
        check_number("LoRA", "lora_dropout", self.lora_dropout, least=0, below=1)

    @property
    def scaling(self) -> float:
        """The scale s of every adapter."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)

    def config(self) -> Any:
        """Peft's ``LoraConfig``, without ``modules_to_save``.

        Raises:
            MisconfigurationException: if peft is not installed.
        """
        try:
            from peft import LoraConfig
        except ModuleNotFoundError as error:
            raise MisconfigurationException(
                "LoRA needs the package peft: pip install '.[adapters]' in the repository."
            ) from error
        others = ("modules_to_save", "autocast_adapter_dtype")
        return LoraConfig(**{each.name: getattr(self, each.name) for each in fields(self) if each.name not in others})


class LinearAdapter(nn.Module):
    """The adapter of a linear layer or a convolution.

    Args:
        lora_A: maps the layer's inputs to r values.
        lora_B: maps these to what is added to the layer's outputs.
        dropout: for the inputs.
        scaling: the scale s.
    """

    def __init__(self, lora_A: nn.Module, lora_B: nn.Module, dropout: nn.Module, scaling: float) -> None:
        super().__init__()
        self.lora_A, self.lora_B, self.dropout = lora_A, lora_B, dropout
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the output of the layer for its input x."""
        return self.of_dropped(self.dropped(x))

    def dropped(self, x: Tensor) -> Tensor:
        """The input without the values that dropout leaves out."""
        weight: Any = self.lora_A.weight
        return self.dropout(x.to(weight.dtype))

    def of_dropped(self, x: Tensor) -> Tensor:
        """What is added for an input after dropout."""
        return self.lora_B(self.lora_A(x)) * self.scaling


class EmbeddingAdapter(nn.Module):
    """The adapter of an embedding.

    Args:
        lora_embedding_A: shape (r, rows of the embedding).
        lora_embedding_B: shape (width of the embedding, r).
        scaling: the scale s.
        padding_idx: the id that the embedding does not train; None for none.
    """

    def __init__(
        self,
        lora_embedding_A: nn.Parameter,
        lora_embedding_B: nn.Parameter,
        scaling: float,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.lora_embedding_A, self.lora_embedding_B = lora_embedding_A, lora_embedding_B
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the embeddings of the ids x."""
        return F.embedding(x, self.lora_embedding_A.T, self.padding_idx) @ self.lora_embedding_B.T * self.scaling

    def dropped(self, x: Tensor) -> Tensor:
        """The ids, of which none is left out."""
        return x

    of_dropped = forward


Weigh = Callable[[str, Tensor], Tensor]
"""The weights of the experts in a layer, given its path and its input (B, ..., F): shape (B, ..., experts) or (B,
experts)."""


@dataclass
class Pass:
    """A forward pass of a base, and what it computed.

    Attributes:
        experts: those that take part.
        weigh: how layers weigh them; None for a single one, which has the weight 1.
        called: the paths of the layers that were called.
        logits: the base's output.
        features: what the first of ``modules_to_save`` read, shape (B, ..., F); without any, the output layer that a
            language model of transformers names; None if there is none.
        weights: the weights of the experts by the path of the layer that mixed them, in the order of the calls. Of a
            layer that the base calls again, those of its second call have the name ``<path>, call 2``, and so on.
    """

    experts: Sequence[int]
    weigh: Weigh | None
    called: set[str] = field(default_factory=set)
    logits: Tensor = field(init=False)
    features: Tensor | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)

    def weights_in(self, path: str, x: Tensor) -> Tensor:
        """The weights of the experts in a layer or block, which it notes."""
        assert self.weigh is not None
        name, calls = path, 1
        while name in self.weights:
            calls += 1
            name = f"{path}, call {calls}"
        weights = self.weights[name] = self.weigh(path, x)
        return weights


class Look:
    """Whether the calls of a base's layers that have experts were looked at; copies need not be looked at again."""

    is_done = False

    def __deepcopy__(self, known: dict[int, Any]) -> Look:
        return self


class AdapterExpert(nn.Module):
    """An expert's adapters and trained layers, as a tree of modules with the paths that they have in the base.

    It computes what the base does with this expert alone; layers outside of the blocks have the first one nevertheless.
    """

    def __init__(self) -> None:
        super().__init__()
        self._computes: list[tuple[AdaptedBase, list[int]]] = []  # the base, which is no part of it, and its index

    def forward(self, *inputs: Any, **arguments: Any) -> Tensor:
        """The base's outputs with this expert, for inputs as one value or as keyword arguments."""
        (adapted, experts), (x,) = self._computes[0], inputs or (arguments,)
        return adapted(x, experts).logits


class AdaptedBase:
    """A frozen base that computes with some of its experts at a time; it is no module, so that it names no tensors.

    Args:
        base: the base; its parameters are frozen.
        lora: which layers get adapters.
        num_experts: number of experts, whose adapters are drawn one after the other.
        prepare: makes what the base is called with of the inputs.
        blocks: names of modules of the base, or their ends, that each expert computes as a whole, so that their
            outputs are mixed; layers outside of them have the first expert only. Empty mixes in every adapted layer.
        has_one_head: whether the experts have the copies of ``modules_to_save`` together, in ``head``.

    Attributes:
        experts: the experts.
        head: what the experts have together.
        outside: the paths of the adapted layers outside of the blocks; none if there are no blocks.
        widths: by the path of the layers and blocks that mix experts, the number of input features.

    Raises:
        MisconfigurationException: if names match nothing, or layers cannot have adapters.
    """

    def __init__(
        self,
        base: nn.Module,
        lora: LoRA,
        num_experts: int,
        prepare: Callable[[Any], Any],
        blocks: Sequence[str],
        has_one_head: bool,
    ) -> None:
        self.base = base.requires_grad_(False)
        self.head = nn.Module()
        self.prepare = prepare
        self._saved = paths_to_save(base, lora)
        self.experts = [*_drawn(base, lora, num_experts, self._saved)]
        self._read = self._saved[0] if self._saved else _output_layer(base)
        self._paths = [name for name, part in self.experts[0].named_modules() if isinstance(part, _ADAPTERS)]
        if wrong := next((path for path in self._paths if path.endswith(tuple(self._saved))), None):
            allowed = (
                f"names that no layer with an adapter ends with, as '{wrong}' does (exclude_modules leaves it out)"
            )
            because = "peft's files could not have both"
            raise InvalidArgumentError("LoRA", "modules_to_save", lora.modules_to_save, allowed, because)
        if head := _untrained_head(base, self._paths, self._saved):
            rank_zero_warn(
                f"LoRA: modules_to_save is {lora.modules_to_save}, which leaves the {type(base).__name__}'s {head} as "
                "it is; if the base was not trained for this task, it is a random draw."
            )
        # in blocks without adapters, all experts would compute the same
        found = _matching(base, blocks, "blocks")
        self._blocks = [block for block in found if any(path.startswith(f"{block}.") for path in self._paths)]
        if blocks and not self._blocks:
            raise InvalidArgumentError("LoRA", "blocks", blocks, "names of modules in which layers have adapters")
        within = tuple(f"{block}." for block in self._blocks)
        self.outside = [path for path in self._paths if within and not path.startswith(within)]
        self._pass: Pass | None = None
        self._check = Look()
        self._checkpointing = [part for part in base.modules() if hasattr(part, "gradient_checkpointing")]
        for path in self._saved:
            for root in [self.head] if has_one_head else self.experts:
                plant(root, path, copy_module(base.get_submodule(path)).requires_grad_(True))
        self._heads = [self.head if has_one_head else expert for expert in self.experts]
        for index, expert in enumerate(self.experts):
            expert._computes.append((self, [index]))
        self._patch()

    @property
    def widths(self) -> dict[str, int]:
        """Numbers of input features of what mixes experts; 0 of one that begins with no linear layer."""
        return {path: _in_features(self.base.get_submodule(path)) for path in self._blocks or self._paths}

    def __call__(self, x: Any, experts: Sequence[int], weigh: Weigh | None = None) -> Pass:
        """What the base computes of inputs with some of its experts; ``weigh`` is needed for more than one."""
        if any(getattr(part, "gradient_checkpointing", False) for part in self._checkpointing):
            reason = "it computes layers again when the gradient is, without their experts"
            raise InvalidArgumentError("LoRA", "base", type(self.base).__name__, "without checkpointing", reason)
        self._pass = current = Pass(experts, weigh)
        try:
            current.logits = call(self.base, self.prepare(x))
        finally:
            self._pass = None
        if not self._check.is_done:
            self._check_layers(current.called)
        return current

    def _check_layers(self, called: set[str]) -> None:
        """Refuses layers that the base does not call, because what is trained of them would change nothing."""
        for argument, paths in (("target_modules", self._paths), ("modules_to_save", self._saved)):
            if missing := [path for path in paths if path not in called]:
                allowed = "layers that the base calls, because what is trained of others would change nothing"
                raise InvalidArgumentError("LoRA", argument, missing[0], allowed)
        self._check.is_done = True

    def plain_base(self) -> nn.Module:
        """A copy of the base that computes without experts, as it was before it had any."""
        base = copy.deepcopy(self.base, {id(self): self})
        for part in base.modules():
            for hooks in (part._forward_hooks, part._forward_pre_hooks):
                for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", "") == __name__]:
                    del hooks[key]
        for path in (*self._blocks, *self._saved):
            del vars(base.get_submodule(path))["forward"]
        return base

    def _patch(self) -> None:
        """Lets layers and blocks of the base ask for the experts."""
        for path in self._paths:
            adapted = _AdaptedLayer(self, path, not self._blocks, path in self.outside)
            self.base.get_submodule(path).register_forward_hook(adapted, with_kwargs=True)
        for path in self._blocks:
            self.base.get_submodule(path).forward = _MixedBlock(self, path)
        for path in self._saved:
            self.base.get_submodule(path).forward = _Saved(self, path)
            # in eval mode, torch's encoder layers take weights past a part's forward, unless it has a hook
            self.base.get_submodule(path).register_forward_hook(_pass_on)
        if not self._saved and self._read:
            self.base.get_submodule(self._read).register_forward_pre_hook(self._note_input, with_kwargs=True)

    def _note_input(self, layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A hook that notes what the output layer of a language model reads."""
        if self._pass is not None:
            self._pass.features = _first(inputs, options)


@dataclass
class _AdaptedLayer:
    """A hook that adds the experts' adapters to the output of a layer."""

    adapted: AdaptedBase
    path: str
    mixes: bool
    is_outside: bool  # of the blocks, where all experts are the first one

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> Tensor:
        current = self.adapted._pass
        if current is None:
            return output
        current.called.add(self.path)
        experts = [0] if self.is_outside else current.experts
        adapters: list[Any] = [self.adapted.experts[index].get_submodule(self.path) for index in experts]
        x = _first(inputs, options)
        if len(adapters) == 1 or not self.mixes:
            change = adapters[0](x)
        else:
            weights = current.weights_in(self.path, x)  # before the adapters: gradients are summed in this order
            # one draw for all, as in FedALT's and FedLEASE's code, also where frozen experts are in eval mode
            x = next((adapter for adapter in adapters if adapter.training), adapters[0]).dropped(x)
            change = mixed(weights, [adapter.of_dropped(x) for adapter in adapters], self.path)
        scale: Any = getattr(layer, "embed_scale", None)  # of embeddings such as Gemma's, which have scaled the output
        if isinstance(layer, nn.Embedding) and scale is not None:
            change = change * scale
        return (output + change).to(output.dtype)


@dataclass
class _MixedBlock:
    """The forward of a block that every expert computes as a whole."""

    adapted: AdaptedBase
    path: str

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        block, current = self.adapted.base.get_submodule(self.path), self.adapted._pass
        compute = type(block).forward
        if current is None or len(current.experts) == 1:
            return compute(block, *inputs, **options)
        outputs = []
        try:
            for expert in current.experts:
                self.adapted._pass = Pass([expert], None, current.called)
                outputs.append(compute(block, *inputs, **options))
        finally:
            self.adapted._pass = current
        if not isinstance(outputs[0], Tensor):
            raise InvalidArgumentError("LoRA", "blocks", self.path, "a module that returns one tensor")
        return mixed(current.weights_in(self.path, _first(inputs, options)), outputs, self.path).to(outputs[0].dtype)


@dataclass
class _Saved:
    """The forward of a layer that is trained as a whole: that of the experts' copy, which also notes its input."""

    adapted: AdaptedBase
    path: str

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        adapted, current = self.adapted, self.adapted._pass
        if current is None:
            layer = adapted.base.get_submodule(self.path)
            return type(layer).forward(layer, *inputs, **options)
        current.called.add(self.path)
        if self.path == adapted._read:
            current.features = _first(inputs, options)
        return adapted._heads[current.experts[0]].get_submodule(self.path)(*inputs, **options)


def _first(inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The first tensor that a layer is called with, by its place or by its name."""
    return next((value for value in (*inputs, *options.values()) if isinstance(value, Tensor)), None)


def _pass_on(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """A hook that changes nothing."""


def mixed(weights: Tensor, outputs: Sequence[Tensor], path: str) -> Tensor:
    """The weighted sum of the experts' outputs (B, ..., F) of a layer.

    Weights have the shape (B, ..., experts), or (B, experts) if they are those of whole samples.
    """
    if weights.shape[:-1] != outputs[0].shape[: weights.dim() - 1]:
        reason = f"its outputs have shape {tuple(outputs[0].shape)}, the weights {tuple(weights.shape)}"
        raise InvalidArgumentError("LoRA", "target_modules", path, "a layer that keeps the samples apart", reason)
    return mix_outputs(outputs, weights, "logits")


_ADAPTERS = (LinearAdapter, EmbeddingAdapter)


def _drawn(base: nn.Module, lora: LoRA, num_experts: int, saved: Sequence[str]) -> Iterator[AdapterExpert]:
    """Experts with new adapters of the base; ``saved`` parts have none."""
    config = lora.config()
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import cast_adapter_dtype

    for _ in range(num_experts):
        with silent_peft():
            try:
                inject_adapter_in_model(copy.copy(config), base, adapter_name=_ADAPTER)
            except ValueError as error:
                allowed = "names of layers of the base that peft can adapt"
                raise InvalidArgumentError(
                    "LoRA", "target_modules", lora.target_modules, allowed, f"peft says: {reason_of(error)}"
                ) from error
        cast_adapter_dtype(base, _ADAPTER, lora.autocast_adapter_dtype)
        made = {path: layer for path, layer in base.named_modules() if isinstance(layer, LoraLayer)}
        for path, layer in reversed(made.items()):  # the base as it was: parts of a wrapped layer first
            base.set_submodule(path, layer.get_base_layer())
        if hasattr(base, "peft_config"):
            del base.peft_config
        expert = AdapterExpert()
        for path, layer in made.items():
            if not any(path == part or path.startswith(f"{part}.") for part in saved):
                plant(expert, path, _adapter(path, layer))
        yield expert


@contextmanager
def silent_peft() -> Iterator[None]:
    """Drops peft's warnings that it transposes weights of ``Conv1D`` only, and of transformers what is new to peft."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        yield


def _adapter(path: str, layer: Any) -> nn.Module:
    """The adapter that peft made for a layer."""
    scaling = layer.scaling[_ADAPTER]
    if _ADAPTER in layer.lora_embedding_A:
        embedding = layer.get_base_layer()
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            allowed = "embeddings without max_norm, scale_grad_by_freq and sparse"
            raise InvalidArgumentError("LoRA", "target_modules", path, allowed)
        return EmbeddingAdapter(
            layer.lora_embedding_A[_ADAPTER], layer.lora_embedding_B[_ADAPTER], scaling, embedding.padding_idx
        )
    if _ADAPTER not in layer.lora_A or isinstance(layer.get_base_layer(), nn.MultiheadAttention):
        allowed = "linear layers, convolutions and embeddings"
        raise InvalidArgumentError(
            "LoRA", "target_modules", path, allowed, f"it is {with_article(type(layer.base_layer).__name__)}"
        )
    return LinearAdapter(layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER], layer.lora_dropout[_ADAPTER], scaling)


def paths_to_save(base: nn.Module, lora: LoRA) -> list[str]:
    """The paths of the layers of the base that are trained as a whole."""
    saved = [*dict.fromkeys(_matching(base, lora.modules_to_save or (), "modules_to_save"))]
    return [path for path in saved if not any(path.startswith(f"{other}.") for other in saved)]


def _untrained_head(base: nn.Module, adapted: Sequence[str], saved: Sequence[str]) -> str | None:
    """The path of a layer in a head of a model of transformers that is neither adapted nor trained as a whole."""
    from transformers import PreTrainedModel

    trained = tuple(f"{path}." for path in (*adapted, *saved))
    heads = base.named_children() if isinstance(base, PreTrainedModel) else ()
    layers = (layer for name, head in heads if name.endswith(HEADS) for layer in head.named_modules(prefix=name))
    weighted = (path for path, part in layers if any(True for _ in part.parameters(recurse=False)))
    return next((path for path in weighted if not f"{path}.".startswith(trained)), None)


def unlike_weight(path: str, layer: nn.Module) -> str:
    """Why no change of a layer's weight does what its adapter does; empty if one does."""
    if isinstance(layer, _ConvNd) and (layer.groups > 1 or layer.padding_mode != "zeros" or max(layer.dilation) > 1):
        return f"{path} is a convolution with groups, dilation or padding_mode, which are not its adapter's"
    return ""


def _matching(base: nn.Module, names: Iterable[str], argument: str) -> Iterator[str]:
    """Paths of the modules of the base with these names, whole ones or their ends after a dot."""
    paths = [path for path, _ in base.named_modules() if path]
    for name in names:
        found = [path for path in paths if path == name or path.endswith(f".{name}")]
        if not found:
            tops = ", ".join(name for name, _ in base.named_children())
            raise InvalidArgumentError("LoRA", argument, name, f"names of modules of the base, which has {tops}")
        yield from found


def _output_layer(base: nn.Module) -> str | None:
    """The path of the layer that gives the logits of tokens, of a model of transformers that has one."""
    find: Any = getattr(base, "get_output_embeddings", None)
    layer = None if find is None else find()
    return next((path for path, part in base.named_modules() if part is layer and path), None)


def _in_features(part: nn.Module) -> int:
    """Values per position that the first layer in a part reads, adapted or not; 0 if that is no linear layer."""
    for layer in part.modules():
        if isinstance(layer, (nn.Embedding, _ConvNd)):
            break
        if (width := getattr(layer, "in_features", getattr(layer, "nx", None))) is not None:  # nx: that of Conv1D
            return width
    return 0
