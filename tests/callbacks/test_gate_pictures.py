"""Pictures of what a gate does with single samples, and with single tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import TensorData, run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedALT, FedAvg, FineTuning, PFLMoE
from fedmoe_pl.callbacks import AccuracyMonitor, SampleMonitor
from fedmoe_pl.callbacks.figures import log_figure
from fedmoe_pl.callbacks.gate_monitor import TokenGateMonitor, layer_figure, token_figure, token_weights
from fedmoe_pl.callbacks.sample_monitor import (
    GatedSamples,
    certainty_figure,
    image_samples_figure,
    text_samples_figure,
    words_of,
)
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.evaluation import measure
from fedmoe_pl.models import (
    GlobalOnly,
    LayerwiseAdapterMoE,
    LinearGate,
    LocalOnly,
    LoRA,
    PersonalizedMoE,
    ProxyGate,
    SparseMoE,
    TokenGate,
)


def images(clients=3, **kwargs):
    """Clients with eight images each."""
    x = torch.randn(30, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30) % 3
    parts = torch.arange(8 * clients).split(8)
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


@pytest.fixture
def drawn(monkeypatch):
    """What each picture was drawn of, by its tag."""
    found = {}

    def note(run, tag, draw, *arguments):
        found[tag] = draw.args
        log_figure(run, tag, draw, *arguments)

    for name in ("sample_monitor", "gate_monitor"):
        monkeypatch.setattr(f"fedmoe_pl.callbacks.{name}.log_figure", note)
    return found


@pytest.mark.slow
def test_they_are_what_each_clients_own_mixture_says_of_its_own_samples(drawn, tmp_path):
    monitor, data = SampleMonitor([0, 2], samples=3), images()
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
        certainty = weights.amax(1).sort().values.double()
        least, most = (drawn[f"samples/client_00{client}"][0][f"{name} certain"] for name in ("least", "most"))
        torch.testing.assert_close(least.certainty, certainty[:3])
        torch.testing.assert_close(most.certainty, certainty.flip(0)[:3])
    of_curve = np.concatenate([gated.weights.amax(1) for gated in found.values()])
    np.testing.assert_array_equal(drawn["samples/right_by_certainty"][0], of_curve)
    log = EventAccumulator(str(fed.run_dir / "PFL-MF"), size_guidance={"images": 0}).Reload()
    assert {"samples/client_000", "samples/client_002", "samples/right_by_certainty"} <= {*log.Tags()["images"]}
    log = EventAccumulator(str(fed.run_dir / "FedAvg"), size_guidance={"images": 0}).Reload()
    assert not [tag for tag in log.Tags()["images"] if tag.startswith("samples")], "its gate is constant"


def test_of_two_clients_both_are_shown_and_experts_of_which_none_is_global_have_numbers(drawn, tmp_path, monkeypatch):
    torch.manual_seed(0)
    module, monitor = SparseMoE(nn.Flatten(), nn.Linear(16, 3), 2, gate=ProxyGate(2)), SampleMonitor()
    fed = run([Phase("A", FedAvg("*"))], module, images(2), tmp_path, callbacks=[monitor], logger=True)
    figure = image_samples_figure(*drawn["samples/client_001"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["expert 0", "expert 1"]
    expected, sizes = monitor.compute(fed.run, "A"), []
    assert [*expected] == [0, 1]

    def mix(self, x, mix=SparseMoE.mix):
        sizes.append(len(x))
        return mix(self, x)

    monkeypatch.setattr(SparseMoE, "mix", mix)
    monkeypatch.setattr(TensorData, "evaluated_at_once", 5)
    for client, gated in monitor.compute(fed.run, "A").items():
        for part, of_all in zip(gated, expected[client], strict=True):
            torch.testing.assert_close(part, of_all)
    assert sizes == [5, 3, 5, 3], "a batch that is too large for a model's memory ends the run"


GATED = GatedSamples(
    torch.arange(32.0).view(2, 1, 4, 4),
    torch.tensor([1, 2]),
    torch.tensor([1, 0]),
    torch.tensor([[0.25, 0.75], [0.9, 0.1]]),
)


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


def test_classes_that_a_mixture_predicts_as_labels_that_are_on_or_off_are_not_shown(monkeypatch):
    """The largest of its outputs, of which there is one, is no prediction."""
    monitor, computed = SampleMonitor([0]), []
    monkeypatch.setattr(monitor, "compute", lambda *arguments: computed.append(arguments) or {})
    binary = PersonalizedMoE(nn.Sequential(nn.Flatten(), nn.Linear(16, 1)), gate=LinearGate(16), task="binary")
    loggers, models = SimpleNamespace(take_images=True), {"": binary}
    fed = SimpleNamespace(loggers=loggers, datamodule=images(), models=models, module=lambda phase: binary)
    with pytest.warns(UserWarning, match="nothing is shown, because no model predicts classes"):
        monitor.on_fit_start(fed)
    monitor.on_phase_end(fed, Phase("A", PFLMoE()), SimpleNamespace(method="A"))
    assert not computed


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer, self.last = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask=None):
        return self.last(self.layer(self.embedding(input_ids)).relu().mean(1))


def adapted(base=Tokens, layers=("layer", "last"), **kwargs):
    pytest.importorskip("peft")
    torch.manual_seed(0)
    return LayerwiseAdapterMoE(base(), LoRA([*layers], r=2), TokenGate(), pad_token_id=0, **kwargs)


def ids(n):
    x = torch.randint(1, 9, (n, 6), generator=torch.Generator().manual_seed(0))
    x[::2, 4:] = 0
    return x


def test_weights_by_layer_are_those_of_the_gate_and_blank_on_padding():
    mixture, x = adapted(), ids(4)
    found = token_weights(mixture, x)
    features = mixture.base.embedding(x)
    expected = (features @ mixture.gate.routers.layer.weight.T).softmax(-1)[..., 0].detach().numpy()
    assert np.isnan(found["layer"][::2, 4:]).all()
    np.testing.assert_allclose(found["layer"][1], expected[1], rtol=1e-5)
    np.testing.assert_allclose(found["layer"][0, :4], expected[0, :4], rtol=1e-5)
    assert found["last"].shape == (4, 1)


class OfLanguage(Tokens):
    def forward(self, input_ids, attention_mask=None):
        return self.last(self.layer(self.embedding(input_ids)).relu())


def test_logits_of_the_vocabulary_are_computed_of_a_few_samples_at_once(monkeypatch):
    mixture, x, sizes = adapted(OfLanguage, ("layer",), task="causal_lm"), ids(7), []
    expected = token_weights(mixture, x)["layer"]
    mixture.base.register_forward_hook(lambda part, inputs, output: sizes.append(output.numel()))
    monkeypatch.setattr(measure, "_MOST_VALUES", 2 * 6 * 3)
    np.testing.assert_allclose(token_weights(mixture, x)["layer"], expected, rtol=1e-6)
    assert max(sizes) == 2 * 6 * 3 and sum(sizes) >= 7 * 6 * 3


class Deeper(Tokens):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(4, 4)

    def forward(self, input_ids, attention_mask=None):
        return self.last(self.second(self.layer(self.embedding(input_ids)).relu()).mean(1))


@pytest.mark.slow
def test_pictures_are_of_means_over_tokens_and_over_the_layers_that_see_every_token(drawn, tmp_path):
    y = torch.arange(30) % 3
    data = TensorData(ids(30), y, torch.arange(24).split([8, 16]), (ids(6), y[:6]), torch.int64, batch_size=4)
    monitor, module = TokenGateMonitor(samples_per_client=4, sentences=2), adapted(Deeper, ("layer", "second", "last"))
    federation = run([Phase("FedALT", FedALT())], module, data, tmp_path, 1, logger=True, callbacks=[monitor])
    assert {*drawn} <= {*EventAccumulator(str(federation.run_dir / "FedALT")).Reload().Tags()["images"]}
    clients, means, _ = drawn["token_gate/by_client_and_layer"]
    assert clients == [0, 1]
    for client, of_client in zip(clients, means, strict=True):
        weights = token_weights(federation.client_module("FedALT", client), data.x[data.train_samples[client][:4]])
        expected = {path: np.mean(of_layer[~np.isnan(of_layer)]) for path, of_layer in weights.items()}
        assert of_client == pytest.approx(expected) and len({*of_client.values()}) == 3
    weights = token_weights(federation.client_module("FedALT", 0), data.x[:2])
    np.testing.assert_allclose(drawn["token_gate/by_token"][0], (weights["layer"] + weights["second"]) / 2, rtol=1e-5)


def test_maps_have_a_cell_for_each_weight_and_words_where_they_are_known():
    figure = layer_figure([3, 5], [{"a": 0.25, "b": 0.5}, {"a": 1.0, "b": 0.0}], "title")
    (image,) = figure.axes[0].images
    assert image.get_array().tolist() == [[0.25, 0.5], [1.0, 0.0]]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["a", "b"]
    weights = np.array([[0.25, 0.75, np.nan], [1.0, np.nan, np.nan]])
    figure = token_figure(weights, [["oil", "prices", ""], ["sport", "", ""]], "title")
    assert [text.get_text() for text in figure.axes[0].texts] == ["oil", "prices", "sport"]
    assert figure.axes[0].images[0].get_array().shape == (2, 2)
    figure = token_figure(weights[:, ::-1], [["", "prices", "oil"], ["", "", "sport"]], "padded on the left")
    assert sorted(text.get_text() for text in figure.axes[0].texts) == ["oil", "prices", "sport"]
    assert figure.axes[0].images[0].get_array().shape == (2, 2)


def test_names_of_layers_have_their_place_above_the_colour_bar():
    start = "bert.encoder.layer"
    paths = [f"{start}.{layer}.attention.self.{name}" for layer in range(12) for name in ("query", "value")]
    figure = layer_figure([0, 1], [dict.fromkeys(paths, 0.5)] * 2, "title")
    FigureCanvasAgg(figure).draw()  # warns if there is too little room
    axes, bar = figure.axes
    labels = axes.get_xticklabels()
    assert labels[-1].get_text() == "11.attention.self.value" and axes.get_xlabel() == f"layer of {start}"
    lowest = min(label.get_window_extent().y0 for label in (*labels, axes.xaxis.label))
    assert lowest > bar.get_window_extent().y1 and bar.get_tightbbox().y0 >= 0
    assert axes.get_window_extent().height > figure.bbox.height / 4
