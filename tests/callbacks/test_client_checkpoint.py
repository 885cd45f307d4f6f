"""Clients' checkpoints of mixtures and of a user's own modules, from Python and from a configuration."""

import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers import Expert, blobs, phase, run
from helpers.architectures import pair
from helpers.runs import assert_same, data
from lightning.pytorch import LightningModule
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from torch import nn

from fedmoe_pl import PersonalizedMoE, SparseMoE
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.callbacks import ClientCheckpoint
from fedmoe_pl.checks import InvalidArgumentError, with_article
from fedmoe_pl.cli import main
from fedmoe_pl.commands.export import lightning_checkpoint
from fedmoe_pl.models import ConstantGate, EqualWeights, Gate, GlobalOnly, NetworkGate, SmallMLP
from fedmoe_pl.models.description import describe
from fedmoe_pl.rounds.begin import phase_module


class Classifier(LightningModule):
    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class Own(Classifier):
    """A classifier of 5 numbers whose shape and optimizer follow from its hyperparameters."""

    def __init__(self, hidden: int = 4, lr: float = 0.5, sizes: tuple = (1,), activation=None):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(5, hidden), (activation or nn.Tanh)(), nn.Linear(hidden, 3))


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


def written(module, path):
    """The checkpoint of a module, as the callback writes it."""
    torch.save(lightning_checkpoint(module), path)
    return path


def assert_computes_the_same(loaded, module):
    x = torch.rand(4, 5)
    assert torch.equal(loaded.eval()(x), module.eval()(x))


def test_clients_models_are_those_that_the_checkpoints_have(tmp_path):
    phases = [phase("Local", Local(), evaluate=True), phase("FedAvg", FedAvg(), evaluate=True)]
    finished = run(phases, Own(hidden=16, lr=0.25), data(), tmp_path, max_epochs=1, callbacks=[ClientCheckpoint()])
    for method, file in {"Local": "client_001.ckpt", "FedAvg": "all_clients.ckpt"}.items():
        loaded = Own.load_from_checkpoint(finished.run_dir / "clients" / method / file).eval()
        assert dict(loaded.hparams) == {"hidden": 16, "lr": 0.25, "sizes": (1,), "activation": None}
        assert torch.equal(loaded(data().x), finished.client_module(method, 1)(data().x))


class ToEach(FedAvg):
    """Sends each client a model of its own, which the clients do not keep."""

    def server_send(self, server, client_id, request):
        sent = super().server_send(server, client_id, request)
        return {name: tensor + client_id for name, tensor in sent.items()}


def test_clients_that_receive_different_models_have_files_of_their_own(tmp_path):
    finished = run([phase("A", ToEach(), evaluate=True)], Own(), data(), tmp_path, callbacks=[ClientCheckpoint()])
    for client in range(3):
        loaded = Own.load_from_checkpoint(finished.run_dir / "clients" / "A" / f"client_00{client}.ckpt").eval()
        assert torch.equal(loaded(data().x), finished.client_module("A", client)(data().x))


def test_clients_of_different_architectures_have_files_of_their_own(tmp_path):
    shared = phase("A", FedAvg("global_expert.*"), gate=GlobalOnly(), evaluate=True)
    callbacks = [ClientCheckpoint()]
    finished = run([shared], pair(), blobs(), tmp_path, max_epochs=1, callbacks=callbacks)
    for client in range(3):
        path = finished.run_dir / "clients" / "A" / f"client_00{client}.ckpt"
        state = torch.load(path, weights_only=False)["state_dict"]
        assert_same(dict(state), dict(finished.client_module("A", client).state_dict()))


def test_hyperparameters_are_those_of_lightning_s_checkpoints(tmp_path):
    slope = partial(nn.LeakyReLU, 0.3)
    loaded = Own.load_from_checkpoint(written(Own(activation=slope), tmp_path / "own.ckpt"), weights_only=False)
    assert loaded.layers[1].negative_slope == 0.3
    with pytest.warns(match="'activation' removed from hparams because it cannot be pickled"):
        path = written(Own(activation=lambda: nn.LeakyReLU(0.4)), tmp_path / "own.ckpt")
    assert Own.load_from_checkpoint(path, activation=slope).layers[1].negative_slope == 0.3


def test_settings_in_one_argument_and_those_of_a_subclass_of_a_mixture_are_loaded(tmp_path):
    of_one = OfOneArgument.load_from_checkpoint(written(OfOneArgument({"hidden": 7, "lr": 0.125}), tmp_path / "a.ckpt"))
    assert dict(of_one.hparams.get("settings", of_one.hparams)) == {"hidden": 7, "lr": 0.125}
    module = OwnMixture(hidden=6, note="mine", mixing="probabilities")
    loaded = OwnMixture.load_from_checkpoint(written(module, tmp_path / "b.ckpt"))
    assert (loaded.hparams["hidden"], loaded.hparams["note"], loaded.mixing) == (6, "mine", "probabilities")
    assert_computes_the_same(loaded, module)


class OfOneOwnArgument(PersonalizedMoE):
    """Saves its own argument alone."""

    def __init__(self, hidden: int = 4, **kwargs):
        super().__init__(SmallMLP(5, hidden, 3), **kwargs)
        self.save_hyperparameters("hidden")


def test_what_a_subclass_hands_on_is_kept_although_it_saves_its_own_argument_alone(tmp_path):
    module = OfOneOwnArgument(6, gate=ConstantGate(0.9), mixing="probabilities")
    loaded = OfOneOwnArgument.load_from_checkpoint(written(module, tmp_path / "own.ckpt"))
    assert (loaded.gate.weight, loaded.mixing) == (0.9, "probabilities")
    assert_computes_the_same(loaded, module)


class Mode(Enum):
    FLAT, DEEP = range(2)


LAYER = partial(nn.Linear, 5, 3)


class OfObjects(PersonalizedMoE):
    """Its hyperparameters are neither numbers nor texts."""

    def __init__(
        self,
        activation: type = nn.ReLU,
        mode: Mode = Mode.FLAT,
        folder: Path = Path("a"),
        make: Callable = LAYER,
    ):
        self.save_hyperparameters()
        super().__init__(nn.Sequential(make(), activation()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation", nn.GELU),
        ("mode", Mode.DEEP),
        ("folder", Path("b")),
        ("make", partial(nn.Linear, 5, 3, bias=False)),
    ],
)
def test_a_hyperparameter_that_cannot_be_described_must_be_given(name, value, tmp_path):
    module = OfObjects(**{name: value})
    path = written(module, tmp_path / "own.ckpt")
    with pytest.raises(InvalidArgumentError, match="the checkpoint cannot describe it") as error:
        OfObjects.load_from_checkpoint(path)
    assert error.value.argument == name
    loaded = OfObjects.load_from_checkpoint(path, **{name: value})
    assert loaded.hparams == module.hparams
    assert_computes_the_same(loaded, module)


def test_the_default_of_a_hyperparameter_need_not_be_given(tmp_path):
    module = OfObjects()
    assert_computes_the_same(OfObjects.load_from_checkpoint(written(module, tmp_path / "own.ckpt")), module)


def squared_error(outputs, targets):
    return (outputs - targets).square().mean()


GATES = {"equal": EqualWeights, "global": GlobalOnly}
LOSSES = {"squared": squared_error, "absolute": nn.L1Loss()}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


class OfWords(PersonalizedMoE):
    """Makes parts from words, and a rate from another one."""

    def __init__(
        self, gate: str = "equal", loss: str = "squared", optimizer: str = "sgd", gate_lr: float = 0.5, lr: float = 0.1
    ):
        self.save_hyperparameters()
        parts = {"gate": GATES[gate](), "loss": LOSSES[loss], "gate_lr": 2 * gate_lr}
        make = partial(OPTIMIZERS[optimizer], lr=lr)
        super().__init__(nn.Linear(5, 1), optimizer=make, task="regression", **parts)


def test_words_from_which_a_subclass_makes_its_parts_are_loaded(tmp_path):
    module = OfWords("global", "absolute", "adam", 0.25, 0.375)
    path = written(module, tmp_path / "own.ckpt")
    loaded = OfWords.load_from_checkpoint(path)
    assert loaded.hparams == module.hparams
    assert (type(loaded.gate), type(loaded.criterion), loaded.gate_lr) == (GlobalOnly, nn.L1Loss, 0.5)
    assert type(loaded.configure_optimizers()) is torch.optim.Adam
    assert OfWords.load_from_checkpoint(path, optimizer="sgd").hparams["optimizer"] == "sgd"
    module.gate = ConstantGate(0.25)
    with pytest.raises(InvalidArgumentError, match="gate is a GlobalOnly, but must be a ConstantGate"):
        OfWords.load_from_checkpoint(written(module, tmp_path / "own.ckpt"))


class OfParts(PersonalizedMoE):
    """Saves arguments that a phase replaces."""

    def __init__(self, gate: Gate | None = None, mixing: str = "logits"):
        self.save_hyperparameters()
        super().__init__(nn.Linear(5, 3), gate=gate, mixing=mixing)


@pytest.mark.filterwarnings("ignore:Attribute 'gate' is an instance of `nn.Module`")
@pytest.mark.parametrize("gate", [None, EqualWeights()])
def test_what_a_phase_has_replaced_is_loaded(gate, tmp_path):
    module = phase_module(OfParts(gate), phase("p", FedAvg(), gate=ConstantGate(0.25), mixing="probabilities"))
    loaded = OfParts.load_from_checkpoint(written(module, tmp_path / "own.ckpt"))
    assert (loaded.gate.weight, loaded.mixing) == (0.25, "probabilities")
    assert_computes_the_same(loaded, module)


class OfExperts(SparseMoE):
    """Saves the numbers of experts of all clients."""

    def __init__(self, num_experts: int | list[int]):
        self.save_hyperparameters()
        super().__init__(nn.Linear(5, 4), nn.Linear(4, 3), num_experts, gate=EqualWeights())


def test_a_client_s_number_of_experts_is_loaded(tmp_path):
    module = OfExperts([3, 2])
    module.keep_architecture(2)
    assert_computes_the_same(OfExperts.load_from_checkpoint(written(module, tmp_path / "own.ckpt")), module)


class Saving(Expert, HyperparametersMixin):
    """Saves its arguments, with Lightning's way for any class."""

    def __init__(self, slope: float = 0.1, **kwargs):
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.classifier = nn.Sequential(nn.LeakyReLU(slope), self.classifier)


class WithoutArguments(nn.Module):
    def forward(self, x):
        return x / 2


def named_layers():
    layers = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Dropout(0.25), WithoutArguments(), nn.LeakyReLU(0.2))
    layers.add_module("head", nn.Linear(4, 3))
    return layers


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: PersonalizedMoE(named_layers(), gate=NetworkGate(nn.Sequential(nn.Linear(5, 2)))),
        lambda: PersonalizedMoE(Saving(0.4, features=5, hidden=7)),
    ],
)
def test_a_mixture_of_described_parts_is_loaded_in_one_line(make, tmp_path):
    made = make()
    loaded = PersonalizedMoE.load_from_checkpoint(written(made, tmp_path / "own.ckpt"))
    assert_computes_the_same(loaded, made)
    assert str(loaded) == str(made), "with the same dropout"


class OwnGate(Gate):
    """Without parameters, so that the tensors of a checkpoint do not tell it from another gate."""

    def __init__(self, weight: float):
        super().__init__()
        self.share = weight

    def forward(self, x):
        return torch.tensor([[self.share, 1 - self.share]]).expand(len(x), -1)


class OfOwnGate(PersonalizedMoE):
    """Has a gate of its own by default."""

    def __init__(self, gate: Gate | None = None):
        self.save_hyperparameters()
        super().__init__(nn.Linear(5, 3), nn.Sequential(nn.Linear(5, 3)), OwnGate(0.25) if gate is None else gate)


@pytest.mark.filterwarnings("ignore:Attribute 'gate' is an instance of `nn.Module`")
def test_a_gate_of_the_same_class_as_the_default_must_be_given(tmp_path):
    default, other = OfOwnGate(), OfOwnGate(OwnGate(0.75))
    assert_computes_the_same(OfOwnGate.load_from_checkpoint(written(default, tmp_path / "own.ckpt")), default)
    path = written(other, tmp_path / "own.ckpt")
    with pytest.raises(InvalidArgumentError, match="gate is missing, but must be an OwnGate, because the checkpoint"):
        OfOwnGate.load_from_checkpoint(path)
    assert_computes_the_same(OfOwnGate.load_from_checkpoint(path, gate=OwnGate(0.75)), other)


def absolute_error(outputs, targets):
    return (outputs - targets).abs().mean()


def assert_must_be_given(module, name, value, path):
    """The checkpoint can be loaded only with the part that it cannot describe."""
    path = written(module, path / "own.ckpt")
    with pytest.raises(InvalidArgumentError) as error:
        PersonalizedMoE.load_from_checkpoint(path)
    assert (error.value.argument, error.value.allowed) == (name, with_article(type(value).__name__))
    assert error.value.because.startswith("the checkpoint cannot describe it")
    assert_computes_the_same(PersonalizedMoE.load_from_checkpoint(path, **{name: value}), module)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_expert", nn.Sequential(Expert(), nn.Tanh())),
        ("gate", OwnGate(0.25)),
        ("loss", lambda outputs, targets: absolute_error(outputs, targets)),
        ("local_expert", nn.Sequential(Expert(), nn.Tanh())),
    ],
)
def test_a_part_that_cannot_be_described_must_be_given(name, value, tmp_path):
    module = PersonalizedMoE(**{"global_expert": nn.Linear(5, 3), "task": "regression", name: value})
    assert_must_be_given(module, name, value, tmp_path)


class Scaled(nn.Linear):
    """Without arguments."""

    def __init__(self):
        super().__init__(5, 3)
        self.scale, self.offset, self.factors, self.activation = 1.0, None, [1.0, 2.0], F.relu

    def forward(self, input):
        return self.activation(self.scale * self.factors[0] * super().forward(input) + (self.offset or 0))


def changed(expert, change) -> nn.Module:
    change(expert)
    return expert


def with_a_layer_called_twice():
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(5, 3))


CHANGED = {
    "part": lambda: changed(SmallMLP(5, 4, 3), lambda expert: expert.extractor.__setitem__(2, nn.Tanh())),
    "slope": lambda: changed(Saving(features=5), lambda expert: setattr(expert.classifier[0], "negative_slope", 0.3)),
    "attribute": lambda: changed(Scaled(), lambda expert: setattr(expert, "scale", 3.0)),
    "number in place of None": lambda: changed(Scaled(), lambda expert: setattr(expert, "offset", 1.7)),
    "function": lambda: changed(Scaled(), lambda expert: setattr(expert, "activation", torch.tanh)),
    "list": lambda: changed(Scaled(), lambda expert: expert.factors.reverse()),
    "hook": lambda: changed(nn.Linear(5, 3), lambda expert: expert.register_forward_hook(lambda *call: 2 * call[2])),
    "layer called twice": with_a_layer_called_twice,
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.parametrize("where", ["global_expert", "local_expert"])
def test_a_part_that_was_changed_after_it_was_made_must_be_given(change, where, tmp_path):
    module = PersonalizedMoE(nn.Linear(5, 3) if where == "local_expert" else CHANGED[change](), gate=ConstantGate(0.5))
    module.local_expert = CHANGED[change]()
    assert_must_be_given(module, where, CHANGED[change](), tmp_path)


def test_fixed_weights_that_were_changed_must_be_given(tmp_path):
    module = PersonalizedMoE(nn.Linear(5, 3), gate=EqualWeights())
    module.gate.weights = [0.25, 0.75]
    path = written(module, tmp_path / "own.ckpt")
    with pytest.raises(InvalidArgumentError, match="the checkpoint cannot describe it") as error:
        PersonalizedMoE.load_from_checkpoint(path)
    assert error.value.argument == "gate"


class Remembering(nn.Linear):
    """Keeps its last outputs, and a function of its own for each object."""

    def __init__(self):
        super().__init__(5, 3)
        self.last, self.activation = None, lambda outputs: outputs.tanh()

    def forward(self, input):
        self.last = self.activation(super().forward(input))
        return self.last


def test_what_a_step_leaves_in_a_part_is_no_change_of_it(tmp_path):
    module = PersonalizedMoE(Remembering())
    module(torch.rand(4, 5))
    assert_computes_the_same(PersonalizedMoE.load_from_checkpoint(written(module, tmp_path / "own.ckpt")), module)


def test_a_description_leaves_the_random_numbers_as_they_are():
    expert, state = SmallMLP(), torch.get_rng_state()
    describe(expert)
    assert torch.equal(torch.get_rng_state(), state)


MODULE = """
import enum
from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from fedmoe_pl import PersonalizedMoE


class Mode(enum.Enum):
    FLAT = "flat"
    DEEP = "deep"


class Base(nn.Module):
    def __init__(self, hidden: int = 4, scale: float = 1.0):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Linear(hidden, 10))
        self.numbers = [hidden, scale]

    def forward(self, x):
        return self.net(x)


class Expert(Base):
    def __init__(
        self,
        wide: int = 4,
        mode: Mode = Mode.FLAT,
        norm: type[nn.Module] = nn.BatchNorm1d,
        make: Callable[[int], nn.Module] = nn.ReLU,
        options: dict | None = None,
        parts: list[nn.Module] | None = None,
        **kwargs,
    ):
        super().__init__(wide, **kwargs)
        self.parts = nn.ModuleList(parts)
        self.wide = 2 * wide  # not the argument
        self.got = [self.numbers, mode, norm, str(make(1)), options, str(self.parts)]


class Forgetful(LightningModule):
    def __init__(self, body: nn.Module, hidden: int = 4, optimizer: OptimizerCallable = torch.optim.Adam):
        super().__init__()
        self.net = nn.Sequential(body, nn.Linear(10, hidden), nn.Linear(hidden, 10))
        self.make = optimizer

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.make(self.parameters())


class Mixture(PersonalizedMoE):
    def __init__(self, hidden: int, scale: float, **kwargs):
        super().__init__(Base(hidden), **kwargs)
        self.hidden = nn.Linear(hidden, hidden)  # not the argument
        self.twice = 2 * scale
"""


def node(name: str, **arguments) -> dict:
    return {"class_path": name, "init_args": arguments}


def has_its_tensors(module, path) -> bool:
    tensors = torch.load(path, weights_only=True)["state_dict"]
    return all(torch.equal(tensor, tensors[name]) for name, tensor in module.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Attribute .* is an instance of `nn.Module`")  # of Lightning, when it is loaded
def test_all_arguments_of_a_configurations_modules_are_known(tmp_path, monkeypatch, caplog):
    base = node("parts_of_yaml.Base", hidden=3)
    expert = node(
        "parts_of_yaml.Expert",
        wide=6,
        mode="DEEP",
        norm="torch.nn.LayerNorm",
        make=node("torch.nn.Dropout", inplace=True),
        options={"a": [1, 2]},
        parts=[base, node("torch.nn.Tanh")],
        scale=2.5,
    )
    optimizer = node("torch.optim.SGD", lr=0.25)
    forgetful = node("parts_of_yaml.Forgetful", body=base, hidden=7, optimizer=optimizer)
    mixture = node("parts_of_yaml.Mixture", hidden=5, scale=1.5, mixing="probabilities")
    one = {"algorithm": "FedAvg", "start": "initial", "train": {"max_epochs": 1}}
    phases = [
        {"name": "expert", **one, "mixing": "probabilities"},
        {"name": "module", **one, "model": forgetful},
        {"name": "mixture", **one, "model": mixture},
    ]
    configuration = {
        "model": node("PersonalizedMoE", global_expert=expert, optimizer=optimizer),
        "data": node("Digits", num_clients=2, partitioner="IID", batch_size=300),
        "trainer": {"accelerator": "cpu"},
        "federation": {
            **{"phases": phases, "callbacks": ["ClientCheckpoint"]},
            **{"logger": False, "enable_progress_bar": False},
        },
    }
    (tmp_path / "parts_of_yaml.py").write_text(MODULE)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(configuration))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command line adds the current folder
    monkeypatch.setattr(sys, "argv", ["fedmoe"])
    main(["fit", "--config", "own.yaml"])
    paths, own = {path.parent.name: path for path in tmp_path.rglob("all_clients.ckpt")}, sys.modules["parts_of_yaml"]
    assert "lack arguments" not in caplog.text

    loaded = PersonalizedMoE.load_from_checkpoint(paths["expert"])
    assert has_its_tensors(loaded, paths["expert"]) and loaded.mixing == "probabilities"
    tanh = str(nn.ModuleList([own.Base(3), nn.Tanh()]))
    dropout = str(nn.Dropout(1, inplace=True))
    expected = [[6, 2.5], own.Mode.DEEP, nn.LayerNorm, dropout, {"a": [1, 2]}, tanh]
    assert loaded.global_expert.got == loaded.local_expert.got == expected

    loaded = own.Forgetful.load_from_checkpoint(paths["module"])
    assert has_its_tensors(loaded, paths["module"]) and loaded.net[1].out_features == 7
    assert loaded.configure_optimizers().defaults["lr"] == 0.25

    loaded = own.Mixture.load_from_checkpoint(paths["mixture"])
    assert has_its_tensors(loaded, paths["mixture"])
    assert (loaded.hidden.in_features, loaded.twice, loaded.mixing) == (5, 3.0, "probabilities")
