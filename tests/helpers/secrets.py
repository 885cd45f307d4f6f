"""Looks for a secret in everything that somebody holds or has sent."""

import gc
from collections.abc import Iterable, Iterator

import numpy as np
import torch

_LEFT_OUT = (type, type(gc), type(lambda: None))  # classes, modules and functions lead to the whole process


def contents(*roots: object) -> Iterator[bytes]:
    """The bytes of all tensors, arrays, texts and numbers that can be reached from objects."""
    seen, todo = set[int](), [*roots]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, _LEFT_OUT):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(each, np.ndarray):
            yield each.tobytes()
        elif isinstance(each, bytes | bytearray):
            yield bytes(each)
        elif isinstance(each, str):
            yield each.encode(errors="replace")
        todo += gc.get_referents(each)
        todo += [vars(each)] if hasattr(each, "__dict__") else []


def held(secrets: Iterable[bytes], *roots: object) -> list[bytes]:
    """Those of the secrets that stand anywhere in what can be reached."""
    found, everything = [], [*contents(*roots)]
    for secret in secrets:
        if any(secret in content for content in everything):
            found.append(secret)
    return found
