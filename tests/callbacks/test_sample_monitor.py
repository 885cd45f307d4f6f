"""Pictures of single samples beside the weights of a gate."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import TensorData, run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE
from fedmoe_pl.callbacks import AccuracyMonitor, SampleMonitor
from fedmoe_pl.callbacks.sample_monitor import (
    GatedSamples,
    certainty_figure,
    image_samples_figure,
    text_samples_figure,
    words_of,
)
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import GlobalOnly, LinearGate, LocalOnly, PersonalizedMoE


def images(**kwargs):
    """Three clients with eight images each."""
    x = torch.randn(30, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30) % 3
    parts = torch.arange(24).split(8)
    data = TensorData(x[:24], y[:24], parts, (x[24:], y[24:]), torch.float32, batch_size=4, **kwargs)
    data.setup()
    return data


def model():
    torch.manual_seed(0)
    return PersonalizedMoE(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))


def fitted(path, *callbacks, data=None):
    phases = [
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=2, gate=GlobalOnly()),
        Phase("PFL-FT", FineTuning(gate_fraction=0.25), gate=LocalOnly()),
        Phase("PFL-MF", PFLMoE(), gate=LinearGate(16), train=Train(max_epochs=2)),
    ]
    return run(phases, model(), data or images(), path, callbacks=[*callbacks], logger=True)


@pytest.mark.slow
def test_they_are_what_each_clients_own_mixture_says_of_its_own_samples(tmp_path):
    monitor, data = SampleMonitor([0, 2]), images()
    fed = fitted(tmp_path, monitor, data=data)
    found = monitor.compute(fed.run, "PFL-MF")
    assert [*found] == [0, 2]
    for client, gated in found.items():
        module, x = fed.client_module("PFL-MF", client), data.x[8 * client : 8 * client + 8]
        weights = module.gate(x)
        shares = [expert(x).softmax(1) for expert in (module.global_expert, module.local_expert)]
        scores = weights[:, :1] * shares[0] + weights[:, 1:] * shares[1]
        torch.testing.assert_close(gated.weights, weights.double(), check_dtype=False)
        assert torch.equal(gated.predicted, scores.argmax(1)) and torch.equal(gated.classes, data.y[8 * client :][:8])
    log = EventAccumulator(str(fed.run_dir / "PFL-MF"), size_guidance={"images": 0}).Reload()
    assert {"samples/client_000", "samples/client_002", "samples/right_by_certainty"} <= {*log.Tags()["images"]}
    log = EventAccumulator(str(fed.run_dir / "FedAvg"), size_guidance={"images": 0}).Reload()
    assert not [tag for tag in log.Tags()["images"] if tag.startswith("samples")], "its gate is constant"


GATED = GatedSamples(
    torch.arange(32.0).view(2, 1, 4, 4),
    torch.tensor([1, 2]),
    torch.tensor([1, 0]),
    torch.tensor([[0.25, 0.75], [0.9, 0.1]]),
)


def test_the_least_certain_samples_are_those_whose_largest_weight_is_lowest(monkeypatch):
    shares = torch.tensor([0.25, 0.5, 0.1, 0.4, 0.95])
    gated = GatedSamples(
        torch.arange(80.0).view(5, 1, 4, 4), *torch.zeros(2, 5).long(), torch.stack((shares, 1 - shares), 1)
    )
    drawn = {}
    monkeypatch.setattr(
        "fedmoe_pl.callbacks.sample_monitor.log_figure", lambda run, tag, draw, *_: drawn.update({tag: draw.args})
    )
    fake = SimpleNamespace(
        datamodule=images(),
        loggers=SimpleNamespace(take_images=True),
        module=lambda phase: PersonalizedMoE(nn.Linear(16, 3), gate=LinearGate(16)),
    )
    monitor = SampleMonitor([1], samples=2)
    monkeypatch.setattr(monitor, "compute", lambda run, method: {1: gated})
    result = SimpleNamespace(method="PFL-MF", step=1)
    monitor.on_phase_end(fake, SimpleNamespace(name="PFL-MF"), result)
    panels = drawn["samples/client_001"][0]
    assert panels["least certain"].weights[:, 0].tolist() == shares[[1, 3]].tolist()
    assert panels["most certain"].weights[:, 0].tolist() == shares[[4, 2]].tolist()
    assert drawn["samples/right_by_certainty"][0].tolist() == torch.maximum(shares, 1 - shares).tolist()


def test_an_image_has_its_class_and_its_weights():
    figure = image_samples_figure({"least certain": GATED}, "a title")
    FigureCanvasAgg(figure).draw()
    first, second = (axes for axes in figure.axes if axes.images)
    assert (first.get_title(), second.get_title()) == ("1", "2, not 0")
    np.testing.assert_allclose(np.asarray(second.images[0].get_array()).squeeze(), np.arange(16).reshape(4, 4) / 15)
    bars = [axes for axes in figure.axes if axes.patches]
    assert [patch.get_width() for patch in bars[0].patches] == pytest.approx([0.25, 0.75])
    assert [patch.get_x() for patch in bars[0].patches] == pytest.approx([0, 0.25]), "beside each other"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["global expert", "local expert"]


def test_classes_that_have_names_are_called_by_them():
    names = ["cat", "dog", "owl"]
    figure = image_samples_figure({"least certain": GATED}, "a title", names)
    assert [axes.get_title() for axes in figure.axes if axes.images] == ["dog", "owl, not cat"]
    texts = {"most certain": [["good"], ["bad"]]}
    figure = text_samples_figure({"most certain": GATED}, texts, "a title", names)
    assert figure.axes[1].get_xlabel() == "0.90 0.10; most certain; class owl, predicted cat"


def test_a_text_has_its_words():
    data = images()
    data.vocabulary = ["good", "bad"]
    texts = words_of(data, torch.tensor([[2, 3, 0], [9, 1, 2]]))
    assert texts == [["good", "bad", ""], ["?", "?", "good"]]
    figure = text_samples_figure({"most certain": GATED}, {"most certain": texts}, "a title")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["good bad", "? ? good"]
    assert figure.axes[1].get_xlabel() == "0.90 0.10; most certain; class 2, predicted 0"
    assert words_of(data, torch.rand(2, 3)) is None


def test_the_curve_has_the_share_of_right_predictions_in_each_bin():
    certainty, right = np.array([0.5, 0.52, 0.98, 1.0]), np.array([False, True, True, True])
    above, below = certainty_figure(certainty, right, "a title").axes
    assert above.lines[0].get_ydata().tolist() == [0.5, 1.0]
    assert above.lines[0].get_xdata() == pytest.approx([0.525, 0.975])
    assert below.patches[0].get_data().values.tolist() == [2, *[0] * 8, 2]


def test_a_client_that_is_not_there_is_refused_and_data_that_cannot_be_shown_are_named(tmp_path):
    for callback in (SampleMonitor([3]), AccuracyMonitor([3])):
        with pytest.raises(InvalidArgumentError, match=r"clients is \[3\], but must be ids of clients, from 0 to 2"):
            fitted(tmp_path, callback)
    with pytest.warns(UserWarning, match="nothing is shown, because no logger takes pictures"):
        run([Phase("FedAvg", FedAvg("*"))], model(), images(), tmp_path, callbacks=[SampleMonitor()])
