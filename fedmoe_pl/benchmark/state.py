"""The runs of a cell on the disk: finished, cut, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fedmoe_pl.benchmark.cells import Cell
from fedmoe_pl.benchmark.grid import SEED
from fedmoe_pl.checkpoints.checkpoint import FILE, PREVIOUS, run_versions
from fedmoe_pl.checkpoints.configuration import relevant


def finished_run(cell: Cell) -> Path | None:
    """The folder of the newest finished run of a cell; None if there is none.

    A run that has more phases than the cell is one of it, too.
    """
    for folder, phases in _runs(cell):
        names = [phase["name"] for phase in _phases(cell.configuration)]
        finished = all((folder / FILE).with_name("finished").joinpath(f"{name}.ckpt").is_file() for name in names)
        if finished and all(phase in phases for phase in _phases(cell.configuration)):
            return folder
    return None


def cut_run(cell: Cell) -> Path | None:
    """The checkpoint with which the newest run of a cell goes on; None if there is none."""
    for folder, phases in _runs(cell):
        path = folder / FILE
        if phases == _phases(cell.configuration) and (path.is_file() or path.with_name(PREVIOUS).is_file()):
            return path
    return None


def has_begun(cell: Cell) -> bool:
    """Whether a cell has a run that is finished or goes on."""
    return finished_run(cell) is not None or cut_run(cell) is not None


def _runs(cell: Cell) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Yields the folders of the runs with the cell's configuration, the newest first, and the phases of each.

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
            yield path.parent, _phases(configuration)


def _compared(configuration: dict[str, Any]) -> dict[str, Any]:
    compared = relevant(configuration)
    federation = {name: value for name, value in compared["federation"].items() if name != "phases"}
    # `relevant` leaves out the seed and where the data are, because a run compares them by itself
    return {**compared, "federation": federation, SEED: configuration[SEED], "data": configuration["data"]}


def _phases(configuration: dict[str, Any]) -> list[dict[str, Any]]:
    return configuration["federation"]["phases"]
