"""A run in channels-last format: it lasts to the end of the run and beyond, and the results are the contiguous ones."""

import copy
from functools import partial

import pytest
import torch
from helpers import TensorData
from helpers.models import in_channels_last
from helpers.runs import Kill, assert_same
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parameter import is_lazy

from fedmoe_pl import Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE
from fedmoe_pl.callbacks import ClientCheckpoint
from fedmoe_pl.checkpoints.checkpoint import load_checkpoint
from fedmoe_pl.models import GlobalOnly, LocalOnly, NetworkGate, TwoConvCNN
from fedmoe_pl.rounds.begin import sized


class Watched(PersonalizedMoE):
    """Computes only in the format that it was asked for, in training and in evaluation."""

    is_checked = False

    def check_gate(self, x):
        self.is_checked = True  # the parts are tried before their format is set
        super().check_gate(x)
        self.is_checked = False

    def mix(self, x):
        assert self.is_checked or any(map(is_lazy, self.parameters())) or in_channels_last(self) == self.channels_last
        return super().mix(x)


def network(**kwargs):
    return TwoConvCNN(1, image_size=16, dropout=0.2, conv1_channels=4, conv2_channels=4, hidden1=8, hidden2=8, **kwargs)


def model(channels_last=True):
    torch.manual_seed(0)
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return Watched(network(num_classes=3), optimizer=optimizer, channels_last=channels_last).double()


def phases():
    torch.manual_seed(1)
    return [
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=3, clients_per_round=2, gate=GlobalOnly()),
        Phase("PFL-FB", FineTuning("local_expert.classifier.*", gate_fraction=0.25), gate=LocalOnly()),
        Phase("own gate", PFLMoE(), gate=NetworkGate(network(num_classes=1))),
    ]


def federation(path, **kwargs):
    arguments = {"enable_progress_bar": False, "logger": False, "trainer": {"accelerator": "cpu", "max_epochs": 2}}
    return Federation(phases(), default_root_dir=path, **{**arguments, **kwargs})


def data():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(44) % 3
    x = (torch.randn(3, 1, 16, 16, generator=generator))[y] + torch.randn(44, 1, 16, 16, generator=generator)
    parts = torch.arange(32).split([10, 9, 13])
    return TensorData(x[:32], y[:32], parts, (x[32:], y[32:]), torch.float64, batch_size=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = federation(tmp_path_factory.mktemp("whole"))
    run.fit(model(), data())
    return run


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, callbacks=[Kill("on_client_end", 8)]).fit(model(), data())
    resumed = federation(tmp_path)
    resumed.fit(model(), data(), ckpt_path="last")
    content, expected = (load_checkpoint(run.run_dir / "checkpoints/last.ckpt") for run in (resumed, whole))
    assert_same(content, expected)


def test_a_client_s_checkpoint_restores_the_format(tmp_path):
    torch.manual_seed(0)
    run = federation(tmp_path, callbacks=[ClientCheckpoint()])
    run.phases = run.phases[:1]
    run.fit(PersonalizedMoE(network(num_classes=3), channels_last=True).double(), data())
    checkpoint = run.run_dir / "clients" / "FedAvg" / "all_clients.ckpt"
    module = PersonalizedMoE.load_from_checkpoint(checkpoint)
    assert module.channels_last and in_channels_last(module)


class OwnModule(LightningModule):
    """A user's own module, which asks for the format itself."""

    def __init__(self, memory_format=torch.channels_last):
        super().__init__()
        torch.manual_seed(0)
        self.expert = network(num_classes=3)
        self.expert.dropout = 0.0
        self.to(memory_format=memory_format)
        self.memory_format = memory_format

    def forward(self, x):
        assert in_channels_last(self) == (self.memory_format == torch.channels_last)
        return self.expert(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_a_user_s_own_module_keeps_the_format_that_it_chose(tmp_path):
    federated = []
    for memory_format in (torch.channels_last, torch.contiguous_format):
        run = Federation(
            [Phase("FedAvg", FedAvg(), rounds=2)],
            {"accelerator": "cpu"},
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            logger=False,
        )
        run.fit(OwnModule(memory_format).double(), data())
        federated.append(run.client_module("FedAvg", 0))
    torch.testing.assert_close(federated[0].state_dict(), federated[1].state_dict(), rtol=1e-8, atol=1e-10)
    assert in_channels_last(federated[0])


def test_a_gate_that_the_data_size_gets_the_format():
    class NoShape(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network(num_classes=3)

        def forward(self, x):
            return self.layers(x)

    gate = NetworkGate(nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(1)))
    datamodule = data()
    datamodule.setup()
    module = PersonalizedMoE(NoShape(), gate=copy.deepcopy(gate), channels_last=True).double()
    assert in_channels_last(sized(module, datamodule, seed=0))
