"""A federation on map-style datasets and LightningDataModules: the same bits in every process, and after a kill."""

from functools import partial

import pytest
import torch
from helpers.data import set_up
from helpers.map_style import DictData, Dicts, WordLoss, WordModel, Words, images, padded
from helpers.runs import Kill, assert_same, federation
from helpers.workers import TwoInThisProcess
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import nn
from torchmetrics import MeanSquaredError
from torchvision.transforms import v2

from fedmoe_pl import PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedALA, FedAvg, FedProx, Local, PFLMoE
from fedmoe_pl.backends import StackedBackend
from fedmoe_pl.checkpoints.checkpoint import load_checkpoint
from fedmoe_pl.data import Dirichlet, FromDataModule, FromDatasets
from fedmoe_pl.models import ConstantGate, LinearGate


def model() -> PersonalizedMoE:
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    return PersonalizedMoE(expert, optimizer=partial(torch.optim.SGD, lr=0.1))


START = {"global_expert": "FedAvg", "local_expert": "Local"}


def phases() -> list[Phase]:
    torch.manual_seed(1)
    fedavg = Phase("FedAvg", FedAvg("global_expert.*"), rounds=2, gate=ConstantGate(1.0))
    local = Phase("Local", Local(), gate=ConstantGate(0.0))
    return [fedavg, local, Phase("PFL-MF", PFLMoE(gate_fraction=0.0), gate=LinearGate(108), start=START)]


def data(**arguments) -> FromDatasets:
    transforms = [v2.RandomHorizontalFlip(), v2.ColorJitter(0.5)]
    arguments = {"batch_size": 4, "partitioner": Dirichlet(5.0), "test_fraction": 0.2, "num_clients": 3} | arguments
    return FromDatasets(images(transforms=transforms), images(9, offset=100), images(), **arguments)


def result(run):
    content = load_checkpoint(run.run_dir / "checkpoints/last.ckpt")
    return content["phases"], (run.run_dir / "clients.csv").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = federation(tmp_path_factory.mktemp("whole"), phases())
    run.fit(model(), data())
    return run


@pytest.mark.slow
@pytest.mark.parametrize("way", ["workers", "worker processes", "killed"])
def test_workers_processes_that_read_samples_and_a_kill_change_no_bit(whole, tmp_path, way):
    """Transforms are random."""
    settings = {"workers": {"backend": TwoInThisProcess()}, "worker processes": {"trainer": TWO_DEVICES}}.get(way, {})
    if way == "killed":
        with pytest.raises(KeyboardInterrupt):
            federation(tmp_path, phases(), callbacks=[Kill("on_round_end", 1)]).fit(model(), data())
    run = federation(tmp_path, phases(), **settings)
    run.fit(model(), data(num_workers=int(way != "killed")), ckpt_path="last" if way == "killed" else None)
    assert_same([*result(run)], [*result(whole)])


TWO_DEVICES = {"accelerator": "cpu", "devices": 2}


@pytest.mark.parametrize(("module", "algorithm"), [(WordModel, FedAvg), (WordLoss, FedProx)])
@pytest.mark.few(1)
def test_a_module_of_dict_batches_is_trained_and_evaluated(module, algorithm, tmp_path):
    words = FromDataModule(DictData(), targets="label", num_clients=3, validation_fraction=0.2, test_fraction=0.2)
    trainer = {"accelerator": "cpu", "max_epochs": 4, "limit_val_batches": 1.0 if module is WordLoss else 0}
    run = federation(tmp_path, [Phase("p", algorithm(), rounds=2)], trainer=trainer)
    run.fit(module(), words)
    (evaluation,) = result(run)[0]["p"].evaluations
    trained = module()
    trained.load_state_dict(result(run)[0]["p"].server)
    with torch.no_grad():
        scores = torch.cat([trained(batch) for batch in words.test_dataloader()])
    right = (scores.argmax(1) == words.y[words.global_test]).double().mean().item()
    assert evaluation.clients[0].global_test == pytest.approx(right)
    assert 0 <= evaluation.clients[1].local_test <= 1


def test_a_plain_trainer_takes_dict_batches(tmp_path):
    words = set_up(FromDataModule(DictData(), targets="label", num_clients=3))
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    trainer.fit(WordModel(), words.train_dataloader())
    assert trainer.global_step == 6


def with_lengths(samples):
    """The length of each sequence is a target that is no class."""
    lengths = torch.tensor([[float(len(sample["words"]))] for sample in samples])
    return {**padded(samples), "length": lengths}


class Lengths(Words):
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch)[:, :1], batch["length"])

    def predict_step(self, batch, batch_idx):
        return self(batch)[:, :1]


def test_targets_of_dict_batches_are_measured(tmp_path):
    samples = [{**sample, "length": float(len(sample["words"]))} for sample in (Dicts(20)[i] for i in range(20))]
    words = FromDatasets(samples, samples, targets="length", num_clients=2, collate_fn=with_lengths)
    run = federation(tmp_path, [Phase("p", FedAvg())], metrics={"mse": MeanSquaredError()})
    run.fit(Lengths(), words)
    (evaluation,) = result(run)[0]["p"].evaluations
    assert evaluation.clients[0].metrics["global_test_mse"] > 0


def mixed(samples):
    """Mixes each sample with the next one, as torchvision's MixUp does; labels become probabilities."""
    x, y = torch.utils.data.default_collate(samples)
    y = nn.functional.one_hot(y, 3).float()
    return 0.7 * x + 0.3 * x.roll(1, 0), 0.7 * y + 0.3 * y.roll(1, 0)


@pytest.mark.parametrize("eval_collate_fn", [None, torch.utils.data.default_collate])
@pytest.mark.few(1)
def test_a_collate_function_may_mix_samples_and_labels(eval_collate_fn, tmp_path):
    torch.manual_seed(0)
    run = federation(tmp_path, [Phase("Local", Local(), gate=ConstantGate(0.0))])
    mixing = data(collate_fn=mixed, eval_collate_fn=eval_collate_fn, validation_fraction=0.2)
    run.fit(model(), mixing)
    client = result(run)[0]["Local"].evaluations[0].clients[0]
    module, samples = run.client_module("Local", 0), mixing.test_samples[0]
    (batch,) = mixing.batches(samples, batch_size=len(samples))
    with torch.no_grad():
        right = module(batch[0]).argmax(1) == mixing.y[samples]
    assert client.local_test == pytest.approx(right.double().mean().item())
    assert client.validation_loss > 0


class Scores(WordModel):
    def predict_step(self, batch, batch_idx):
        return {"labels": self(batch)}


@pytest.mark.parametrize(
    ("module", "algorithm", "targets", "sentence"),
    [
        (
            model,
            FedAvg(),
            "label",
            "target_key is 'labels', but must be 'label', because it is the key of the targets of",
        ),
        (Scores, FedAvg(), "label", "a Scores does not accept the batches of dict of FromDataModule"),
        (WordLoss, FedALA("embedding", 1), "label", "FedALA needs a class for each sample|FedALA needs the loss"),
        (WordModel, FedAvg(), "user", "evaluate is True, but must be False, because the data have batches of dict"),
    ],
)
def test_what_cannot_work_is_refused_before_training(tmp_path, module, algorithm, targets, sentence):
    words = FromDataModule(DictData(), targets=targets, num_clients=3)
    with pytest.raises(MisconfigurationException, match=sentence):
        federation(tmp_path, [Phase("p", algorithm)]).fit(module(), words)


def test_samples_that_are_read_one_by_one_are_not_stacked(tmp_path):
    with pytest.raises(MisconfigurationException, match="cannot stack the clients: samples are read one by one"):
        federation(tmp_path, phases(), backend=StackedBackend()).fit(model(), data())
