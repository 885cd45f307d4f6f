"""The command ``fedmoe``: its commands, and errors as one line."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import ArgsType

from fedmoe_pl.cli.cli import OTHER_PARSERS, FederationCLI
from fedmoe_pl.cli.errors import cause_of
from fedmoe_pl.cli.listing import list_classes
from fedmoe_pl.cli.packaged import configs, with_files
from fedmoe_pl.cli.provisioning import provision
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.federation import Federation
from fedmoe_pl.grids.command import benchmark
from fedmoe_pl.phases.failures import ClientError
from fedmoe_pl.report.command import report


def main(args: ArgsType = None) -> None:
    """Runs the command line.

    Modules in the current folder can be imported, as with ``python -m``; worker processes get the same ``sys.path``.
    An error that the user can fix is printed as one line on stderr, with exit code 2. If too many clients fail, the
    traceback of the first one is printed before such a line, with exit code 1. Ctrl-C exits with code 130, SIGTERM with
    143.

    Args:
        args: command line arguments; None takes ``sys.argv``.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    arguments = sys.argv[1:] if args is None else args
    try:
        if not isinstance(arguments, list) or not arguments or arguments[0] not in _OTHERS:
            FederationCLI(args)
            return
        _run_other(*map(str, arguments))
    except (ArgumentError, MisconfigurationException) as error:
        print(f"fedmoe: {cause_of(error)}", file=sys.stderr)
        sys.exit(2)
    except ClientError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"fedmoe: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _benchmark(arguments: list[str]) -> None:
    """Runs ``fedmoe benchmark``, and exits with its code."""
    sys.exit(benchmark(arguments, configured))


class _Configured(FederationCLI):
    """Makes everything that the configuration of ``fit`` names, and trains nothing."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Only ``fit``: the parsers of the others take time."""
        return {"fit": FederationCLI.subcommands()["fit"]}

    def fit(self, model: LightningModule, datamodule: FederatedDataModule, **arguments: Any) -> None:
        """Takes the place of ``Federation.fit``."""


class _Checked(_Configured):
    """Also makes all checks, for which the data are read."""

    def fit(self, model: LightningModule, datamodule: FederatedDataModule, **arguments: Any) -> None:
        """Takes the place of ``Federation.fit``."""
        self.trainer.check(model, datamodule)  # pyright: ignore[reportAttributeAccessIssue]


def configured(arguments: Sequence[str], check: bool) -> Federation:
    """The federation that ``fedmoe fit`` would train; with all checks, for which the data are read, or without."""
    return objects_of(arguments, _Checked if check else _Configured)[0]


def objects_of(
    arguments: Sequence[str], kind: type[_Configured] = _Configured
) -> tuple[Federation, LightningModule, FederatedDataModule]:
    """The federation, the model and the data module of ``fedmoe fit`` with these arguments; nothing is read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # they are not those of this process
        made = kind(["fit", *arguments])
    return made.trainer, made.model, made.datamodule  # pyright: ignore[reportReturnType]


def _print(command: Callable[[list[str]], object], arguments: list[str]) -> None:
    """Runs a command that prints a list, whose end nobody may read, as in ``fedmoe list | head``."""
    try:
        command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(141)


_OTHERS = {
    "benchmark": _benchmark,
    "report": report,
    "list": partial(_print, list_classes),
    "configs": partial(_print, configs),
    "provision": provision,
}


def _run_other(command: str, *arguments: str) -> None:
    """Runs a command that is not a method of Federation."""
    try:
        _OTHERS[command](with_files(arguments))
    except ArgumentError as error:
        raise MisconfigurationException(cause_of(error, OTHER_PARSERS[command]())) from error
