"""Functions on trees of tensors: what is averaged, loaded and told apart between rounds."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)
Tree = dict[str, Tensor]
"""Tensors by parameter or buffer name, as in a state dict."""


def mean_of_two(a: Mapping[str, Tensor], weight_a: float, b: Mapping[str, Tensor], weight_b: float) -> Tree:
    """Weighted mean of two trees: ``(weight_a * a + weight_b * b) / (weight_a + weight_b)``.

    Applied to one client after another it is the weighted mean of all of them, holding one model in memory.
    Integers (BatchNorm's ``num_batches_tracked``) are taken from one client (METHODS section 2), the larger ones, so
    that the order does not matter.

    Example:
        >>> mean_of_two({"w": torch.tensor(0.0)}, 1, {"w": torch.tensor(4.0)}, 3)
        {'w': tensor(3.)}
    """
    share = weight_b / (weight_a + weight_b)
    return {
        name: torch.lerp(tensor, b[name], share) if tensor.is_floating_point() else torch.maximum(tensor, b[name])
        for name, tensor in a.items()
    }


def load_tree(module: nn.Module, tree: Mapping[str, Tensor]) -> None:
    """Copies the tensors of ``tree`` into the parameters and buffers of the same name.

    Raises:
        MisconfigurationException: if a name is unknown to the module or a shape differs.
    """
    own = module.state_dict()
    with torch.no_grad():
        for name, tensor in tree.items():
            if name not in own or own[name].shape != tensor.shape:
                found = f"has shape {tuple(own[name].shape)}" if name in own else "does not exist"
                raise MisconfigurationException(
                    f"`{name}` of shape {tuple(tensor.shape)} cannot be loaded: in {type(module).__name__} it {found}."
                )
            own[name].copy_(tensor)


def changed(module: nn.Module, loaded: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> Tree:
    """The tensors of a module that differ from what every client starts with.

    Args:
        module: a client's module after training.
        loaded: what every client starts with, by name.
        kept: what this client had kept before; a tensor that still has this value is returned as it is, not copied.

    Returns:
        Copies of the tensors that differ from ``loaded``: all that a client needs to keep.
    """
    different = {}
    for name, tensor in module.state_dict().items():
        if name in kept and torch.equal(kept[name], tensor.cpu()):
            different[name] = kept[name]
        elif name not in loaded or not torch.equal(loaded[name], tensor.cpu()):
            different[name] = tensor.detach().cpu().clone()
    return different


def copy_module(module: Module) -> Module:
    """A deep copy of a module that shares the functions with which LightningCLI makes optimizers.

    They hold its parser, and with it all that was configured, the data included.
    """
    values = [value for part in module.modules() for value in vars(part).values() if isinstance(value, partial)]
    shared = {id(value): value for value in values if value.func.__module__.startswith("jsonargparse")}
    return copy.deepcopy(module, shared)


class Patterns:
    """Names chosen by glob patterns such as ``global_expert.*``.

    Args:
        patterns: one pattern or several; ``*`` matches any characters, dots included.

    Example:
        >>> "global_expert.fc.weight" in Patterns("global_expert.*")
        True
    """

    def __init__(self, patterns: str | list[str]) -> None:
        self.patterns = [patterns] if isinstance(patterns, str) else patterns

    def __contains__(self, name: str) -> bool:
        """Whether one of the patterns matches the name."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def check(self, names: Iterable[str], key: str) -> None:
        """Refuses a pattern that matches nothing, which is a misspelt one.

        Args:
            names: the names of the module's tensors.
            key: the key in the configuration, for the message.

        Raises:
            MisconfigurationException: if a pattern matches no name.
        """
        names = list(names)
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                tops = ", ".join(sorted({f"{name.split('.')[0]}.*" for name in names}))
                raise MisconfigurationException(
                    f"{key} is '{pattern}', which matches no parameter of the model; it has {tops}."
                )
