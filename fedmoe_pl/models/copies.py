"""What a copy of a module would not carry over: each client trains one, and would train something else without a word.

Python's ``deepcopy`` copies modules, tensors, bound methods and partials; it drops the hooks of parameters, gives
tensors memory of their own, and keeps functions and weak references as they are, with the original that they refer to.
"""

from __future__ import annotations

import dis
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import combinations
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from fedmoe_pl.checks import InvalidArgumentError


def check_copies(module: nn.Module) -> None:
    """Refuses a module whose copies would not compute or train what the module does."""
    _check_scripts(module)
    _check_hooks(module)
    _check_memory(module)
    _check_functions(module)


def _check_scripts(module: nn.Module) -> None:
    """Refuses parts in TorchScript that are trained: no optimizer takes the parameters of their copies."""
    for name, part in module.named_modules():
        if isinstance(part, ScriptModule) and any(parameter.requires_grad for parameter in part.parameters()):
            allowed = "a module that is not scripted or traced, or a frozen one"
            raise InvalidArgumentError(module, name or "model", part, allowed, "TorchScript's copies cannot be trained")


def _check_hooks(module: nn.Module) -> None:
    """Refuses hooks of parameters, which Python does not copy; those of modules are copied."""
    for name, parameter in module.named_parameters():
        if has_hooks(parameter):
            allowed = "without hooks of its own; use on_after_backward, or a full backward hook of a layer"
            raise InvalidArgumentError(module, name, "with a hook", allowed, "clients train copies, which lack it")


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks of its own see or change a parameter's gradient when it is computed."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


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


def _check_functions(module: nn.Module) -> None:
    """Refuses functions and weak references that refer to parts of the module: they would not refer to the copy's."""
    names = {id(part): name or type(module).__name__ for name, part in module.named_modules()}
    names |= {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    for path, part in module.named_modules():
        if hasattr(type(part), "__deepcopy__"):
            continue
        for attribute, value in _copied_attributes(part).items():
            if (found := next(_kept(value, names, set()), None)) is None:
                continue
            kept, used = found
            argument = f"{path}.{attribute}" if path else attribute
            if attribute.endswith("_hooks"):
                argument = f"a hook of {path or 'the module'}"
            elif kept is not value:
                argument = f"a value in {argument}"
            allowed = "a method, a module, or a partial of one"
            because = f"it uses the original {names[id(used)]}, and clients train copies"
            raise InvalidArgumentError(module, argument, kept, allowed, because)


def _copied_attributes(part: nn.Module) -> Mapping[str, Any]:
    """The attributes that a copy of a part gets; a compiled part and a metric make some of theirs anew."""
    state = part.__getstate__() if hasattr(part, "__getstate__") else vars(part)
    return state if isinstance(state, dict) else vars(part)


def _kept(value: Any, parts: Collection[int], seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """What a copy of a value has in common with it although it uses a part, and the part.

    ``seen`` has the addresses of what need not be looked at again.
    """
    if isinstance(value, FunctionType | ref):
        yield from ((value, part) for part in _used(value, parts, set()))
    elif isinstance(value, MethodType):
        yield from _kept(value.__func__, parts, seen)
    elif id(value) not in seen:
        seen.add(id(value))
        for item in _items(value):
            yield from _kept(item, parts, seen)


def _used(value: Any, parts: Collection[int], seen: set[int]) -> Iterator[Any]:
    """The parts that a function or something in it uses."""
    if id(value) in parts:
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for item in _items(value):
            yield from _used(item, parts, seen)


def _items(value: Any) -> Iterator[Any]:
    """What a container has, or a function or method uses; of what a function finds in its file, the modules only."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, ref):
        yield value()
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # of a name that has no value yet
                yield cell.cell_contents
        names = {each.argval for each in dis.get_instructions(value) if each.opname == "LOAD_GLOBAL"}
        yield from (each for name in names if isinstance(each := value.__globals__.get(name), nn.Module | Tensor))
