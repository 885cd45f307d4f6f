"""The parameters that no client of a phase trains are in memory once."""

from __future__ import annotations

from collections.abc import Collection

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.trees import Tree, borrow, copy_module, is_borrowed, is_written, same_memory, same_values

_SAMPLE = 16  # values of a parameter that are compared after every client


class Untrained:
    """Makes copies of a phase's module that share what no client trains, such as a frozen base.

    The first client of a process has all parameters to itself, which shows whether the module's own code changes some
    of them all the same, as that of a teacher that follows its student; clients never share these. On other devices
    than the CPU they share nothing, because a copy is moved there.

    Args:
        module: the phase's module.
        initial: its tensors.
        names: the parameters that no client trains.
    """

    def __init__(self, module: LightningModule, initial: Tree, names: Collection[str]) -> None:
        self.module, self.initial = module, initial
        self.shared = {name: parameter for name, parameter in module.named_parameters() if name in names}
        for name, parameter in self.shared.items():
            tensor = initial[name]
            if tensor.stride() == parameter.stride() and same_values(tensor, parameter):
                parameter.data = tensor
        self.is_tried = not self.shared
        self._sums: dict[str, int] = {}
        self._samples: dict[str, Tensor] = {}

    def known(self, tree: Tree) -> Tree:
        """A client's tensors, but the phase's initial ones where they are the same, so that they are in memory once."""
        return {
            name: self.initial[name] if name in self.shared and same_values(self.initial[name], tensor) else tensor
            for name, tensor in tree.items()
        }

    def copy(self) -> LightningModule:
        """A module for clients to train or to be evaluated with."""
        return copy_module(self.module, self.shared if self.is_tried else ())

    def restore(self, module: LightningModule) -> None:
        """Has a copy share again what a client had to itself."""
        for name, parameter in module.named_parameters() if self.is_tried else ():
            if name in self.shared and not same_memory(parameter, self.shared[name]):
                borrow(parameter, self.shared[name].data)

    def check(self, client: Client) -> None:
        """Refuses a change of what clients share; the first client's training says what they can share."""
        parameters = dict(client.module.named_parameters())
        if not self.is_tried:
            before = {**client.loaded, **client.state}
            unchanged = {name for name in self.shared if same_values(before[name], parameters[name])}
            self.shared = {name: tensor for name, tensor in self.shared.items() if name in unchanged}
            self._sums = {name: _sum(tensor) for name, tensor in self.shared.items()}
            self._samples = {name: _sample(tensor) for name, tensor in self.shared.items()}
            self.is_tried = True
        for name in self.shared:
            parameter = parameters[name]
            if not is_borrowed(parameter):
                continue
            is_suspect = is_written(parameter) or not torch.equal(_sample(parameter), self._samples[name])
            if is_suspect and same_memory(parameter, self.shared[name]) and _sum(parameter) != self._sums[name]:
                raise MisconfigurationException(
                    f"{type(client.module).__name__}: '{name}' was changed in the training of client {client.id}, but "
                    "no optimizer trains it, and the first client's training left it as it was; register it as a "
                    "buffer, so that clients do not share it."
                )


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[:_SAMPLE].clone()


def _sum(tensor: Tensor) -> int:
    """A sum of all bits, which takes much less time than a step of training."""
    values = tensor.detach().contiguous().flatten().view(torch.uint8)
    return int(values.view(torch.int32 if len(values) % 4 == 0 else torch.uint8).sum(dtype=torch.int64))
