"""The cells of a grid: each has a configuration of its own, which is checked before any of them is run."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from fedmoe_pl.checkpoints.checkpoint import FILE, PREVIOUS, finished_path, run_versions
from fedmoe_pl.checkpoints.configuration import as_text, relevant
from fedmoe_pl.checks import InvalidArgumentError, is_file_name
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.federation import Federation
from fedmoe_pl.grids.grid import SEED, VARIANT, Grid, Variant, value_name
from fedmoe_pl.phases.starts import chain_of_starts
from fedmoe_pl.report.settings import phases_behind

Configured = Callable[[Sequence[str], bool], tuple[Federation, LightningModule, FederatedDataModule]]
"""Makes what the arguments of ``fedmoe fit`` name; the second argument is whether to make all its checks."""

_PHASES = "federation.phases."


@dataclass(frozen=True)
class Cell:
    """A run of a grid."""

    name: str
    where: dict[str, Any]  # its value for each key of the grid, and its variant if the grid has any
    configuration: dict[str, Any]  # all keys of `fedmoe fit`
    phases: list[str]  # that the table shows
    folder: Path  # of its runs

    @property
    def condition(self) -> dict[str, Any]:
        """Its values without the seed."""
        return {key: value for key, value in self.where.items() if key != SEED}

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.configuration[SEED]


def make_cells(grid: Grid, configured: Configured) -> list[Cell]:
    """The cells of a grid, in the order of its variants and values; the seed changes first.

    Cells that differ only in their seed are checked once.
    """
    cells = list[Cell]()
    others = [key for key in grid.values if key != SEED]
    for variant, *values in product(grid.variants or [None], *(grid.values[key] for key in others)):
        where = {**({} if variant is None else {VARIANT: variant}), **dict(zip(others, values, strict=True))}
        try:
            cells += _cells_of(grid, where, configured)
        except MisconfigurationException as error:
            raise MisconfigurationException(f"{_name(grid, where) or 'every cell'}: {error}") from error
    return cells


def _cells_of(grid: Grid, where: dict[str, Any], configured: Configured) -> list[Cell]:
    """The cells with these values, one for each seed."""
    configuration = configuration_of(grid, where, configured)
    shown = _shown(grid, configuration["federation"]["phases"])
    cells = [_cell(grid, where, seed, configuration, shown) for seed in grid.values.get(SEED, [configuration[SEED]])]
    if all(finished_run(cell) or cut_run(cell) for cell in cells):
        return cells  # they were checked when they began
    check_used("benchmark", "values", grid.values, configuration)
    configuration = configured(["--config", json.dumps(cells[0].configuration)], True)[0].hparams
    return [_cell(grid, where, cell.seed, configuration, shown) for cell in cells]


def configuration_of(grid: Grid, where: Mapping[str, Any], configured: Configured) -> dict[str, Any]:
    """The configuration of the cells with these values: all keys, with their defaults."""
    variant = grid.variants.get(where.get(VARIANT, ""), Variant())
    values = {key: value for key, value in where.items() if key != VARIANT}
    given = grid.overrides, variant.overrides, values
    changes = {key: (place, value) for place, each in enumerate(given) for key, value in each.items()}
    files = [word for path in (*grid.configs, *variant.configs) for word in ("--config", path.absolute)]
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, (_, value) in changes.items()}
    # a phase changes what others give, a value replaces a variant's, and an argument is that of the class above it
    ordered = sorted(changes, key=lambda key: (key.startswith(_PHASES), changes[key][0], key.count(".")))
    federation, *_ = configured([*files, *(f"--{key}={texts[key]}" for key in ordered)], False)
    configuration = copy.deepcopy(federation.hparams)
    if grid.methods is None:
        return configuration
    names = [phase.name for phase in federation.phases]
    for name in grid.methods:
        if name not in names:
            raise InvalidArgumentError("benchmark", "methods", name, f"one of the phases: {', '.join(names)}")
    wanted = [name for name in names if name in grid.methods or is_row_of(grid.baseline, name)]
    chains = [chain_of_starts(federation.phases, federation.starts, name) for name in wanted]
    needed = {phase.name for chain in chains for phase in chain}
    phases = [phase for phase in configuration["federation"]["phases"] if phase["name"] in needed]
    configuration["federation"]["phases"] = phases
    return configuration


def check_used(command: str, argument: str, keys: Iterable[str], configuration: dict[str, Any]) -> None:
    """Refuses keys of phases that are left out, because their values would change nothing."""
    names = [*_phases(configuration)]
    for key in keys:
        if key.startswith(_PHASES) and not key.startswith(tuple(f"{_PHASES}{name}." for name in names)):
            allowed = f"a key of a phase that is run: {', '.join(names)}"
            raise InvalidArgumentError(command, argument, key, allowed)


def is_row_of(row: str | None, phase: str) -> bool:
    """Whether a row of ``clients.csv`` is of a phase: it has its name, to which an evaluation point may be added.

    Example:
        >>> is_row_of("FedAvg after local training", "FedAvg"), is_row_of("FedAvgM", "FedAvg")
        (True, False)
    """
    return row is not None and (row == phase or row.startswith(f"{phase} after "))


def _shown(grid: Grid, phases: list[dict[str, Any]]) -> list[str]:
    """The names of the phases that the table shows: those that are evaluated."""
    names = [phase["name"] for phase in phases if phase["evaluate"]]
    shown = [name for name in names if grid.methods is None or name in grid.methods or is_row_of(grid.baseline, name)]
    if grid.baseline is not None and not any(is_row_of(grid.baseline, name) for name in shown):
        raise InvalidArgumentError("benchmark", "baseline", grid.baseline, f"one of {', '.join(names)}")
    return shown


def _cell(grid: Grid, where: dict[str, Any], seed: int, configuration: dict[str, Any], shown: list[str]) -> Cell:
    full = {**where, SEED: seed}
    full = {key: full[key] for key in dict.fromkeys((*grid.keys, SEED))}
    name = _name(grid, full)
    if not is_file_name(name):
        allowed = "such that a folder can have the cell's name; give other values as variants"
        raise InvalidArgumentError("benchmark", "values", name, allowed)
    return named_cell(grid, name, full, {**configuration, SEED: seed}, shown)


def named_cell(grid: Grid, name: str, where: dict[str, Any], configuration: dict[str, Any], shown: list[str]) -> Cell:
    """The cell of this name: its runs are in a folder of the same name."""
    federation = {
        **configuration["federation"],
        "default_root_dir": grid.folder,
        "name": name,
        "enable_checkpointing": True,
        "enable_progress_bar": False,
    }
    return Cell(name, where, {**configuration, "federation": federation}, shown, Path(grid.folder) / name)


def _name(grid: Grid, where: Mapping[str, Any]) -> str:
    words = grid.words
    return ",".join(
        value_name(value) if key == VARIANT else f"{words.get(key, key)}={value_name(value)}"
        for key, value in where.items()
    )


def finished_run(cell: Cell) -> Path | None:
    """The folder of the newest finished run of a cell, which may have more phases; None if there is none."""
    wanted = _phases(cell.configuration)
    for folder, configuration in _runs(cell):
        # among more phases, one without a `start` may start from another one
        same = wanted.items() <= _phases(configuration).items() and all(
            phases_behind(name, configuration) == phases_behind(name, cell.configuration) for name in wanted
        )
        if same and all(finished_path(folder / FILE, name).is_file() for name in wanted):
            return folder
    return None


def cut_run(cell: Cell) -> Path | None:
    """The checkpoint with which the newest run of a cell goes on; None if there is none."""
    for folder, configuration in _runs(cell):
        path, same = folder / FILE, [*_phases(configuration).items()] == [*_phases(cell.configuration).items()]
        if same and (path.is_file() or path.with_name(PREVIOUS).is_file()):
            return path
    return None


def last_round(cell: Cell, since: float) -> str:
    """The round that a cell's run has evaluated last, in words; empty if there is none since then, in seconds."""
    newest = max(run_versions(cell.folder), default=0)
    path = cell.folder / f"version_{newest}" / "rounds.csv"
    if not path.is_file() or path.stat().st_mtime < since:  # of an earlier run
        return ""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    return f"{rows[-1]['method']}, round {rows[-1]['round']}" if rows else ""


def _runs(cell: Cell) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields the folders of the runs with the cell's configuration, the newest first, and the configuration of each.

    The phases themselves are not compared, nor what does not change a result, such as devices and loggers.
    """
    expected = _compared(cell.configuration)
    for version in sorted(run_versions(cell.folder), reverse=True):
        path = cell.folder / f"version_{version}" / "config.yaml"
        try:
            configuration = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError):  # of a run that has only begun
            continue
        if isinstance(configuration, dict) and _compared(configuration) == expected:
            yield path.parent, configuration


def _compared(configuration: dict[str, Any]) -> str:
    compared = relevant(configuration, of_two_runs=True)
    federation = {name: value for name, value in compared["federation"].items() if name != "phases"}
    # a run compares the seed by itself
    return as_text({**compared, "federation": federation, SEED: configuration[SEED]})


def _phases(configuration: dict[str, Any]) -> dict[str, str]:
    """The phases by name, in their order, as texts to compare."""
    return {phase["name"]: as_text(phase) for phase in configuration["federation"]["phases"]}
