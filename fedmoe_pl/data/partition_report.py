"""The samples of every client by class, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fedmoe_pl.data.datamodule import FederatedDataModule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_CLIENTS = 40  # clients in the table; if there are more, some are left out
_MOST_CLASSES = 20  # classes with a column in the table
_MOST_NUMBERS = 200  # cells of the figure that show their counts
_MOST_UNSORTED = 200  # clients of the figure in the order of their ids
_MOST_NAMED = 100  # clients of the figure whose rows have their ids
_MOST_ROWS = 1000  # rows of the figure, each at least one pixel high


def write_partition(datamodule: FederatedDataModule, path: Path) -> str:
    """Draws the partition to a file, whose folder is made if it is missing, and returns it as a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partition_figure(datamodule).savefig(path)
    return f"{partition_table(datamodule)}\n\nPicture: {path}"


def partition_table(datamodule: FederatedDataModule) -> str:
    """Returns a table of the samples of every client.

    A row has the sizes of a client's training, validation and local test sets, and its number of training and
    validation samples of each class. If there are more than 20 classes, it has the number of the client's classes and
    its largest class instead. If there are more than 40 clients, the first 30 and the last 10 are listed. The last rows
    have the mean, the smallest and the largest value of each column over all clients.

    Args:
        datamodule: a data module after ``setup``.
    """
    columns = _sizes(datamodule) | _class_columns(datamodule.class_counts())
    n = datamodule.num_clients
    listed = list(range(n)) if n <= _MOST_CLIENTS else [*range(_MOST_CLIENTS - 10), *range(n - 10, n)]
    rows = [["client", *columns]]
    rows += [[str(client), *(str(column[client]) for column in columns.values())] for client in listed]
    if n > len(listed):
        rows.insert(_MOST_CLIENTS - 9, ["..."] * len(rows[0]))
    rows.append(["mean", *(f"{sum(column) / n:.1f}" for column in columns.values())])
    rows.append(["least", *(str(min(column)) for column in columns.values())])
    rows.append(["greatest", *(str(max(column)) for column in columns.values())])
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = "-" * len(lines[0])
    body = [lines[0], rule, *lines[1:-3], rule, *lines[-3:]]
    classes = f"{datamodule.num_classes} classes, " if datamodule.num_classes else ""
    title = f"{n} clients, {classes}{_shared(datamodule)}, {len(datamodule.global_test)} global test samples"
    return "\n".join([title, "", *body])


def partition_rows(datamodule: FederatedDataModule) -> Iterator[dict[str, int]]:
    """The rows of ``partition.csv``, one per client.

    ``train``, ``validation`` and ``test`` are the sizes of its sets, and ``class_<c>`` its number of training and
    validation samples of class c.

    Args:
        datamodule: a data module after ``setup``.
    """
    parts = (datamodule.train_samples, datamodule.validation_samples, datamodule.test_samples)
    names = ("client", "train", "validation", "test", *(f"class_{c}" for c in range(datamodule.num_classes)))
    columns = [part.sizes.tolist() for part in parts]
    counts = datamodule.class_counts().long().tolist()
    for client, (*sizes, of_classes) in enumerate(zip(*columns, counts, strict=True)):
        yield dict(zip(names, (client, *sizes, *of_classes), strict=True))


def _shared(datamodule: FederatedDataModule) -> str:
    """Returns in words how many samples the clients hold, and of how many if some are not used."""
    parts = (datamodule.train_samples, datamodule.validation_samples, datamodule.test_samples)
    dealt = sum(int((part.indices < datamodule.num_shared).sum()) for part in parts)
    whole = "" if dealt == datamodule.num_shared else f" of {datamodule.num_shared}"
    return f"{dealt}{whole} {'pooled' if datamodule.pool else 'training'} samples"


def _class_columns(counts: Tensor) -> dict[str, list[int]]:
    num_classes = counts.shape[1]
    if num_classes <= _MOST_CLASSES:
        return {f"class {c}": counts[:, c].long().tolist() for c in range(num_classes)}
    return {
        "classes": (counts > 0).sum(dim=1).tolist(),
        "largest class": counts.argmax(dim=1).tolist(),
        "its samples": counts.max(dim=1).values.long().tolist(),
    }


def partition_figure(datamodule: FederatedDataModule) -> Figure:
    """Returns a figure of every client's samples (row): on the left, by class in colours; on the right, their number.

    Data without classes have only their number. More than 200 clients are sorted by their largest class and its share.

    Args:
        datamodule: a data module after ``setup``.
    """
    from matplotlib.figure import Figure  # slow to import, and training does not need it

    counts = datamodule.class_counts()  # (num_clients, num_classes)
    n, num_classes = counts.shape
    order = _order(datamodule, counts)
    height = min(1.7 + max(0.085 * n, 0.24 * min(n, 30)), 10.5)  # as high as heat maps of the same clients
    figure = Figure(figsize=(700 / 144, height), dpi=144, layout="constrained")
    # clients narrower than a pixel are averaged with their neighbours: faster than drawing all, and none is left out
    edges = np.linspace(0, n, min(n, _MOST_ROWS) + 1).astype(int)
    if num_classes:
        cells, sizes = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
        _draw_classes(cells, counts, _averaged(counts[order].numpy(), edges))
    else:
        cells = sizes = figure.subplots()
    before = np.zeros(len(edges) - 1)
    for name, part in _sizes(datamodule).items():
        after = before + _averaged(np.array(part)[order], edges)
        bars = {"orientation": "horizontal", "fill": True, "label": name}
        sizes.stairs(after, edges - 0.5, baseline=before, **bars)  # one shape is faster than bars
        before = after
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    sizes.set_xlabel("samples")
    sizes.set_xlim(left=0)
    _name_clients(cells, height, n)
    return figure


def _name_clients(axes: Axes, height: float, n: int) -> None:
    """Writes the ids of up to 100 clients beside their rows, the first one above."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel("client" if n <= _MOST_UNSORTED else f"{n} clients, sorted by their largest class")
    axes.set_ylim(n - 0.5, -0.5)
    if n <= _MOST_NAMED:
        axes.set_yticks(range(n))
        axes.tick_params(axis="y", labelsize=max(4.0, min(8.0, 72 * 0.75 * (height - 1.7) / n)))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(20, integer=True))


def _draw_classes(cells: Axes, counts: Tensor, averaged: np.ndarray) -> None:
    """Draws the number of samples of each client and class, shape (num_clients, num_classes).

    Args:
        cells: where to draw.
        counts: the numbers.
        averaged: the same in the order of the figure; neighbouring clients may be averaged.
    """
    from matplotlib.ticker import MaxNLocator

    extent = (-0.5, averaged.shape[1] - 0.5, len(counts) - 0.5, -0.5)
    image = cells.imshow(averaged, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest", extent=extent)
    assert cells.figure is not None
    cells.figure.colorbar(
        image, ax=cells, label="training and validation samples", location="bottom", fraction=0.04, pad=0.02
    )
    if counts.numel() <= _MOST_NUMBERS:
        _write_numbers(cells, counts)
    cells.set_xlabel("class")
    cells.xaxis.set_major_locator(MaxNLocator(20, integer=True))


def _order(datamodule: FederatedDataModule, counts: Tensor) -> list[int]:
    """Returns the clients in the order of the figure."""
    order = list(range(datamodule.num_clients))
    if len(order) > _MOST_UNSORTED and datamodule.num_classes:
        largest, shares = counts.argmax(dim=1).tolist(), datamodule.class_shares.max(dim=1).values.tolist()
        order.sort(key=lambda client: (largest[client], -shares[client]))
    return order


def _averaged(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns the means of ``values``, shape (n, ...), from each edge to the next, shape (len(edges) - 1, ...)."""
    return (np.add.reduceat(values, edges[:-1]).T / np.diff(edges)).T


def _write_numbers(cells: Axes, counts: Tensor) -> None:
    for client, row in enumerate(counts.long().tolist()):
        for label, count in enumerate(row):
            color = "white" if count > counts.max() / 2 else "black"
            cells.text(label, client, str(count), ha="center", va="center", fontsize=6, color=color)


def _sizes(datamodule: FederatedDataModule) -> dict[str, list[int]]:
    """Returns each client's numbers of training, validation and local test samples, without sets that are all empty."""
    parts = {
        "train": datamodule.train_samples,
        "validation": datamodule.validation_samples,
        "test": datamodule.test_samples,
    }
    return {name: part.sizes.tolist() for name, part in parts.items() if len(part.indices)}
