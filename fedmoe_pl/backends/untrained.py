"""What the models of clients have in common: parameters in memory once, and outputs of parts that are looked up."""

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
from fedmoe_pl.trees import Tree, borrow, copy_module, is_borrowed, is_interchangeable, same_bits


class DeviceCopies:
    """Copies, on another device than the CPU, of what the clients of a phase share; other processes have their own."""

    def __init__(self) -> None:
        self.tensors: Tree = {}
        self._sums: dict[str, int] = {}

    def of(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        """The copy of a tensor; made if there is none yet."""
        if name not in self.tensors:
            self.tensors[name] = tensor.to(device)
            self._sums |= _sums({name: self.tensors[name]})
        return self.tensors[name]

    def clear(self) -> None:
        """Forgets them at the end of a phase: Trainers are in cycles of references, which are freed late."""
        self.tensors.clear()

    def changed(self) -> list[str]:
        """Names of the copies that are no longer what they were."""
        return [name for name, value in _sums(self.tensors).items() if value != self._sums[name]]

    def __reduce__(self) -> tuple[type[DeviceCopies], tuple[()]]:
        """Without the copies."""
        return DeviceCopies, ()


class Untrained:
    """Makes copies of a phase's module that share what no client trains, such as a frozen base.

    The first client that a process trains has all parameters to itself, which shows whether the module's own code
    changes some of them all the same, as that of a teacher that follows its student; clients never share these. On
    another device than the CPU, what they share is there once, for all architectures of the phase.

    Args:
        module: the phase's module.
        initial: its tensors.
        names: the parameters that no client trains.
        elsewhere: the copies on another device, which the phase's other architectures share.
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
        # others do more when they are moved: metrics of torchmetrics take the default dtype
        self._stays_on_cpu = on_cpu and all(type(part)._apply is nn.Module._apply for part in module.modules())

    @property
    def lent(self) -> Collection[str]:
        """Names of what copies share now: nothing before a first client has been trained."""
        return self.shared if self.is_tried else ()

    def known(self, tree: Tree) -> Tree:
        """A client's tensors, but the phase's initial ones where they are the same, so that they are in memory once."""
        return {
            name: self.initial[name] if name in self.shared and same_bits(self.initial[name], tensor) else tensor
            for name, tensor in tree.items()
        }

    def copy(self) -> LightningModule:
        """A module for clients to train or to be evaluated with."""
        return copy_module(self.module, self.lent)

    def move(self, module: LightningModule, device: torch.device) -> LightningModule:
        """Moves a copy to a device; what it shares goes there once."""
        elsewhere = device.type != "cpu"
        self._stays_on_cpu &= not elsewhere
        if self._stays_on_cpu:  # checking every tensor takes as long as a small training step
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
        """Finds what others can share in the first client that was trained: what its training left as it was.

        A module may change parameters in eval mode, too: adapters are merged into the weights that they adapt.
        """
        if self.is_tried or not client.steps:
            return
        with evaluating(client.module):
            parameters, before = dict(client.module.named_parameters()), {**client.loaded, **client.state}
            unchanged = {name for name in self.shared if same_bits(before[name], parameters[name])}
        self.shared = {name: tensor for name, tensor in self.shared.items() if name in unchanged}
        self.is_tried = True

    def check(self, algorithm: Algorithm) -> None:
        """Refuses a change of what clients share, also on another device and of other architectures."""
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
    """Checksums of the sums of blocks of 4096 bytes, which take a fifth of the time of copies."""
    parts = list[Tensor]()
    for tensor in tensors.values():
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        values = values.clone() if values.storage_offset() % 8 else values  # or it is no view of numbers of 8 bytes
        end = len(values) // 4096 * 4096
        blocks = values[:end].view(torch.int64).view(-1, 512).sum(1)
        parts.append(torch.cat([blocks.view(torch.uint8), values[end:]]))
    if not parts:
        return {}
    # from another device at once
    of_tensors = torch.cat(parts).cpu().split([len(part) for part in parts])
    return {name: zlib.crc32(part.numpy().data) for name, part in zip(tensors, of_tensors, strict=True)}


_MOST_BYTES = 2**28  # of what is remembered in a process, so that it never weighs much more than the data


class SharedParts:
    """Remembers what the parts of one model gave for each batch, for the next models that have the same parts.

    A part is looked up if its tensors are the same objects and its input is equal, and only in models of layers that
    are known to treat samples apart: an output is then a function of both.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # of the last model
        self._calls: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by part, the input and output for each batch

    @contextmanager
    def looked_up(self, module: LightningModule, state: Tree) -> Iterator[None]:
        """In this context, the module, with the tensors of ``state``, is called for one batch after another."""
        same = {name for name, tensor in state.items() if self._is_last(name, tensor)}
        self._tensors = {name: (weakref.ref(tensor), _version(tensor)) for name, tensor in state.items()}
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
        return last is not None and last[0]() is tensor and last[1] == _version(tensor)

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
            # a copy, which the next part may change in place
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


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _parts_of(module: nn.Module, same: Set[str], others: Set[str]) -> dict[str, nn.Module]:
    """Submodules by name that hold tensors with names in ``same`` and none with names in ``others``."""
    with_same, with_others = (
        {name[:end] for name in names for end, letter in enumerate(name) if letter == "."} for names in (same, others)
    )
    names = with_same - with_others
    return {name: part for name, part in module.named_modules() if name in names and not computes_more(part)}
