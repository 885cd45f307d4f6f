"""Export of a client's model."""

import io
import json
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from helpers import run
from helpers.data import set_up
from helpers.methods import METHODS
from helpers.methods import data as data_of_methods
from helpers.runs import WithDropout, assert_same, data, federation, model
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from PIL import Image
from torch import nn
from torch.optim import SGD
from torchmetrics import MeanSquaredError

from fedmoe_pl import PersonalizedMoE, Phase, SparseMoE
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.commands import export
from fedmoe_pl.data import (
    IID,
    AGNews,
    ClientFolders,
    ClientNames,
    CsvFile,
    FromDatasets,
    SyntheticTimeSeries,
    TimeSeriesFile,
)
from fedmoe_pl.data.own_client import add_clients
from fedmoe_pl.data.partitioners.given import AllToOne
from fedmoe_pl.evaluation.outputs import ScoresAndWeights
from fedmoe_pl.models import LinearGate, LocalOnly, MixtureWeights, SmallMLP


@pytest.fixture(scope="module")
def fed(tmp_path_factory):
    run = federation(tmp_path_factory.mktemp("run"))
    run.fit(model(), data())
    return run


def exported(fed, **arguments):
    fed.export(model(), data(), **arguments)


def about_of(model, datamodule, tmp_path, client=0, **settings):
    """What a file says of the numbers of a client's model that was trained alone."""
    phase = Phase("A", Local(), gate=LocalOnly())
    finished = run([phase], model, datamodule, tmp_path, enable_checkpointing=True, **settings)
    about, path = {export.ABOUT: ""}, tmp_path / "model"
    finished.export(model, datamodule, method="A", client=client, format="torch_export", output=str(path))
    torch.export.load(path, extra_files=about)
    return json.loads(about[export.ABOUT])


def test_a_number_on_the_command_line_is_a_name_first():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(export.export_clients, skip={"run"}, fail_untyped=False)
    names = ClientNames(["1", "10", "11", "2"])
    asked = [parser.parse_args(["--method", "M", "--client", client]).client for client in ("2", "3", "10")]
    assert [names.number("Federation", client) for client in (*asked, 2)] == [3, 3, 1, 2]


def test_torch_export_is_the_client_s_mixture_with_its_gate_for_batches_of_any_size(fed, capsys):
    exported(fed, method="PFL-MF", client=2, format="torch_export")
    path = fed.run_dir / "exported" / "PFL-MF" / "client_002.pt2"
    assert capsys.readouterr().out.startswith(f"Client 2 of PFL-MF: {path} (")
    program = torch.export.load(path).module()
    module, x = fed.client_module("PFL-MF", 2), torch.randn(19, 5)
    for batch in (x, x[:1]):
        torch.testing.assert_close(program(batch), module.mix(batch))


def test_onnx_is_the_client_s_mixture_with_its_gate(fed, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    path = tmp_path / "models" / "a.onnx"
    exported(fed, method="PFL-MF", client=1, output=str(path))
    assert "the outputs differ by at most" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["scores", "gate_weights"]
    x = torch.randn(7, 5)
    scores, weights = session.run(None, {"x": x.numpy()})
    expected = fed.client_module("PFL-MF", 1).mix(x)
    torch.testing.assert_close((torch.from_numpy(scores), torch.from_numpy(weights)), expected)


@pytest.mark.parametrize("format", ["onnx", "torch_export"])
@pytest.mark.few(1)
def test_a_file_has_what_its_numbers_mean_and_no_sample(format, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime") if format == "onnx" else None
    images = np.random.default_rng(0).integers(256, size=(40, 4, 4, 3), dtype=np.uint8)
    for index, image in enumerate(images):
        path = tmp_path / f"data/site_{index % 2}/{('oak', 'ash')[index // 20]}/{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    folders = ClientFolders(str(tmp_path / "data"), image_size=4, test_fraction=0.5)
    phase = Phase("A", Local(), gate=LocalOnly())
    mixture = PersonalizedMoE(SmallMLP(48, 4, 2), optimizer=SGD)
    finished = run([phase], mixture, folders, tmp_path, enable_checkpointing=True)
    path = tmp_path / "model"
    finished.export(mixture, folders, method="A", client="site_1", format=format, output=str(path))
    if onnxruntime is None:
        about = {export.ABOUT: ""}
        (example,), _ = torch.export.load(path, extra_files=about).example_inputs
        assert not example.any()
        content = b"".join(ZipFile(path).read(name) for name in ZipFile(path).namelist())
    else:
        session, content = onnxruntime.InferenceSession(path), path.read_bytes()
        about = session.get_modelmeta().custom_metadata_map
    about = json.loads(about[export.ABOUT])
    mean, std = folders.normalization
    assert about == {"classes": ["ash", "oak"], "mean": mean, "std": std, "image_size": 4}
    weight = finished.client_module("A", 1).state_dict()["local_expert.extractor.1.weight"]
    assert weight.numpy().tobytes() in content, "tensors are found by their bytes"
    assert not any(row.numpy().tobytes() in content for row in folders.x[:, 0, 0]), "a row of an image's pixels"


def test_a_client_s_file_has_the_scales_of_its_time_series(tmp_path):
    series = SyntheticTimeSeries(num_clients=2, num_steps=60, context_length=6, prediction_length=2, test_fraction=0.2)
    mixture = PersonalizedMoE(nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), optimizer=SGD, task="regression")
    about = about_of(mixture, series, tmp_path, client=1, metrics={"mse": MeanSquaredError()})
    mean, std = [*series.scales.values()][1]
    assert about == {"mean": mean.tolist(), "std": std.tolist()}


class Meters(SyntheticTimeSeries):
    """Time series whose keys are integers, but not the clients' numbers."""

    def series(self):
        return {1 + client: series for client, series in super().series().items()}


def test_scales_are_those_of_the_client_s_own_windows_whatever_it_is_called(tmp_path):
    shape = {"num_steps": 60, "context_length": 6, "prediction_length": 2, "test_fraction": 0.2}
    meters = set_up(Meters(num_clients=3, **shape))
    for client, values in enumerate(meters.series().values()):
        mean, std = values[:48].mean(), values[:48].std()
        assert export._about(meters, client) == {"mean": [pytest.approx(mean)], "std": [pytest.approx(std)]}
    np.savez(tmp_path / "own.npz", meter=values)
    own = set_up(
        TimeSeriesFile(str(tmp_path / "own.npz"), context_length=6, prediction_length=2, partitioner=AllToOne(1))
    )
    add_clients(own, 3, 0)
    assert export._about(own, 1) == export._about(meters, 2), "a client of a deployed federation"
    mixed = set_up(SyntheticTimeSeries(num_clients=3, partitioner=IID(), **shape))
    assert export._about(mixed, 0) == {}, "its windows are of several series"


@pytest.mark.slow
def test_a_file_has_the_columns_of_its_table_and_the_vocabulary_of_its_texts(tmp_path):
    (tmp_path / "a.csv").write_text("who,weight,age,y\n" + "a,1,2,no\na,3,4,yes\n" * 3)
    table = CsvFile(str(tmp_path / "a.csv"), target="y", client="who", test_fraction=0.5)
    about = about_of(PersonalizedMoE(nn.Linear(2, 2), optimizer=SGD), table, tmp_path)
    assert about == {"classes": ["no", "yes"], "columns": ["age", "weight"]}
    for part in ("train", "test"):
        lines = [f"{i % 4 + 1},,{'sea sand sun wind'.split()[i % 4]}" for i in range(8)]
        (tmp_path / f"{part}.csv").write_text("\n".join(lines))
    texts = AGNews(str(tmp_path), vocabulary_size=3, length=2, num_clients=1, partitioner=IID())
    network = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 4))  # torch 2.9 cannot export a BiLSTM
    about = about_of(PersonalizedMoE(network, optimizer=SGD), texts, tmp_path)
    assert about["vocabulary"] == ["sand", "sea", "sun"]


def test_what_cannot_be_exported_is_refused(fed, monkeypatch):
    def refused(**arguments):
        with pytest.raises(InvalidArgumentError) as error:
            exported(fed, **{"method": "PFL-MF", "format": "torch_export", **arguments})
        return error.value.argument

    for argument, value in (("method", "X"), ("client", 3), ("format", "pt")):
        assert refused(**{argument: value}) == argument
    monkeypatch.setattr(export, "_torch_export", lambda module, x, about: (b"", lambda x: [2 + y for y in module(x)]))
    assert refused(client=0) == "format", "the outputs differ"
    assert not (fed.run_dir / "exported" / "PFL-MF" / "client_000.pt2").exists()


@pytest.mark.slow
def test_lightning_loads_the_models_of_one_client_or_of_all(fed, tmp_path, capsys):
    exported(fed, method="PFL-MF", client="all", format="lightning")
    exported(fed, method="FedAvg", client="all", format="lightning", output=str(tmp_path))
    exported(fed, method="FedAvg", client=1, format="lightning", output=str(tmp_path / "own.ckpt"))
    folder = fed.run_dir / "exported/PFL-MF"
    files = {folder / f"client_{client:03d}.ckpt": ("PFL-MF", client) for client in range(3)}
    files |= {tmp_path / "all_clients.ckpt": ("FedAvg", 0), tmp_path / "own.ckpt": ("FedAvg", 1)}
    assert capsys.readouterr().out.splitlines() == [f"{method}: {path}" for path, (method, _) in files.items()]
    assert {*folder.glob("*.ckpt"), *tmp_path.iterdir()} == {*files}
    for path, (method, client) in files.items():
        experts = {name: WithDropout() for name in ("global_expert", "local_expert")}
        loaded = PersonalizedMoE.load_from_checkpoint(path, **experts).eval()
        assert_same(dict(loaded.state_dict()), dict(fed.client_module(method, client).state_dict()))


@pytest.mark.slow
def test_a_gate_whose_width_the_data_set_is_exported(tmp_path):
    fed = federation(tmp_path, [Phase("mixed", Local(), gate=LinearGate())])
    fed.fit(model(), data())
    exported(fed, method="mixed", format="torch_export")
    assert (fed.run_dir / "exported/mixed/client_000.pt2").is_file()


def test_a_method_that_predicts_with_more_than_a_model_is_refused(tmp_path):
    method = METHODS["KNNPer"]
    phases = method.phases()
    phases[-1].evaluate = True
    fed = run(phases, method.model(), data_of_methods(), tmp_path)
    with pytest.raises(InvalidArgumentError, match="KNNPer predicts with more than a model"):
        export.export_clients(fed.run, "kNN-Per", 0, "torch_export")


class OfDicts(LightningModule):
    """Its inputs are dicts, in batches that are pairs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x["values"])

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)


def test_a_model_of_dicts_is_refused(tmp_path):
    samples = [({"values": x}, int(y)) for x, y in zip(torch.randn(12, 5), torch.arange(12) % 3, strict=True)]
    fed = run([Phase("A", FedAvg())], OfDicts(), FromDatasets(samples, samples, num_clients=2), tmp_path)
    with pytest.raises(InvalidArgumentError, match="one whose model maps a tensor"):
        export.export_clients(fed.run, "A", 0, "torch_export")


class Branching(LightningModule):
    """What it computes depends on the values of its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


MODELS = {
    "a constant gate": lambda: PersonalizedMoE(nn.Linear(5, 3), gate=LocalOnly()),
    "weights of a client": lambda: SparseMoE(nn.Identity(), nn.Linear(5, 3), gate=MixtureWeights()),
    "samples sent to experts": lambda: SparseMoE(nn.Identity(), nn.Linear(5, 3)),
    "an own module": lambda: nn.Linear(5, 3),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_family_are_exported(name):
    torch.manual_seed(0)
    module, x = ScoresAndWeights(MODELS[name]()).eval(), torch.randn(6, 5)
    module(x)  # sizes a lazy gate
    content, difference = export._exported(module, x, "FedAvg", "torch_export", "{}")
    assert difference < 1e-6
    program = torch.export.load(io.BytesIO(content)).module()
    torch.testing.assert_close(program(x[:4]), module(x[:4]))


def test_why_a_model_cannot_be_exported_is_one_line_without_the_exporter_s_output(capfd):
    with pytest.raises(InvalidArgumentError, match=r"'FedAvg', but .* can export \(Could not guard .*\)\.$") as error:
        export._exported(ScoresAndWeights(Branching()).eval(), torch.randn(6, 5), "FedAvg", "torch_export", "{}")
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_missing_package_of_onnx_is_named_with_what_installs_it(fed, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(MisconfigurationException, match=r"onnx needs onnxscript: pip install .\.\[export\]"):
        exported(fed, method="PFL-MF", format="onnx")
