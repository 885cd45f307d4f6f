"""What a client's training may change in a module besides the values of its tensors."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

from fedmoe_pl.trees import is_borrowed

_PLAIN = (bool, int, float, str)
_SET_FOR_EACH_CLIENT = ("training", "configure_optimizers")
_MOVES = object()  # instead of the address of memory that is the module's own as soon as a client writes to it


def contents_of(module: LightningModule, saved_buffers: bool = True) -> list[Any]:
    """The attributes of a module's parts, what is in those that are containers, and where its tensors are.

    Without ``saved_buffers``, the buffers of a state dict are left out, and other buffers may not change in place.
    """
    contents = list[Any]()
    for part in module.modules():
        for name, value in vars(part).items():
            if name in _SET_FOR_EACH_CLIENT:
                continue
            contents += name, value
            if name == "_buffers" and not saved_buffers:
                value = {each: value[each] for each in part._non_persistent_buffers_set}
                contents += (tensor._version for tensor in value.values() if tensor is not None)
            if isinstance(value, dict):
                contents += (each for item in value.items() for each in item)
                if name in ("_parameters", "_buffers"):
                    tensors = (tensor for tensor in value.values() if tensor is not None)
                    contents += (_MOVES if is_borrowed(tensor) else tensor.data_ptr() for tensor in tensors)
            elif isinstance(value, (list, set)):
                contents += value
    return contents


def contents_differ(before: list[Any], now: list[Any]) -> bool:
    """Whether, say, a part has counted something, or a buffer is another tensor. Values of tensors may differ."""
    return len(now) != len(before) or not all(map(_is_same, before, now))


def _is_same(before: Any, now: Any) -> bool:
    return now is before or before is _MOVES or (type(now) is type(before) and type(now) in _PLAIN and now == before)
