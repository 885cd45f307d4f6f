"""Error messages of the command line: one line each, with the configuration key that is wrong."""

from __future__ import annotations

import ast
import contextlib
import os
import pydoc
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any, NamedTuple, get_args, get_type_hints

import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from fedmoe_pl.catalogue import COMMANDS, did_you_mean
from fedmoe_pl.checks import InvalidArgumentError, shown, with_article
from fedmoe_pl.cli.kinds import KINDS
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.phases.phase import Phase

_KNOWN = [each.__name__ for classes in KINDS.values() for each in classes]
_LONGEST = 80  # of a value
_BESIDE = ("init_args", "dict_kwargs")  # keys beside class_path
_OVERLAY = "An overlay needs the --config that it changes before it."
PHASES = "federation.phases"
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


_LISTED = {
    "Module": "experts",
    "FederatedDataModule": "data",
    "Partitioner": "partitioners",
    "Augmentation": "augmentations",
    "LightningModule": "models",
    "Gate": "gates",
    "Algorithm": "algorithms",
    "Aggregation": "aggregations",
    "Backend": "backends",
    "FederationCallback": "callbacks",
}  # the kinds of `fedmoe list`, by their base
_EXAMPLES = {
    "Phase": "{name: FedAvg, algorithm: FedAvg}",
    "Select or null": "{monitor: global_test}",
    "Evaluate or bool": "{every_n_rounds: 5}",
    "dict[str, Metric] or null": "{error: torchmetrics.MeanSquaredError}",
    "Module or Callable[[Tensor, Tensor], Any] or null": "torch.nn.HuberLoss",
}
_WRITTEN = {
    "Module": "SmallMLP or {class_path: my_module.Net, init_args: {hidden: 64}}",
    "Optimizer": "{class_path: torch.optim.SGD, init_args: {lr: 0.1}}",
    "LRScheduler": "{class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 1}}",
    "Metric": "torchmetrics.MeanSquaredError",
}  # how objects are written, by their class
_MEANINGS = {"method": "the name of a row of the run's table"}  # of arguments of commands
_MOST_LISTED = 8  # arguments of a class


def cause_of(error: BaseException, parser: ArgumentParser | None = None) -> str:
    """The message of the ``MisconfigurationException`` behind an exception, else the exception's, condensed."""
    refusal = refusal_behind(error)
    return " ".join(str(refusal).split()) if refusal is not None else condensed(error, parser)


def refusal_behind(error: BaseException) -> MisconfigurationException | None:
    """The ``MisconfigurationException`` behind an exception, or the exception if it is one; None if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MisconfigurationException):
        cause = cause.__cause__ or cause.__context__
    return cause


def condensed(error: BaseException, parser: ArgumentParser | None) -> str:
    """One sentence for an error of jsonargparse: its exceptions name key after key, and the last one what is wrong.

    For unknown arguments, it suggests those of the class or, outside of any, of the parser.
    """
    key, class_type, types, value, text = "", None, "", "", ""
    for text in _messages(error):
        if match := re.match(r'Parser key "(.+?)":\s*', text):
            is_whole = not key or f"{match[1]}.".startswith(f"{key}.")
            is_again = text.startswith("Unable to load", match.end()) and key.endswith(f".{match[1]}")
            key = match[1] if is_whole else key if is_again else f"{key}.{match[1]}"
            of_item = re.match(r"of type (.*)", text[match.end() :])  # as ItemsAction says it
            types, value, text = of_item[1] if of_item else "", "", text[match.end() :]
        elif match := re.match(r"Does not validate .*\nSubtypes: \[(.*)\]", text):
            types, value = match[1], text.rpartition("Given value: ")[2]
        elif match := re.match(r"(?s)Problem with given class_path '(.+?)'|Type .*class_path='(.+?)'", text):
            value = match[1] or match[2]
            class_type = _located(value)
            key += "" if is_dataclass(class_type) else ".init_args"
    place = f"{key}." if key else ""
    if match := re.search(r"arguments are required: (.+)", text):
        names = [re.sub(r"^(?!federation|trainer)\w+\.", "", name) for name in match[1].split(", ")]
        end = f", as in a file after --config. {_OVERLAY}" if {*names} & {"model", "data", PHASES} else "."
        listed = " and ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])
        kind = _MEANINGS.get(names[0]) or words_of(_type_of(names[0], class_type)) if len(names) == 1 else ""
        of_class = f" for {class_type.__name__}" if isinstance(class_type, type) else ""
        return f"{place}{listed} must be given{of_class}{kind and ': '}{kind}{end}"
    if any(isinstance(each, UnicodeDecodeError) for each in _causes(error)):
        example = "as in {class_path: NpzFile, init_args: {path: FILE}}"
        return f"{key} is a file that is no text; a file of data is given to a class, {example}."
    if match := re.search(r'Unable to load config "(.*)"', text):
        return f"{place.removesuffix('.')} is {match[1]}, but must have arguments, as in {{name: value}}."
    if class_type is not None and "has no attribute 'keys'" in text:
        return f"{key} must have arguments, as in {{name: value}}."
    if match := re.search(r"not accepted before subcommand '(\w+)'", text):
        return f"options must come after the command, as in fedmoe {match[1]} --config quickstart."
    if text.startswith('expected "subcommand"'):
        return "a command must be given, as in fedmoe fit --config quickstart; fedmoe --help lists all."
    unknown = r"unrecognized arguments: (?:--)?([^\s=]+)|(?:Group '(.+?)' does not accept o|O|accept o)ption '(.+?)'"
    if match := re.search(unknown, text):
        name = match[1] or (f"{match[2]}.{match[3]}" if match[2] else match[3])
        if name == "class_path" and key:
            return f"{key.removesuffix('.init_args')} has arguments beside class_path; they belong in its init_args."
        return f"{place}{_unknown(name, class_type, parser)}"
    if names := _beside_class_path(value):
        return f"{place}{names[0]} is not a key beside class_path{did_you_mean(names[0], _BESIDE)}"
    place = key.removesuffix(".init_args")
    expected = re.match(r"Expected an? (<.*?>|(?:typing\S*|list)\[.*?\])|Not a valid subclass of (\w+)", text)
    if match := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", text):
        return f"{place}: {_no_attribute(match[1], match[2])}"
    missing = next((each.name for each in _causes(error) if isinstance(each, ModuleNotFoundError)), None)
    if missing:
        name = missing.partition(".")[0]
        remedy = f"install {name}, run fedmoe from the folder that has {name}.py, or add that folder to PYTHONPATH"
        return f"{place}: no module {missing} in {os.getcwd()}, PYTHONPATH or the installed packages; {remedy}."
    if not expected and "mport path" not in text:
        return f"{place}{place and ': '}{' '.join(text.split()).rstrip('.')}."
    given = re.search(r"Got value: (.*)|path \w+: (.*)|Import path (\S+)", text)
    found = value or (given and given[given.lastindex or 0]) or ""
    of_library = {
        "optimizer": torch.optim,
        "lr_scheduler": torch.optim.lr_scheduler,
        "round_lr_scheduler": torch.optim.lr_scheduler,
        "callbacks": lightning.pytorch.callbacks,
        "logger": lightning.pytorch.loggers,
        "sampler": sys.modules.get("optuna.samplers"),
        "pruner": sys.modules.get("optuna.pruners"),
    }
    libraries = (dir(of_library[name]) for name in re.split(r"[.\[]", place) if name in of_library)
    in_library = [each for each in next(libraries, []) if each[0].isupper()]  # no modules, such as wandb
    known = [*in_library, *_KNOWN]
    nested = re.fullmatch(r"NestedArg\(key='class_path', val='(.*)'\)", found)  # --data.class_path
    nested = nested or re.match(r"{'class_path': '(\w+)'", found)
    nested = nested if nested and nested[1] not in known else None
    if nested:
        place, found = f"{place}.class_path", nested[1]
    found = found if len(found) <= _LONGEST else f"{found[:_LONGEST]} ..."
    quoted = found if re.match(r"[\[{\d-]|None$|nan$|True$|False$", found) else repr(found)
    types = types or (expected and (expected[1] or expected[2])) or _type_of(place.rpartition(".")[2], class_type)
    allowed = words_of(types or "a class")
    if place.removesuffix(".class_path") in ("model", "data"):  # Lightning lets them be null, but they must be given
        allowed = allowed.removesuffix(" or null")
    if "dot import path" in text and " or " not in allowed and found not in _KNOWN:
        allowed += " or its import path"
    example = f"[{found}]" if allowed == "list" and re.fullmatch(r"[\w./-]+", found) else _EXAMPLES.get(allowed)
    allowed += f", such as {example}" if example else ""
    word = re.sub(r"^\['([\w.]+)'\]$", r"\1", found)  # of a list of one
    is_name = re.fullmatch(r"[\w.]+", word) is not None and word not in known
    takes_class = nested or not expected or re.search(r"\b[A-Z]\w+", allowed)
    bases = [each for each in re.findall(r"\w+", allowed) if each in _LISTED or each in _WRITTEN] or [""]
    kind = _LISTED.get(bases[0])
    of_kind = [*in_library, *(each.__name__ for each in KINDS[kind])] if kind else known
    end = did_you_mean(word, of_kind) if is_name and takes_class and not example else "."
    if end == "." and not example and bases[0] in _WRITTEN:
        end = f", such as {_WRITTEN[bases[0]]}."
    elif end == "." and kind and not example:
        end = f"; `fedmoe list {kind}` has those of the package."
    return f"{place} is {quoted}, but must be {allowed}{end}"


def _type_of(argument: str, class_type: Any) -> str:
    """The type of a class's argument, as far as it is known."""
    actions = _parser_of(class_type)._actions if isinstance(class_type, type) else []
    return next((repr(getattr(each, "_typehint", each.type)) for each in actions if each.dest == argument), "")


def _parser_of(class_type: type) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(class_type, fail_untyped=False)
    return parser


def _beside_class_path(value: str) -> list[str]:
    """The keys that a class's mapping may not have, such as a misspelt ``init_args``."""
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        mapping = ast.literal_eval(value)
        if isinstance(mapping, dict) and "class_path" in mapping:
            return [str(name) for name in mapping if name not in ("class_path", *_BESIDE)]
    return []


def _messages(error: BaseException) -> list[str]:
    """The messages of an exception and its causes, each once: parsers of commands repeat those of their arguments."""
    return [*dict.fromkeys(str(cause) or type(cause).__name__ for cause in _causes(error))]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, its cause, the cause of that, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _located(class_path: str) -> Any:
    try:
        return pydoc.locate(class_path)
    except pydoc.ErrorDuringImport:
        return None


def _no_attribute(module: str, name: str) -> str:
    """What is said of a class that a module does not have."""
    found = _located(module)
    if not module.startswith("fedmoe_pl."):
        return f"{module} has no {name}{did_you_mean(name, dir(found))}"
    own = [each for each, value in vars(found).items() if getattr(value, "__module__", None) == module]
    has = getattr(found, "__all__", own)
    longer = [each for each in has if name.lower() in each.lower()]
    end = f"; similar ones are {', '.join(longer)}." if longer else did_you_mean(name, has)
    return f"{module} has no class {name}{end}"


def _unknown(name: str, class_type: Any, parser: ArgumentParser | None) -> str:
    """What is said of an unknown argument of a class, or of a command."""
    class_type = class_type if isinstance(class_type, type) else None  # not a union of several
    parser = parser if class_type is None else _parser_of(class_type)
    names = [*parser.get_defaults().keys(), "class_path", "init_args"] if parser else []
    if PHASES in names:
        names += [f"{PHASES}.NAME.{each}" for each in signature(Phase).parameters]
    sections = {each.partition(".")[0] for each in names}
    section = name.partition(".")[0]
    optional = _of_optional(class_type)
    end = did_you_mean(name, names) if section in sections else did_you_mean(section, [*sections, *optional])
    inside = [each for each in (*names, *optional) if each.endswith(f".{section}")]
    inside += [each for each in sections if each.startswith(f"{name}_")]  # seed_everything
    if inside and section not in sections:  # as with max_epochs, which is train.max_epochs of a phase
        end = f"; did you mean {' or '.join(inside)}?"
    if class_type in (LightningModule, FederatedDataModule, Optimizer):
        end = f"; a class_path must be given. {_OVERLAY}"
    elif section in COMMANDS:
        end = f"; a file with the section {section} comes before the command, as in fedmoe --config FILE {section}."
    elif section in _BESIDE or section == "class_path":
        end = "; it belongs below what it is of, as in model: {class_path: PersonalizedMoE, init_args: {...}}."
    elif section in ("model", "data", "trainer", "federation") and "configs" in names:
        end = "; the file of a run stands under configs, as in configs: [run.yaml]."
    elif name.endswith((".yaml", ".yml")):
        end = f"; a file comes after --config, as in --config {name}."
    elif name in [f"federation.{each}" for each in signature(Phase).parameters]:
        end = f"; it belongs to a phase, as {PHASES}.NAME.{name.rpartition('.')[2]}."
    elif end == "." and (owners := _owners(name.rpartition(".")[2])):
        end = f"; it belongs to {' or '.join(owners)}."
    elif end == "." and class_type is not None:
        has = [each for each in names if "." not in each and each not in ("class_path", "init_args", "params")]
        end = f"; it has {', '.join(has[:_MOST_LISTED])}{' and others' * (len(has) > _MOST_LISTED)}."
    elif end == "." and name == section and parser is not None:
        end = f"; there are {', '.join(sorted(sections - {'class_path', 'init_args'}))}."
    return f"{name} is not an argument{f' of {class_type.__name__}' if class_type else ''}{end}"


def _owners(argument: str) -> list[str]:
    """What has an argument of this name: some classes of each kind, with their place in a configuration."""
    found = [_OPTIMIZER] if argument in signature(torch.optim.SGD).parameters else []
    for kind, place in _PLACES.items():
        having = [each.__name__ for each in KINDS[kind] if argument in signature(each).parameters]
        found += [f"{', '.join(sorted(having, key=len)[:3])} ({place})"] if having else []
    return found


def _of_optional(class_type: Any) -> list[str]:
    """The arguments of a dataclass's optional dataclasses, such as ``select.monitor``: no defaults of a parser."""
    hints = get_type_hints(class_type) if is_dataclass(class_type) else {}
    inner = [(name, kind) for name, hint in hints.items() for kind in get_args(hint) if is_dataclass(kind)]
    return [f"{name}.{field.name}" for name, kind in inner for field in fields(kind)]


def words_of(types: str) -> str:
    """The names of types as jsonargparse shows them, such as ``int or null``.

    Example:
        >>> words_of("<class 'torch.Tensor'>, typing.Literal['a', 'b'], list[fedmoe_pl.Phase], <class 'NoneType'>")
        "Tensor or 'a' or 'b' or list[Phase] or null"
        >>> words_of("typing.Callable[[collections.abc.Iterable], torch.optim.optimizer.Optimizer], <class 'NoneType'>")
        'Optimizer or null'
    """
    short = re.sub(r"(?:[A-Za-z_]\w*\.)+", "", re.sub(r"<class '(.+?)'>", r"\1", types)).replace("NoneType", "null")
    short = re.sub(r"Callable\[\[\w+\], (?:Union\[(.+?)\]|(.+?))\]", r"\1\2", short)  # what a factory makes
    return re.sub(r", (?![^\[]*\])", " or ", re.sub(r"Literal\[(.*?)\]", r"\1", short))


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
