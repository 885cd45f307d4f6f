"""From the text of a configuration to its objects, as far as jsonargparse does it in another way."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cache, reduce
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader
from jsonargparse._actions import ActionConfigFile
from jsonargparse._common import lenient_check
from jsonargparse._typehints import ActionTypeHint, sub_defaults
from jsonargparse._util import NestedArg, parse_value_or_config
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters_context

from fedmoe_pl.catalogue import did_you_mean
from fedmoe_pl.checks import InvalidArgumentError, shown
from fedmoe_pl.cli import errors
from fedmoe_pl.cli.errors import PHASES, RefusedKeyError, members, place_in, places
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models.description import keep_configuration
from fedmoe_pl.seeds import named_seed, seeded

_load = get_loader("yaml")
_NEEDED = ("data", "model")  # by every command that has them


class ConfigFile(ActionConfigFile):
    """A configuration file; what cannot be read is said with the line."""

    def __call__(self, parser: ArgumentParser, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Applies the file to what the arguments before it say."""
        values, content = read_config(values)
        check_names(content, parser)
        if isinstance(content.get("config"), list):  # jsonargparse would leave it out
            one = "its key config must be one file; several come one after another, each after --config"
            raise RefusedKeyError("config", f"is '{values}', but it cannot be read: {one}.")
        super().__call__(parser, cfg, values, option_string)


def read_config(file: str) -> tuple[str, Mapping[str, Any]]:
    """A configuration file, or a text in its place, and what it says; ``-`` is the text on stdin."""
    try:
        if file == "-":
            file = f"{sys.stdin.read()}\n"
        is_text = any(mark in file for mark in "{\n")
        path = Path(file).expanduser()
        text = file if is_text else path.read_text(encoding="utf-8")
        content = load(text)
        if not isinstance(content, Mapping):
            raise ValueError("it has no keys, as YAML has in key: value")
        sections = {"": content, **{f"{key}.": each for key, each in content.items() if isinstance(each, Mapping)}}
        keys = (f"{section}{key}" for section, each in sections.items() for key in each if not isinstance(key, str))
        if wrong := next(keys, ""):
            raise ValueError(f"its key {wrong} must be a text")
        return file if is_text or path.is_file() else f"{text}\n", content  # a pipe can be read once
    except (MisconfigurationException, OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        if file.endswith(".toml"):
            reason = "it must be YAML, or JSON"
        elif isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            tab = ", a tab; YAML is indented with spaces" if "'\\t'" in str(error.problem) else ""
            mark = error.problem_mark
            reason = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{tab}"
        raise MisconfigurationException(f"config is '{file}', but it cannot be read: {reason}.") from error


class CheckingParser(LightningArgumentParser):
    """Refuses keys with fields, and knows none by its beginning; jsonargparse makes the parsers of classes alike."""

    owner: type | None = None  # the class whose arguments they are; None for those of a command

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation may stand for: nothing; argparse's signature."""
        return []

    def add_class_arguments(self, class_type: type, nested_key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Adds the arguments of a class; the signature is the base's."""
        if nested_key is None and "config" not in hints_of(self):
            self.owner = class_type
        return super().add_class_arguments(class_type, nested_key, *args, **kwargs)

    def parse_args(self, args: Any = None, *more: Any, **kwargs: Any) -> Namespace:
        """Parses arguments, of which none may have an unknown name; the signature is the base's."""
        self._check(check_options, sys.argv[1:] if args is None else args)
        return super().parse_args(args, *more, **kwargs)

    def parse_object(self, obj: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Parses the arguments of a class, of which none may have an unknown name; the signature is the base's."""
        self._check(check_names, obj)
        return super().parse_object(obj, *args, **kwargs)

    def _check(self, check: Callable[[Any, Any], None], arguments: Any) -> None:
        for action in self._actions:
            if type(action) is ActionTypeHint:
                action.__class__ = CheckedAction
                vars(action)["owner"] = self.owner
        try:
            check(arguments, self)
        except RefusedKeyError as error:
            self.error(str(error), error)

    def validate(
        self,
        namespace: Namespace,
        skip_unset: bool = True,
        skip_required: bool = False,
        branch: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Refuses wrong values, and arguments that are missing; the signature is the base's."""
        super().validate(namespace, skip_unset, True, branch, **kwargs)
        if skip_required or lenient_check.get():
            return
        hints = hints_of(self)
        needed = _NEEDED if "config" in hints else ()  # jsonargparse notes them elsewhere
        required = [action.dest for action in self._actions if action.required or action.dest in needed]
        if names := [name for name in required if namespace.get(name) is None]:
            raise errors.missing(names, hints, self.owner)


def hints_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The types of a parser's arguments, and of those of its commands."""
    actions = [action for action in parser._actions if action.default is not argparse.SUPPRESS]
    hints = {action.dest: getattr(action, "_typehint", action.type or str) for action in actions}
    commands = [action.choices for action in actions if isinstance(action, argparse._SubParsersAction)]
    of_commands = [(name, each) for choices in commands for name, each in choices.items()]
    return hints | {f"{name}.{key}": hint for name, each in of_commands for key, hint in hints_of(each).items()}


def check_options(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuses an option that a parser does not have."""
    known, hints = {option for action in parser._actions for option in action.option_strings}, hints_of(parser)
    rest = [*reversed(words)]
    while rest:
        option, equals, value = (word := rest.pop()).partition("=")
        if not word.startswith("-"):
            if any(not action.option_strings for action in parser._actions):  # those after it belong to a command
                return
            raise errors.unknown(word, hints, None)
        # some options, such as print_config, need no value; "- name: A" is one
        if not equals and rest and not re.match(r"-[^\d.\s]", rest[-1]):
            value = rest.pop()
        name = option.removeprefix("--").removesuffix("+")
        if option not in known or any(each.startswith(f"{name}.") for each in hints):
            check_names({name: value if option in known else None}, parser)


def check_names(node: Any, parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """Refuses the name of an argument that a parser does not have, and another value in place of a group."""
    hints, owner = hints_of(parser), getattr(parser, "owner", None)
    node = vars(node) if isinstance(node, Namespace) else node
    for name, value in node.items():
        full = f"{prefix}{name}"
        is_known = full in hints or str(name).startswith("__") or any(full.startswith(f"{each}.") for each in hints)
        if is_known and not (full == "config" and "configs" in hints):  # a grid's, which jsonargparse takes for its own
            continue
        if not any(each.startswith(f"{full}.") for each in hints):
            is_class = full == "class_path" and owner
            raise errors.beside_class_path("", node) if is_class else errors.unknown(full, hints, owner)
        value = _loaded(value)
        if isinstance(value, Mapping | Namespace):
            check_names(value, parser, f"{full}.")
        elif (value is not None or "." in full or owner) and not str(value).endswith(errors.FILES):
            raise RefusedKeyError(full, f"is {shown(value)}, but {errors.AS_MAPPING}", owner)


class _Strict(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML takes the last one, and 010, which it takes for 8."""

    def construct_scalar(self, node: Any) -> Any:
        """The text of a node; the signature is the base's."""
        if node.tag == "tag:yaml.org,2002:int" and re.fullmatch(r"[-+]?0[0-7_]+", node.value):
            number = node.value.replace("_", "")
            hint = f"{int(number, 8)}; write {int(number)} or '{node.value}'"
            raise MisconfigurationException(
                f"line {node.start_mark.line + 1} has {node.value}, which YAML takes for {hint}"
            )
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; the signature is the base's."""
        names = [name for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        seen = set[str]()
        for name in names:
            if name.value in seen:
                raise MisconfigurationException(f"line {name.start_mark.line + 1} has the key '{name.value}' again")
            seen.add(name.value)
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    """Reads YAML as jsonargparse does, but no key may stand twice, no number begin with 0, and no part hold itself."""
    if any(mark in text for mark in ":{?["):  # otherwise it has none of these, as almost all texts
        content = yaml.load(text, _Strict)
        try:
            json.dumps(content, default=str, skipkeys=True)
        except ValueError as error:
            raise MisconfigurationException("a part of it contains itself") from error
    return _load(text)


def _loaded(value: Any) -> Any:
    """What a text stands for, and another value itself."""
    with contextlib.suppress(yaml.YAMLError):
        return load(value) if isinstance(value, str) else value
    return value


set_loader("yaml", load, exceptions=(yaml.YAMLError,))


class CheckedAction(ActionTypeHint):
    """An argument whose value is refused with its key; a list replaces the whole list, and a phase has its name.

    In jsonargparse itself, items of a list inherit from those of a list of the same length before it, such as a phase
    its rounds, and ``--federation.phases.FedAvg.rounds`` is an argument of the last phase.
    """

    owner: type | None = None

    def _check_type(self, value: Any, append: bool = False, cfg: Any = None, mode: str | None = None) -> Any:
        """Parses a value; the signature is the base's."""
        place = ""
        try:
            if self.dest == PHASES and isinstance(value, NestedArg):
                before = (cfg.get(self.dest) if cfg else None) or []
                index, argument = _phase_of(value, before, vars(self).get("_appended"))
                place = place_in(before, index, PHASES)
                changed = super()._check_type(argument, False, Namespace({PHASES: [before[index]]}), mode)
                return [*before[:index], *changed, *before[index + 1 :]]
            # in a grid, a key of a dict is one with its dots
            if self._typehint is dict and isinstance(value, NestedArg):
                return {**(cfg.get(self.dest) or {}), value.key: load(value.val)}
            vars(self)["_appended"] = append or vars(self).get("_appended")
            if append or not self._supports_append or not isinstance(self._read(value), list):
                return super()._check_type(value, append, cfg, mode)
            # jsonargparse checks a list five times in three ways; again in the same way would be a third of all parsing
            right = vars(self).setdefault("_right", {})
            way = mode, sub_defaults.get(), lenient_check.get()
            if right.get(way) != repr(value):  # 1 == True, but only one of them may be right
                value = super()._check_type(value, append, None, mode)
                right[way] = repr(value)
            return value
        except Exception as error:  # a module of the user's may raise anything while it is imported
            if isinstance(error, MisconfigurationException) and not isinstance(error, RefusedKeyError):
                key = f"{self.dest}.{value.key}" if isinstance(value, NestedArg) else f"{self.dest}{place}"
                raise RefusedKeyError(key, f"cannot be read: {str(error).rstrip('.')}.", self.owner) from error
            raise self._refusal(value, append, error).below(f"{self.dest}{place}", self.owner) from error

    def _read(self, value: Any) -> Any:
        """What a text stands for."""
        with contextlib.suppress(yaml.YAMLError, ValueError):  # such as a null byte in what looks like a path
            value, _ = parse_value_or_config(value, enable_path=self._enable_path)
        return _loaded(value)

    def _refusal(self, value: Any, append: bool, error: Exception) -> RefusedKeyError:
        """What is wrong with a value, without the key of this argument."""
        inner = next((each for each in errors.causes_of(error) if isinstance(each, RefusedKeyError)), None)
        value, hint = self._read(value), self._typehint
        if isinstance(value, NestedArg):
            value = reduce(lambda below, name: {name: below}, reversed(value.key.split(".")), value.val)
        value = value.as_dict() if isinstance(value, Namespace) else value
        value = [value] if append and not isinstance(value, list) else value
        if self.owner is None and self.dest in _NEEDED:  # which Lightning lets be null
            hint = Union[(*(each for each in members(hint) if each is not type(None)),)]
        parts = list[tuple[str, Any, Any]]()  # of a list or a dict; or the whole, of which only one type may be right
        for kind in members(hint):
            below = get_args(kind)[-1:]
            if isinstance(value, list) and get_origin(kind) in (list, Iterable):
                parts += [(place_in(value, index, self.dest), each, *below) for index, each in enumerate(value)]
            elif isinstance(value, dict) and get_origin(kind) is dict and below != (Any,):
                parts += [(f".{name}", each, *below) for name, each in value.items()]
            elif isinstance(value, str) and get_origin(kind) is list and _refusal_of(value, *below) is None:
                return RefusedKeyError("", f"is {shown(value)}, but must be a list, as in [{value}].")
            elif inner is None and kind not in (hint, type(None)):
                parts.append(("", value, kind))
        refusals = ((key, _refusal_of(each, kind)) for key, each, kind in parts)
        deeper = ((key, each) for key, each in refusals if each and (key or each.key not in ("", ".class_path")))
        found = next((refusal.below(key) for key, refusal in deeper), inner)
        return found or errors.refusal_of_value("", value, hint, error)


def _refusal_of(value: Any, hint: Any) -> RefusedKeyError | None:
    """What is wrong with a value of this type."""
    action: Any = ActionTypeHint(typehint=hint)(option_strings=[], dest="")
    action.__class__ = CheckedAction
    try:
        action._check_type(value)
    except RefusedKeyError as refusal:
        return refusal
    return None


def _phase_of(argument: NestedArg, phases: Sequence[Namespace], appended: Any) -> tuple[int, NestedArg]:
    """The index of the phase that an argument of the command line names, and the argument without the name.

    After a phase was appended, an argument without a name is that phase's, as in Lightning's command line.
    """
    words = f"{argument.key}={argument.val}"  # a name may have dots and equals signs
    names = {str(phase.get("init_args", phase).name): index for index, phase in enumerate(phases)}
    name = max((name for name in names if words.startswith(f"{name}.")), key=len, default=None)
    if name is None and appended and phases:
        return len(phases) - 1, argument
    if name is None:
        first = argument.key.partition(".")[0]
        hint = "." if first in names else did_you_mean(first, names)
        problem = "must name a phase that a --config before it has, and one of its arguments, such as"
        raise RefusedKeyError(f".{argument.key}", f"{problem} {PHASES}.NAME.rounds{hint}")
    key, _, value = words.removeprefix(f"{name}.").partition("=")
    return names[name], NestedArg(key=key, val=value)


class ConstructorFailure(NamedTuple):
    """A constructor that raised an exception: its class, its arguments, and the exception."""

    class_type: type
    arguments: dict[str, Any]
    error: Exception

    @property
    def is_refusal(self) -> bool:
        """Whether the exception says what is wrong in the words of this package."""
        of_package = self.class_type.__module__.startswith("fedmoe_pl.")
        is_such = isinstance(self.error, MisconfigurationException) and of_package
        return is_such or isinstance(self.error, InvalidArgumentError)


class Constructor:
    """Constructs the objects of a configuration, as an instantiator of jsonargparse.

    Attributes:
        node: the part of the configuration whose model or data module is being made. Lightning's own instantiator takes
            every module for the one under ``model``; here a phase may have another.
        failure: the last constructor that has failed.
    """

    def __init__(self) -> None:
        self.node: Mapping[str, Any] = {}
        self.failure: ConstructorFailure | None = None

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict, **kwargs: Any) -> Any:
        """Constructs an object."""
        try:
            check_values(class_type, kwargs)
            if issubclass(class_type, LightningModule | FederatedDataModule) and _names(self.node, class_type):
                arguments = {**self.node.get("init_args", {}), **self.node.get("dict_kwargs", {})}
                hparams = {"_class_path": self.node["class_path"], **arguments}
                with _given_hyperparameters_context(hparams, "lightning.pytorch.cli.instantiate_module"):
                    return class_type(*args, **kwargs)
            return class_type(*args, **kwargs)
        except Exception as error:
            self.failure = ConstructorFailure(class_type, kwargs, error)
            raise


def check_values(class_type: type, arguments: Mapping[str, Any], owner: str = "") -> None:
    """Refuses nan, and null where it is no value of an argument; jsonargparse lets both pass."""
    owner = owner or class_type.__name__
    for name, value in arguments.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, float) and math.isnan(number) for number in numbers):
            allowed = "a finite number" if numbers is not value else "finite numbers"
            raise InvalidArgumentError(owner, name, value, allowed)
        if value is None and name in (hints := _not_optional(class_type)):
            allowed = "given" if hints[name] is object else errors.words_of(hints[name])
            raise InvalidArgumentError(owner, name, value, allowed)


@cache
def _not_optional(class_type: type) -> dict[str, Any]:
    """The types of a class's arguments that cannot be None, also of those that it passes on to a base by its kwargs."""
    found = dict[str, Any]()
    for init in (vars(each)["__init__"] for each in class_type.__mro__ if "__init__" in vars(each)):
        parameters = inspect.signature(init).parameters
        try:
            hints = get_type_hints(init)
        except NameError:  # of a type that is only imported where types are checked
            break
        for name, parameter in parameters.items():
            takes_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            is_required = parameter.default is parameter.empty and takes_one
            hint = hints.get(name, object if is_required else Any)  # jsonargparse takes null for one without a type
            found.setdefault(name, Any if parameter.default is None else hint)
        if all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
            break
    return {name: hint for name, hint in found.items() if hint is not Any and type(None) not in get_args(hint)}


def with_modules(
    config: Namespace, dump: Mapping[str, Any], seed: int, parser: ArgumentParser, constructor: Constructor
) -> Namespace:
    """The configuration with modules in place of the model and of the phases' gates and models.

    The initial parameters of each are drawn from the seed and its own name, so that they do not depend on which other
    phases stand in the file. Each keeps its node of ``dump``, the configuration in plain values.
    """
    made = deepcopy(config)
    parts = [(made, dump, "model", ("model",))]
    for phase, node in zip(made.federation.phases, dump["federation"]["phases"], strict=True):
        phase, node = phase.get("init_args", phase), node.get("init_args", node)
        parts += [(phase, node, part, (phase.name, part)) for part in ("gate", "model")]
    for owner, node, part, names in parts:
        if isinstance(owner.get(part), Namespace):
            constructor.node = node[part]
            with seeded(named_seed(seed, *names)):
                owner[part] = parser.instantiate(Namespace(part=owner[part])).part
            keep_configuration(owner[part], node[part])
    return made


def describe_failure(failure: ConstructorFailure, configuration: Mapping[str, Any]) -> str:
    """A sentence with the key of the class in the configuration, and what its constructor raised.

    Example:
        >>> failure = ConstructorFailure(dict, {"n": 1}, KeyError("n"))
        >>> describe_failure(failure, {"data": {"parts": [{"class_path": "builtins.dict", "init_args": {"n": 1}}]}})
        "data.parts[0]: dict cannot be made: KeyError: 'n'"
    """
    of_class = [place for place in places(configuration) if _names(place.value, failure.class_type)]
    of_class.sort(key=lambda place: not _has_arguments(place.value.get("init_args") or {}, failure.arguments))
    reason = " ".join(f"{type(failure.error).__name__}: {failure.error}".split())
    key = f"{of_class[0].key}: " if of_class else ""
    return f"{key}{failure.class_type.__name__} cannot be made: {reason}"


def _names(node: Any, class_type: type) -> bool:
    """Whether a part of a configuration names the class."""
    return isinstance(node, Mapping) and str(node.get("class_path")).rpartition(".")[2] == class_type.__name__


def _has_arguments(init_args: Mapping[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether the numbers and texts in the configuration are those that the constructor got."""
    plain = {name: value for name, value in init_args.items() if isinstance(value, (int, float, str))}
    return all(arguments.get(name) == value for name, value in plain.items())
