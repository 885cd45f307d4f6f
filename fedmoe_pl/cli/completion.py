"""``fedmoe completion``: a script with which a shell completes commands, options and values, without Python."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser

from fedmoe_pl.catalogue import names, parser_of
from fedmoe_pl.cli.kinds import KINDS
from fedmoe_pl.cli.parsing import CheckingParser

_OF_PACKAGE = [each for classes in KINDS.values() for each in classes]
_CONFIGS = {  # names of the package's configurations, or files
    "bash": '_fedmoe_configs() {{ compgen -W \'{}\' -- "$1"; compgen -f -- "$1"; }}',
    "zsh": "_fedmoe_configs() {{ compadd {}; _files; }}",
}


def completion_parser() -> ArgumentParser:
    """The parser of ``fedmoe completion``."""
    parser = parser_of("completion", CheckingParser)
    parser.add_argument("shell", choices=[*_CONFIGS], help="the shell")
    return parser


def script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script for a shell, from the parser of each command."""
    import shtab  # no other command needs it

    whole = argparse.ArgumentParser(prog="fedmoe", add_help=False)
    commands = whole.add_subparsers()
    for name, parser in parsers.items():
        command = commands.add_parser(name, help=parser.description)
        for action in parser._actions:
            if not action.option_strings:
                words = action.choices or {"kinds": KINDS, "names": names()}.get(action.dest)
                command.add_argument(action.dest, nargs=action.nargs, choices=words and [*words])
        for option, words in _options(parser).items():
            completed = command.add_argument(option, choices=words or None)
            if option == "--config" or not words:
                own = dict.fromkeys(_CONFIGS, "_fedmoe_configs")
                completed.complete = own if option == "--config" else shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    return shtab.complete(whole, shell, preamble=_CONFIGS[shell].format(" ".join(names())))


def _options(parser: argparse.ArgumentParser, depth: int = 2) -> dict[str, list[str]]:
    """The options of a parser, and of the package's classes below it, with the words that complete their values."""
    options = dict[str, list[str]]()
    for action in parser._actions:
        option = f"--{action.dest}"
        if not action.option_strings or option.endswith("help"):
            continue
        words = [*_words(getattr(action, "_typehint", None))]
        options[option] = [*dict.fromkeys(each.__name__ if isinstance(each, type) else str(each) for each in words)]
        for each in words if depth else []:
            if isinstance(each, type):
                for below, words_below in _options_of(each, depth - 1).items():
                    options.setdefault(f"{option}.init_args.{below[2:]}", words_below)
    return options


@functools.cache
def _options_of(class_type: type, depth: int) -> dict[str, list[str]]:
    parser = ArgumentParser()
    parser.add_class_arguments(class_type, fail_untyped=False)
    return _options(parser, depth)


def _words(hint: Any) -> Iterator[Any]:
    """The words, and the classes of the package, that are values of a type."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif get_args(hint):
        yield from (word for each in get_args(hint) for word in _words(each))
    elif hint is bool:
        yield from ("true", "false")
    elif isinstance(hint, type) and hint is not object:
        yield from (each for each in _OF_PACKAGE if issubclass(each, hint))
