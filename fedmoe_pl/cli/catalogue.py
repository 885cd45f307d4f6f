"""What can be named: the package's classes (``fedmoe list``) and its configurations (``fedmoe configs``)."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.optim import Optimizer

import fedmoe_pl.aggregation
import fedmoe_pl.algorithms
import fedmoe_pl.backends
import fedmoe_pl.callbacks
import fedmoe_pl.data
import fedmoe_pl.models
from fedmoe_pl.aggregation import Aggregation, Attack
from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.backends import Backend
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.checks import check_choice
from fedmoe_pl.data import Augmentation, FederatedDataModule, Partitioner
from fedmoe_pl.models import Gate, SwitchNorm1d


def _classes(module: Any, base: type, *but: type) -> list[type]:
    """The public classes of a module that can be made, of one kind but not of another."""
    public = [getattr(module, name) for name in sorted(module.__all__, key=str.lower)]
    classes = [each for each in public if inspect.isclass(each) and issubclass(each, base) and each is not base]
    return [each for each in classes if not issubclass(each, but) and not inspect.isabstract(each)]


KINDS = {
    "algorithms": _classes(fedmoe_pl.algorithms, Algorithm),
    "server_optimizers": _classes(fedmoe_pl.algorithms, Optimizer),
    "models": _classes(fedmoe_pl.models, LightningModule),
    "experts": _classes(fedmoe_pl.models, nn.Module, LightningModule, Gate, SwitchNorm1d),
    "gates": _classes(fedmoe_pl.models, Gate),
    "data": _classes(fedmoe_pl.data, FederatedDataModule),
    "partitioners": _classes(fedmoe_pl.data, Partitioner),
    "augmentations": _classes(fedmoe_pl.data, Augmentation),
    "aggregations": _classes(fedmoe_pl.aggregation, Aggregation),
    "attacks": _classes(fedmoe_pl.aggregation, Attack),
    "backends": _classes(fedmoe_pl.backends, Backend),
    "callbacks": _classes(fedmoe_pl.callbacks, FederationCallback),
    "client_callbacks": _classes(fedmoe_pl.callbacks, Callback),
}
"""What ``fedmoe list`` lists."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: a full stop, or the name that was probably meant."""
    similar = difflib.get_close_matches(name, [*names], n=1)
    return f"; did you mean {similar[0]}?" if similar else "."


def parser_of(command: str, description: str) -> ArgumentParser:
    """A parser for a command that is no method of Federation."""
    return ArgumentParser(prog=f"fedmoe {command}", description=description, allow_abbrev=False, exit_on_error=False)


def list_parser() -> ArgumentParser:
    """The parser of ``fedmoe list``."""
    parser = parser_of("list", "Lists the classes of the package that a configuration can name, with one line each")
    parser.add_argument("kinds", nargs="*", default=[], metavar="KIND", help=f"only these: {', '.join(KINDS)}")
    return parser


def list_classes(arguments: Sequence[str]) -> None:
    """Runs ``fedmoe list`` with the arguments after ``list``."""
    kinds = list_parser().parse_args([*arguments]).kinds or [*KINDS]
    for kind in kinds:
        check_choice("list", "kind", kind, (*KINDS,))
    for kind in kinds:
        print(f"{kind}:")
        width = max(len(each.__name__) for each in KINDS[kind])
        for each in KINDS[kind]:
            print(f"  {each.__name__:<{width}}  {_line(each)}")
        print()


def _line(class_type: type) -> str:
    """The first line of a class's docstring, without the marks of Sphinx.

    Example:
        >>> _line(fedmoe_pl.algorithms.FedAdam)
        'The server steps by Adam, v = beta2 v + (1 - beta2) D**2; see AdaptiveServerOptimizer.'
    """
    line = (inspect.getdoc(class_type) or "").partition("\n")[0]
    return re.sub(r"(:class:)?`+~?([^`]*)`+", r"\2", line)


_PACKAGE = Path(__file__).parents[1]


def folder() -> Path:
    """The folder of the configurations: in the package or, in a clone of the repository, beside it."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def names() -> list[str]:
    """The names of the configurations, such as ``quickstart`` and ``papers/pfl_moe``; runs first, then grids."""
    paths = sorted(folder().rglob("*.yaml"), key=lambda path: (path.parent != folder(), path))
    return [path.relative_to(folder()).with_suffix("").as_posix() for path in paths]


def with_files(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line, in which the name of a configuration after ``--config`` is that of its file.

    A file of the user's goes first.

    Example:
        >>> [Path(word).name for word in with_files(["fit", "--config", "quickstart", "--config=mine.yaml"])]
        ['fit', '--config', 'quickstart.yaml', '--config=mine.yaml']
    """
    result = list[str]()
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if result and result[-1] in ("--config", "-c"):
            result.append(_file(argument))
        else:
            result.append(f"{option}={_file(value)}" if equals and option in ("--config", "-c") else argument)
    return result


def configs(arguments: Sequence[str]) -> list[Path]:
    """Runs ``fedmoe configs`` with the arguments after it, and returns the files that it wrote."""
    options = configs_parser().parse_args([*arguments])
    if not options.names:
        width = max(map(len, names()))
        for name in names():
            print(f"{name:<{width}}  {_first_sentence(_path(name))}")
        return []
    wanted = [name for pattern in options.names for name in _matching(pattern)]
    files = dict.fromkeys(file for name in wanted for file in _needed(_path(name)))
    copies = {file: Path(options.to) / file.relative_to(folder()) for file in files}
    for copy in copies.values():
        if copy.exists():
            raise MisconfigurationException(f"configs: {copy} exists; --to names another folder.")
    for file, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
        print(copy)
    return [*copies.values()]


def configs_parser() -> ArgumentParser:
    """The parser of ``fedmoe configs``."""
    parser = parser_of("configs", "Lists the configurations of the package, or copies them into a folder")
    parser.add_argument(
        "names",
        nargs="*",
        default=[],
        metavar="NAME",
        help="configuration to copy, or a pattern such as 'papers/*'; its base comes along; without any, all are "
        "listed",
    )
    parser.add_argument("--to", default="configs", metavar="FOLDER", help="where to copy it")
    return parser


def _path(name: str) -> Path:
    return folder() / f"{name}.yaml"


def _file(value: str) -> str:
    if "{" in value or Path(os.path.expanduser(value)).exists():
        return value
    if value in names():
        return str(_path(value))
    similar = difflib.get_close_matches(value.removesuffix(".yaml").removeprefix("configs/"), names(), n=1)
    if not similar:
        return value
    raise MisconfigurationException(
        f"config is '{value}', but there is no such file; did you mean {similar[0]}, which the package has? "
        f"`fedmoe configs {similar[0]}` copies it."
    )


def _matching(pattern: str) -> list[str]:
    found = fnmatch.filter(names(), pattern.removesuffix(".yaml"))
    if not found:
        raise MisconfigurationException(f"configs has no {pattern}{did_you_mean(pattern, names())}")
    return found


def _needed(path: Path) -> Iterator[Path]:
    """A configuration and the files that its command, or the grid, names."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"--config configs/(\S+)", text.partition("\n\n")[0]):
        yield folder() / name
    for name in re.findall(r"An overlay of (\S+\.yaml)", text):
        yield from _needed(path.parent / name)
    yield path
    content = yaml.safe_load(text)
    variants = (content.get("variants") or {}).values()
    for relative in [*content.get("configs", []), *(name for each in variants for name in each.get("configs", []))]:
        yield (path.parent / relative).resolve()


def _first_sentence(path: Path) -> str:
    """The first sentence of the comment at the top of a configuration, without addresses."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith("# fedmoe "):
            break
        lines.append(line[2:])
    text = re.sub(r",? https?://[^\s),]+", "", " ".join(lines))
    return re.split(r"(?<!al)(?<!Fig)\.(?: |$)", text)[0]
