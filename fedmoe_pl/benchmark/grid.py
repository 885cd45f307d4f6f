"""The grid file: configurations, values of their keys, and what the table compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser
from jsonargparse.typing import Path_fr, PositiveInt
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.benchmark.published import VARIANT, Published, full_key

DESCRIPTION = "Runs every combination of some values of a configuration, and makes one table over their seeds"


@dataclass
class Variant:
    """A named change of the configuration, such as another data set.

    Args:
        configs: configuration files over those of the grid.
        overrides: keys that these cells have in place of those of the files.
    """

    configs: list[Path_fr] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass
class Grid:
    """A grid of runs: one cell for every combination of a variant and one value of each key.

    Args:
        configs: configuration files of all cells, each over those before it; relative to the file that names them.
        values: the values of each key, as a list; ``seed_everything`` is the key over which the table has mean and
            standard deviation.
        folder: where the cells' runs and the table are written.
        variants: named changes of the configuration, such as other data sets.
        overrides: keys that all cells have in place of those of the files. A phase is named by its name, as in
            ``federation.phases.FedAvg.rounds``.
        methods: the phases to run and to show; those that they start from are run, too. Without it, all are.
        baseline: the method to which the others are compared.
        parallel: runs at a time; on GPUs, each has one of its own, in turn.
        paper: published numbers beside which the table puts its own; see ``fedmoe_pl/benchmark/published.py``.
    """

    configs: list[Path_fr]
    values: dict[str, Any]
    folder: str
    variants: dict[str, Variant] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    methods: list[str] | None = None
    baseline: str | None = None
    parallel: PositiveInt = 1
    paper: list[Published] = field(default_factory=list)


class _GridFile(ActionConfigFile):
    """A file over others: it changes single keys of ``values`` and ``overrides``, where the parser replaces all."""

    def __call__(self, parser: ArgumentParser, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Applies the file to what the arguments before it say."""
        before = {name: dict(cfg.get(name) or {}) for name in ("values", "overrides")}
        super().__call__(parser, cfg, values, option_string)
        for name, old in before.items():
            cfg[name] = {**old, **(cfg.get(name) or {})}


def grid_parser() -> ArgumentParser:
    """The parser of ``fedmoe benchmark``."""
    parser = ArgumentParser(prog="fedmoe benchmark", description=DESCRIPTION, exit_on_error=False)
    parser.add_argument("--config", action=_GridFile, help="A grid file; may be given more than once, as overlays.")
    parser.add_class_arguments(Grid, as_group=False)
    return parser
