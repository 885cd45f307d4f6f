"""The numbers that a paper has published, under the key ``paper`` of a grid.

The key is a list. Each entry has the numbers of one metric in one column of a table, in percent::

    paper:
      - table: Guo et al. 2021, Table I
        where: {variant: Fashion-MNIST, alpha: 0.5}
        metric: reweighted_test
        cells: {FedAvg: 90.00, PFL-FB: 92.84}
      - table: Isaksson et al. 2022, Table 2
        where: {majority_share: 1.0}
        metric: reweighted_test
        cells: {MoE: [90.76, 0.82]}

* ``table``: where the numbers are from; it also says if they are corrected.
* ``where``: for which cells of the grid they are: the value of some of its keys, and its ``variant`` if it has any. A
  key may be shortened to its last words, as long as one key of the grid ends with them. An entry is for every cell that
  has these values; without ``where``, for all.
* ``metric``: ``local_test``, ``reweighted_test`` or ``global_test``, as in ``clients.csv``.
* ``cells``: a number for each method, or a number and its standard deviation. A method is named as in ``clients.csv``;
  the paper's names are those of the configurations' phases. Methods that the grid lacks are allowed.

For each cell, ``fedmoe benchmark`` writes the numbers that are for it to ``cell.yaml``, in the folder that its runs
are in (``<folder>/<cell>/cell.yaml`` beside ``<folder>/<cell>/version_0``)::

    variant: Fashion-MNIST           # null without variants
    values: {data.init_args.partitioner.init_args.alpha: 0.5, seed_everything: 0}
    baseline: FedAvg                 # null if the grid has none
    paper:
      - table: Guo et al. 2021, Table I
        metric: reweighted_test
        cells: {FedAvg: [90.0, null], PFL-FB: [92.84, null]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException

Metric = Literal["local_test", "reweighted_test", "global_test"]
PublishedNumber = tuple[float, float | None]
"""A published number in percent, and its standard deviation if the paper has it."""

VARIANT = "variant"


@dataclass
class Published:
    """Published numbers of one metric in one column of a table.

    Args:
        table: where the numbers are from, and how they were corrected if they were.
        metric: the metric.
        cells: the number of each method in percent, or the number and its standard deviation.
        where: the values of the grid's keys for which the numbers are; ``variant`` is that of the grid.
    """

    table: str
    metric: Metric
    cells: dict[str, float | list[float]]
    where: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            MisconfigurationException: if a method has more than a number and its standard deviation.
        """
        for method, numbers in self.cells.items():
            if isinstance(numbers, list) and len(numbers) != 2:
                raise MisconfigurationException(
                    f"paper: cells of {self.table} has {numbers} for '{method}', but must have a number, or a number "
                    "and its standard deviation."
                )

    @property
    def numbers(self) -> dict[str, PublishedNumber]:
        """The number of each method and its standard deviation, or None."""
        return {
            method: (numbers[0], numbers[1]) if isinstance(numbers, list) else (numbers, None)
            for method, numbers in self.cells.items()
        }


def full_key(key: str, keys: Iterable[str], table: str = "") -> str:
    """The key of a grid that a shortened key stands for.

    Args:
        key: the key, or its last words.
        keys: the grid's keys.
        table: where the shortened key is used, for the message.

    Raises:
        MisconfigurationException: if no key ends with it, or several do.

    Example:
        >>> full_key("alpha", ["seed_everything", "data.init_args.partitioner.init_args.alpha"])
        'data.init_args.partitioner.init_args.alpha'
    """
    keys = list(keys)
    found = [other for other in keys if other == key or other.endswith(f".{key}")]
    if len(found) != 1:
        raise MisconfigurationException(
            f"paper: where of {table} has '{key}', but must have keys of the grid: {', '.join(keys) or 'it has none'}."
        )
    return found[0]


def published_for(paper: Iterable[Published], values: Mapping[str, Any]) -> list[Published]:
    """The published numbers that are for a cell.

    Args:
        paper: all published numbers.
        values: the cell's value for each key of the grid, and its ``variant`` if the grid has any.
    """
    return [
        published
        for published in paper
        if all(values[full_key(key, values, published.table)] == value for key, value in published.where.items())
    ]
