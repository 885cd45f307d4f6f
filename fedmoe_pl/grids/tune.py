"""The command ``fedmoe tune``: Optuna draws values, each trial is a run, and validation says which one is best."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import yaml
from jsonargparse.typing import Path_fr
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from optuna.pruners import BasePruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from fedmoe_pl.checkpoints.configuration import as_text
from fedmoe_pl.checkpoints.files import write_file
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation.metrics import lower_is_better
from fedmoe_pl.evaluation.results import ACCURACIES
from fedmoe_pl.federation import Federation
from fedmoe_pl.grids.benchmark import locked, say_how_to_continue
from fedmoe_pl.grids.cells import Configured, check_used, make_cells
from fedmoe_pl.grids.grid import Grid, Variant
from fedmoe_pl.grids.processes import run_cells
from fedmoe_pl.grids.space import distribution_of, ends_of
from fedmoe_pl.grids.trials import Trials, of_optuna
from fedmoe_pl.grids.tuning import Tuning
from fedmoe_pl.report.search import TRIALS
from fedmoe_pl.rounds.interruption import Interruption
from fedmoe_pl.setup.data import check_direction, measured

_JOURNAL = "optuna.journal"
_VALIDATION = "validation"
_ONLY_VALIDATION = "a metric on validation samples", "what is chosen by test samples looks better on them than it is"


def tune(tuning: Tuning, of_run: Sequence[str], configured: Configured, arguments: Sequence[str]) -> int:
    """Runs the trials that arguments gave, and returns the exit code: 1 if none has a value, 128 + n for signal n."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {key: distribution_of(key, entry) for key, entry in tuning.space.items()}
    if tuning.sampler["init_args"].get("seed", 0) is not None:
        allowed, because = "a sampler with a seed, which is left out", "tune derives one for each trial from its own"
        raise InvalidArgumentError("tune", "sampler", tuning.sampler["class_path"], allowed, because)
    if not space:
        raise InvalidArgumentError("tune", "space", tuning.space, "keys of the run with their values")
    print("checking the configuration", flush=True)
    federation, model, data = configured(of_run, True)
    method = _method(tuning, federation)
    tuning = replace(tuning, method=method)
    _check_metric(tuning.metric, method, federation, model, data)
    folder = Path(tuning.folder or f"{federation.runs}_tune")
    with locked(folder, "tune"):
        lower = tuning.metric in lower_is_better(federation.metrics)
        study = _study(folder / _JOURNAL, lower, of_optuna(BasePruner, tuning.pruner))
        settings = {"space": tuning.space, "metric": tuning.metric, "method": method, "seed": tuning.seed}
        for name, content in {"run.yaml": federation.hparams, "space.yaml": settings}.items():
            _keep(folder / name, content, is_new=not study.trials)
        run = Path_fr(folder / "run.yaml")  # pyright: ignore[reportCallIssue]
        grid = Grid([run], {}, str(folder), methods=[method], parallel=tuning.parallel)

        trials = Trials(study, space, tuning, grid, configured)
        if not study.trials:
            _check_ends(tuning, grid, configured)
        try:
            run_cells(trials.cells(), grid, trials.is_pruned, trials.on_end)
        except Interruption as end:
            return say_how_to_continue(end, ["tune", *arguments])
        finally:
            trials.write()
    best = trials.best
    if best is None:
        print(f"fedmoe: no trial has a value; see {folder / TRIALS}", file=sys.stderr)
        return 1
    print(f"\nbest: {trials.text(best)}\n\nFiles: {folder / 'best.yaml'}, {folder / TRIALS}", flush=True)
    return 0


def _method(tuning: Tuning, federation: Federation) -> str:
    """The phase whose metric counts."""
    evaluated = [phase.name for phase in federation.phases if phase.evaluate]
    method = evaluated[-1] if tuning.method is None and evaluated else tuning.method
    if method not in evaluated:
        raise InvalidArgumentError("tune", "method", method, f"one of {', '.join(evaluated)}, which are evaluated")
    return method


def _check_metric(
    metric: str, method: str, federation: Federation, model: LightningModule, data: FederatedDataModule
) -> None:
    """Refuses a metric that is not on validation samples, or that is not measured."""
    (phase,) = (phase for phase in federation.phases if phase.name == method)
    known = [
        name for name in measured(data, federation.metrics, [phase.model or model]) if name.startswith(_VALIDATION)
    ]
    if metric.startswith(tuple(name for name in ACCURACIES if name != _VALIDATION)):
        raise InvalidArgumentError("tune", "metric", metric, *_ONLY_VALIDATION)
    if not known:
        raise MisconfigurationException(
            f"tune: metric is '{metric}', but there are no validation samples; data.init_args.validation_fraction "
            "sets some aside."
        )
    if metric not in known:
        raise InvalidArgumentError("tune", "metric", metric, f"one of {', '.join(known)}")
    check_direction("tune", "metric", metric, federation.metrics)


def _study(journal: Path, lower_is_better: bool, pruner: BasePruner) -> optuna.Study:
    """The study of a folder; what a kill has left half-written is removed."""
    if journal.is_file():
        data = journal.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(journal, data.rfind(b"\n") + 1)
        journal.with_name(f"{_JOURNAL}.lock").unlink(missing_ok=True)  # only one process has this folder
    storage = JournalStorage(JournalFileBackend(str(journal), JournalFileOpenLock(str(journal))))
    direction = "minimize" if lower_is_better else "maximize"
    return optuna.create_study(
        storage=storage, study_name="tune", direction=direction, pruner=pruner, load_if_exists=True
    )


def _check_ends(tuning: Tuning, grid: Grid, configured: Configured) -> None:
    """Refuses ends of ranges and choices that the run refuses, and rounds that test samples select."""
    ends = {f"values {number}": Variant(overrides=ends) for number, ends in enumerate(ends_of(tuning.space))}
    try:
        cells = make_cells(replace(grid, variants=ends), configured)
    except MisconfigurationException as error:
        raise (error.__cause__ or error) from None
    check_used("tune", "space", tuning.space, cells[0].configuration)
    for phase in (phase for cell in cells for phase in cell.configuration["federation"]["phases"]):
        monitor = (phase["select"] or {}).get("monitor", _VALIDATION)
        if not monitor.startswith(_VALIDATION):
            raise InvalidArgumentError(f"Phase '{phase['name']}'", "select.monitor", monitor, *_ONLY_VALIDATION)


def _keep(path: Path, content: dict[str, Any], is_new: bool) -> None:
    """Writes what the trials are of; refuses a folder with trials of something else."""
    text = yaml.safe_dump(content, sort_keys=False)
    if is_new:
        write_file(path, text)
    elif not path.is_file() or as_text(yaml.safe_load(path.read_text())) != as_text(yaml.safe_load(text)):
        raise InvalidArgumentError("tune", "folder", str(path.parent), "another one", f"its {path.name} differs")
