"""The configurations of the package: found by their names, listed and copied."""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.cli.errors import did_you_mean

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
    parser = ArgumentParser(
        prog="fedmoe configs",
        description="Lists the configurations of the package, or copies them into a folder",
        allow_abbrev=False,
        exit_on_error=False,
    )
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
