"""What a run was made with: one record of constructor arguments, which checkpoints, servers, loggers and reports use.

A run from the command line has a resolved configuration. For a run from Python, the constructor arguments of its
objects are read from their attributes of the same names. Both are stored as text, without what does not affect the
result.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedmoe_pl.backends.fitting import LEAN_TRAINER, TRAINER_DEFAULTS
from fedmoe_pl.data import FederatedDataModule

RECORD = "record.json"
"""The file in a run's folder with the settings that a report compares."""
PARTS = "parts"
"""The key in that file for the parts that a module has made from its arguments."""
_HARMLESS = re.compile(
    r"seed_everything|seed|"  # compared separately
    r"(federation\.)?(name|logger|callbacks|default_root_dir|enable_checkpointing|enable_progress_bar|store|backend)|"
    r"(.+\.)?evaluate\.every_n_epochs|"
    r"(.+\.)?trainer\.(accelerator|devices|num_nodes|strategy|logger|default_root_dir|enable_checkpointing|"
    r"enable_progress_bar|enable_model_summary|log_every_n_steps|num_sanity_val_steps|profiler|detect_anomaly)"
)
# harmless for a run that goes on, but not in a comparison of two runs
_OWN = re.compile(
    r"data(module)?\.(init_args\.)?(.+\.)?(root|download|path|train_dir|test_dir)|"
    r"(federation\.)?(failures\.(action|min_clients|timeout|max_change)|reports(\..+)?)"
)
_MISSING = "not set"
_LONGEST = 60  # the most characters of a value in a message
_DEEPEST = 8  # levels of nested objects; deeper ones may form cycles


class Change(NamedTuple):
    """A changed argument: its key, and the old and new value as text."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key} was {self.old}, now {self.new}"


def configuration(federation: Any, model: LightningModule, datamodule: FederatedDataModule) -> dict[str, str]:
    """The configuration of a run, to be stored in its checkpoint."""
    objects = {**_arguments(federation), "model": _described(model), "datamodule": _described(datamodule)}
    texts = {"hparams": federation.hparams, "objects": objects}
    return {name: json.dumps(relevant(tree), default=str) if tree else "" for name, tree in texts.items()}


def recorded(federation: Any, model: LightningModule, datamodule: FederatedDataModule) -> dict[str, Any]:
    """The settings that a report compares, under the command line's keys, also for runs from Python."""
    of_federation = _arguments(federation)
    trainer = TRAINER_DEFAULTS | LEAN_TRAINER | of_federation.pop("trainer")
    groups = {"model": _described(model), "data": _described(datamodule), "trainer": trainer}
    tree = {**groups, "federation": {name: value for name, value in of_federation.items() if name != "seed"}}
    return {"seed_everything": federation.seed, **relevant(_brief(tree), of_two_runs=True)}


def _brief(tree: Any) -> Any:
    """The tree, with patterns as text and with a checksum in place of the parts that modules made from arguments."""
    if isinstance(tree, list):
        return [_brief(item) for item in tree]
    if not isinstance(tree, Mapping):
        return tree
    if tree.keys() == {"class_path", "patterns", "excluded", "within"} and not tree["excluded"] and not tree["within"]:
        return ", ".join(tree["patterns"])
    module, _, name = str(tree.get("class_path")).rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)  # torch.optim hides its modules from pydoc.locate
    named = parameters_of(kind) if isinstance(kind, type) else {}
    brief = {key: _as_annotated(_brief(item), named.get(key)) for key, item in tree.items()}
    is_module = isinstance(kind, type) and issubclass(kind, nn.Module)
    parts = {key: item for key, item in brief.items() if is_module and key not in {*named, "class_path"}}
    if not parts or not named.keys() & brief.keys():
        return brief
    checksum = f"{zlib.crc32(json.dumps(parts, default=str).encode()):08x}"
    return {key: item for key, item in brief.items() if key not in parts} | {PARTS: checksum}


def _as_annotated(value: Any, parameter: inspect.Parameter | None) -> Any:
    """The value, with integers as floats if the argument's annotation allows only floats, as on the command line."""
    kinds = re.findall(r"\b(?:int|float)\b", str(parameter and parameter.annotation))
    if "float" not in kinds or "int" in kinds:
        return value
    if isinstance(value, list):
        return [_as_annotated(item, parameter) for item in value]
    return float(value) if type(value) is int else value


def changes(
    old: Mapping[str, str], new: Mapping[str, str], begun: Collection[str], extensible: Mapping[str, int] | None = None
) -> list[Change]:
    """What changed between two configurations, except what does not affect the rounds that were run.

    Phases that had not begun may change, and the number of rounds of an ``extensible`` phase that had rounds left.
    """
    kind = "hparams" if old["hparams"] and new["hparams"] else "objects"
    prefix = "federation.phases" if kind == "hparams" else "phases"
    trees = []
    for texts in (old, new):
        tree = json.loads(texts[kind])
        phases = (tree["federation"] if kind == "hparams" else tree).pop("phases", [])
        trees.append((tree, {phase["name"]: phase for phase in phases}))
    (before, were), (after, are) = trees
    found: list[Change] = []
    if [*are][: len(begun)] != [*begun]:
        found.append(Change(prefix, _text([*begun]), _text([*are])))
    for name in begun:
        if name in are:
            was, now = were[name], are[name]
            if (extensible or {}).get(name, math.inf) < was["rounds"]:
                was, now = ({**phase, "rounds": None} for phase in (was, now))
            found += _differences(was, now, f"{prefix}.{name}")
    return [*found, *_differences(before, after)]


def is_listed(key: str, listed: Collection[str]) -> bool:
    """Whether a key, or a key above it, is in the list.

    Example:
        >>> [is_listed("model.optimizer.lr", [key]) for key in ("model", "model.optimizer.lr", "model.opt")]
        [True, True, False]
    """
    return any(key == other or key.startswith((f"{other}.", f"{other}[")) for other in listed)


def _differences(old: Any, new: Any, key: str = "") -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict) and old.get("class_path") == new.get("class_path"):
        for name in dict.fromkeys((*old, *new)):
            if old.get(name) is not None or new.get(name) is not None:  # null is the same as not set
                yield from _differences(old.get(name, _MISSING), new.get(name, _MISSING), _child(key, name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _differences(one, other, f"{key}[{index}]")
    elif as_text(old) != as_text(new):
        yield Change(key, _text(old), _text(new))


def as_text(tree: Any) -> str:
    """The tree as JSON, in which 1, 1.0 and true differ: as ``clients_per_round``, 1 is one client and 1.0 is all."""
    return json.dumps(tree, sort_keys=True, default=str)


def _child(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _text(value: Any) -> str:
    if isinstance(value, dict) and "class_path" in value:
        return str(value["class_path"]).rsplit(".", 1)[-1]
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def relevant(tree: Any, of_two_runs: bool = False, key: str = "") -> Any:
    """The tree without keys that do not affect the result, such as the logger.

    For a run that goes on (not ``of_two_runs``), it also leaves out where the data are, because the data themselves
    are compared, and how failures are handled from now on.
    """
    if isinstance(tree, list):
        return [relevant(item, of_two_runs, f"{key}[{index}]") for index, item in enumerate(tree)]
    if not isinstance(tree, Mapping):
        return tree
    children = {name: _child(key, name) for name in tree if not _is_harmless(_child(key, name), of_two_runs)}
    return {name: relevant(tree[name], of_two_runs, child) for name, child in children.items()}


def _is_harmless(key: str, of_two_runs: bool) -> bool:
    return bool(_HARMLESS.fullmatch(key) or (not of_two_runs and _OWN.fullmatch(key)))


def _described(value: Any, name: str = "", depth: int = 0) -> Any:
    """Describes a value by plain values that are the same in every process."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, np.generic):  # NumPy's long double, which has no counterpart in Python
        return str(value)
    if isinstance(value, complex | Decimal | Fraction | date | time | timedelta):
        return str(value)
    if depth > _DEEPEST:
        return _class_path(type(value))
    if isinstance(value, Mapping):
        return {str(key): _described(item, str(key), depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence | Set):
        items = [_described(item, "", depth + 1) for item in value]
        return sorted(items, key=repr) if isinstance(value, Set) else items
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return {"class_path": _class_path(np.ndarray), "items": _described(value.tolist(), "", depth + 1)}
    if isinstance(value, Tensor | np.ndarray):
        return _checksum(value)
    if name in ("optimizer", "server_optimizer") and callable(value):
        return _optimizer(value, depth)
    if isinstance(value, functools.partial):
        given = {"args": value.args} if value.args else {}
        function = _described(value.func, "", depth)
        function = function if isinstance(function, dict) else {"class_path": _class_path(value.func)}
        return {**function, **_described({**given, **value.keywords}, "", depth)}
    if inspect.isfunction(value) and "<" in value.__qualname__:
        return {"class_path": _class_path(value), "code": _of_local(value, depth)}
    if inspect.isroutine(value) or isinstance(value, type):
        return _class_path(value)
    if isinstance(value, Enum | PurePath | torch.dtype | torch.device):
        return str(value)
    return {"class_path": _class_path(type(value)), **_arguments(value, depth)}


def _arguments(value: object, depth: int = 0) -> dict[str, Any]:
    """The constructor arguments of an object that it has as attributes of the same names, and a module's parts."""
    known = dict(value.hparams) if isinstance(value, LightningModule) else {}
    buffers = dict(value.named_buffers(recurse=False)) if isinstance(value, nn.Module) else {}
    known |= buffers | getattr(value, "__dict__", {})
    parts = dict(value._modules) if isinstance(value, nn.Module) else {}  # a part may have two names here
    found = {name: known[name] for name in parameters_of(type(value)) if name in known and name not in parts} | parts
    return {name: _described(item, name, depth + 1) for name, item in found.items()}


@functools.cache
def parameters_of(kind: type) -> dict[str, inspect.Parameter]:
    """The named parameters of a class's constructor and of its bases' constructors, to which it may pass arguments."""
    found: dict[str, inspect.Parameter] = {}
    for base in reversed(kind.__mro__[:-1]):
        if inspect.isfunction(vars(base).get("__init__")):
            found |= inspect.signature(vars(base)["__init__"]).parameters
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in found.items() if parameter.kind in kinds and name != "self"}


def _optimizer(make: Callable[..., Any], depth: int) -> Any:
    """Describes an optimizer by its class and defaults, whether a partial, a lambda or the command line makes it."""
    try:
        optimizer = make([nn.Parameter(torch.zeros(1))])
        return {"class_path": _class_path(type(optimizer)), **_described(optimizer.defaults, "", depth)}
    except Exception:  # a user's function, which may need other parameters
        return _class_path(make)


def _of_local(function: FunctionType, depth: int) -> str:
    """A checksum of a function that cannot be imported, such as a lambda, and of what it sees, which may be private."""
    seen = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    given = _described([function.__defaults__, function.__kwdefaults__, seen], "", depth)
    checksum = zlib.crc32(repr((_code(function.__code__), given)).encode())
    return f"{checksum:08x} in Python {sys.version_info.major}.{sys.version_info.minor}"  # bytecode differs by version


def _code(code: CodeType) -> tuple[Any, ...]:
    constants = [_code(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    return code.co_code, code.co_names, _described(constants)


def _checksum(array: Tensor | np.ndarray) -> str:
    """The data type, shape and a checksum of all bytes of an array."""
    if isinstance(array, Tensor):
        dense = array.detach().cpu() if array.layout == torch.strided else array.detach().cpu().to_dense()
        values = dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return f"{array.dtype} {[*array.shape]} {zlib.crc32(values.data):08x}"


def _class_path(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
