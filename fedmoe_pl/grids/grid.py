"""The grid file: configurations, values of their keys, and what the table compares; see docs/guide/benchmark.md."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jsonargparse.typing import Path_fr, PositiveInt, register_type

from fedmoe_pl.callbacks.hparams import short_names
from fedmoe_pl.catalogue import with_files
from fedmoe_pl.checks import InvalidArgumentError, check_at_least

SEED = "seed_everything"
PARTITION_SEED = "data.init_args.partition_seed"
VARIANT = "variant"
_OF_CLASS = {"class_path", "init_args", "dict_kwargs"}


class ConfigPath(Path_fr):  # pyright: ignore[reportGeneralTypeIssues]
    """A configuration file, or the name of one of the package's."""

    def __init__(self, path: Any, **kwargs: Any) -> None:
        try:
            super().__init__(path, **kwargs)
        except TypeError:
            if (named := with_files(["--config", str(path)])[1]) == str(path):
                raise
            super().__init__(named, **kwargs)


register_type(ConfigPath, str, type_check=lambda value, kind: isinstance(value, ConfigPath))


@dataclass
class Published:
    """Published numbers of one metric in one column of a table.

    Args:
        table: where the numbers are from; it also says if they are corrected.
        metric: the metric, as in ``clients.csv``.
        cells: the number of each method in percent, or number and standard deviation.
        where: the values of the cells that they are for, by key of the grid or its last words; by default, all.
    """

    table: str
    metric: Literal["local_test", "reweighted_test", "global_test"]
    cells: dict[str, float | tuple[float, float]]
    where: dict[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, tuple[float, float | None]]:
        """The number of each method and its standard deviation, or None."""
        return {name: cell if isinstance(cell, tuple) else (cell, None) for name, cell in self.cells.items()}


@dataclass
class Variant:
    """A named change of the configuration, such as another data set.

    Args:
        configs: configuration files over those of the grid.
        overrides: keys that these cells have in place of those of the files.
    """

    configs: list[ConfigPath] = field(default_factory=list)  # pyright: ignore[reportInvalidTypeForm]
    overrides: dict = field(default_factory=dict)  # of Any, jsonargparse would fill in the arguments of classes in it


@dataclass
class Grid:
    """A grid of runs: one cell for every combination of a variant and one value of each key.

    Args:
        configs: configuration files of all cells, each over those before it; relative to the file that names them,
            or names of the package's, such as ``quickstart``.
        values: the values of each key, as a list. Over those of ``seed_everything``, the table has mean and standard
            deviation.
        folder: where the cells' runs and the table are written.
        variants: named changes of the configuration, such as other data sets.
        overrides: keys that all cells have in place of those of the files. A phase is named by its name, as in
            ``federation.phases.FedAvg.rounds``.
        methods: the phases to run and to show, beside the baseline; those that they start from are run, too. By
            default, all are.
        baseline: the method with which the others are compared.
        parallel: runs at a time; on GPUs, each has one of its own, in turn.
        paper: published numbers, which the table puts beside its own.
    """

    configs: list[ConfigPath]  # pyright: ignore[reportInvalidTypeForm]
    values: dict
    folder: str
    variants: dict[str, Variant] = field(default_factory=dict)
    overrides: dict = field(default_factory=dict)  # of Any, jsonargparse would fill in the arguments of classes in it
    methods: list[str] | None = None
    baseline: str | None = None
    parallel: PositiveInt = 1  # pyright: ignore[reportInvalidTypeForm]
    paper: list[Published] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Writes keys as dotted words, and checks what needs no configuration."""
        self.values = dict(dotted(self.values))
        self.overrides = dict(dotted(self.overrides))
        for variant in self.variants.values():
            variant.overrides = dict(dotted(variant.overrides))
        for key, values in self.values.items():
            if not isinstance(values, list) or not values:
                raise InvalidArgumentError("benchmark", f"values.{key}", values, "a list of at least one value")
            names = [value_name(value) for value in values]
            if len({*names}) < len(names):
                raise InvalidArgumentError("benchmark", f"values.{key}", names, "a list that has every value once")
        if VARIANT in self.values:  # cells would differ in nothing but their names
            raise InvalidArgumentError("benchmark", "values", [*self.values], "keys of a run, beside variants")
        for seed in self.values.get(SEED, []):
            if seed is None:
                raise InvalidArgumentError("benchmark", f"values.{SEED}", seed, "an integer of at least 0")
            check_at_least("benchmark", f"values.{SEED}", seed, 0, highest=None)
        for published in self.paper:
            for key in published.where:
                full_key(key, [other for other in self.keys if other != SEED], published.table)

    @property
    def keys(self) -> list[str]:
        """The keys of ``values``, after ``variant`` if there are variants."""
        return [*([VARIANT] if self.variants else []), *self.values]

    @property
    def number(self) -> int:
        """The number of cells."""
        return math.prod([max(len(self.variants), 1), *map(len, self.values.values())])

    @property
    def words(self) -> dict[str, str]:
        """The last words of each key, as many as tell it from the others; for names of cells and for tables."""
        return {".".join(path): name for path, name in short_names(tuple(key.split(".")) for key in self.keys).items()}


def value_name(value: Any) -> str:
    """A value in the name of a cell and in the table: the name of a class, and others as in YAML."""
    if isinstance(value, Mapping):
        return str(value.get("class_path", value)).rsplit(".", 1)[-1]
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def dotted(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the keys of nested mappings as dotted words, with their values; a class with its arguments is a value."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        is_class = isinstance(value, Mapping) and "class_path" in value and set(value) <= _OF_CLASS
        if isinstance(value, Mapping) and value and not is_class:
            yield from dotted(value, f"{key}.")
        else:
            yield key, value


def full_key(key: str, keys: Iterable[str], table: str) -> str:
    """The key of a grid that a shortened key stands for.

    Example:
        >>> full_key("alpha", ["seed_everything", "data.init_args.partitioner.init_args.alpha"], "1")
        'data.init_args.partitioner.init_args.alpha'
    """
    keys = list(keys)
    found = [other for other in keys if other == key or other.endswith(f".{key}")]
    if len(found) != 1:
        allowed = f"a key of the grid: {', '.join(keys) or 'it has none'}"
        raise InvalidArgumentError(f"paper '{table}'", "where", key, allowed)
    return found[0]


def published_for(paper: Iterable[Published], values: Mapping[str, Any]) -> list[Published]:
    """The published numbers that are for a cell."""
    return [
        published
        for published in paper
        if all(values[full_key(key, values, published.table)] == value for key, value in published.where.items())
    ]
