"""Pictures of many clients, classes and methods: legible at a column's width."""

from itertools import pairwise
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from helpers.reports import cost_rows

from fedmoe_pl.callbacks.figures import RC, WIDTH, by_class, client_order, gate_figure, partition_figure, styles
from fedmoe_pl.report.costs import costs
from fedmoe_pl.report.pictures import cost_figure, curves_figure, distribution_figure
from fedmoe_pl.report.tables import Choices, Condition, Method

METRIC = "reweighted_test"


def method(label, accuracies=(0.2, 0.5, 0.7), clients=20, seeds=1):
    """A method whose run was evaluated in some rounds."""
    runs = []
    for seed in range(seeds):
        of_seed = [accuracy + 0.01 * seed for accuracy in accuracies]
        rounds = [*cost_rows(label, of_seed, spent=(1e6, 1e6, 1e9), every=1.0)]
        rng = np.random.default_rng(seed)
        of_clients = [{"method": label, METRIC: value} for value in rng.uniform(0.3, 0.9, clients)]
        runs.append(SimpleNamespace(rounds=rounds, summary=rounds[-1:], clients=of_clients, seed=seed))
    return Method(label, label, runs, True)


def assert_legible(figure):
    """Nothing that is drawn is cut off at an edge of the column, and no text is smaller than 7 points."""
    with matplotlib.rc_context(RC):
        figure.draw_without_rendering()
        box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert width == WIDTH
    assert -0.01 < box.x0 and box.x1 < width + 0.01 and -0.01 < box.y0 and box.y1 < height + 0.01
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 7


def names_overlap(axes):
    """Whether labels of the vertical axis overlap."""
    boxes = sorted((label.get_window_extent() for label in axes.get_yticklabels()), key=lambda box: box.y0)
    return any(low.y1 > high.y0 + 1 for low, high in pairwise(boxes))


LONG = ["FedMoE-DA (top_p 5, load_balancing 0.01, mixing logits)", "gate over FedAvg and Ditto", "FedAvg"]
MANY = [*LONG, *(f"method {i}" for i in range(11))]


@pytest.mark.few(1)
@pytest.mark.parametrize("labels", [["FedAvg"], MANY], ids=["one", "many"])
def test_curves_and_boxes_have_room_for_the_names(labels):
    methods = [method(label) for label in labels] + [method("once", accuracies=(0.6,))]
    of_methods = styles(one.label for one in methods)
    assert len({*of_methods.values()}) == len(methods), "every method has a look of its own"
    for figure in (
        curves_figure(methods, METRIC, of_methods),
        cost_figure(methods, METRIC, "bytes", of_methods),
        cost_figure(methods, METRIC, "flops", of_methods),
    ):
        assert_legible(figure)
    boxes = distribution_figure(methods, METRIC, of_methods)
    assert_legible(boxes)
    assert not names_overlap(boxes.axes[0])


@pytest.mark.parametrize("name", ["_A $x_$", r"\frac{"])
@pytest.mark.few(1)
def test_a_method_is_named_in_each_picture_as_it_is_called(name):
    """Matplotlib would leave out a name that begins with an underscore, and read mathematics between dollars."""
    of_method = styles([name])
    curves = curves_figure([method(name)], METRIC, of_method)
    costs = cost_figure([method(name)], METRIC, "bytes", of_method)
    once = curves_figure([method("many"), method(name, accuracies=[0.5])], METRIC, styles(["many", name]))
    boxes = distribution_figure([method(name)], METRIC, of_method)
    for figure in (curves, costs, once, boxes):
        assert_legible(figure)
        assert name in [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_the_band_is_one_standard_deviation_over_the_seeds():
    figure = curves_figure([method("FedAvg", seeds=3)], METRIC, styles(["FedAvg"]))
    (line,), (band,) = figure.axes[0].lines, figure.axes[0].collections
    assert line.get_ydata() == pytest.approx([21, 51, 71])
    assert band.get_paths()[0].vertices[:, 1].min() == pytest.approx(20)


def test_without_rounds_there_is_no_curve_and_without_clients_no_box():
    once, of_once = method("PFL-FB", accuracies=(0.6,), clients=0), styles(["PFL-FB"])
    assert curves_figure([once], METRIC, of_once) is None
    assert cost_figure([once], METRIC, "bytes", of_once) is None
    assert distribution_figure([once], METRIC, of_once) is None


@pytest.mark.parametrize("lacking", ["bytes_", "flops_before", "rounds_before"])
def test_a_method_whose_rounds_lack_a_column_of_costs_has_no_line_over_them(lacking):
    one, other = method("FedAvg"), method("old")
    for run in other.runs:
        run.rounds[:] = [{key: row[key] for key in row if not key.startswith(lacking)} for row in run.rounds]
    figure = cost_figure([one, other], METRIC, "bytes", styles(["FedAvg", "old"]))
    assert [line.get_label() for line in figure.axes[0].lines] == ["FedAvg"]
    condition = Condition("", [], [one, other], Choices())
    assert [cost.label for cost in costs(condition, METRIC, 0.5)] == ["FedAvg"]


def rows_of_clients(values, **columns):
    return [
        {"client": float(client), **columns, **{f"class_{c}": value for c, value in enumerate(of_client)}}
        for client, of_client in enumerate(values)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "classes"), [(3, 2), (100, 62)])
def test_maps_of_many_clients_and_classes_are_legible(clients, classes):
    counts = np.random.default_rng(0).integers(0, 9, (clients, classes)).astype(float)
    rows = rows_of_clients(counts, train=5.0, validation=1.0, test=0.0)
    assert (by_class(rows) == counts).all()
    weights = np.where(counts > 0, counts / 9, np.nan)
    of_experts = [row for expert in "0123" for row in rows_of_clients(weights, expert=expert)]
    means = dict(enumerate(np.nanmean(weights, axis=1)))
    figures = [
        partition_figure(rows),
        gate_figure(of_experts, {}, counts),
        gate_figure(rows_of_clients(weights, expert="global"), means, counts),
        gate_figure(rows_of_clients(weights, expert="global"), means, None),
    ]
    for figure in figures:
        assert_legible(figure)
        assert not names_overlap(figure.axes[0])
    assert len(figures[1].axes) == 5, "four experts and what their colours mean"


def test_the_partition_has_a_row_for_each_client_and_many_are_sorted_by_their_largest_class():
    counts = np.zeros((60, 3))
    counts[np.arange(60), np.arange(60) % 3] = 5
    counts[:, 0] += 1
    ordered = counts[client_order(counts)].argmax(axis=1)
    assert (np.diff(ordered) >= 0).all()
    assert client_order(counts[:30]) == [*range(30)]
    samples, sizes = partition_figure(rows_of_clients(counts[:30], train=5.0, validation=1.0, test=0.0)).axes[:2]
    np.testing.assert_array_equal(samples.images[0].get_array(), counts[:30])
    assert samples.get_ylim() == sizes.get_ylim() == (29.5, -0.5), "client 0 is above"
    assert [label.get_text() for label in samples.get_yticklabels()] == [str(client) for client in range(30)]
    assert sizes.get_legend_handles_labels()[1] == ["train", "validation"]
