"""Pictures of gates that weigh every token."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import TensorData, run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from fedmoe_pl.algorithms import FedALT
from fedmoe_pl.callbacks.gate_monitor import TokenGateMonitor, layer_figure, token_figure, token_weights
from fedmoe_pl.models import LayerwiseAdapterMoE, LoRA, TokenGate
from fedmoe_pl.phases.phase import Phase

pytest.importorskip("peft")


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer, self.last = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask=None):
        return self.last(self.layer(self.embedding(input_ids)).relu().mean(1))


def module():
    torch.manual_seed(0)
    return LayerwiseAdapterMoE(Tokens(), LoRA(["layer", "last"], r=2), TokenGate(), pad_token_id=0)


def ids(n):
    x = torch.randint(1, 9, (n, 6), generator=torch.Generator().manual_seed(0))
    x[::2, 4:] = 0
    return x


def test_weights_by_layer_are_those_of_the_gate_and_blank_on_padding():
    mixture, x = module(), ids(4)
    found = token_weights(mixture, x)
    features = mixture.base.embedding(x)
    expected = (features @ mixture.gate.routers.layer.weight.T).softmax(-1)[..., 0].detach().numpy()
    assert np.isnan(found["layer"][::2, 4:]).all()
    np.testing.assert_allclose(found["layer"][1], expected[1], rtol=1e-5)
    np.testing.assert_allclose(found["layer"][0, :4], expected[0, :4], rtol=1e-5)
    assert found["last"].shape == (4, 1)


class Deeper(Tokens):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(4, 4)

    def forward(self, input_ids, attention_mask=None):
        return self.last(self.second(self.layer(self.embedding(input_ids)).relu()).mean(1))


def test_pictures_are_of_means_over_tokens_and_over_the_layers_that_see_every_token(monkeypatch):
    torch.manual_seed(0)
    mixture = LayerwiseAdapterMoE(Deeper(), LoRA(["layer", "second", "last"], r=2), TokenGate(), pad_token_id=0)
    data = TensorData(
        ids(12), torch.arange(12) % 3, torch.arange(12).split([8, 4]), (ids(3), torch.arange(3)), torch.int64
    )
    data.setup()
    drawn = {}
    monkeypatch.setattr(
        "fedmoe_pl.callbacks.gate_monitor.log_figure", lambda run, tag, draw, *_: drawn.update({tag: draw.args})
    )
    fake = SimpleNamespace(
        datamodule=data,
        loggers=SimpleNamespace(take_images=True),
        module=lambda phase: mixture,
        client_modules=lambda method, clients: [mixture for _ in clients],
    )
    result = SimpleNamespace(method="FedALT", step=1, clients=[SimpleNamespace(client=client) for client in (0, 1)])
    TokenGateMonitor(samples_per_client=4, sentences=2).on_phase_end(fake, SimpleNamespace(name="FedALT"), result)
    clients, means, _ = drawn["token_gate/by_client_and_layer"]
    assert clients == [0, 1]
    for of_client, samples in zip(means, (slice(0, 4), slice(8, 12)), strict=True):
        weights = token_weights(mixture, data.x[samples])
        expected = {path: np.mean(of_layer[~np.isnan(of_layer)]) for path, of_layer in weights.items()}
        assert of_client == pytest.approx(expected) and len({*of_client.values()}) == 3
    weights = token_weights(mixture, data.x[:2])
    np.testing.assert_allclose(drawn["token_gate/by_token"][0], (weights["layer"] + weights["second"]) / 2, rtol=1e-5)


@pytest.mark.slow
def test_loggers_get_both_pictures(tmp_path):
    y = torch.arange(30) % 3
    data = TensorData(ids(30), y, torch.arange(24).split([8, 16]), (ids(6), y[:6]), torch.int64, batch_size=4)
    phase = Phase("FedALT", FedALT())
    federation = run([phase], module(), data, tmp_path, 1, logger=True)
    (folder,) = {path.parent for path in tmp_path.rglob("events.*") if "FedALT" in str(path)}
    tags = EventAccumulator(str(folder)).Reload().Tags()["images"]
    assert {"token_gate/by_client_and_layer", "token_gate/by_token"} <= {*tags}
    assert federation.run.states["FedALT"].server


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
