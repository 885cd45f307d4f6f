"""Error messages of the command line: one line each, with the configuration key that is wrong."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import signature
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import torch
from jsonargparse import Namespace  # pyright: ignore[reportPrivateImportUsage]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from fedmoe_pl.catalogue import COMMANDS, did_you_mean
from fedmoe_pl.checks import InvalidArgumentError, reason_of, shown, with_article
from fedmoe_pl.cli.kinds import KINDS
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.phases.phase import Phase

_OF_PACKAGE = {each.__name__ for classes in KINDS.values() for each in classes}
PHASES = "federation.phases"
OF_CLASS = ("class_path", "init_args", "dict_kwargs")
AS_MAPPING = "must have arguments, as in {name: value}."
_OVERLAY = "An overlay needs the --config that it changes before it."
_OPTIMIZER = "an optimizer (model.init_args.optimizer or train.optimizer of a phase)"
_PLACES = {
    "data": "data",
    "partitioners": "data.init_args.partitioner",
    "augmentations": "data.init_args.augmentation",
    "models": "model",
    "experts": "model.init_args.global_expert",
    "gates": f"{PHASES}.NAME.gate",
    "algorithms": f"{PHASES}.NAME.algorithm",
    "aggregations": f"{PHASES}.NAME.aggregation",
    "callbacks": "federation.callbacks",
}
_EXAMPLES = {
    "Phase": "{name: FedAvg, algorithm: FedAvg}",
    "list[Phase]": "[{name: FedAvg, algorithm: FedAvg}]",
    "Select": "{monitor: global_test}",
    "Evaluate": "{every_n_rounds: 5}",
    "dict[str, Metric]": "{error: torchmetrics.MeanSquaredError}",
    "Module": "SmallMLP or {class_path: my_module.Net, init_args: {hidden: 64}}",
    "Optimizer": "{class_path: torch.optim.SGD, init_args: {lr: 0.1}}",
    "LRScheduler": "{class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 1}}",
    "Metric": "torchmetrics.MeanSquaredError",
}  # how values are written, by the name of their type
_NAMES = {"NoneType": "null", "PositiveInt": "int above 0", "PositiveFloat": "float above 0", "ConfigPath": "a file"}
_MEANINGS = {"method": "the name of a row of the run's table"}  # of arguments of commands
_MOST_LISTED = 8  # arguments of a class
FILES = (".yaml", ".yml", ".json")
_NOT_CLASSES: tuple[type, ...] = (str, int, float, dict, list, tuple, set, type(None), os.PathLike)


class RefusedKeyError(MisconfigurationException, TypeError):
    """A refused key: the key as far as it is known, the rest of the sentence, and the class that has it as an argument.

    It is a TypeError, because jsonargparse goes on with those.
    """

    def __init__(self, key: str, problem: str, owner: type | None = None) -> None:
        self.key, self.problem, self.owner = key, problem, owner
        super().__init__(key, problem, owner)

    def __str__(self) -> str:
        """The sentence."""
        return f"{self.key} {self.problem}"

    def below(self, key: str, owner: type | None = None) -> RefusedKeyError:
        """The same refusal of what stands below a key, which is an argument of ``owner``."""
        init_args = ".init_args" if self.owner and not is_dataclass(self.owner) else ""
        dot = "." if self.key and self.key[0] not in ".[" else ""
        return RefusedKeyError(f"{key}{init_args}{dot}{self.key}", self.problem, owner)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """An exception, its cause, the cause of that, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def as_refusal(error: BaseException) -> MisconfigurationException:
    """The ``MisconfigurationException`` behind an exception, else one that says the first of its causes in one line."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MisconfigurationException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        *_, first = causes_of(error)
        cause = MisconfigurationException(f"{' '.join(str(first).split()).rstrip('.')}.")
    return cause


def refusal_of_value(key: str, value: Any, hint: Any, error: Exception) -> RefusedKeyError:
    """The refusal of a value of this type, which is wrong in itself and not in the arguments of its class."""
    node = vars(value) if isinstance(value, Namespace) else value if isinstance(value, Mapping) else {}
    class_path = node.get("class_path") if node else value
    bases = (*_bases(hint),)
    if any(isinstance(each, UnicodeDecodeError) for each in causes_of(error)):
        example = "as in {class_path: NpzFile, init_args: {path: FILE}}"
        return RefusedKeyError(key, f"is a file that is no text; a file of data is given to a class, {example}.")
    if not isinstance(node.get("init_args", {}), Mapping | Namespace):
        return RefusedKeyError(f"{key}.init_args", AS_MAPPING)
    if bases and "init_args" in node and class_path is None:
        is_needed = not {LightningModule, FederatedDataModule}.isdisjoint(bases)
        return RefusedKeyError(key, f"must have a class_path.{f' {_OVERLAY}' if is_needed else ''}")
    if not bases or not isinstance(class_path, str):
        return wrong_value(key, value, hint)
    place = f"{key}.class_path" if node else key
    if class_path.endswith(FILES):
        return RefusedKeyError(place, f"is '{class_path}', but there is no such file here, or it is not YAML.")
    try:
        found = _class_of(class_path, bases, place)
    except RefusedKeyError as refusal:
        return refusal
    if not inspect.isclass(found) or not issubclass(found, bases):
        names = {each.__name__ for base in bases for each in _subclasses(base) if not inspect.isabstract(each)}
        return wrong_value(place, class_path, hint, names)
    if inspect.isabstract(found):
        return RefusedKeyError(place, f"is '{class_path}', but must be a class that can be made; it is abstract.")
    return beside_class_path(key, node) if {*node} - {*OF_CLASS} else wrong_value(key, value, hint)


def beside_class_path(key: str, node: Iterable[str]) -> RefusedKeyError:
    """The refusal of what stands beside a class_path."""
    name = next(name for name in node if name not in OF_CLASS)
    if (end := did_you_mean(name, OF_CLASS[1:])) == ".":
        return RefusedKeyError(key, "has arguments beside class_path; they belong in its init_args.")
    return RefusedKeyError(f"{key}.{name}", f"is not a key beside class_path{end}")


def _bases(hint: Any) -> Iterator[type]:
    """The classes that fit a type, also those in a list or a dict, and those that a function makes."""
    for kind in members(hint):
        if get_origin(kind) is not None:
            yield from _bases(get_args(kind)[-1])
        elif isinstance(kind, type) and not issubclass(kind, _NOT_CLASSES):
            yield kind


def _subclasses(base: type) -> Iterator[type]:
    """A class and those that are made from it, but private ones."""
    if base.__name__[0] != "_" and "<locals>" not in base.__qualname__:
        yield base
    for each in type.__subclasses__(base):
        yield from _subclasses(each)


def _class_of(class_path: str, bases: tuple[type, ...], key: str) -> Any:
    """What a class path stands for; a name without dots is that of a subclass of one of the bases."""
    module, _, name = class_path.rpartition(".")
    if not module:
        return next((each for base in bases for each in _subclasses(base) if each.__name__ == name), None)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missed = str(error.name).partition(".")[0]
        nowhere = f"there is no module {error.name} in {os.getcwd()}, PYTHONPATH or the installed packages"
        remedy = f"install {missed}, run fedmoe from the folder that has {missed}.py, or add that folder to PYTHONPATH"
        raise RefusedKeyError(key, f"is '{class_path}', but {nowhere}; {remedy}.") from error
    except Exception as error:  # whatever the user's module raises
        problem = f"is '{class_path}', but {module} cannot be imported: {reason_of(error)}."
        raise RefusedKeyError(key, problem) from error
    if not hasattr(imported, name):
        end = did_you_mean(name, getattr(imported, "__all__", dir(imported)))
        raise RefusedKeyError(key, f"is '{class_path}', but {module} has no {name}{end}")
    return getattr(imported, name)


def wrong_value(key: str, value: Any, hint: Any, known: Iterable[str] = ()) -> RefusedKeyError:
    """The refusal of a value that does not fit a type; of those ``known``, a name that is like it is suggested."""
    allowed, names, known = words_of(hint), [words_of(each) for each in members(hint)], sorted(known)
    is_unknown = isinstance(value, str) and value not in _OF_PACKAGE
    if is_unknown and known and "." not in value and len(names) == 1:
        allowed += " or its import path"
    end = did_you_mean(value, known) if is_unknown else "."
    example = next((_EXAMPLES[name] for name in names if name in _EXAMPLES), None)
    listed = (kind for kind, classes in KINDS.items() for base in _bases(hint) if issubclass(classes[0], base))
    if end == "." and example:
        end = f", such as {example}."
    elif end == "." and (kind := next(listed, None)):
        end = f"; `fedmoe list {kind}` has those of the package."
    return RefusedKeyError(key, f"is {shown(value)}, but must be {allowed}{end}")


def missing(names: Sequence[str], hints: Mapping[str, Any], owner: type | None) -> RefusedKeyError:
    """The refusal of a class, or of a command, without arguments that it needs."""
    end = f", as in a file after --config. {_OVERLAY}" if {*names} & {"model", "data", PHASES} else "."
    kind = words_of(hints[names[0]]) if owner else _MEANINGS.get(names[0], "")
    kind = f": {kind}" if kind and len(names) == 1 else ""
    listed = " and ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])
    return RefusedKeyError(listed, f"must be given{f' for {owner.__name__}' if owner else ''}{kind}{end}", owner)


def unknown(name: str, hints: Mapping[str, Any], owner: type | None) -> RefusedKeyError:
    """The refusal of an argument that a class, or a command, does not have."""
    names = [each for each in hints if (each, name) != ("config", "config")]
    if PHASES in names:
        names += [f"{PHASES}.NAME.{each}" for each in signature(Phase).parameters]
    sections = {each.partition(".")[0] for each in names}
    section = name.partition(".")[0]
    groups = [(key, kind) for key, hint in hints.items() for kind in members(hint) if is_dataclass(kind)]
    optional = [f"{key}.{field.name}" for key, kind in groups for field in fields(kind)]  # such as select.monitor
    end = did_you_mean(name, names) if section in sections else did_you_mean(section, [*sections, *optional])
    inside = [each for each in (*names, *optional) if each.endswith(f".{section}")]
    inside += [each for each in sections if each.startswith(f"{name}_")]  # seed_everything
    if inside and section not in sections:  # as with max_epochs, which is train.max_epochs of a phase
        end = f"; did you mean {' or '.join(inside)}?"
    if "subcommand" in hints:
        end = "; options come after the command, as in fedmoe fit --config quickstart."
    elif owner in (LightningModule, FederatedDataModule, Optimizer):
        end = f"; a class_path must be given. {_OVERLAY}"
    elif name == "configs" and owner is None:
        end = "; a file comes after --config, and that of a grid after fedmoe benchmark --config."
    elif section in COMMANDS and owner is None:
        end = f"; a file with the section {section} comes before the command, as in fedmoe --config FILE {section}."
    elif section in OF_CLASS:
        end = "; it belongs below what it is of, as in model: {class_path: PersonalizedMoE, init_args: {...}}."
    elif section in ("seed_everything", "model", "data", "trainer", "federation") and "configs" in names:
        end = "; the file of a run stands under configs, as in configs: [run.yaml]."
    elif name.endswith((".yaml", ".yml")):
        end = f"; a file comes after --config, as in --config {name}."
    elif name in [f"federation.{each}" for each in signature(Phase).parameters]:
        end = f"; it belongs to a phase, as {PHASES}.NAME.{name.rpartition('.')[2]}."
    elif end == "." and (owners := _owners(name.rpartition(".")[2])):
        end = f"; it belongs to {' or '.join(owners)}."
    elif end == "." and owner is not None:
        has = [each for each in names if "." not in each]
        end = f"; it has {', '.join(has[:_MOST_LISTED])}{' and others' * (len(has) > _MOST_LISTED)}."
    elif end == "." and name == section:
        end = f"; there are {', '.join(sorted(sections))}."
    return RefusedKeyError(name, f"is not an argument{f' of {owner.__name__}' if owner else ''}{end}", owner)


def _owners(argument: str) -> list[str]:
    """What has an argument of this name: some classes of each kind, with their place in a configuration."""
    found = [_OPTIMIZER] if argument in signature(torch.optim.SGD).parameters else []
    for kind, place in _PLACES.items():
        having = [each.__name__ for each in KINDS[kind] if argument in signature(each).parameters]
        found += [f"{', '.join(sorted(having, key=len)[:3])} ({place})"] if having else []
    return found


def members(hint: Any) -> tuple[Any, ...]:
    """The types of a union; another type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def words_of(hint: Any) -> str:
    """A type in words, such as ``int or null``; a function that makes an object, as an optimizer's, is the object's.

    Example:
        >>> words_of(torch.Tensor | Literal["a", "b"] | list[Phase] | None)
        "Tensor or 'a' or 'b' or list[Phase] or null"
        >>> words_of(Callable[[list], Optimizer] | None)
        'Optimizer or null'
    """
    kinds, origin = get_args(hint), get_origin(hint)
    if origin is Literal:
        return " or ".join(map(repr, kinds))
    if origin is Callable:
        return "a function" if kinds[-1] is Any else words_of(kinds[-1])
    if members(hint) != (hint,):
        return " or ".join(dict.fromkeys(map(words_of, kinds)))
    name = getattr(origin or hint, "__name__", str(hint))
    return f"{name}[{', '.join(map(words_of, kinds))}]" if kinds else _NAMES.get(name, name)


class Place(NamedTuple):
    """An argument in a configuration: its key, its value, the class or section that it belongs to, and its phase."""

    key: str
    value: Any
    owner: str
    phase: str


def places(node: Any, key: str = "", owner: str = "", phase: str = "") -> Iterator[Place]:
    """Every argument in a parsed configuration."""
    if isinstance(node, list | tuple):
        for index, item in enumerate(node):
            child = f"{key}{place_in(node, index, key)}"
            yield Place(child, item, owner, phase)
            yield from places(item, child, owner, item["name"] if key == PHASES else phase)
    elif isinstance(node, Mapping):
        if "class_path" in node:
            key, owner, node = f"{key}.init_args", node["class_path"].rpartition(".")[2], node.get("init_args") or {}
        for name, value in node.items():
            child = f"{key}.{name}" if key else name
            yield Place(child, value, owner, phase)
            yield from places(value, child, name, phase)


def place_in(items: Sequence[Any], index: int, key: str) -> str:
    """The place of an item in the list of this key, as it is in keys: ``.FedAvg`` for a phase, else ``[1]``."""
    settings = [item.get("init_args", item) if isinstance(item, Mapping | Namespace) else None for item in items]
    names = [each.get("name") if isinstance(each, Mapping | Namespace) else None for each in settings]
    is_named = key == PHASES and names[index] != "" and isinstance(names[index], str) and names.count(names[index]) == 1
    return f".{names[index]}" if is_named else f"[{index}]"


def with_key(error: InvalidArgumentError, configuration: Mapping[str, Any]) -> str:
    """The sentence of an exception with the argument's key in the configuration, if its fields tell which it is."""
    named = [place for place in places(configuration) if f".{place.key}".endswith(f".{error.argument}")]
    owned = [place for place in named if _belongs(place, error.owner)]
    same = [place for place in owned if _shown(place.value) == error.value]
    same = same or [place for place in named if _shown(place.value) == error.value]
    named = named if "." in error.argument else []  # such as metrics.f1, which names enough
    found = next((each for each in (same, owned, named) if len(each) == 1), same if owned else [])
    keys = " or ".join(place.key for place in found)
    return error.sentence(keys) if found else str(error)


def _belongs(place: Place, owner: str) -> bool:
    """Whether an argument belongs to what a refusal names, such as ``Phase 'FedAvg': PFLMoE`` or ``Federation``."""
    is_here = not owner.startswith("Phase '") or owner.startswith(f"Phase '{place.phase}'")
    return is_here and (owner.endswith("'") or owner.lower().endswith(place.owner.lower()))


def _shown(value: Any) -> str:
    is_class = isinstance(value, Mapping) and "class_path" in value
    return with_article(value["class_path"].rpartition(".")[2]) if is_class else shown(value)
