"""Pictures of evaluations."""

import numpy as np
from helpers.evaluations import evaluation, mixture

from fedmoe_pl.callbacks.figures import representation_figure, sorted_accuracy_figure


def test_sorted_accuracy_figure_is_the_cumulative_distribution():
    panels = sorted_accuracy_figure([evaluation(reweighted=(0.9, 0.5, 0.7)), mixture()]).axes
    assert [axes.get_title() for axes in panels] == [
        "reweighted test: all clients, sorted",
        "global test: all clients, sorted",
    ]
    line = panels[0].lines[0]
    assert line.get_label() == "FedAvg"
    np.testing.assert_allclose(line.get_ydata(), [50, 50, 70, 90])
    np.testing.assert_allclose(line.get_xdata(), [0, 1 / 3, 2 / 3, 1])
    assert len(panels[0].lines) == 2


def test_the_colours_of_classes_and_the_markers_of_clients_are_explained():
    points = {"local": np.arange(12.0).reshape(6, 2)}
    figure = representation_figure("m", points, np.array([3, 3, 7, 7, 0, 0]), np.array([0, 1, 0, 1, 0, 1]))
    clients, classes = ([text.get_text() for text in legend.get_texts()] for legend in figure.legends)
    assert (clients, classes) == (["client 0", "client 1"], ["0", "3", "7"])
    without_classes = representation_figure("m", points, np.zeros(6, dtype=int), np.zeros(6, dtype=int))
    assert len(without_classes.legends) == 1
