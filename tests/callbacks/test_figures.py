"""Pictures of evaluations."""

import matplotlib
import numpy as np
import pytest
import torch
from helpers.evaluations import evaluation, mixture
from matplotlib.text import Text

from fedmoe_pl.callbacks.accuracy_monitor import sorted_accuracy_figure
from fedmoe_pl.callbacks.cluster_monitor import _picks_figure, cluster_figure
from fedmoe_pl.callbacks.expert_monitor import aggregation_figure, expert_usage_figure
from fedmoe_pl.callbacks.figures import gate_figure, partition_figure, styled
from fedmoe_pl.callbacks.gate_monitor import layer_figure, token_figure
from fedmoe_pl.callbacks.representation_monitor import representation_figure
from fedmoe_pl.callbacks.sample_monitor import GatedSamples, certainty_figure, image_samples_figure, text_samples_figure
from fedmoe_pl.evaluation.results import gate_rows

COUNTS = torch.tensor([[2, 2, 0, 0], [0, 0, 1, 0], [0, 2, 0, 0]])


def shown(axes):
    return axes.images[0].get_array()


def names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_gate_weights_are_sorted_and_beside_the_same_clients_samples():
    """The clients' means are 0.4375, 0.75 and 0.15."""
    means = {client.client: client.mean_gate_weight for client in mixture().clients}
    samples, weights = gate_figure([*gate_rows(mixture(), 4)], means, COUNTS.numpy()).axes[:2]
    assert names(samples) == ["2", "0", "1"]
    np.testing.assert_array_equal(shown(samples), COUNTS[[2, 0, 1]])
    assert samples.get_ylim() == weights.get_ylim() == (2.5, -0.5)
    assert weights.images[0].get_clim() == (0.0, 1.0)
    expected = [[np.nan, 0.15, np.nan, np.nan], [0.25, 0.625, np.nan, np.nan], [np.nan, np.nan, 0.75, np.nan]]
    np.testing.assert_allclose(shown(weights).filled(np.nan), expected, atol=1e-7)


def test_clients_of_the_same_expert_are_neighbours():
    def weights(*experts):
        return torch.eye(3)[list(experts)], torch.zeros(len(experts), dtype=torch.long)

    used = evaluation(reweighted=[0.5] * 4, gates=[weights(2), weights(0, 0, 1), weights(2, 2, 0), weights(0)])
    samples, usage = expert_usage_figure(used, np.ones((4, 2))).axes[:2]
    assert names(samples) == ["3", "1", "0", "2"]
    np.testing.assert_allclose(shown(usage)[1], [2 / 3, 1 / 3, 0])
    without_classes = expert_usage_figure(used, np.ones((4, 0))).axes[0]
    assert names(without_classes) == names(samples)
    np.testing.assert_allclose(shown(without_classes), shown(usage))


def test_clients_of_the_same_cluster_are_neighbours_and_then_those_of_the_same_class():
    counts = np.array([[9, 0], [0, 9], [9, 0], [0, 9], [9, 0]])
    samples, cells = cluster_figure("IFCA", {0: 1, 1: 1, 2: 1, 4: 0}, 3, counts).axes[:2]
    assert names(samples) == ["4", "0", "2", "1"]
    np.testing.assert_array_equal(shown(samples), counts[[4, 0, 2, 1]])
    np.testing.assert_array_equal(shown(cells), np.eye(3)[[0, 1, 1, 1]])


def test_clients_that_average_with_one_another_are_neighbours():
    """Clients 0 and 2, and 1 and 3, have two experts each, which are averaged in these pairs."""
    owners = torch.arange(4).repeat_interleave(2)
    pairs = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]])
    matrix = pairs.repeat_interleave(2, 0).repeat_interleave(2, 1) / 4
    samples, weights = aggregation_figure(matrix, owners, "FedMoE-DA", np.eye(4)).axes[:2]
    order = [int(name) for name in names(samples)]
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 2}), frozenset({1, 3})}
    experts = np.arange(35) % 3 + 1
    owners = torch.arange(35).repeat_interleave(torch.tensor(experts))
    half_own = (torch.eye(len(owners), dtype=torch.float64) + 1 / len(owners)) / 2
    clients, many = aggregation_figure(half_own, owners, "m", np.eye(35)).axes[:2]
    shares = experts[shown(clients).argmax(1)] / len(owners)
    np.testing.assert_allclose(shown(many), (np.eye(35) + shares) / 2, err_msg="of all experts of both")
    blocks = np.kron(np.eye(2), np.full((4, 4), 0.25))
    np.testing.assert_allclose(shown(weights), blocks)
    np.testing.assert_array_equal(shown(samples), np.eye(4)[order].repeat(2, 0))


def test_sorted_accuracy_figure_is_the_cumulative_distribution():
    panels = sorted_accuracy_figure([evaluation(reweighted=(0.9, 0.5, 0.7)), mixture()]).axes
    titles = [f"{metric} test: all clients, sorted" for metric in ("reweighted", "global")]
    assert [axes.get_title() for axes in panels] == titles
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


NAME = r"_A $x_$ \frac{ %s"  # of a method, a client, a class: no mathematics
POINTS = {NAME: np.arange(6.0).reshape(3, 2)}
SAMPLES = GatedSamples(torch.rand(1, 1, 4, 4), *torch.tensor([[0], [1]]), torch.ones(1, 2) / 2)
ROW = {"client": 0, "name": NAME, "train": 2.0, "validation": 0.0, "test": 1.0, "class_0": 2.0, "class_1": 0.0}
ONE_CLIENT = {"gates": [(torch.eye(2), torch.arange(2))], "reweighted": [0.5]}
DRAWN = {
    "representations": lambda: representation_figure(NAME, POINTS, np.arange(3), np.arange(3)),
    "accuracies": lambda: sorted_accuracy_figure([evaluation(NAME)]),
    "clusters": lambda: cluster_figure(NAME, {0: 1}, 2, np.ones((1, 2))),
    "picks": lambda: _picks_figure(NAME, torch.ones(2, 2)),
    "averaged experts": lambda: aggregation_figure(torch.eye(2), torch.arange(2), NAME, np.eye(2)),
    "used experts": lambda: expert_usage_figure(evaluation(NAME, **ONE_CLIENT), np.ones((1, 2))),
    "partition": lambda: partition_figure([ROW]),
    "gates": lambda: gate_figure([ROW | {"expert": "global"}], {0: 0.5}, None, NAME),
    "images": lambda: image_samples_figure({NAME: SAMPLES}, NAME, [NAME, "$b$"]),
    "texts": lambda: text_samples_figure({NAME: SAMPLES}, {NAME: [[NAME]]}, NAME, [NAME, "$b$"]),
    "certainty": lambda: certainty_figure(np.ones(3), np.ones(3, dtype=bool), NAME),
    "layers": lambda: layer_figure([0], [{NAME: 0.5}], NAME),
    "tokens": lambda: token_figure(np.ones((1, 2)), [[NAME, "b"]], NAME),
}


@pytest.mark.parametrize("drawn", DRAWN)
def test_no_name_is_parsed_as_mathematics(drawn):
    with matplotlib.rc_context({"text.usetex": True}):  # as a user may have set it
        figure = DRAWN[drawn]()
        styled(figure.draw_without_rendering)()
    texts = figure.findobj(Text)
    assert any(NAME[:12] in text.get_text() for text in texts)
    assert not any(text.get_parse_math() or text.get_usetex() for text in texts if text.get_text())
