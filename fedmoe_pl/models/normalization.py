"""Switchable normalization, the first layer of pFedMoE's gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


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
        if self.training:
            batch_mean, batch_var = self._batch_statistics(x)
        else:
            batch_mean, batch_var = self.running_mean, self.running_var
        of_mean, of_var = self.mean_weight.softmax(0), self.var_weight.softmax(0)
        mean = of_mean[0] * x.mean(1, keepdim=True) + of_mean[1] * batch_mean  # (B, D)
        var = of_var[0] * x.var(1, keepdim=True) + of_var[1] * batch_var
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (D,) of every feature over the batch; updates the running statistics."""
        if len(x) < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        mean, var = x.mean(0), x.var(0)
        with torch.no_grad():
            # in place, as in nn.BatchNorm1d, because under functional_call the buffers belong to the caller
            self.running_mean.mul_(self.momentum).add_((1 - self.momentum) * mean)
            self.running_var.mul_(self.momentum).add_((1 - self.momentum) * var)
        return mean, var

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
