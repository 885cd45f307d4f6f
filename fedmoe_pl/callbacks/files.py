"""Files of a run: its results, and the clients' models."""

from __future__ import annotations

import inspect
import io
import math
from typing import Any

import torch
from lightning import __version__
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fedmoe_pl.algorithms.algorithm import EvaluationPoint
from fedmoe_pl.algorithms.overrides import chooses_model
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import partition_rows
from fedmoe_pl.evaluation.clients import has_own_model
from fedmoe_pl.evaluation.evaluation import Evaluation
from fedmoe_pl.evaluation.gate_weights import gate_rows
from fedmoe_pl.logs.summary import append_csv, client_rows, format_table, summary_row, write_csv
from fedmoe_pl.models.description import (
    describe_all,
    hyperparameters_of,
    remembered,
    required_arguments,
    unknown_reason,
)
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run


class ResultFiles(FederationCallback):
    """Writes the run's results as CSV files into its folder, and prints the table.

    ``rounds.csv``, ``clients.csv`` and ``summary.csv`` have the accuracies, ``partition.csv`` each client's number of
    samples of each class, and ``gate_weights.csv`` the mean weights of the clients' gates by class.

    Args:
        partition: whether to write ``partition.csv``.
        gate_weights: whether to write ``gate_weights.csv``, if a method has a trained gate.
    """

    def __init__(self, partition: bool = True, gate_weights: bool = True) -> None:
        self.partition = partition
        self.gate_weights = gate_weights

    def on_fit_start(self, run: Run) -> None:
        """Writes the partition. Other files are begun anew: a resumed run's may have more than its checkpoint."""
        self._written = 0
        if self.partition:
            write_csv(run.folder / "partition.csv", partition_rows(run.datamodule))
        self._write_results(run)
        if run.rows:
            self._write_rounds(run)

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Writes the rows of the rounds since the last evaluation."""
        self._write_rounds(run)

    def _write_rounds(self, run: Run) -> None:
        path = run.folder / "rounds.csv"
        new = run.rows[self._written :]
        if self._written and all(row.keys() <= self._columns.keys() for row in new):
            append_csv(path, [self._columns | row for row in new])
        else:  # methods may differ in their metrics, and a run may go on with others
            self._columns = dict.fromkeys((name for row in run.rows for name in row), math.nan)
            write_csv(path, run.rows)
        self._written = len(run.rows)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes the results of all methods so far."""
        self._write_results(run)

    def _write_results(self, run: Run) -> None:
        results, gate_weights = run.results.values(), self.gate_weights
        tables = {
            "clients": [row for result in results for row in client_rows(result)],
            "summary": [summary_row(result) for result in results],
            "gate_weights": [
                row for result in results if gate_weights for row in gate_rows(result, run.datamodule.num_classes)
            ],
        }
        for name, rows in tables.items():
            path = run.folder / f"{name}.csv"
            if rows:
                write_csv(path, rows)
            elif path.is_file():
                path.unlink()

    def on_fit_end(self, run: Run) -> None:
        """Prints the table."""
        if run.results:
            print(f"\n{format_table(run.results.values())}\n\nFiles: {run.folder}", flush=True)


class ClientCheckpoint(FederationCallback):
    """Writes the model of every client of every method as a Lightning checkpoint.

    ``PersonalizedMoE.load_from_checkpoint("<run>/clients/<method>/client_007.ckpt")`` loads one. A method whose clients
    all have the same model is written once, as ``all_clients.ckpt``. Your own module is built again with what it gave
    to ``save_hyperparameters()``, or keeps as attributes of the arguments' names. Modules among these arguments are
    described by their own arguments, if they save or keep them so, as torch's do. All arguments of classes that a
    configuration names are known. What cannot be written down is named in the log, and by the error if
    ``load_from_checkpoint`` does not get it.

    Args:
        methods: names of the methods to write; None for all. Many clients with large models need much disk space.
    """

    def __init__(self, methods: list[str] | None = None) -> None:
        self.methods = methods
        self._said = set[str]()

    def on_fit_start(self, run: Run) -> None:
        """Refuses names that no evaluated phase has."""
        self._said = set()
        names = [phase.name for phase in run.phases if phase.evaluate]
        for method in self.methods or []:
            if method not in names:
                raise InvalidArgumentError(self, "methods", method, f"names of evaluated phases, {', '.join(names)}")

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes the clients' models of an evaluated phase."""
        if evaluation is None or (self.methods is not None and phase.name not in self.methods):
            return
        for evaluation_point in phase.evaluation_points:
            self._write_models(run, phase, evaluation_point)

    def _write_models(self, run: Run, phase: Phase, evaluation_point: EvaluationPoint) -> None:
        method = phase.method(evaluation_point)
        folder = run.folder / "clients" / method
        folder.mkdir(parents=True, exist_ok=True)
        kept = run.states[phase.name].clients.values()
        personalized = chooses_model(phase.algorithm) or any(has_own_model(tree, evaluation_point) for tree in kept)
        clients = range(run.datamodule.num_clients if personalized else 1)
        for client, module in zip(clients, run.client_modules(method, clients), strict=True):
            checkpoint = _checkpoint(module)
            if client == 0:  # all clients' modules have the same arguments
                self._warn_of(checkpoint, module)
            torch.save(checkpoint, folder / (f"client_{client:03d}.ckpt" if personalized else "all_clients.ckpt"))

    def _warn_of(self, checkpoint: dict[str, Any], module: LightningModule) -> None:
        """Says once what to give ``load_from_checkpoint``: a warning if the module has asked to save it, else a log."""
        name, written = type(module).__name__, checkpoint[module.CHECKPOINT_HYPER_PARAMS_KEY]
        unknown = {argument: reason for argument, value in written.items() if (reason := unknown_reason(value))}
        if getattr(module, "_hparams_name", None) in (None, "kwargs"):
            missing = {*required_arguments(type(module)), *module.hparams} - {*written}
            unknown |= dict.fromkeys(missing, "")
        texts = [f"{argument} ({reason})" if reason else argument for argument, reason in sorted(unknown.items())]
        text = (
            f"ClientCheckpoint: the checkpoints lack arguments of {name} that cannot be described: {', '.join(texts)}. "
            f"Pass them to {name}.load_from_checkpoint."
        )
        if unknown and text not in self._said:
            self._said.add(text)
            (rank_zero_warn if {*unknown} & {*module.hparams} else rank_zero_info)(text)


def _checkpoint(module: LightningModule) -> dict[str, Any]:
    """What ``Trainer.save_checkpoint`` writes of a module: its tensors and its hyperparameters."""
    key, hyperparameters = module.CHECKPOINT_HYPER_PARAMS_KEY, _hyperparameters(module)
    checkpoint = {"pytorch-lightning_version": __version__, "state_dict": module.state_dict(), key: hyperparameters}
    if module.hparams:  # the name of the constructor's argument that holds all of them, if there is one
        checkpoint[module.CHECKPOINT_HYPER_PARAMS_NAME] = getattr(module, "_hparams_name", None)
    module.on_save_checkpoint(checkpoint)
    return checkpoint


def _hyperparameters(module: LightningModule) -> dict[str, Any]:
    """The module's hyperparameters, with descriptions of modules; arguments that it did not save, if it keeps them.

    What ``load_from_checkpoint`` cannot load is left out.
    """
    saved = {name: value for name, value in module.hparams.items() if _is_loadable(value)}
    if "_instantiator" in saved or getattr(module, "_hparams_name", None) not in (None, "kwargs"):
        return saved  # the command line's descriptions, or one argument that holds all
    known = remembered(module)
    names = [name for name in inspect.signature(type(module)).parameters if name not in {**saved, **known}]
    values = {name: module.hparams.get(name, getattr(module, name, None)) for name in names}
    values = {name: value for name, value in values.items() if value is not None}
    described = {**known, **describe_all(module, values)}
    plain = {name: value for name, value in described.items() if value is values.get(name)}
    if plain == described or "<locals>" in type(module).__qualname__:  # a class that cannot be imported again
        return {**saved, **plain}
    return hyperparameters_of(module, {**saved, **described})


def _is_loadable(value: object) -> bool:
    """Whether ``load_from_checkpoint`` loads the value without ``weights_only=False``."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # a class decides how it is pickled, and may raise anything
        return False
    return True
