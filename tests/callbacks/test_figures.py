"""Pictures of evaluations."""

import numpy as np
from helpers.evaluations import evaluation, mixture

from fedmoe_pl.callbacks.figures import sorted_accuracy_figure


def test_sorted_accuracy_figure_is_the_cumulative_distribution():
    panels = sorted_accuracy_figure([evaluation(local=(0.9, 0.5, 0.7)), mixture()]).axes
    assert [axes.get_title() for axes in panels] == [
        "local test: all clients, sorted",
        "global test: all clients, sorted",
    ]
    line = panels[0].lines[0]
    assert line.get_label() == "FedAvg"
    np.testing.assert_allclose(line.get_ydata(), [50, 50, 70, 90])
    np.testing.assert_allclose(line.get_xdata(), [0, 1 / 3, 2 / 3, 1])
    assert len(panels[0].lines) == 2
