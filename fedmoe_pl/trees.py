"""Functions that average, compare, load, split and copy trees (dicts of tensors) and modules."""

from __future__ import annotations

import copy
import copyreg
import gc
import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)
_BORROWED = "_fedmoe_pl_borrowed"  # name of a parameter's attribute
Value = TypeVar("Value")
Tree = dict[str, Tensor]
"""Tensors by name. A module's tensors have the names of its state dict; an algorithm's have a "/" in their names."""
_ATOMS = {type(None), bool, int, float, str, type, FunctionType, torch.dtype, torch.device}
_OF_EVERY_PART = frozenset(vars(nn.Module()))
_MOST_DEAD = 2**28  # bytes of dead copies before a garbage collection, which takes about a tenth of a second


def mean_of_two(a: Mapping[str, Tensor], weight_a: float, b: Mapping[str, Tensor], weight_b: float) -> Tree:
    """Weighted mean of two trees: ``(weight_a * a + weight_b * b) / (weight_a + weight_b)``.

    Applied to one client after another, it gives the weighted mean of all of them with a single model in memory.
    Integers, such as ``num_batches_tracked`` of batch normalization, are not averaged: the larger one is taken, so that
    the order of clients does not matter. Means of half-precision tensors are float32; see :func:`with_types_of`.

    Example:
        >>> mean_of_two({"w": torch.tensor(0.0)}, 1, {"w": torch.tensor(4.0)}, 3)
        {'w': tensor(3.)}
    """
    if missing := [name for name in a if name not in b]:
        raise MisconfigurationException(
            f"A client sends {missing[0]}, and another one of the same round does not; hooks may not rename the "
            "module's tensors."
        )
    total = weight_a + weight_b
    share = weight_b / total if total else 0.0  # a later update with a weight replaces those of weight 0
    return {name: _mean(tensor, b[name], share) for name, tensor in a.items()}


def _mean(a: Tensor, b: Tensor, share: float) -> Tensor:
    if same_values(a, b):  # `lerp` would turn two -0 into 0 and two infinite values into NaN
        return a
    if not (a.is_floating_point() or a.is_complex()):
        return torch.maximum(a, b)
    # in bfloat16, a hundredth of a change would often be rounded away
    return torch.lerp(precise(a), precise(b), share)


def precise(tensor: Tensor) -> Tensor:
    """The tensor, converted to float32 if it is in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def with_types_of(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tree:
    """The tensors of ``new``, converted to half precision where they have it in ``old``."""
    half = {name: old[name].dtype for name in new if name in old and old[name].dtype in (torch.float16, torch.bfloat16)}
    return {name: tensor.to(half.get(name, tensor.dtype)) for name, tensor in new.items()}


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """``a - b`` for every name in ``a``; ``b`` may have more names. Equal values, also infinite ones, give 0."""
    return {n: torch.zeros_like(tensor) if same_values(tensor, b[n]) else tensor - b[n] for n, tensor in a.items()}


def inner_product(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor | int:
    """Sum of all products of elements of two trees, of shape (); 0 for an empty ``a``; ``b`` may have more names."""
    return sum((b[name] * tensor).sum() for name, tensor in a.items())


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor | int:
    """Sum of all squared differences of elements of ``a`` and ``b``, of shape (); 0 for an empty ``a``."""
    return sum(((b[name] - tensor) ** 2).sum() for name, tensor in a.items())


def subtree(tree: Mapping[str, Tensor], prefix: str) -> Tree:
    """The tensors whose names start with a prefix, under their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tree.items() if name.startswith(prefix)}


def with_prefix(tree: Mapping[str, Tensor], prefix: str) -> Tree:
    """The same tensors, with a prefix before their names."""
    return {prefix + name: tensor for name, tensor in tree.items()}


def of_parts(tree: Mapping[str, Tensor], parts: Collection[str]) -> Tree:
    """The tensors of some parts of a module."""
    prefixes = tuple(f"{part}." for part in parts)
    return {name: tensor for name, tensor in tree.items() if name.startswith(prefixes)}


def copies_of_parts(tree: Mapping[str, Value], parts: Mapping[str, str]) -> dict[str, Value]:
    """The values of some parts of a module under the names of their copies; ``parts`` maps copies to originals."""
    return {
        copied + name.removeprefix(original): value
        for copied, original in parts.items()
        for name, value in tree.items()
        if name.startswith(f"{original}.")
    }


def of_module(tree: Mapping[str, Tensor]) -> Tree:
    """The module's tensors: those without a "/" in their names."""
    return {name: tensor for name, tensor in tree.items() if "/" not in name}


def of_algorithm(tree: Mapping[str, Tensor]) -> Tree:
    """The algorithm's tensors: those with a "/" in their names."""
    return {name: tensor for name, tensor in tree.items() if "/" in name}


def problem_of_shapes(tree: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int | None]]) -> str:
    """Says how a tree differs from the names and shapes that it should have; empty if it does not.

    None in a shape stands for any size.
    """
    if missing := [name for name in shapes if name not in tree]:
        return f"has no {missing[0]}"
    if unknown := [name for name in tree if name not in shapes]:
        return f"has {unknown[0][:100]}, which no client sends"
    for name, shape in shapes.items():
        found = tree[name].shape
        if len(found) != len(shape) or any(b not in (None, a) for a, b in zip(found, shape, strict=True)):
            return f"has a {name} of shape {tuple(found)}"
    return ""


def check_names(module: nn.Module) -> None:
    """Refuses a module in which a tensor's name looks like that of an algorithm's tensor."""
    for name in module.state_dict():
        if "/" in name:
            raise MisconfigurationException(
                f"{type(module).__name__}: a tensor's name is '{name}', but must not contain '/', which marks the "
                "tensors of algorithms."
            )


def names_of_same_tensors(module: nn.Module) -> list[list[str]]:
    """The names of each tensor that a module holds under several names.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> names_of_same_tensors(nn.Sequential(layer, nn.ReLU(), layer))
        [['0.weight', '2.weight']]
    """
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def load_tree(module: nn.Module, tree: Mapping[str, Tensor]) -> None:
    """Copies the tensors of ``tree`` into the parameters and buffers of the same name, which must have their shapes.

    A parameter that is borrowed from another module (see :func:`copy_module`) gets memory of its own. Parts with their
    own code to load a state use it; their tensors that are not in ``tree`` keep their values.
    """
    state, own = module.state_dict(keep_vars=True), parts_that_load(module)
    prefixes = tuple(own)
    with torch.no_grad():
        for name, tensor in tree.items():
            if name not in state or state[name].shape != tensor.shape:
                reason = 'does not exist; a tensor of an algorithm\'s own needs a "/" in its name'
                if name in state:
                    reason = f"has shape {tuple(state[name].shape)}"
                raise MisconfigurationException(
                    f"`{name}` of shape {tuple(tensor.shape)} cannot be loaded: in {type(module).__name__} it {reason}."
                )
            target = state[name]
            if same_memory(target, tensor) or is_copy_of(target, tensor) or name.startswith(prefixes):
                continue
            if is_borrowed(target):
                if same_bits(target, tensor):
                    continue
                with torch.inference_mode(False):
                    target.data = torch.empty_like(target, requires_grad=False)
            target.copy_(tensor)
        for prefix, part in own.items():
            if given := subtree(tree, prefix):
                _load_by_itself(part, given, part is module)


def parts_that_load(module: nn.Module) -> dict[str, nn.Module]:
    """The outermost parts that load their state by code or hooks that are not torch's, by name prefix."""
    found = dict[str, nn.Module]()
    for name, part in module.named_modules(remove_duplicate=False):
        hooks = (part._load_state_dict_pre_hooks, part._load_state_dict_post_hooks)
        loads = _has_own_loading(type(part)) or (part is module and not _is_of_torch(part.load_state_dict))
        if loads or not all(_is_of_torch(hook) for each in hooks if each for hook in each.values()):
            prefix = f"{name}." if name else ""
            if not prefix.startswith(tuple(found)):
                found[prefix] = part
    return found


def loads_by_itself(module: nn.Module) -> bool:
    """Whether a part with its own code to load a state has tensors, so that copying values may not be all it does."""
    return any(part.state_dict() for part in parts_that_load(module).values())


@cache
def _has_own_loading(kind: type[nn.Module]) -> bool:
    """Whether a class of parts has its own code to load a state; torch's classes only upgrade old formats."""
    return kind.set_extra_state is not nn.Module.set_extra_state or not _is_of_torch(kind._load_from_state_dict)


def _is_of_torch(function: Any) -> bool:
    """Whether a method or hook is torch's; the hook may be wrapped in an object that calls it."""
    function = getattr(function, "hook", function)
    home = getattr(function, "__module__", None) or type(function).__module__
    return home.partition(".")[0] == "torch"


def _load_by_itself(part: nn.Module, given: Tree, is_root: bool) -> None:
    """Loads tensors with ``load_state_dict``; all other tensors of the part are copied onto themselves."""
    state = part.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if name in given and not is_copy_of(tensor, given[name]):
            if is_borrowed(tensor):
                with torch.inference_mode(False):
                    tensor.data = tensor.data.clone()
            state[name] = given[name].to(tensor.device, copy=True)  # a copy, because the part may keep and change it
        elif tensor.requires_grad:
            state[name] = tensor.detach()
    # loading a whole model does not call the `load_state_dict` of its parts
    load = part.load_state_dict if is_root else partial(nn.Module.load_state_dict, part)
    load(state, strict=False)


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values because they are the same memory."""
    return one is other or (
        one.layout is other.layout is torch.strided
        and one.data_ptr() == other.data_ptr()
        and (one.device, one.dtype, one.shape) == (other.device, other.dtype, other.shape)
        and one.stride() == other.stride()
    )


def changed(tensors: Mapping[str, Tensor], loaded: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Tree:
    """Copies, on the CPU, of a client's tensors that differ from what every client starts with (``loaded``).

    A tensor that still equals the one in the client's ``state`` is returned without a copy.
    """
    different = {}
    for name, tensor in tensors.items():
        if name in state and same_values(state[name], tensor):
            different[name] = state[name]
        elif name not in loaded or not same_values(loaded[name], tensor):
            different[name] = tensor.detach().cpu().clone()
    return different


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, one of which may be on another device, have the same values."""
    if same_memory(one, other) or is_copy_of(one, other) or is_copy_of(other, one):
        return True
    return torch.equal(one, other.to(one.device))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are bit-identical: NaN equals itself, and 0 differs from -0."""
    return same_memory(one, other) or (
        (one.dtype, one.shape) == (other.dtype, other.shape) and _equal_bytes(bits_of(one), bits_of(other))
    )


def is_interchangeable(one: Tensor, other: Tensor) -> bool:
    """Whether a tensor can replace another: same device and strides, and bit-identical."""
    return (one.device, one.stride()) == (other.device, other.stride()) and same_bits(one, other)


def _equal_bytes(one: Tensor, other: Tensor) -> bool:
    if len(one) == len(other) and not (len(one) | one.data_ptr() | other.data_ptr()) % 8:
        one, other = one.view(torch.int64), other.view(torch.int64)  # six times as fast
    return torch.equal(one, other)


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def digest_of(*trees: Mapping[str, Tensor]) -> str:
    """Tells apart trees whose tensors differ."""
    digest = hashlib.sha256()
    for tree in trees:
        for name in sorted(tree):
            digest.update(f"{name} {tree[name].dtype} {[*tree[name].shape]}\n".encode())
            digest.update(bits_of(tree[name]).numpy().data)
        digest.update(b"\0")
    return digest.hexdigest()


def version_of(tensor: Tensor) -> int:
    """The number of in-place changes of a tensor; -1 if it was made in inference mode, where PyTorch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def copy_module(module: Module, borrowed: Collection[str] = ()) -> Module:
    """A deep copy of a module, except for LightningCLI's optimizer factories, which the copy shares.

    Copying such a function would copy the command line's parser and everything it configured, including the data.
    Parameters keep the attributes that the user has given them, which ``copy.deepcopy`` drops.

    Args:
        module: the module.
        borrowed: names of parameters that the copy is only going to read; they share the module's memory.
    """
    _free_dead_copies()
    known = dict[int, Any]()
    parameters = dict(module.named_parameters())
    size = 0
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            continue
        tensor = parameter.data
        if name not in borrowed:
            tensor = tensor.clone(memory_format=torch.preserve_format)
            size += tensor.nbytes
        known[id(parameter)] = own = nn.Parameter(tensor, parameter.requires_grad)
        if name in borrowed:
            setattr(own, _BORROWED, (own.data_ptr(), None))
    copied = _deep_copy(module, known)
    for parameter in parameters.values():
        if vars(parameter) and (copy_of := known.get(id(parameter), parameter)) is not parameter:
            given = {name: value for name, value in vars(parameter).items() if name != _BORROWED}
            vars(copy_of).update(_deep_copy(given, known))
    _copied[copied] = size
    return copied


def _deep_copy(value: Any, known: dict[int, Any]) -> Any:
    """Does the same as ``copy.deepcopy``, but faster: a part has a dozen empty dicts."""
    kind, address = type(value), id(value)
    if kind in _ATOMS or (kind is tuple and all(type(item) in _ATOMS for item in value)):
        return value
    if address in known:
        return known[address]
    if kind is dict or (kind in (OrderedDict, set) and not value):
        known[address] = own = kind()
        if value:
            own.update({_deep_copy(key, known): _deep_copy(item, known) for key, item in value.items()})
        return own
    if kind is list:
        known[address] = own = list[Any]()
        own += (_deep_copy(item, known) for item in value)
        return own
    if kind is partial and str(getattr(value.func, "__module__", "")).startswith("jsonargparse"):
        return value
    copies_itself = hasattr(kind, "__deepcopy__") or "__deepcopy__" in getattr(value, "__dict__", ())
    if not isinstance(value, nn.Module) or copies_itself or kind in copyreg.dispatch_table:
        return copy.deepcopy(value, known)
    if _is_plain(kind):
        known[address] = own = nn.Module.__new__(type(value))
        state = vars(own)
        for name, item in value.__getstate__().items():  # copied here where possible, to save calls
            of_item = type(item)
            if of_item in _ATOMS:
                state[name] = item
            elif name in _OF_EVERY_PART and not item:
                state[name] = of_item()
            else:
                state[name] = _deep_copy(item, known)
        return own
    match value.__reduce_ex__(4):
        case (make, (only,), dict() as state, None, None) if make.__name__ == "__newobj__" and only is kind:
            known.setdefault(id(known), []).append(state)  # kept alive, so that no other object reuses its addresses
            known[address] = own = make(kind)
            own.__setstate__({name: _deep_copy(item, known) for name, item in state.items()})
            return own
    return copy.deepcopy(value, known)


@cache
def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether a class of parts leaves copying to ``Module``, which copies all that is in ``__dict__``."""
    names = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
    return all(getattr(kind, name, None) is getattr(nn.Module, name, None) for name in names)


_copied = WeakKeyDictionary[nn.Module, int]()  # bytes of each copy in this process
_in_use = 0  # bytes of copies after the last collection


def _free_dead_copies() -> None:
    """Frees copies in reference cycles before they fill the memory; Python's collector counts objects, not bytes."""
    global _in_use
    if sum(_copied.values()) > _in_use + _MOST_DEAD:
        gc.collect()
        _in_use = sum(_copied.values())


def is_borrowed(parameter: Tensor) -> bool:
    """Whether a parameter shares memory with the module that it was copied from."""
    place = _mark(parameter)[0]
    return place is not None and place == parameter.data_ptr()


def is_copy_of(parameter: Tensor, tensor: Tensor) -> bool:
    """Whether a parameter borrows the copy of a tensor on another device."""
    original = _mark(parameter)[1]
    return original is not None and is_borrowed(parameter) and same_memory(original, tensor)


def borrow(parameter: nn.Parameter, tensor: Tensor, original: Tensor | None = None) -> None:
    """Has a parameter share a tensor's memory; the tensor may be a copy of an ``original`` on another device."""
    set_data(parameter, tensor)
    setattr(parameter, _BORROWED, (parameter.data_ptr(), original))


def set_data(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Has a parameter use a tensor's memory; tests replace this function where PyTorch cannot do so."""
    parameter.data = tensor


def _mark(parameter: Tensor) -> tuple[int | None, Tensor | None]:
    """A borrowed parameter's address when it was borrowed, and the original on another device, if any."""
    return getattr(parameter, _BORROWED, (None, None))
