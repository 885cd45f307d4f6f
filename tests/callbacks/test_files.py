"""Clients' checkpoints of a user's own modules, which ``load_from_checkpoint`` builds again without arguments."""

import re
from argparse import ArgumentError
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import phase, run
from helpers.runs import data
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl import PersonalizedMoE
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.callbacks.files import _checkpoint
from fedmoe_pl.models import NetworkGate


class Classifier(LightningModule):
    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class Own(Classifier):
    """A classifier of 5 numbers whose shape and optimizer follow from its hyperparameters."""

    def __init__(self, hidden: int = 4, lr: float = 0.5, sizes: tuple = (1,), activation: Callable | None = None):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(5, hidden), (activation or nn.Tanh)(), nn.Linear(hidden, 3))


class WithAttribute(Classifier):
    """The attribute ``dropout`` is a layer, the argument its probability."""

    def __init__(self, dropout: float = 0.5):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(self.dropout, nn.Linear(5, 3))


class OfOneArgument(Classifier):
    """Keeps its settings as one dict."""

    def __init__(self, settings: dict):
        super().__init__()
        self.save_hyperparameters(settings)
        self.layers = nn.Sequential(nn.Linear(5, settings["hidden"]), nn.Linear(settings["hidden"], 3))


class OwnMixture(PersonalizedMoE):
    """Neither ``hidden`` nor ``note`` is an attribute; ``mixing`` is one of the other arguments."""

    def __init__(self, hidden: int = 4, note: str = "none", **kwargs):
        super().__init__(nn.Linear(5, 3) if hidden == 4 else nn.Sequential(nn.Linear(5, hidden), nn.Linear(hidden, 3)))
        self.mixing = kwargs.get("mixing", self.mixing)
        self.save_hyperparameters()


def checkpoints(module, tmp_path) -> list:
    """A client's personalized model and one that is all clients', each with the path of its checkpoint."""
    phases = [phase("Local", Local(), evaluate=True), phase("FedAvg", FedAvg(), evaluate=True)]
    finished = run(phases, module, data(), tmp_path, max_epochs=1, enable_checkpointing=True)
    files = {"Local": "client_001.ckpt", "FedAvg": "all_clients.ckpt"}
    return [
        (finished.client_module(method, 1), finished.run_dir / "clients" / method / file)
        for method, file in files.items()
    ]


def written(module, path):
    """The checkpoint of a module, as the callback writes it."""
    torch.save(_checkpoint(module), path)
    return path


def test_an_own_module_is_loaded_with_its_hyperparameters_and_what_cannot_be_loaded_safely_is_named(tmp_path):
    slope = partial(nn.LeakyReLU, 0.3)
    with pytest.warns(match=r"lack arguments of Own .*: activation \(partial\). Pass them to Own.load_from_checkpoint"):
        files = checkpoints(Own(hidden=16, lr=0.25, activation=slope), tmp_path)
    for client_module, path in files:
        loaded = Own.load_from_checkpoint(path, activation=slope).eval()
        assert dict(loaded.hparams) == {"hidden": 16, "lr": 0.25, "sizes": (1,), "activation": slope}
        assert torch.equal(loaded(data().x), client_module(data().x))


def test_settings_in_one_argument_and_those_of_a_subclass_of_a_mixture_are_loaded(tmp_path):
    of_one = OfOneArgument.load_from_checkpoint(written(OfOneArgument({"hidden": 7, "lr": 0.125}), tmp_path / "a.ckpt"))
    assert dict(of_one.hparams.get("settings", of_one.hparams)) == {"hidden": 7, "lr": 0.125}
    module = OwnMixture(hidden=6, note="mine", mixing="probabilities").eval()
    loaded = OwnMixture.load_from_checkpoint(written(module, tmp_path / "b.ckpt")).eval()
    assert (loaded.hparams["hidden"], loaded.hparams["note"], loaded.mixing) == (6, "mine", "probabilities")
    assert torch.equal(loaded(data().x), module(data().x))


class OwnExpert(nn.Module):
    """Does not keep its argument."""

    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, hidden), nn.Linear(hidden, 3))

    def forward(self, x):
        return self.layers(x)


class Nested(Classifier):
    """Has a module as an argument."""

    def __init__(self, body: nn.Module, lr: float = 0.5):
        super().__init__()
        self.save_hyperparameters()
        self.layers = body


class WithoutHyperparameters(Classifier):
    """Keeps its arguments as attributes."""

    def __init__(self, hidden, body, lr=0.5):
        super().__init__()
        self.hidden, self.body, self.lr = hidden, body, lr
        self.layers = nn.Linear(5, hidden)

    def forward(self, x):
        return self.body(self.layers(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class WithoutConstructor(nn.Module):
    def forward(self, x):
        return x[0]


def recurrent():
    return nn.Sequential(nn.LSTM(5, 3, 2, bias=False, batch_first=True, dropout=0.25), WithoutConstructor(), nn.Tanh())


def layers():
    return nn.Sequential(nn.Linear(5, 4, bias=False), nn.Dropout(0.25), nn.LeakyReLU(0.2), nn.Linear(4, 3))


@pytest.mark.filterwarnings("ignore:Attribute .* is an instance of `nn.Module`")  # of Lightning, when it is loaded
@pytest.mark.parametrize(
    "module",
    [
        lambda: Nested(nn.Linear(5, 3)),
        lambda: Nested(layers(), lr=0.25),
        lambda: Nested(recurrent()),
        lambda: WithoutHyperparameters(6, nn.Linear(6, 3, bias=False), lr=0.25),
        lambda: PersonalizedMoE(layers(), gate=NetworkGate(nn.Sequential(nn.Linear(5, 2)))),
    ],
)
def test_modules_with_modules_among_their_arguments_are_loaded_in_one_line(module, tmp_path):
    made = module().eval()
    loaded = type(made).load_from_checkpoint(written(made, tmp_path / "own.ckpt")).eval()
    assert torch.equal(loaded(data().x), made(data().x))
    assert str(loaded) == str(made), "with the same dropout"
    if "lr" in vars(made) or made.hparams:
        rates = [each.configure_optimizers().param_groups[0]["lr"] for each in (loaded, made)]
        assert rates[0] == rates[1]


@pytest.mark.filterwarnings("ignore:Attribute .* is an instance of `nn.Module`")
def test_a_module_that_cannot_be_described_is_named_at_both_ends(tmp_path, caplog, recwarn):
    reason = "hidden of OwnExpert, which keeps no attribute of this name"
    lacking = rf"lack arguments of Nested .*: body \({reason}\)\. Pass them to Nested.load_from"
    files = checkpoints(Nested(OwnExpert(6)), tmp_path)
    said = re.findall(lacking, "\n".join([*(str(warning.message) for warning in recwarn), caplog.text]))
    assert len(said) == 1, "once, although there are two phases"
    for client_module, path in files:
        with pytest.raises(MisconfigurationException, match="body is missing, because the checkpoint"):
            Nested.load_from_checkpoint(path)
        loaded = Nested.load_from_checkpoint(path, body=OwnExpert(6)).eval()
        assert torch.equal(loaded(data().x), client_module(data().x))


def test_an_attribute_of_the_same_name_is_not_taken_for_the_argument(tmp_path):
    path = written(WithAttribute(0.25), tmp_path / "own.ckpt")
    with pytest.raises((ArgumentError, MisconfigurationException), match="dropout is missing, because the checkpoint"):
        WithAttribute.load_from_checkpoint(path)
    assert WithAttribute.load_from_checkpoint(path, dropout=0.25).dropout.p == 0.25
