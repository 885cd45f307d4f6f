"""Looks for a secret in everything that somebody holds or has sent."""

import gc
from collections.abc import Iterable, Iterator

import numpy as np
import torch

_LEFT_OUT = (type, type(gc), type(lambda: None))  # classes, modules and functions lead to the whole process


def contents(*roots: object, beyond: Iterable[object] = ()) -> Iterator[bytes]:
    """The bytes of all tensors, arrays and texts that can be reached from objects, but not through those ``beyond``."""
    seen, todo = {id(each) for each in beyond}, [*roots]
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
        todo += gc.get_referents(each)
        todo += [vars(each)] if hasattr(each, "__dict__") else []


def held(secrets: Iterable[bytes], *roots: object, beyond: Iterable[object] = ()) -> list[bytes]:
    """Those of the secrets that stand anywhere in what can be reached."""
    everything = [*contents(*roots, beyond=beyond)]
    return [secret for secret in secrets if any(secret in content for content in everything)]
