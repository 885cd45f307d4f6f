"""What can be named: commands, the package's classes (``fedmoe list``) and configurations (``fedmoe configs``).

Nothing here imports torch or Lightning, which take seconds.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

COMMANDS = {
    "fit": "Runs all phases on the clients of the data module",
    "personalize": "Makes models for new clients, from a federation's checkpoint",
    "validate": "Prints the accuracy of every client's model on its validation samples, from a checkpoint",
    "test": "Prints the table of the test accuracies of every client's model, from a checkpoint",
    "predict": "Writes the predictions of every client's model to a file",
    "export": "Writes clients' models to files",
    "partition": "Prints and draws how the samples are divided among the clients",
    "audit": "Prints what would leave the clients, and who would see it; trains nothing",
    "serve": "Runs all phases with clients on other machines",
    "join": "Takes part in a federation on another machine, as one of its clients",
    "benchmark": "Runs every combination of some values of a configuration, and makes one table over their seeds",
    "tune": "Searches for the best values of a configuration by validation, with Optuna",
    "report": "Writes the results of runs as one page, as tables and as pictures for a paper",
    "list": "Lists the classes of the package that a configuration can name, with one line each",
    "configs": "Lists the configurations of the package, or copies them into a folder",
    "provision": "Makes certificates and keys for serve and join",
    "completion": "Prints a script with which the shell completes commands, options and values",
}
"""What each command does."""


def refusal(sentence: str) -> ArgumentError:
    """The exception for an argument that is refused; the command line prints its sentence."""
    return ArgumentError(None, sentence)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: a full stop, or the name that was probably meant."""
    known = [*names]
    group = name[: name.rfind(".") + 1]
    if not any(each.startswith(group) for each in known):
        group = ""
    # only what comes after the group counts: federation.name is not like federation.roundz
    beside = [each.removeprefix(group) for each in known if each.startswith(group)]
    word, lower = name.removeprefix(group).lower(), {each.lower(): each for each in reversed(beside)}
    close = [lower[each] for each in difflib.get_close_matches(word, lower, n=1)]
    longer = [each for each in beside if each[:1].isupper() and len(word) > 2 and word in each.lower()]
    is_near = close and difflib.SequenceMatcher(None, word, close[0].lower()).ratio() > 0.75
    similar = close if is_near else [*longer, *close]
    return f"; did you mean {group}{similar[0]}?" if similar else "."


def parser_of(command: str, kind: type[ArgumentParser] = ArgumentParser, **arguments: Any) -> ArgumentParser:
    """A parser for a command that is no method of Federation; the arguments are those of argparse."""
    words = {"prog": f"fedmoe {command}", "description": COMMANDS[command], **arguments}
    return kind(**words, allow_abbrev=False, exit_on_error=False)


_LISTING = Path(__file__).with_name("cli") / "classes.txt"


@functools.cache
def sections() -> dict[str, str]:
    """What ``fedmoe list`` prints for each kind of class."""
    return {text.partition(":")[0]: text for text in _LISTING.read_text(encoding="utf-8").rstrip().split("\n\n")}


def list_parser() -> ArgumentParser:
    """The parser of ``fedmoe list``."""
    parser = parser_of("list")
    parser.add_argument("kinds", nargs="*", default=[], metavar="KIND", help=f"only these: {', '.join(sections())}")
    return parser


def list_classes(arguments: Sequence[str]) -> None:
    """Runs ``fedmoe list`` with the arguments after ``list``."""
    kinds = list_parser().parse_args([*arguments]).kinds or [*sections()]
    for kind in kinds:
        if kind not in sections():
            raise refusal(f"list: kind is '{kind}', but must be one of {', '.join(sections())}.")
    for kind in kinds:
        print(f"{sections()[kind]}\n")


_PACKAGE = Path(__file__).parent


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
            raise refusal(f"configs: {copy} exists; --to names another folder.")
    try:
        for file, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    except OSError as error:
        raise refusal(f"configs: --to is '{options.to}', but cannot be written: {error.strerror}.") from error
    print(*copies.values(), sep="\n")
    return [*copies.values()]


def configs_parser() -> ArgumentParser:
    """The parser of ``fedmoe configs``."""
    parser = parser_of("configs")
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
    is_text = not {"{", "\n"}.isdisjoint(value)
    if not is_text and value in names() and not os.path.isfile(value):
        return str(_path(value))
    if is_text or os.path.exists(os.path.expanduser(value)):
        return value
    similar = difflib.get_close_matches(value.removesuffix(".yaml").removeprefix("configs/"), names(), n=1)
    if not similar:
        return value
    raise refusal(
        f"config is '{value}', but there is no such file; did you mean {similar[0]}, which the package has? "
        f"`fedmoe configs {similar[0]}` copies it."
    )


def _matching(pattern: str) -> list[str]:
    found = fnmatch.filter(names(), pattern.removesuffix(".yaml").removeprefix("configs/"))
    if not found:
        raise refusal(f"configs has no {pattern}{did_you_mean(pattern, names())}")
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
