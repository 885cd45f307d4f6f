"""What a copy of a module would not carry over: each client trains one, and would train something else without a word.

Python's ``deepcopy`` copies modules, tensors, bound methods and partials; it drops the hooks of parameters, gives
tensors memory of their own, and keeps functions and weak references as they are, with the original that they refer to.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import torch
from torch import Tensor, nn

from fedmoe_pl.checks import InvalidArgumentError


def check_copies(module: nn.Module) -> None:
    """Refuses a module whose copies would not compute or train what the module does."""
    _check_hooks(module)
    _check_memory(module)


def _check_hooks(module: nn.Module) -> None:
    """Refuses hooks of parameters, which Python does not copy; those of modules are copied."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            allowed = "without hooks of its own; use on_after_backward, or a full backward hook of a layer"
            raise InvalidArgumentError(module, name, "with a hook", allowed, "clients train copies, which lack it")


def _check_memory(module: nn.Module) -> None:
    """Refuses trained parameters whose memory another parameter or buffer uses, too; frozen ones may share theirs."""
    groups = defaultdict[int, list[tuple[str, Tensor]]](list)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if type(tensor) in (nn.Parameter, Tensor) and tensor.layout is torch.strided and tensor.data_ptr():
            groups[tensor.untyped_storage().data_ptr()].append((name, tensor))
    for group in groups.values():
        for (name, tensor), (other, same) in combinations(group, 2):
            if (tensor.requires_grad or same.requires_grad) and tensor is not same and _overlap(tensor, same):
                allowed = "in memory of its own; let both be the same Parameter, or compute one of the other in forward"
                because = "clients train copies, in which they are apart"
                raise InvalidArgumentError(module, other, f"in the memory of {name}", allowed, because)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a storage have an element in common, and do not just lie beside or between each other."""
    (start, end), (other_start, other_end) = _bytes(one), _bytes(other)
    if end <= other_start or other_end <= start:
        return False
    if one.element_size() != other.element_size():
        return True
    used = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    used.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor, which is not empty, begins and ends in memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
