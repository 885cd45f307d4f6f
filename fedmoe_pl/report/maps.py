"""Maps of clients and classes: who holds what, and what the gates weigh."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmoe_pl.report.runs import Row
from fedmoe_pl.report.style import RC, new_figure

_MOST_UNSORTED = 30  # clients in the order of their ids
_MOST_VECTORS = 5000  # cells; a picture with more has an image inside
_MOST_PANELS = 4


def class_counts(partition: Sequence[Row]) -> np.ndarray:
    """Each client's number of samples of each class, shape (clients, classes), from the rows of ``partition.csv``."""
    return _by_class(partition)


def client_order(counts: np.ndarray) -> np.ndarray:
    """The clients in the order of a map: up to 30 by id, more by their largest class and its share."""
    if len(counts) <= _MOST_UNSORTED:
        return np.arange(len(counts))
    shares = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    return np.lexsort((-shares, counts.argmax(axis=1)))


def partition_figure(counts: np.ndarray) -> Figure:
    """The number of samples of each client (column) and class (row).

    Args:
        counts: shape (clients, classes).
    """
    order = client_order(counts)
    with matplotlib.rc_context(RC):
        figure = new_figure(_height(counts.shape[1]))
        axes = figure.subplots()
        axes.set_facecolor(colormaps["Blues"](0))  # what shows between cells on a dark page
        mesh = _draw(axes, counts[order], "Blues", 0, counts.max())
        _add_colorbar(figure, mesh, [axes], "samples")
        _label(axes, counts.shape[1], order)
    return figure


def gate_figure(gates: Sequence[Row], order: Sequence[int]) -> Figure:
    """The gate's mean weights by client (column) and class (row); blank where a client lacks the class.

    The colours always span 0 to 1, so that pictures can be compared. A gate over several experts, none of which is
    global, has a panel for each of the first four.

    Args:
        gates: one method's rows of ``gate_weights.csv``.
        order: the ids of the clients from left to right; those without rows are left out.
    """
    experts = list(dict.fromkeys(row["expert"] for row in gates))[:_MOST_PANELS]
    with_gates = {row["client"] for row in gates}
    clients = np.array([client for client in order if client in with_gates])
    with matplotlib.rc_context(RC):
        height = _height(len(_classes(gates[0])))
        figure = new_figure(height if len(experts) == 1 else 0.6 + 0.75 * (height - 0.6) * len(experts))
        panels = figure.subplots(len(experts), 1, sharex=True, squeeze=False)[:, 0]
        meshes = []
        for axes, expert in zip(panels, experts, strict=True):
            rows = {row["client"]: row for row in gates if row["expert"] == expert}
            missing = dict.fromkeys(_classes(gates[0]), np.nan)
            weights = _by_class([rows.get(client, missing) for client in clients])
            meshes.append(_draw(axes, np.ma.masked_invalid(weights), "viridis", 0.0, 1.0))
            _label(axes, weights.shape[1], clients, most_classes=12 if len(experts) == 1 else 5)
            if len(experts) > 1:
                axes.set_title(f"expert {expert}", loc="left", pad=2)
                axes.set_xlabel("")
        panels[-1].set_xlabel(_clients_label(len(clients)))
        name = "weight of global expert" if experts == ["global"] else "weight of the expert"
        _add_colorbar(figure, meshes[0], panels, name)
    return figure


def _classes(row: Row) -> list[str]:
    return [column for column in row if column.startswith("class_")]


def _by_class(rows: Sequence[Row]) -> np.ndarray:
    columns = _classes(rows[0])
    return np.array([[row[column] for column in columns] for row in rows])


def _height(num_classes: int) -> float:
    return min(0.75 + 0.125 * max(num_classes, 8), 3.6)


def _draw(axes: Axes, values: np.ndarray, colors: str, least: float, most: float) -> QuadMesh:
    """Draws a column for each row of ``values``; masked cells stay blank."""
    colormap = colormaps[colors].with_extremes(bad="none")
    mesh = axes.pcolormesh(values.T, cmap=colormap, vmin=least, vmax=most)
    if values.size <= _MOST_VECTORS:  # lines of the cells' own colours close the gaps that viewers draw between cells
        mesh.set(edgecolor="face", linewidth=0.15)
    else:
        mesh.set_rasterized(True)
    return mesh


def _add_colorbar(figure: Figure, mesh: QuadMesh, panels: Sequence[Axes] | np.ndarray, label: str) -> None:
    bar = figure.colorbar(mesh, ax=[*panels], label=label, pad=0.02)
    bar.outline.set_linewidth(0.4)


def _label(axes: Axes, num_classes: int, clients: Sequence[int] | np.ndarray, most_classes: int = 12) -> None:
    axes.set(xlabel=_clients_label(len(clients)), ylabel="class")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(True)
    step = max(1, -(-num_classes // most_classes))
    axes.set_yticks(np.arange(0, num_classes, step) + 0.5, [str(c) for c in range(0, num_classes, step)])
    axes.tick_params(length=0)
    if len(clients) <= _MOST_UNSORTED:
        step = max(1, -(-len(clients) // 15))
        places = range(0, len(clients), step)
        axes.set_xticks([place + 0.5 for place in places], [str(int(clients[place])) for place in places])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _clients_label(number: int) -> str:
    return "client" if number <= _MOST_UNSORTED else f"{number} clients, sorted by their largest class"
