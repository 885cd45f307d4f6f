"""The loss of a client as a function of its module's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call

from fedmoe_pl.algorithms.algorithm import Algorithm


class Loss(nn.Module):
    """The algorithm's loss as a module, so that ``functional_call`` can replace the tensors of the client's module."""

    def __init__(self, algorithm: Algorithm, module: LightningModule) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.module = module

    def forward(self, x: Tensor, y: Tensor, constants: dict[str, Any]) -> Tensor:
        """The loss of a batch, of shape ()."""
        return self.algorithm.client_loss(self.module, (x, y), constants)

    def of(self, tensors: Mapping[str, Tensor], x: Tensor, y: Tensor, constants: dict[str, Any]) -> Tensor:
        """The loss with other tensors, whose names are those in the client's module."""
        return functional_call(self, {f"module.{name}": tensor for name, tensor in tensors.items()}, (x, y, constants))
