"""Heat maps of all clients."""

import numpy as np
import torch
from helpers.evaluations import evaluation, gate, mixture

from fedmoe_pl.callbacks.figures import figure_pixels
from fedmoe_pl.callbacks.maps import aggregation_figure, cluster_figure, expert_usage_figure, gate_weight_figure
from fedmoe_pl.evaluation.evaluation import ClientEvaluation, Evaluation

COUNTS = torch.tensor([[2, 2, 0, 0], [0, 0, 1, 0], [0, 2, 0, 0]])


def shown(axes):
    return axes.images[0].get_array()


def names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_gate_weights_are_sorted_and_beside_the_same_clients_samples():
    """The clients' means are 0.4375, 0.75 and 0.15."""
    samples, weights = gate_weight_figure(mixture(), COUNTS).axes[:2]
    assert names(samples) == ["2", "0", "1"]
    np.testing.assert_array_equal(shown(samples), COUNTS[[2, 0, 1]])
    assert samples.get_ylim() == weights.get_ylim() == (2.5, -0.5)
    assert weights.images[0].get_clim() == (0.0, 1.0)
    expected = [[np.nan, 0.15, np.nan, np.nan], [0.25, 0.625, np.nan, np.nan], [np.nan, np.nan, 0.75, np.nan]]
    np.testing.assert_allclose(shown(weights).filled(np.nan), expected, atol=1e-7)
    assert [text.get_text() for text in weights.texts] == ["0.15", "0.25", "0.62", "0.75"]


def test_clients_without_weights_come_last():
    first, *others = mixture().clients
    without = ClientEvaluation(0, first.n_train, 0.5, np.nan, 0.5, np.nan)
    samples = gate_weight_figure(Evaluation("m", 1, "mixture", "", "", [without, *others]), COUNTS).axes[0]
    assert names(samples) == ["2", "1", "0"]


def test_figures_of_many_clients_and_classes_render():
    many = evaluation(reweighted=[0.5] * 200, gates=[gate([0.5], [150])] * 200)
    pixels = figure_pixels(gate_weight_figure(many, torch.ones(200, 151)))
    assert pixels.dtype == np.uint8
    assert pixels.shape[1:] == (700, 3)


def test_every_one_of_100_clients_has_its_name():
    many = evaluation(reweighted=[0.5] * 100, gates=[gate([0.5], [0])] * 100)
    samples = gate_weight_figure(many, torch.ones(100, 10)).axes[0]
    assert names(samples) == [str(client) for client in range(100)]


def test_clients_of_the_same_expert_are_neighbours():
    def weights(*experts):
        return torch.eye(3)[list(experts)], torch.zeros(len(experts), dtype=torch.long)

    used = evaluation(reweighted=[0.5] * 4, gates=[weights(2), weights(0, 0, 1), weights(2, 2, 0), weights(0)])
    samples, usage = expert_usage_figure(used, torch.ones(4, 2)).axes[:2]
    assert names(samples) == ["3", "1", "0", "2"]
    np.testing.assert_allclose(shown(usage)[1], [2 / 3, 1 / 3, 0])
    without_classes = expert_usage_figure(used, torch.ones(4, 0)).axes[0]
    assert names(without_classes) == names(samples)
    np.testing.assert_allclose(shown(without_classes), shown(usage))


def test_clients_of_the_same_cluster_are_neighbours_and_then_those_of_the_same_class():
    counts = torch.tensor([[9, 0], [0, 9], [9, 0], [0, 9], [9, 0]])
    samples, cells = cluster_figure("IFCA", {0: 1, 1: 1, 2: 1, 4: 0}, 3, counts).axes[:2]
    assert names(samples) == ["4", "0", "2", "1"]
    np.testing.assert_array_equal(shown(samples), counts[[4, 0, 2, 1]])
    np.testing.assert_array_equal(shown(cells), np.eye(3)[[0, 1, 1, 1]])


def test_clients_that_average_with_one_another_are_neighbours():
    """Clients 0 and 2, and 1 and 3, have two experts each, which are averaged in these pairs."""
    owners = torch.arange(4).repeat_interleave(2)
    pairs = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]])
    matrix = pairs.repeat_interleave(2, 0).repeat_interleave(2, 1) / 4
    samples, weights = aggregation_figure(matrix, owners, "FedMoE-DA", torch.eye(4)).axes[:2]
    order = [int(name) for name in names(samples)]
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 2}), frozenset({1, 3})}
    many = aggregation_figure(torch.eye(70), torch.arange(35).repeat_interleave(2), "m", torch.eye(35)).axes[1]
    np.testing.assert_allclose(shown(many), np.eye(35))
    blocks = np.kron(np.eye(2), np.full((4, 4), 0.25))
    np.testing.assert_allclose(shown(weights), blocks)
    np.testing.assert_array_equal(shown(samples), torch.eye(4)[order].repeat_interleave(2, 0))
