"""A federation on map-style datasets and LightningDataModules: the same bits in every process, and after a kill."""

from functools import partial

import pytest
import torch
from helpers.map_style import DictData, Noisy, WordLoss, WordModel, images, padded
from helpers.runs import Kill, assert_same, federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torchvision.transforms import v2

from fedmoe_pl import PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg, FedProx, Local, PFLMoE
from fedmoe_pl.data import Dirichlet, FromDataModule, FromDatasets
from fedmoe_pl.models import ConstantGate, LinearGate
from fedmoe_pl.rounds.checkpoint import load_checkpoint


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x):
        return self.classifier(self.extractor(x))


def model() -> PersonalizedMoE:
    torch.manual_seed(0)
    return PersonalizedMoE(Expert(), optimizer=partial(torch.optim.SGD, lr=0.1))


def phases() -> list[Phase]:
    torch.manual_seed(1)
    fedavg = Phase("FedAvg", FedAvg("global_expert.*"), rounds=2, gate=ConstantGate(1.0))
    return [fedavg, Phase("PFL-MF", PFLMoE(trainable="gate.*"), gate=LinearGate(108), start="FedAvg")]


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
