"""The command ``fedmoe``: LightningCLI with a group ``federation``, and errors as one line."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import shlex
import sys
import threading
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import yaml
from jsonargparse import ArgumentParser, Namespace  # pyright: ignore[reportPrivateImportUsage]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning_utilities.core.enums import StrEnum
from torch import nn

from fedmoe_pl.backends import LEAN_TRAINER
from fedmoe_pl.backends.workers.fork_server import FORKS, fork_server
from fedmoe_pl.backends.workers.process import work
from fedmoe_pl.catalogue import COMMANDS, configs_parser, list_parser, with_files
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.cli.completion import completion_parser, script
from fedmoe_pl.cli.errors import as_refusal, with_key
from fedmoe_pl.cli.grid_files import grid_parser, read_grid, read_tuning, tune_parser
from fedmoe_pl.cli.help import arrange, with_class_to_help
from fedmoe_pl.cli.parsing import (
    CheckingParser,
    ConfigFile,
    Constructor,
    check_options,
    check_values,
    describe_failure,
    with_modules,
)
from fedmoe_pl.cli.provisioning import provision, provision_parser
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.federation import Federation
from fedmoe_pl.grids.benchmark import benchmark
from fedmoe_pl.grids.forks import serve_forks
from fedmoe_pl.phases.client_failures import ClientError
from fedmoe_pl.report.report import report, report_parser
from fedmoe_pl.version import __version__

# An integer is a number of batches, a float a share. In the Trainer's own annotation the float comes first, so that
# jsonargparse would make 1.0, all batches, of 1.
_NUMBERS_OR_SHARES = ("limit_train_batches", "limit_val_batches")
# Defaults of Lightning's classes, such as Timer's, which a YAML file has as words
yaml.SafeDumper.add_multi_representer(StrEnum, lambda dumper, value: dumper.represent_str(value.value))


_SEED = "The seed of models and training. The partition among clients has its own, partition_seed of data."

_COMMANDS = ("fit", "personalize", "validate", "test", "predict", "export", "partition", "audit", "serve", "join")
_TRAIN = ("fit", "personalize", "validate", "test")  # they may use worker processes
_GRIDS = ("benchmark", "tune")  # they run fit in other processes
OTHER_PARSERS = {
    "benchmark": grid_parser,
    "tune": tune_parser,
    "report": report_parser,
    "list": list_parser,
    "configs": configs_parser,
    "provision": provision_parser,
    "completion": completion_parser,
}
"""What makes the parsers of the commands that are not methods of Federation."""
# arguments of commands, which are no part of the configuration that a run's folder has
_OF_COMMANDS = (
    *("ckpt_path", "allow_changes", "rounds", "method", "client", "format", "output"),
    *("num_clients", "address", "keys", "insecure"),
)


class FederationCLI(LightningCLI):
    """LightningCLI that runs a :class:`Federation`; ``trainer:`` is the Trainer of every client.

    Args:
        args: command line arguments, as a list or as a dict; None takes ``sys.argv``.
    """

    def __init__(self, args: ArgsType = None) -> None:
        strict = {"exit_on_error": False, "allow_abbrev": False}  # main() prints errors, one line each
        arguments = sys.argv[1:] if args is None else args
        self._asked = str(arguments[0]) if isinstance(arguments, list) and arguments else ""
        try:
            super().__init__(
                datamodule_class=FederatedDataModule,
                subclass_mode_data=True,
                trainer_class=Federation,  # pyright: ignore[reportArgumentType]  its methods are the subcommands
                seed_everything_default=0,
                save_config_callback=None,
                parser_kwargs={
                    **strict,
                    "prog": "fedmoe",
                    "version": __version__,
                    "description": "Personalized federated learning with mixtures of experts",
                    # a dict for each command, because Lightning puts the command's description into it
                    **{name: dict(strict) for name in self.subcommands()},
                },
                auto_configure_optimizers=False,  # they would get the initial model's parameters, not the clients'
                args=args,
            )
        except MisconfigurationException as error:
            refused = error if isinstance(error, InvalidArgumentError) else error.__cause__
            if not isinstance(refused, InvalidArgumentError):
                raise
            raise MisconfigurationException(with_key(refused, self._configuration())) from error

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The methods of Federation that are subcommands, with the arguments that the configuration provides."""
        return {name: {"model", "datamodule"} for name in _COMMANDS}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Makes a parser without abbreviations, in whose files a list replaces the whole list."""
        kwargs.setdefault("dump_header", [f"lightning.pytorch=={lightning.__version__}"])
        parser = CheckingParser(**kwargs)
        parser.add_argument(
            "-c", "--config", action=ConfigFile, help="Path to a configuration file in json or yaml format."
        )
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the seed, from which every client's generators follow, so that it cannot be drawn."""
        parser.add_argument("--seed_everything", type=int, default=self.seed_everything_default, help=_SEED)

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Adds the federation's commands and, unless one of them is run, lists the others; Lightning's signature."""
        super()._add_subcommands(parser, **kwargs)
        if self._asked in self.subcommands():
            return
        commands = parser._subcommands_action
        assert commands is not None, "Lightning has added its own"
        for name, make in OTHER_PARSERS.items():
            of_command = make()
            commands.add_subcommand(name, of_command, help=of_command.description)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Leaves out the arguments of all commands but the one that is run; Lightning's signature."""
        if subcommand != self._asked and self._asked in self.subcommands():
            self._subcommand_method_arguments[subcommand] = []
            return self.init_parser(**kwargs)
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        arrange(parser, subcommand)
        return parser

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the groups ``trainer``, ``model``, ``data`` and ``federation``."""
        parser.add_class_arguments(
            Trainer, "trainer", skip={*_NUMBERS_OR_SHARES}, instantiate=False, sub_configs=True, fail_untyped=False
        )
        groups: Any = parser.groups
        for name in _NUMBERS_OR_SHARES:
            groups["trainer"].add_argument(f"--trainer.{name}", type=int | float | None)
        parser.set_defaults({f"trainer.{name}": value for name, value in LEAN_TRAINER.items()})
        parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
        parser.add_lightning_class_args(FederatedDataModule, "data", subclass_mode=True)
        parser.add_class_arguments(
            Federation, "federation", skip={"trainer", "seed"}, instantiate=False, sub_configs=True, fail_untyped=False
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses the arguments, in which configurations of the package have their names."""
        arguments: Any = sys.argv[1:] if args is None else args
        is_list = isinstance(arguments, list)
        self._command = _command(arguments) if is_list else ""
        arguments = with_class_to_help(with_files([*map(str, arguments)])) if is_list else arguments
        if is_list and not {*arguments} & {*COMMANDS, "-h", "--help", "--version"}:
            example = "as in fedmoe fit --config quickstart; fedmoe --help lists all."
            raise MisconfigurationException(f"a command must be given, {example}")
        try:
            if args is None:
                self.config = parser.parse_args(arguments)
            else:
                super().parse_arguments(parser, arguments)
            if self.config.subcommand == "completion":
                assert parser._subcommands_action is not None, "fedmoe has commands"
                print(script(self.config.completion.shell, parser._subcommands_action.choices), end="")
                sys.exit()
        except ArgumentError as error:
            raise as_refusal(error) from None
        except RecursionError as error:
            raise MisconfigurationException("a part of a file given by --config contains itself.") from error

    def _set_seed(self) -> None:
        """Refuses what is no seed, and seeds all generators with 32 bits, which is what NumPy takes."""
        seed = self._get(self.config, "seed_everything")
        if seed is None or seed < 0:
            raise InvalidArgumentError(str(self.subcommand), "seed_everything", seed, "an integer of at least 0")
        seed_everything(seed % 2**32, workers=True)

    def _add_instantiators(self) -> None:
        """Registers what constructs all objects; Lightning's signature."""
        self._constructor = Constructor()
        self._part_parser = ArgumentParser(exit_on_error=False)
        self._part_parser.add_subclass_arguments(nn.Module, "part", fail_untyped=False)
        for parser in (self.parser, self._part_parser):
            parser.add_instantiator(self._constructor, object)

    def instantiate_classes(self) -> None:
        """Makes everything that the configuration names: the modules first, each from a seed of its own."""
        configuration, command = self.config, str(self.subcommand)
        # while it has no modules; Lightning would validate it again first, which takes a fifth of all parsing
        text = self.parser.dump(configuration, skip_unset=False, skip_validation=True, skip_link_targets=False)
        self.config_dump = yaml.safe_load(text)[command]
        seed = self._get(configuration, "seed_everything")
        try:
            modules = with_modules(configuration[command], self.config_dump, seed, self._part_parser, self._constructor)
            self.config = Namespace(**{**vars(configuration), command: modules})
            self._constructor.node = self.config_dump["data"]
            super().instantiate_classes()
        except Exception as error:
            failure = self._constructor.failure
            if isinstance(error, MisconfigurationException) and (failure is None or failure.error is not error):
                raise
            if failure is not None and failure.is_refusal:
                raise failure.error from (None if error is failure.error else error)
            if failure is not None and (isinstance(error, ValueError) or _is_of_library(failure.class_type)):
                raise MisconfigurationException(describe_failure(failure, self._configuration())) from failure.error
            if isinstance(error, ValueError):
                raise as_refusal(error) from None
            raise  # a user's own class, whose author needs the traceback
        finally:
            self.config = configuration

    def _configuration(self) -> dict[str, Any]:
        """The parsed configuration of the command."""
        return self.config.get(str(self.subcommand), self.config).as_dict()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Makes the Federation, with the arguments of the clients' Trainers and the run's seed."""
        arguments = self._get(self.config_init, "federation")
        check_values(Federation, arguments)
        trainer = dict(self._get(self.config_init, "trainer") or {})
        federation = Federation(**arguments, trainer=trainer, seed=self._get(self.config, "seed_everything"))
        federation.command = self._command
        # without these, so that every command can use the configuration in a run's folder
        federation.hparams = {key: value for key, value in self.config_dump.items() if key not in _OF_COMMANDS}
        return federation  # pyright: ignore[reportReturnType]

    def _parse_ckpt_path(self) -> None:
        """Does nothing: a federation's checkpoint holds no hyperparameters of the model, and Federation reads it."""


def _is_of_library(class_type: type) -> bool:
    return class_type.__module__.split(".")[0] in ("fedmoe_pl", "torch", "torchvision", "torchmetrics", "lightning")


def _command(arguments: Sequence[str]) -> str:
    """The command line without ``--ckpt_path``.

    Example:
        >>> _command(["fit", "--config", "my run.yaml", "--ckpt_path", "last"])
        "fedmoe fit --config 'my run.yaml'"
    """
    script = Path(sys.argv[0])
    program = ["python", sys.argv[0]] if script.name == "cli.py" else ["fedmoe"]
    program = ["python", "-m", "fedmoe_pl"] if script.name == "__main__.py" and "fedmoe_pl" in script.parts else program
    words, rest = list[str](), iter(arguments)
    for word in rest:
        if word == "--ckpt_path":
            next(rest, None)
        elif not word.startswith("--ckpt_path="):
            words.append(str(word))
    return shlex.join([*program, *words])


def run(args: ArgsType = None, may_fork: bool = False) -> None:
    """Runs a command that needs torch and Lightning; what the user can fix is one line, with the exit codes of main.

    Args:
        args: command line arguments; None takes ``sys.argv``.
        may_fork: whether worker processes can be forked from this one, which has only imported everything.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    arguments = sys.argv[1:] if args is None else args
    if args is None:
        # LightningCLI of lightning 2.6, and what replaces its methods here, use what jsonargparse 4.49 deprecated
        os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        # that of TensorBoard's thread is raised in this one as well
        threading.excepthook = lambda raised: None if _is_full(raised.exc_value) else threading.__excepthook__(raised)
        warnings.filterwarnings("ignore", ".isinstance.treespec, LeafSpec.. is deprecated", FutureWarning)
    may_fork = may_fork and FORKS
    words = arguments if isinstance(arguments, list) else [""]
    if may_fork and words[0] in _GRIDS:
        serve_forks()
        words = sys.argv[1:]  # of the process of a cell, in that process
    try:
        if words[0] in _OTHERS:
            _run_other(*map(str, words))
        else:
            if may_fork and words[0] in _TRAIN:
                fork_server(work)
            FederationCLI(args)
    except (ArgumentError, MisconfigurationException) as error:
        print("fedmoe:", *str(as_refusal(error)).split(), file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if not _is_full(error):
            raise
        print(f"fedmoe: {error.strerror}; make room, and continue the run with --ckpt_path last.", file=sys.stderr)
        sys.exit(2)
    except ClientError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"fedmoe: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _is_full(error: BaseException | None) -> bool:
    """Whether the disk, or the user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _benchmark(arguments: list[str]) -> None:
    sys.exit(benchmark(read_grid(arguments), configured, arguments))


def _tune(arguments: list[str]) -> None:
    try:
        importlib.import_module("optuna")
    except ImportError as error:
        raise MisconfigurationException('tune needs Optuna: pip install ".[tune]" in the repository.') from error
    sys.exit(importlib.import_module("fedmoe_pl.grids.tune").tune(*read_tuning(arguments), configured, arguments))


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
        self.trainer.check(model, datamodule)  # pyright: ignore[reportAttributeAccessIssue]


def configured(arguments: Sequence[str], check: bool) -> tuple[Federation, LightningModule, FederatedDataModule]:
    """What ``fedmoe fit`` would train, with all checks or without; nothing is logged of it, which the runs will do."""
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        return objects_of(arguments, _Checked if check else _Configured)
    finally:
        logging.disable(disabled)


def objects_of(
    arguments: Sequence[str], kind: type[_Configured] = _Configured
) -> tuple[Federation, LightningModule, FederatedDataModule]:
    """The federation, the model and the data module of ``fedmoe fit`` with these arguments; nothing is read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # they are not those of this process
        made = kind(["fit", *arguments])
    return made.trainer, made.model, made.datamodule  # pyright: ignore[reportReturnType]


_OTHERS = {"benchmark": _benchmark, "tune": _tune, "report": report, "provision": provision}


def _run_other(command: str, *arguments: str) -> None:
    """Runs a command that is not a method of Federation."""
    try:
        _OTHERS[command](with_files(arguments))
    except ArgumentError as error:
        check_options([f"{word}=" for word in arguments if word.startswith("--")], OTHER_PARSERS[command]())
        raise as_refusal(error) from None
