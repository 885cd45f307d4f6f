"""The trials of a search: drawn by Optuna, run as cells, pruned, and written to files."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import yaml
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState

from fedmoe_pl.callbacks.hparams import short_names
from fedmoe_pl.checkpoints.checkpoint import run_versions
from fedmoe_pl.checkpoints.files import write_file
from fedmoe_pl.grids.cells import Cell, Configured, configuration_of, finished_run, named_cell
from fedmoe_pl.grids.grid import VARIANT, Grid, Variant
from fedmoe_pl.grids.space import value_of
from fedmoe_pl.grids.tuning import Tuning
from fedmoe_pl.logs.summary import value_text, write_csv
from fedmoe_pl.report.runs import Row, read_rows
from fedmoe_pl.report.search import TRIALS, brief_number
from fedmoe_pl.seeds import derive_seed

_OF_PLACE = ("name", "default_root_dir", "enable_checkpointing", "enable_progress_bar")


def of_optuna(kind: type, given: dict[str, Any]) -> Any:
    """A sampler or a pruner, from its class and arguments."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, "it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # the user has named it
        return parser.instantiate_classes(parser.parse_object({"it": given}))["it"]


class Trials:
    """The trials of a study, as cells to run."""

    def __init__(
        self,
        study: optuna.Study,
        space: dict[str, BaseDistribution],
        tuning: Tuning,
        grid: Grid,
        configured: Configured,
    ) -> None:
        self.study = study
        study.stop = self._stop
        self.space = space
        self.tuning = tuning
        self.grid = grid
        self.configured = configured
        self.running = dict[str, Trial]()
        self.reported = dict[str, int]()  # the last round of each
        self.pruned = set[str]()
        self.is_exhausted = False

    def cells(self) -> Iterator[tuple[str, Cell]]:
        """Yields the trials that a kill has cut, and then new ones."""
        end = time.monotonic() + (self.tuning.timeout or math.inf)
        self.study.sampler = self._sampler(0)  # told of those that go on
        for frozen in self.study.get_trials(states=[TrialState.RUNNING]):
            trial = Trial(self.study, frozen._trial_id)
            if frozen.params.keys() != self.space.keys():  # killed while its values were drawn
                self.study.tell(trial, state=TrialState.FAIL)
            elif frozen.intermediate_values and trial.should_prune():
                self.study.tell(trial, state=TrialState.PRUNED)
            else:
                yield from self._begin(trial)
        while (
            (count := len(self.study.trials)) < self.tuning.trials and time.monotonic() < end and not self.is_exhausted
        ):
            # its values depend on the seed and on the trials before it, but on no state that a kill would lose
            self.study.sampler = self._sampler(count)
            trial = self.study.ask(self.space)
            yield from self._begin(trial)

    def _sampler(self, number: int) -> BaseSampler:
        given = self.tuning.sampler
        seed = derive_seed(self.tuning.seed, number) % 2**32
        return of_optuna(BaseSampler, {**given, "init_args": {**given["init_args"], "seed": seed}})

    def _begin(self, trial: Trial) -> Iterator[tuple[str, Cell]]:
        """Yields the cell of a trial, unless an earlier one had the same values, or the run refuses them."""
        name = _name(trial)
        title = f"[{trial.number + 1}/{self.tuning.trials}] {name} ({self._words(trial.params)})"
        for other in self._complete:
            if other.params == trial.params:
                print(f"{title} has the values of {_name(other)}", flush=True)
                self.study.tell(trial, other.value)
                return
        values = {key: value_of(self.tuning.space[key], drawn) for key, drawn in trial.params.items()}
        grid = replace(self.grid, variants={name: Variant(overrides=values)})
        try:
            configuration = configuration_of(grid, {VARIANT: name}, self.configured)
        except MisconfigurationException as error:
            print(f"{title} is refused: {error}", flush=True)
            self.study.tell(trial, state=TrialState.FAIL)
            return
        self.running[name], self.reported[name] = trial, self.study.trials[trial.number].last_step or 0
        yield title, named_cell(grid, name, {VARIANT: name, **values}, configuration, [])

    def is_pruned(self, cell: Cell) -> bool:
        """Reports the rounds that a trial has evaluated since the last call, until its pruner ends it."""
        trial = self.running[cell.name]
        version = max(run_versions(cell.folder), default=0)
        rows = []
        with suppress(MisconfigurationException):  # a row is being written
            rows = read_rows(cell.folder / f"version_{version}" / "rounds.csv")
        for round, value in self._values(rows).items():
            if round > self.reported[cell.name]:
                trial.report(value, round)
                self.reported[cell.name] = round
                if trial.should_prune():
                    self.pruned.add(cell.name)
                    return True
        return False

    def on_end(self, cell: Cell, has_succeeded: bool) -> None:
        """Tells Optuna how a trial has ended, and writes the results so far."""
        is_pruned = cell.name in self.pruned or (has_succeeded and self.is_pruned(cell))
        trial, run = self.running.pop(cell.name), finished_run(cell) if has_succeeded else None
        values = [*self._values(read_rows(run / "summary.csv")).values()] if run else []
        if is_pruned:
            self.study.tell(trial, state=TrialState.PRUNED)
        elif values:
            self.study.tell(trial, values[0])
        else:
            self.study.tell(trial, state=TrialState.FAIL)
        print(f"  {self.text(self.study.trials[trial.number])}", flush=True)
        self.write()

    def _values(self, rows: Iterable[Row]) -> dict[int, float]:
        """The method's values of the metric, by round."""
        column = f"{self.tuning.metric}_mean"
        found = {int(row["round"]): row.get(column, math.nan) for row in rows if row["method"] == self.tuning.method}
        return {round: value for round, value in found.items() if not math.isnan(value)}

    def _stop(self) -> None:
        """What a sampler calls that has nothing left to draw; Optuna's own is only for ``Study.optimize``."""
        self.is_exhausted = True

    @property
    def best(self) -> FrozenTrial | None:
        """The best trial that has ended by itself, the first one of several."""
        return self.study.best_trial if self._complete else None

    @property
    def _complete(self) -> list[FrozenTrial]:
        return self.study.get_trials(states=[TrialState.COMPLETE])

    def text(self, trial: FrozenTrial) -> str:
        """A trial in a line."""
        value = math.nan if trial.value is None else trial.value
        number = value_text(self.tuning.metric, value)
        state = "" if trial.state == TrialState.COMPLETE else f" ({_state(trial)})"
        return f"{_name(trial)}{state}: {self.tuning.metric} {number} with {self._words(trial.params)}"

    def _words(self, values: Mapping[str, Any]) -> str:
        names = {".".join(key): name for key, name in short_names(tuple(key.split(".")) for key in values).items()}
        return ", ".join(f"{names[key]} {brief_number(value)}" for key, value in values.items())

    def write(self) -> None:
        """Writes the table of all trials, and the best one's configuration."""
        best = self.best
        rows = [
            {
                "trial": _name(trial),
                "state": _state(trial),
                "best": "best" if best is not None and trial.number == best.number else "",
                "round": trial.last_step,
                self.tuning.metric: math.nan if trial.value is None else trial.value,
                **trial.params,
            }
            for trial in self.study.trials
        ]
        folder = Path(self.grid.folder)
        if rows:
            write_csv(folder / TRIALS, rows)
        if best is None:
            return
        run, trained = (
            yaml.safe_load(path.read_text()) for path in (folder / "run.yaml", folder / _name(best) / "config.yaml")
        )
        trained["federation"] |= {name: run["federation"][name] for name in _OF_PLACE}
        write_file(folder / "best.yaml", yaml.safe_dump(trained, sort_keys=False))


def _name(trial: FrozenTrial | Trial) -> str:
    return f"trial_{trial.number:03}"


def _state(trial: FrozenTrial) -> str:
    return {TrialState.FAIL: "failed"}.get(trial.state, trial.state.name.lower())
