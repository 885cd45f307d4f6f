"""What the models of clients have in common: parameters that are in memory once, and outputs that are looked up."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.models.layers import computes_more, evaluating, replaced_forward, treats_samples_apart
from fedmoe_pl.trees import Tree, borrow, copy_module, is_borrowed, is_interchangeable, same_bits, version_of


class DeviceCopies:
    """Copies of what a phase's clients share, on a device other than the CPU; each process has its own copies."""

    def __init__(self) -> None:
        self.tensors: Tree = {}
        self._sums: dict[str, int] = {}

    def of(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        """The copy of a tensor, which is made at the first request."""
        if name not in self.tensors:
            self.tensors[name] = tensor.to(device)
            self._sums |= _sums({name: self.tensors[name]})
        return self.tensors[name]

    def clear(self) -> None:
        """Drops the copies at the end of a phase; the Trainers' reference cycles would keep them until a collection."""
        self.tensors.clear()

    def changed(self) -> list[str]:
        """Names of the copies whose values have changed since they were made."""
        return [name for name, value in _sums(self.tensors).items() if value != self._sums[name]]

    def __reduce__(self) -> tuple[type[DeviceCopies], tuple[()]]:
        """Pickles without the copies."""
        return DeviceCopies, ()


class ModuleCopies:
    """Makes copies of a phase's module that share what no client trains, such as a frozen base.

    The first client that a process trains has all parameters to itself, to find out which of them the module's own
    code changes without training, as in a teacher that follows its student; clients never share these. On a device
    other than the CPU, one copy serves all architectures of the phase.

    Args:
        module: the phase's module.
        initial: the module's initial tensors.
        names: the parameters that no client trains.
        elsewhere: the copies on another device, shared with the phase's other architectures.
    """

    def __init__(self, module: LightningModule, initial: Tree, names: Collection[str], elsewhere: DeviceCopies) -> None:
        self.module, self.initial = module, initial
        self.shared: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            tensor = initial[name]
            if name in names and is_interchangeable(tensor, parameter):
                parameter.data = tensor
                self.shared[name] = parameter
        self.is_tried = not self.shared
        self._sums = _sums(self.shared)
        self._elsewhere = elsewhere
        on_cpu = all(tensor.device.type == "cpu" for tensor in (*module.parameters(), *module.buffers()))
        # a part with its own `_apply` does more when it is moved: torchmetrics' metrics take the default data type
        self._stays_on_cpu = on_cpu and all(type(part)._apply is nn.Module._apply for part in module.modules())

    @property
    def lent(self) -> Collection[str]:
        """Names of the parameters that copies share; none until a first client was trained."""
        return self.shared if self.is_tried else ()

    def known(self, tree: Tree) -> Tree:
        """A client's tensors, replaced by the phase's initial ones where equal, so that these are in memory once."""
        return {
            name: self.initial[name] if name in self.shared and same_bits(self.initial[name], tensor) else tensor
            for name, tensor in tree.items()
        }

    def copy(self) -> LightningModule:
        """A copy of the module, for training or evaluating a client."""
        return copy_module(self.module, self.lent)

    def move(self, module: LightningModule, device: torch.device) -> LightningModule:
        """Moves a copy to a device, to which the shared parameters are copied only once."""
        elsewhere = device.type != "cpu"
        self._stays_on_cpu &= not elsewhere
        if self._stays_on_cpu:  # checking every tensor would take as long as a small training step
            return module
        with torch.inference_mode(False):
            for name, parameter in module.named_parameters() if self.lent else ():
                if name in self.lent and is_borrowed(parameter):
                    shared = self.shared[name].data
                    if elsewhere:
                        borrow(parameter, self._elsewhere.of(name, shared, device), original=shared)
                    else:
                        borrow(parameter, shared)
        return module.to(device)

    def try_out(self, client: Client) -> None:
        """Lets later clients share what the training of the first one left unchanged.

        It also compares in eval mode, because entering it may change parameters, such as merge adapters into weights.
        """
        if self.is_tried or not client.steps:
            return
        with evaluating(client.module):
            parameters, before = dict(client.module.named_parameters()), {**client.loaded, **client.state}
            unchanged = {name for name in self.shared if same_bits(before[name], parameters[name])}
        self.shared = {name: tensor for name, tensor in self.shared.items() if name in unchanged}
        self.is_tried = True

    def check(self, algorithm: Algorithm) -> None:
        """Refuses changes of what clients share, including copies on another device for other architectures."""
        sums = _sums(self.shared)
        changed = [*self._elsewhere.changed(), *(name for name in sums if sums[name] != self._sums[name])]
        if changed:
            raise MisconfigurationException(
                f"{type(self.module).__name__}: '{changed[0]}' was changed in place, but no optimizer trains it, and "
                "the first client's training left it as it was, so that clients share its memory. If the module "
                f"changes it, register it as a buffer; hooks of {type(algorithm).__name__} must make new tensors in "
                "place of changing those that they were given, and load tensors into a module with `load_tree`."
            )


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Checksums of the sums of 4096-byte blocks, computed in a fifth of the time that copying would take."""
    parts = list[Tensor]()
    for tensor in tensors.values():
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        values = values.clone() if values.storage_offset() % 8 else values  # aligned, to be viewed as 8-byte integers
        end = len(values) // 4096 * 4096
        blocks = values[:end].view(torch.int64).view(-1, 512).sum(1)
        parts.append(torch.cat([blocks.view(torch.uint8), values[end:]]))
    if not parts:
        return {}
    # one transfer from another device
    of_tensors = torch.cat(parts).cpu().split([len(part) for part in parts])
    return {name: zlib.crc32(part.numpy().data) for name, part in zip(tensors, of_tensors, strict=True)}


_MOST_BYTES = 2**28  # limit of the outputs that a process remembers, so that they do not outweigh the data by much


class SharedParts:
    """Remembers the outputs of one model's parts for each batch, for the next models that have the same parts.

    A part's output is looked up if its tensors are the same objects and its input is equal, and only if all layers of
    the model are known to treat samples apart: the output is then a function of tensors and input.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # of the last model
        self._calls: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by part, the input and output for each batch

    @contextmanager
    def looked_up(self, module: LightningModule, state: Tree) -> Iterator[None]:
        """In this context, outputs are looked up while the module, with ``state`` loaded, is called batch by batch."""
        same = {name for name, tensor in state.items() if self._is_last(name, tensor)}
        self._tensors = {name: (weakref.ref(tensor), version_of(tensor)) for name, tensor in state.items()}
        parts = _parts_of(module, same, state.keys() - same) if same and treats_samples_apart(module) else {}
        self._calls = {name: self._calls.get(name, []) for name in parts}
        self._inside = False
        with ExitStack() as patched:
            for name, calls in self._calls.items():
                call = partial(self._call, parts[name].forward, itertools.count(), calls)
                patched.enter_context(replaced_forward(parts[name], call))
            yield

    def _is_last(self, name: str, tensor: Tensor) -> bool:
        last = self._tensors.get(name)
        return last is not None and last[0]() is tensor and last[1] == version_of(tensor)

    def _call(
        self,
        forward: Callable[..., Any],
        places: Iterator[int],
        calls: list[tuple[Tensor, Tensor]],
        *inputs: Any,
        **options: Any,
    ) -> Any:
        """The output of a part, looked up or computed."""
        place = next(places)
        is_simple = len(inputs) == 1 and isinstance(inputs[0], Tensor) and not options
        if self._inside or place > len(calls) or not is_simple:
            return forward(*inputs, **options)
        if place < len(calls):
            known, output = calls[place]
            # a copy, because the next part may change it in place
            return output.clone() if torch.equal(known, inputs[0]) else forward(*inputs)
        self._inside = True
        try:
            output = forward(*inputs)
        finally:
            self._inside = False
        if isinstance(output, Tensor) and self._bytes() + inputs[0].nbytes + output.nbytes <= _MOST_BYTES:
            calls.append((inputs[0], output.clone()))
        return output

    def _bytes(self) -> int:
        return sum(tensor.nbytes for calls in self._calls.values() for call in calls for tensor in call)


def _parts_of(module: nn.Module, same: Set[str], others: Set[str]) -> dict[str, nn.Module]:
    """Submodules, by name, that hold tensors named in ``same`` and none named in ``others``."""
    with_same, with_others = (
        {name[:end] for name in names for end, letter in enumerate(name) if letter == "."} for names in (same, others)
    )
    names = with_same - with_others
    return {name: part for name, part in module.named_modules() if name in names and not computes_more(part)}
