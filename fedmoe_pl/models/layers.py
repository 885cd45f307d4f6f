"""Layers, initial parameters and checks for several networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import activation, conv, dropout, padding, pooling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from fedmoe_pl.checks import InvalidArgumentError

_LAYERS = {
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.LSTM, nn.GRU, nn.RNN, nn.Identity, nn.Flatten, nn.Unflatten),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm),
    *(nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(getattr(of, name) for of in (activation, conv, dropout, padding, pooling) for name in of.__all__),
} - {nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d}  # which draws numbers in eval mode, too


def draw_anew(module: nn.Module) -> None:
    """Draws new initial parameters in place, with the ``reset_parameters`` of every layer that has this method.

    They do not depend on the memory format, although random numbers are drawn in the order of the memory.
    """
    in_channels_last = [tensor for tensor in four_dimensional(module) if not tensor.is_contiguous()]
    formatted = [tensor.data for tensor in in_channels_last]
    for tensor in in_channels_last:
        tensor.data = tensor.data.contiguous()
    for layer in module.modules():
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()
    for tensor, data in zip(in_channels_last, formatted, strict=True):
        tensor.data = data.copy_(tensor.data)


def to_channels_last(module: nn.Module) -> None:
    """Puts all 4-D parameters and buffers into channels-last memory format, in place; those of lazy layers are left."""
    for tensor in four_dimensional(module):
        tensor.data = tensor.data.to(memory_format=torch.channels_last)


def four_dimensional(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers with 4 dimensions, such as weights of 2-D convolutions."""
    tensors = (*module.parameters(), *module.buffers())
    return [tensor for tensor in tensors if not is_lazy(tensor) and tensor.dim() == 4]


def has_own_train(module: nn.Module) -> bool:
    """Whether a part may do more than note its mode, such as merge adapters into the weights that they adapt."""
    return any(type(part).train is not nn.Module.train for part in module.modules())


def computes_more(module: nn.Module) -> bool:
    """Whether a part's output may depend on more than its own tensors and input, because of hooks of other parts."""
    parts = (vars(part) for part in module.modules())
    return any(part["_forward_hooks"] or part["_forward_pre_hooks"] or "forward" in part for part in parts)


def treats_samples_apart(module: nn.Module) -> bool:
    """Whether a module in eval mode computes the output for a sample from this sample and its own tensors alone.

    That is known of layers that PyTorch, torchvision or this package wrote, if nobody has replaced or hooked anything.
    In train mode, it holds but for dropout and batch normalization. The ``criterion`` of a mixture is not looked at.
    """
    parts = (part for name, part in module.named_modules() if name.partition(".")[0] != "criterion")
    return all(_treats_samples_apart(part) for part in parts)


def _treats_samples_apart(part: nn.Module) -> bool:
    """The same of one part, without those in it."""
    hooks = *part._forward_hooks.values(), *part._forward_pre_hooks.values()
    replaced = (name for name, value in vars(part).items() if callable(value) and hasattr(type(part), name))
    if any(not _is_own(hook) for hook in hooks) or any(name != "configure_optimizers" for name in replaced):
        return False
    if type(part) not in _LAYERS:
        return _is_own(type(part))
    if isinstance(part, _BatchNorm | _InstanceNorm):
        return part.track_running_stats is isinstance(part, _BatchNorm)
    dims = [getattr(part, name, 1) for name in ("dim", "start_dim")]
    is_apart = all(dim in (-1, 1, 2, 3) for dim in dims) and getattr(part, "batch_first", True)
    of_batch = getattr(part, "max_norm", None) is not None or getattr(part, "scale_grad_by_freq", False)
    return is_apart and not of_batch


def _is_own(code: Any) -> bool:
    return getattr(code, "__module__", "").startswith(("fedmoe_pl.", "torchvision.models."))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In this context, the module is in eval mode, so that it draws no random numbers; then its parts' modes return."""
    modes = modes_of(module)
    module.eval()
    try:
        yield
    finally:
        set_modes(modes)


def modes_of(module: nn.Module) -> dict[nn.Module, bool]:
    """Whether each part is in train mode."""
    return {part: part.training for part in module.modules()}


def set_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Puts each part into a mode of its own."""
    for part, mode in modes.items():
        if part.training is not mode and type(part).train is not nn.Module.train:
            part.train(mode)  # which may do more, such as merge adapters, also in parts of it, which come later
    for part, mode in modes.items():
        part.training = mode


@contextmanager
def trying(module: nn.Module) -> Iterator[None]:
    """In this context, the module may train with copies of its buffers; PyTorch's generators are put back after it."""
    buffers = [(part._buffers, {**part._buffers}) for part in module.modules()]
    copies = {buffer: buffer.clone() for buffer in module.buffers()}
    for own, saved in buffers:
        own.update({name: buffer if buffer is None else copies[buffer] for name, buffer in saved.items()})
    with torch.random.fork_rng({tensor.device for tensor in module.parameters() if tensor.is_cuda}):
        try:
            yield
        finally:
            for own, saved in buffers:
                own.clear()
                own.update(saved)


@contextmanager
def replaced_forward(part: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """In this context, another function is called in place of the part's ``forward``, which it may have of its own."""
    own = vars(part).get("forward")
    part.forward = forward
    try:
        yield
    finally:
        del part.forward
        if own is not None:
            part.forward = own


def layer_without_reset(module: nn.Module) -> nn.Module | None:
    """The first layer that has parameters but no ``reset_parameters``; None if all parameters can be drawn anew."""
    layers = (layer for layer in module.modules() if any(True for _ in layer.parameters(recurse=False)))
    return next((layer for layer in layers if not callable(getattr(layer, "reset_parameters", None))), None)


def plant(root: nn.Module, path: str, module: nn.Module) -> None:
    """Makes a module a descendant of another one, under a path."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root._modules[parent]  # pyright: ignore[reportAssignmentType]
    root.add_module(name, module)


class XavierConv2d(nn.Conv2d):
    """A convolution whose initial weight comes from Xavier's uniform distribution."""

    def reset_parameters(self) -> None:
        """Draws the weight and the bias."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.weight)


class FanOutConv2d(nn.Conv2d):
    """A convolution whose initial weights come from N(0, sqrt(2 / (k * k * out_channels))), with bias 0."""

    def reset_parameters(self) -> None:
        """Draws the weight and sets the bias to 0."""
        super().reset_parameters()
        nn.init.normal_(self.weight, 0, (2 / (self.kernel_size[0] * self.kernel_size[1] * self.out_channels)) ** 0.5)
        nn.init.zeros_(self.bias)  # pyright: ignore[reportArgumentType]


class SmallBiasLinear(nn.Linear):
    """A linear layer whose bias starts at 0.01."""

    def reset_parameters(self) -> None:
        """Draws the weight and sets the bias."""
        super().reset_parameters()
        nn.init.constant_(self.bias, 0.01)


def keep_arguments(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Makes attributes of the locals of a module's constructor, from which a checkpoint can describe it."""
    for name, value in arguments.items():
        if name != "self" and not name.startswith("_"):
            setattr(module, name, value)


def pooled_size(owner: nn.Module, image_size: int, times: int = 2) -> int:
    """Height and width of an image after 5x5 convolutions without padding, each followed by 2x2 pooling."""
    pooled = image_size
    for _ in range(times):
        pooled = (pooled - 4) // 2
    if pooled < 1:
        because = "smaller images need another network, such as SmallMLP"
        raise InvalidArgumentError(owner, "image_size", image_size, f"at least {10 * times - 4}", because)
    return pooled


def two_convolutions(
    in_channels: int, conv1_channels: int, conv2_channels: int, convolution: type[nn.Conv2d] = nn.Conv2d
) -> nn.Sequential:
    """Two 5x5 convolutions, each followed by ReLU and 2x2 pooling, then flattening.

    As in all networks here, pooling comes first, which has the same outputs and gradients, and leaves ReLU a quarter of
    the values.
    """
    return nn.Sequential(
        convolution(in_channels, conv1_channels, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        convolution(conv1_channels, conv2_channels, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
    )


class SwitchNorm1d(nn.Module):
    """Normalizes by a learned mixture of layer and batch statistics (Luo et al., https://arxiv.org/abs/1806.10779).

    As in the official implementation for 2-D input, the output is ``(x - mean) / sqrt(var + eps) * weight + bias``.
    The mean is a mixture of the sample's mean over its features (index 0) and the feature's mean over the batch (index
    1), weighted with the softmax of ``mean_weight``. The variance is mixed in the same way, with ``var_weight``.
    Variances are unbiased. In eval mode, running statistics replace those of the batch. Both start at 0, even the
    variance, so that they need many steps to become right.

    Args:
        num_features: number of features D of inputs (B, D), at least 2.
        momentum: share of the old running statistics in the new ones, from 0 to 1; in ``nn.BatchNorm1d``, momentum is
            the share of the new statistics. The official implementation has 0.997: after 1000 steps, 5% of the initial
            value is left.
        eps: added to the variance.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, momentum: float = 0.9, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_features = num_features
        self.momentum = momentum
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_features))
        self.bias = nn.Parameter(torch.empty(num_features))
        self.mean_weight = nn.Parameter(torch.empty(2))
        self.var_weight = nn.Parameter(torch.empty(2))
        self.register_buffer("running_mean", torch.empty(num_features))
        self.register_buffer("running_var", torch.empty(num_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets parameters and running statistics to their initial values."""
        for parameter in (self.weight, self.mean_weight, self.var_weight):
            nn.init.ones_(parameter)
        nn.init.zeros_(self.bias)
        self.running_mean.zero_()
        self.running_var.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Normalized values (B, D) of inputs (B, D).

        Raises:
            ValueError: if the input is not 2-D, or has only one sample in train mode, so that there is no variance.
        """
        if x.dim() != 2:
            raise ValueError(f"expected 2D input (got {x.dim()}D input)")
        if self.training and len(x) < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        if self.training:
            batch_mean, batch_var = x.mean(0), x.var(0)
            with torch.no_grad():
                # in place, as in nn.BatchNorm1d, because under functional_call the buffers belong to the caller
                self.running_mean.mul_(self.momentum).add_((1 - self.momentum) * batch_mean)
                self.running_var.mul_(self.momentum).add_((1 - self.momentum) * batch_var)
        else:
            batch_mean, batch_var = self.running_mean, self.running_var
        of_mean, of_var = self.mean_weight.softmax(0), self.var_weight.softmax(0)
        mean = of_mean[0] * x.mean(1, keepdim=True) + of_mean[1] * batch_mean  # (B, D)
        var = of_var[0] * x.var(1, keepdim=True) + of_var[1] * batch_var
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias

    def extra_repr(self) -> str:
        """The arguments, as ``print`` shows them."""
        return f"{self.num_features}, momentum={self.momentum}, eps={self.eps}"


def has_batch_norm(module: nn.Module) -> bool:
    """Whether the module has batch normalization in train mode, which needs more than one sample in a batch."""
    return any(part.training and isinstance(part, (_BatchNorm, SwitchNorm1d)) for part in module.modules())


def batch_norm_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers of the module's batch normalization."""
    layers = [(name, part) for name, part in module.named_modules() if isinstance(part, (_BatchNorm, SwitchNorm1d))]
    return frozenset(f"{layer}.{name}".lstrip(".") for layer, part in layers for name in part.state_dict())
