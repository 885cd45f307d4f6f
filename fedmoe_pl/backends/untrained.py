"""The parameters that no client of a phase trains are in memory once."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Mapping

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.trees import Tree, borrow, copy_module, is_borrowed, is_interchangeable, same_bits, same_memory


class Untrained:
    """Makes copies of a phase's module that share what no client trains, such as a frozen base.

    The first client that a process trains has all parameters to itself, which shows whether the module's own code
    changes some of them all the same, as that of a teacher that follows its student; clients never share these. On
    another device than the CPU, what they share is in memory once, too.

    Args:
        module: the phase's module.
        initial: its tensors.
        names: the parameters that no client trains.
    """

    def __init__(self, module: LightningModule, initial: Tree, names: Collection[str]) -> None:
        self.module, self.initial = module, initial
        self.shared: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            tensor = initial[name]
            if name in names and is_interchangeable(tensor, parameter):
                parameter.data = tensor
                self.shared[name] = parameter
        self.is_tried = not self.shared
        self._sums = _sums(self.shared)
        self._elsewhere: Tree = {}  # copies of `shared` on another device than the CPU

    def known(self, tree: Tree) -> Tree:
        """A client's tensors, but the phase's initial ones where they are the same, so that they are in memory once."""
        return {
            name: self.initial[name] if name in self.shared and same_bits(self.initial[name], tensor) else tensor
            for name, tensor in tree.items()
        }

    def copy(self) -> LightningModule:
        """A module for clients to train or to be evaluated with."""
        return copy_module(self.module, self.shared if self.is_tried else ())

    def move(self, module: LightningModule, device: torch.device) -> LightningModule:
        """Moves a copy to a device; what it shares goes there once."""
        elsewhere = device.type != "cpu"
        with torch.inference_mode(False):
            for name, parameter in module.named_parameters() if self.is_tried else ():
                if name in self.shared and is_borrowed(parameter):
                    shared = self.shared[name].data
                    if elsewhere and name not in self._elsewhere:
                        self._elsewhere[name] = shared.to(device)
                    borrow(parameter, self._elsewhere[name] if elsewhere else shared, shared)
        return module.to(device)

    def restore(self, module: LightningModule) -> bool:
        """Has a copy share again what a client had to itself; returns whether there was anything."""
        parameters = module.named_parameters() if self.is_tried and self.shared else ()
        own = [(p, self.shared[n]) for n, p in parameters if n in self.shared and not same_memory(p, self.shared[n])]
        for parameter, shared in own:
            borrow(parameter, shared.data)
        return bool(own)

    def try_out(self, client: Client) -> None:
        """Finds what others can share in the first client that was trained: what its training left as it was.

        A module may change parameters in eval mode, too: adapters are merged into the weights that they adapt.
        """
        if self.is_tried or not client.steps:
            return
        client.module.eval()
        parameters, before = dict(client.module.named_parameters()), {**client.loaded, **client.state}
        unchanged = {name for name in self.shared if same_bits(before[name], parameters[name])}
        self.shared = {name: tensor for name, tensor in self.shared.items() if name in unchanged}
        self.is_tried = True
        client.module.train()

    def check(self, algorithm: Algorithm) -> None:
        """Refuses a change of what clients share."""
        for name, value in itertools.chain(_sums(self.shared).items(), _sums(self._elsewhere).items()):
            if value != self._sums[name]:
                raise MisconfigurationException(
                    f"{type(self.module).__name__}: '{name}' was changed in place, but no optimizer trains it, and the "
                    "first client's training left it as it was, so that clients share its memory. If the module "
                    f"changes it, register it as a buffer; hooks of {type(algorithm).__name__} must make new tensors "
                    "in place of changing those that they were given, and load tensors into a module with `load_tree`."
                )


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Checksums of the sums of blocks of 4096 bytes, which take a fifth of the time of copies."""
    parts = list[Tensor]()
    for tensor in tensors.values():
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        end = len(values) // 4096 * 4096
        blocks = values[:end].view(torch.int64).view(-1, 512).sum(1)
        parts.append(torch.cat([blocks.view(torch.uint8), values[end:]]))
    if not parts:
        return {}
    # from another device at once
    of_tensors = torch.cat(parts).cpu().split([len(part) for part in parts])
    return {name: zlib.crc32(part.numpy().data) for name, part in zip(tensors, of_tensors, strict=True)}
