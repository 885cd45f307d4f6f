"""Clients' checkpoints of a user's own modules, which ``load_from_checkpoint`` builds again without arguments."""

import enum
import re
import sys
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
from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from fedmoe_pl import PersonalizedMoE
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.callbacks.files import _checkpoint
from fedmoe_pl.cli import main
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


class Mode(enum.Enum):
    FLAT = "flat"
    DEEP = "deep"


class OfTypes(Classifier):
    """Has an enumeration, a class, a function, an optimizer and a list of modules as arguments."""

    def __init__(
        self,
        bodies: list[nn.Module],
        mode: Mode = Mode.FLAT,
        activation: type[nn.Module] = nn.ReLU,
        final: Callable = F.relu,
        optimizer: OptimizerCallable = torch.optim.Adam,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.mode, self.final, self.optimizer = mode, final, optimizer
        self.layers = nn.Sequential(*bodies, activation(), nn.Linear(4, 3))

    def forward(self, x):
        return self.final(self.layers(x))

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


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


@pytest.mark.parametrize(
    ("module", "hyperparameters"),
    [
        (lambda: Own(hidden=16, lr=0.25), {"hidden": 16, "lr": 0.25, "sizes": (1,), "activation": None}),
        (lambda: OfOneArgument({"hidden": 7, "lr": 0.125}), {"hidden": 7, "lr": 0.125}),
    ],
)
def test_an_own_module_is_loaded_with_its_hyperparameters(module, hyperparameters, tmp_path):
    for client_module, path in checkpoints(module(), tmp_path):
        loaded = type(client_module).load_from_checkpoint(path).eval()
        assert dict(loaded.hparams.get("settings", loaded.hparams)) == hyperparameters
        assert torch.equal(loaded(data().x), client_module(data().x))


def test_hyperparameters_that_cannot_be_loaded_safely_are_left_out_and_named(tmp_path):
    slope = partial(nn.LeakyReLU, 0.3)
    with pytest.warns(match=r"lack arguments of Own .*: activation \(partial\). Pass them to Own.load_from_checkpoint"):
        files = checkpoints(Own(hidden=16, activation=slope), tmp_path)
    for client_module, path in files:
        loaded = Own.load_from_checkpoint(path, activation=slope).eval()
        assert loaded.hparams["hidden"] == 16
        assert torch.equal(loaded(data().x), client_module(data().x))


def test_a_subclass_of_a_mixture_is_loaded_with_its_hyperparameters(tmp_path):
    module = OwnMixture(hidden=6, note="mine", mixing="probabilities")
    for client_module, path in checkpoints(module, tmp_path):
        loaded = OwnMixture.load_from_checkpoint(path).eval()
        assert (loaded.hparams["hidden"], loaded.hparams["note"], loaded.mixing) == (6, "mine", "probabilities")
        assert torch.equal(loaded(data().x), client_module(data().x))


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
    for client_module, path in checkpoints(module(), tmp_path):
        loaded = type(client_module).load_from_checkpoint(path).eval()
        assert torch.equal(loaded(data().x), client_module(data().x))
        assert str(loaded) == str(client_module), "with the same dropout"
        if "lr" in vars(client_module) or client_module.hparams:
            assert (
                loaded.configure_optimizers().param_groups[0]["lr"]
                == (client_module.configure_optimizers().param_groups[0]["lr"])
            )


@pytest.mark.filterwarnings("ignore:Attribute .* is an instance of `nn.Module`")
@pytest.mark.parametrize(("own", "argument"), [(Nested, "body"), (PersonalizedMoE, "global_expert")])
def test_a_module_that_cannot_be_described_is_named_at_both_ends(own, argument, tmp_path, caplog, recwarn):
    reason = "hidden of OwnExpert, which keeps no attribute of this name"
    lacking = rf"lack arguments of {own.__name__} .*: {argument} \({reason}\)\. Pass them to {own.__name__}.load_from"
    files = checkpoints(own(OwnExpert(6)), tmp_path)
    said = re.findall(lacking, "\n".join([*(str(warning.message) for warning in recwarn), caplog.text]))
    assert len(said) == 1, "once, although there are two phases"
    for client_module, path in files:
        with pytest.raises(MisconfigurationException, match=f"{argument} is missing, because the checkpoint"):
            own.load_from_checkpoint(path)
        loaded = own.load_from_checkpoint(path, **{argument: OwnExpert(6)}).eval()
        assert torch.equal(loaded(data().x), client_module(data().x))


def written(module, path):
    """The checkpoint of a module, as the callback writes it."""
    torch.save(_checkpoint(module), path)
    return path


@pytest.mark.filterwarnings("ignore:Attribute .* is an instance of `nn.Module`")
def test_classes_functions_members_and_optimizers_are_loaded_where_the_type_says_so(tmp_path):
    bodies = [nn.Linear(5, 4), nn.Dropout(0.25)]
    module = OfTypes(bodies, Mode.DEEP, nn.Tanh, torch.tanh, partial(torch.optim.SGD, lr=0.25))
    loaded = OfTypes.load_from_checkpoint(written(module, tmp_path / "own.ckpt"))
    assert (loaded.mode, loaded.final, str(loaded)) == (Mode.DEEP, torch.tanh, str(module))
    (group,) = loaded.configure_optimizers().param_groups
    assert group["lr"] == 0.25 and "momentum" in group


@pytest.mark.filterwarnings("ignore:Attribute .* is an instance of `nn.Module`")
@pytest.mark.parametrize(
    ("module", "argument", "given"),
    [
        (lambda: OfTypes([nn.Linear(5, 4)], final=lambda x: -x), "final", F.gelu),
        (lambda: WithAttribute(0.25), "dropout", 0.25),
    ],
)
def test_the_default_is_never_taken_in_place_of_what_cannot_be_described(module, argument, given, tmp_path):
    path, own = written(module(), tmp_path / "own.ckpt"), type(module())
    with pytest.raises(
        (ArgumentError, MisconfigurationException),
        match=rf"{argument} is missing, because the checkpoint cannot describe",
    ):
        own.load_from_checkpoint(path)
    assert isinstance(own.load_from_checkpoint(path, **{argument: given}), own)


def test_an_argument_that_a_module_does_not_keep_is_named(tmp_path, caplog):
    class Forgetful(Classifier):
        def __init__(self, hidden):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, hidden), nn.Linear(hidden, 3))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    files = checkpoints(Forgetful(6), tmp_path)
    assert re.search(r"lack arguments of Forgetful .*: hidden\. Pass them to Forgetful", caplog.text)
    for client_module, path in files:
        loaded = Forgetful.load_from_checkpoint(path, hidden=6).eval()
        assert torch.equal(loaded(data().x), client_module(data().x))


MODULE = """
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable


class OnTheCommandLine(LightningModule):
    def __init__(self, body: torch.nn.Module, channels: int = 4, optimizer: OptimizerCallable = torch.optim.Adam):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), body, torch.nn.Linear(channels, 10))
        self.optimizer = optimizer

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.optimizer(self.parameters())
"""

CONFIGURATION = """
model:
  class_path: on_the_command_line.OnTheCommandLine
  init_args:
    body: {class_path: torch.nn.Linear, init_args: {in_features: 64, out_features: 16}}
    channels: 16
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.25}}
data: {class_path: Digits, init_args: {num_clients: 2, partitioner: IID, batch_size: 300}}
trainer: {accelerator: cpu}
federation: {phases: [{name: FedAvg, algorithm: FedAvg}], logger: false, enable_progress_bar: false}
"""


@pytest.mark.filterwarnings("ignore:Attribute .* is an instance of `nn.Module`")  # of Lightning, when it is loaded
def test_a_module_of_a_configuration_is_loaded_with_its_parts(tmp_path, monkeypatch):
    (tmp_path / "on_the_command_line.py").write_text(MODULE)
    (tmp_path / "own.yaml").write_text(CONFIGURATION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command line adds the current folder
    monkeypatch.setattr(sys, "argv", ["fedmoe"])
    main(["fit", "--config", "own.yaml"])
    (path,) = tmp_path.rglob("all_clients.ckpt")
    loaded = sys.modules["on_the_command_line"].OnTheCommandLine.load_from_checkpoint(path)
    tensors = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.net[1].out_features == loaded.hparams["channels"] == 16
    (group,) = loaded.configure_optimizers().param_groups
    assert group["lr"] == 0.25 and "momentum" in group
