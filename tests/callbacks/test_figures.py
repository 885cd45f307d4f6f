"""Pictures of evaluations."""

import numpy as np
from helpers.evaluations import evaluation, gate, mixture

from fedmoe_pl.callbacks.figures import figure_pixels, gate_weight_figure, sorted_accuracy_figure


def test_gate_weight_figure_has_fixed_colour_limits_and_a_number_in_every_cell():
    axes = gate_weight_figure(mixture(), num_classes=4).axes[0]
    assert axes.images[0].get_clim() == (0.0, 1.0)
    assert sorted(text.get_text() for text in axes.texts) == ["0.15", "0.25", "0.62", "0.75"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]


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


def test_figures_of_many_clients_and_classes_render():
    many = evaluation(local=[0.5] * 200, gates=[gate([0.5], [150])] * 200)
    pixels = figure_pixels(gate_weight_figure(many, num_classes=151))
    assert pixels.dtype == np.uint8
    assert pixels.shape[1:] == (700, 3)
