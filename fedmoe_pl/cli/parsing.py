"""From the text of a configuration to its objects, as far as jsonargparse does it in another way."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

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
from fedmoe_pl.cli.errors import PHASES, place_in, places, words_of
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models.description import keep_configuration
from fedmoe_pl.seeds import named_seed, seeded

_load = get_loader("yaml")


class ConfigFile(ActionConfigFile):
    """A configuration file: each of its lists replaces the whole list of an earlier file.

    Without it, items of a list inherit what they leave out from those of a list before them, if both lists have the
    same length: a phase would have the rounds of another phase in its place.
    """

    def __call__(self, parser: ArgumentParser, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Applies the file to what the arguments before it say."""
        try:
            if values == "-":
                values = f"{sys.stdin.read()}\n"
            is_text = any(mark in values for mark in "{\n")
            content = load(values if is_text else Path(values).expanduser().read_text(encoding="utf-8"))
            if not isinstance(content, Mapping):
                raise ValueError("it has no keys, as YAML has in key: value")
            if isinstance(content.get("config"), list):  # jsonargparse would leave it out
                raise ValueError("its key config must be one file; several come one after another, each after --config")
            sections = {"": content, **{f"{key}.": each for key, each in content.items() if isinstance(each, Mapping)}}
            keys = (f"{section}{key}" for section, each in sections.items() for key in each if not isinstance(key, str))
            if wrong := next(keys, ""):
                raise ValueError(f"its key {wrong} must be a text")
        except (MisconfigurationException, OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())
            if str(values).endswith(".toml"):
                reason = "it must be YAML, or JSON"
            elif isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
                tab = ", a tab; YAML is indented with spaces" if "'\\t'" in str(error.problem) else ""
                mark = error.problem_mark
                reason = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{tab}"
            raise MisconfigurationException(f"config is '{values}', but it cannot be read: {reason}.") from error
        for key in _lists(content):
            if isinstance(cfg.get(key), list):
                cfg[key] = []
        super().__call__(parser, cfg, values, option_string)


class UnabbreviatedParser(LightningArgumentParser):
    """Knows no argument by the beginning of its name; jsonargparse makes the parsers of phases of the same class."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation may stand for: nothing; argparse's signature."""
        return []


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
    """Reads YAML as jsonargparse does, but no key may stand twice, and no number begin with 0."""
    if any(mark in text for mark in ":{?["):  # otherwise it has neither, as almost all texts
        yaml.load(text, _Strict)
    return _load(text)


set_loader("yaml", load, exceptions=(yaml.YAMLError,))


def _lists(node: Any, prefix: str = "") -> Iterator[str]:
    """The keys of the lists in a configuration, but not of those in lists."""
    for name, value in node.items() if isinstance(node, Mapping) else ():
        if isinstance(value, list):
            yield f"{prefix}{name}"
        yield from _lists(value, f"{prefix}{name}.")


class ItemsAction(ActionTypeHint):
    """An argument that can be a list or a dict: errors say which item is wrong. A phase can be changed by its name.

    jsonargparse itself takes ``--federation.phases.FedAvg.rounds`` for an argument of the last phase.
    """

    def _check_type(self, value: Any, append: bool = False, cfg: Any = None, mode: str | None = None) -> Any:
        """Parses a list, what is appended to it, or an argument of an item; the signature is the base's."""
        if isinstance(value, NestedArg):
            if self.dest != PHASES:
                return super()._check_type(value, append, cfg, mode)
            before = (cfg.get(self.dest) if cfg else None) or []
            index, argument = _phase_of(value, before, vars(self).get("_appended"))
            with _naming(f"{PHASES}{place_in(before, index, PHASES)}"):
                changed = super()._check_type(argument, False, Namespace({PHASES: [before[index]]}), mode)
            return [*before[:index], *changed, *before[index + 1 :]]
        vars(self)["_appended"] = append or vars(self).get("_appended")
        items = value
        with contextlib.suppress(yaml.YAMLError):
            items, _ = parse_value_or_config(value, enable_path=self._enable_path)
        if not isinstance(items, list) or append:
            return self._check_items(value, items, append, cfg, mode)
        # jsonargparse checks a list five times in three ways; again in the same way would be a third of all parsing
        right = vars(self).setdefault("_right", {})
        way = mode, sub_defaults.get(), lenient_check.get()
        if right.get(way) != repr(value):  # 1 == True, but only one of them may be right
            value = self._check_items(value, items, append, None, mode)
            right[way] = repr(value)
        return value

    def _check_items(self, value: Any, items: Any, append: bool, cfg: Any, mode: str | None) -> Any:
        """Parses a list, or what is appended to it; an error names the item."""
        try:
            return super()._check_type(value, append, cfg, mode)
        except Exception:  # a module of the user's may raise anything while it is imported
            is_list = isinstance(items, list)
            kind = type_of_items(self._typehint)
            of_item: Any = ActionTypeHint(typehint=kind)(option_strings=[], dest="item")
            if not self._supports_append:
                for name, item in items.items() if isinstance(items, Mapping) else ():
                    with _naming(f"{self.dest}.{name}", kind):
                        of_item._check_type(item)
                raise
            if not is_list and not append:
                if isinstance(items, Mapping) and items and self.dest == PHASES:
                    example = "[{name: FedAvg, algorithm: FedAvg}]"
                    raise MisconfigurationException(f"{PHASES} must be a list, as in {example}.") from None
                if isinstance(items, str | Mapping | Namespace) and items:
                    with _naming(self.dest, kind):
                        of_item._check_type(items)
                    example = items.class_path.rpartition(".")[2] if isinstance(items, Namespace) else items
                    raise MisconfigurationException(
                        f"{self.dest} is {shown(example)}, but must be a list, as in [{example}]."
                    ) from None
                raise
            items = items if is_list else [items]
            for index, item in enumerate(items):
                with _naming(f"{self.dest}{place_in(items, index, self.dest)}", kind):
                    of_item._check_type(item)
            raise


def naming_items(parser: ArgumentParser) -> ArgumentParser:
    """The parser, whose errors say which item of a list or a dict is wrong."""
    for action in parser._actions:
        if type(action) is ActionTypeHint and type_of_items(action._typehint) is not None:
            action.__class__ = ItemsAction
    return parser


@contextlib.contextmanager
def _naming(key: str, kind: Any = None) -> Iterator[None]:
    """In this context, an error names this key, and not that of the whole list, and the type that belongs there."""
    try:
        yield
    except Exception as error:
        message = f'Parser key "{key}":{f" of type {kind!r}" if kind else ""}'
        raise TypeError(message) from (error.__cause__ if isinstance(error, TypeError) else error)


def type_of_items(hint: Any) -> Any:
    """The type of the items of a type that may be a list or a dict of them; None for others."""
    kinds = (each for each in (hint, *get_args(hint)) if get_origin(each) in (list, Iterable, dict))
    return next((get_args(each)[-1] for each in kinds), None)


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
        hint = did_you_mean(argument.key.partition(".")[0], names)
        raise MisconfigurationException(
            f"federation.phases.{argument.key} must name a phase that a --config before it has, and one of its "
            f"arguments, such as federation.phases.NAME.rounds{hint}"
        )
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


def check_values(class_type: type, arguments: Mapping[str, Any]) -> None:
    """Refuses nan, and null where it is no value of an argument; jsonargparse lets both pass."""
    for name, value in arguments.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, float) and math.isnan(number) for number in numbers):
            allowed = "a finite number" if numbers is not value else "finite numbers"
            raise InvalidArgumentError(class_type.__name__, name, value, allowed)
        if value is None and name in (hints := _not_optional(class_type)):
            allowed = "given" if hints[name] is object else words_of(repr(hints[name]))
            raise InvalidArgumentError(class_type.__name__, name, value, allowed)


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


def check_groups(config: Namespace) -> None:
    """Refuses another value in place of a group of arguments, such as ``train: 3``; jsonargparse lets it pass."""
    groups = {f"federation.{name}": config.federation[name] for name in ("failures", "reports")}
    groups["trainer"] = config.trainer or Namespace()
    for index, phase in enumerate(config.federation.phases):
        key = f"{PHASES}{place_in(config.federation.phases, index, PHASES)}.train"
        groups[key] = phase.get("init_args", phase).train
    for key, value in groups.items():
        if not isinstance(value, Namespace):
            raise MisconfigurationException(f"{key} is {shown(value)}, but must have arguments, as in {{name: value}}.")


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

    If the exception names one of the arguments, the key is that argument's.

    Example:
        >>> failure = ConstructorFailure(dict, {"n": 1}, KeyError("n"))
        >>> describe_failure(failure, {"data": {"parts": [{"class_path": "builtins.dict", "init_args": {"n": 1}}]}})
        "data.parts[0].init_args.n is 1, but dict cannot be made with it: KeyError: 'n'"
    """
    of_class = [place for place in places(configuration) if _names(place.value, failure.class_type)]
    of_class.sort(key=lambda place: not _has_arguments(place.value.get("init_args") or {}, failure.arguments))
    reason = " ".join(f"{type(failure.error).__name__}: {failure.error}".split())
    name, key = failure.class_type.__name__, of_class[0].key if of_class else ""
    blamed = [each for each in failure.arguments if re.search(rf"['\"`]{each}\b|\b{each}=", str(failure.error))]
    if not key or len(blamed) != 1:
        return f"{f'{key}: ' if key else ''}{name} cannot be made: {reason}"
    value = failure.arguments[blamed[0]]
    end = f"must be given for {name}" if value is None else f"is {shown(value)}, but {name} cannot be made with it"
    return f"{key}.init_args.{blamed[0]} {end}: {reason}"


def _names(node: Any, class_type: type) -> bool:
    """Whether a part of a configuration names the class."""
    return isinstance(node, Mapping) and str(node.get("class_path")).rpartition(".")[2] == class_type.__name__


def _has_arguments(init_args: Mapping[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether the numbers and texts in the configuration are those that the constructor got."""
    plain = {name: value for name, value in init_args.items() if isinstance(value, (int, float, str))}
    return all(arguments.get(name) == value for name, value in plain.items())
