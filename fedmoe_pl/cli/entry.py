"""The start of the command ``fedmoe``, which imports torch and Lightning only for commands that need them."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import io
import os
import sys
import threading
from types import ModuleType
from typing import Any

from jsonargparse import ArgumentError

from fedmoe_pl.catalogue import COMMANDS, configs, did_you_mean, list_classes, refusal
from fedmoe_pl.version import __version__


def main(args: Any = None) -> None:
    """Runs the command line.

    Modules in the current folder can be imported, as with ``python -m``; worker processes get the same ``sys.path``.
    An error that the user can fix is printed as one line on stderr, with exit code 2. If too many clients fail, the
    traceback of the first one is printed before such a line, with exit code 1. Ctrl-C exits with code 130, SIGTERM with
    143.

    Args:
        args: command line arguments, as a list or, as LightningCLI takes it, as a dict; None takes ``sys.argv``.
    """
    arguments = sys.argv[1:] if args is None else args
    if args is None and isinstance(sys.stdout, io.TextIOWrapper):  # names in an alphabet that the terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(arguments, list) and (not arguments or arguments[0] in _AT_ONCE or _is_unknown(arguments[0])):
        _answer(*map(str, arguments))
    else:
        # nobody has used a GPU or torch's threads, and there is no debugger, which has threads of its own
        is_new = args is None and "torch" not in sys.modules and threading.active_count() == 1
        (_imported if args is None else importlib.import_module)("fedmoe_pl.cli.command_line").run(args, is_new)


_LISTS = {"list": list_classes, "configs": configs}
_IMPORTING = "importing torch and Lightning ..."
_AT_ONCE = {"-h", "--help", "--version", *_LISTS}


def _imported(name: str) -> ModuleType:
    """A module; while it is imported, the garbage collector is off, which saves a fifth of the time.

    Only for a process that belongs to the command, because objects that already exist are no longer collected.
    """
    shows = sys.stderr is not None and sys.stderr.isatty()
    if shows:  # the first import after an installation takes 20 seconds
        print(_IMPORTING, end="\r", file=sys.stderr, flush=True)
    gc.disable()
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        print("fedmoe: SIGINT has ended the command before the run began.", file=sys.stderr)
        sys.exit(130)
    finally:
        if shows:
            print(" " * len(_IMPORTING), end="\r", file=sys.stderr, flush=True)
        gc.freeze()  # later collections leave out what was imported
        gc.enable()
        atexit.register(gc.unfreeze)  # otherwise some libraries report leaks at exit


def _is_unknown(word: str) -> bool:
    return not word.startswith("-") and word not in COMMANDS


def _answer(command: str = "", *arguments: str) -> None:
    """Answers what needs no torch."""
    try:
        if not command:
            raise refusal("a command must be given, as in fedmoe fit --config quickstart; fedmoe --help lists all.")
        if command in _LISTS:
            _LISTS[command](arguments)
        elif command in _AT_ONCE:
            _parser().parse_args([command])
        else:
            end = did_you_mean(command, COMMANDS)
            raise refusal(f"{command} is not a command{'; fedmoe --help lists all.' if end == '.' else end}")
        sys.stdout.flush()
    except ArgumentError as error:
        print(f"fedmoe: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # nobody read to the end, as in `fedmoe list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(141)


def _parser() -> argparse.ArgumentParser:
    """The parser whose help lists all commands."""
    parser = argparse.ArgumentParser(
        prog="fedmoe",
        usage="fedmoe COMMAND [--config FILE] [--KEY VALUE ...]",
        description="Personalized federated learning with mixtures of experts, as ordinary PyTorch Lightning.",
        epilog="`fedmoe COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line)
    return parser
