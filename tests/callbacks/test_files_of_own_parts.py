"""Clients' checkpoints of mixtures and modules with a user's own parts, from Python and from a configuration."""

import enum
import re
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers.configurations import REPOSITORY
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from torch import nn

from fedmoe_pl import PersonalizedMoE
from fedmoe_pl.callbacks.files import _checkpoint
from fedmoe_pl.cli import main
from fedmoe_pl.models.description import MissingArgumentError


class Mode(enum.Enum):
    FLAT = "flat"
    DEEP = "deep"


class Part(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, width), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)


class OfTypes(Part):
    """Keeps its arguments; the default of ``final`` cannot be described."""

    def __init__(
        self,
        mode: Mode = Mode.FLAT,
        activation: type[nn.Module] = nn.ReLU,
        function: Callable = F.relu,
        options: dict | None = None,
        branches: dict[str, nn.Module] | None = None,
        final: Callable = lambda x: x,
    ):
        super().__init__()
        self.mode, self.activation, self.function, self.options, self.final = mode, activation, function, options, final
        self.branches = nn.ModuleDict(branches)


class OfUnknownTypes(Part):
    """Nothing says that the argument is a function."""

    def __init__(self, function=F.relu):
        super().__init__()
        self.function = function


class Handing(Part):
    """Hands on what it does not name."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class Saving(Part, HyperparametersMixin):
    """Saves its arguments, with Lightning's way for any class."""

    def __init__(self, act: type[nn.Module] = nn.ReLU, **kwargs):
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.act = act()


def loaded(expert, path) -> nn.Module:
    """The expert of a mixture after saving and loading."""
    torch.save(_checkpoint(PersonalizedMoE(expert)), path)
    return PersonalizedMoE.load_from_checkpoint(path).global_expert


def test_what_the_types_of_a_parts_arguments_say_is_loaded(tmp_path):
    branches = {"a": nn.Linear(2, 2, bias=False)}
    part = OfTypes(Mode.DEEP, nn.Tanh, F.gelu, {"a": [1, {"b": 2.5}], 3: None}, branches)  # type: ignore[arg-type]
    again = loaded(part, tmp_path / "own.ckpt")
    assert isinstance(again, OfTypes)
    assert (again.mode, again.activation, again.function) == (Mode.DEEP, nn.Tanh, F.gelu)
    assert again.options == {"a": [1, {"b": 2.5}], 3: None}
    assert str(again.branches) == str(part.branches)
    assert again.final is part.final


def test_a_part_that_saves_its_arguments_is_loaded_with_them(tmp_path):
    again = loaded(Saving(nn.Tanh, width=7), tmp_path / "own.ckpt")
    assert isinstance(again, Saving)
    assert again.layers[0].out_features == 7 and isinstance(again.act, nn.Tanh)


@pytest.mark.parametrize(
    ("part", "lacking"),
    [
        (lambda: Part(6), r"width of Part, which keeps no attribute of this name"),
        (lambda: nn.Sequential(Part(6), nn.Tanh()), r"width of Part, which keeps no attribute of this name"),
        (lambda: Handing(width=6), r"\*\*kwargs of Handing, which keeps no attribute of this name"),
        (lambda: OfTypes(final=lambda x: -x), r"final of OfTypes, which is <lambda>"),
        (lambda: OfTypes(options={"class_path": "builtins.dict"}), r"options of OfTypes, which is dict"),
        (lambda: OfUnknownTypes(F.gelu), r"function of OfUnknownTypes, which is gelu"),
    ],
)
def test_the_argument_and_the_part_that_it_belongs_to_are_named(part, lacking, tmp_path):
    with pytest.raises(
        MisconfigurationException,
        match=rf"PersonalizedMoE: global_expert is missing, because the checkpoint cannot describe {lacking}; load it",
    ):
        loaded(part(), tmp_path / "own.ckpt")


class OfNoTypes(LightningModule):
    """Nothing says what the arguments are."""

    def __init__(self, body, final=torch.tanh):
        super().__init__()
        self.body, self.final = body, final


@pytest.mark.parametrize(
    ("module", "lacking"),
    [
        (lambda: OfNoTypes(Part(6)), {"body": Part(6)}),
        (lambda: OfNoTypes(nn.Linear(5, 3), torch.relu), {"final": torch.relu}),
    ],
)
def test_an_argument_without_a_type_that_cannot_be_described_is_named(module, lacking, tmp_path):
    (name,) = lacking
    torch.save(_checkpoint(module()), tmp_path / "own.ckpt")
    with pytest.raises(MissingArgumentError, match=f"OfNoTypes: {name} is missing, because the checkpoint cannot desc"):
        OfNoTypes.load_from_checkpoint(tmp_path / "own.ckpt")
    again = OfNoTypes.load_from_checkpoint(tmp_path / "own.ckpt", **lacking)
    assert getattr(again, name) is lacking[name]


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


def fitted(configuration: dict, module: str, code: str, folder, monkeypatch):
    """The checkpoints that the command line writes, by phase, and the user's module."""
    (folder / f"{module}.py").write_text(code)
    configuration["federation"] |= {"logger": False, "enable_progress_bar": False}
    (folder / "own.yaml").write_text(yaml.safe_dump(configuration))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command line adds the current folder
    monkeypatch.setattr(sys, "argv", ["fedmoe"])
    main(["fit", "--config", "own.yaml"])
    return {path.parent.name: path for path in folder.rglob("all_clients.ckpt")}, sys.modules[module]


def has_its_tensors(module, path) -> bool:
    tensors = torch.load(path, weights_only=True)["state_dict"]
    return all(torch.equal(tensor, tensors[name]) for name, tensor in module.state_dict().items())


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
    one = {"algorithm": "FedAvg", "start": "initial", "max_epochs": 1}
    phases = [
        {"name": "expert", **one, "mixing": "probabilities"},
        {"name": "module", **one, "model": forgetful},
        {"name": "mixture", **one, "model": mixture},
    ]
    configuration = {
        "model": node("PersonalizedMoE", global_expert=expert, optimizer=optimizer),
        "data": node("Digits", num_clients=2, partitioner="IID", batch_size=300),
        "trainer": {"accelerator": "cpu"},
        "federation": {"phases": phases},
    }
    paths, own = fitted(configuration, "parts_of_yaml", MODULE, tmp_path, monkeypatch)
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


def test_the_tutorials_mixture_of_a_configuration_is_loaded_in_one_line(tmp_path, monkeypatch):
    page = (REPOSITORY / "docs/tutorials/own_model_and_data.md").read_text()
    cells = re.findall(r"^```\{code-cell\}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (data,) = (cell for cell in cells if "class Tumours" in cell)
    (expert,) = re.findall(r"^class Expert.*?(?=\n\n\n)", page, re.DOTALL | re.MULTILINE)
    (configuration,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    code = "\n".join([cells[0], data.split("\n\n\ndata =")[0], "from torch import nn", expert])
    # another test has a module of the page's name
    configuration = yaml.safe_load(configuration.replace("my_project", "page_project"))
    configuration["model"]["init_args"]["global_expert"]["init_args"]["hidden"] = 8
    configuration["federation"]["phases"][0]["rounds"] = 1
    paths, _ = fitted(configuration, "page_project", code, tmp_path, monkeypatch)
    loaded = PersonalizedMoE.load_from_checkpoint(paths["FedAvg"])
    assert has_its_tensors(loaded, paths["FedAvg"]) and loaded.global_expert.classifier.in_features == 8
