"""One line for each refusal: what jsonargparse says, condensed, and what a class says, with the key."""

import copy
import re
from argparse import ArgumentError
from pathlib import Path

import pytest
import yaml
from helpers.configurations import QUICKSTART, REPOSITORY
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Federation, Phase
from fedmoe_pl.algorithms import FedAvg, PersonalizedExpert
from fedmoe_pl.backends import LEAN_TRAINER, StackedBackend
from fedmoe_pl.cli import FederationCLI
from fedmoe_pl.cli.errors import cause_of, with_key
from fedmoe_pl.data import Digits, Dirichlet
from fedmoe_pl.models import ConstantGate
from fedmoe_pl.rounds.trainer_checks import check_trainer


class Parser(Exception):
    """Carries the command line's parser out of it."""


@pytest.fixture(scope="module")
def parser():
    class OnlyParser(FederationCLI):
        def parse_arguments(self, parser, args):
            raise Parser(parser)

    with pytest.raises(Parser) as error:
        OnlyParser([])
    return error.value.args[0]


@pytest.fixture(scope="module")
def configuration(parser) -> dict:
    """The quickstart, parsed."""
    return parser.parse_args(["fit", "--config", QUICKSTART]).fit.as_dict()


def refusal(parser, *arguments: str) -> str:
    with pytest.raises(Exception) as error:
        parser.parse_args(["fit", *arguments])
    return cause_of(error.value)


PARTITIONER = "data.init_args.partitioner.init_args"
NOT_PARSED = {
    "--federation.naem": ["--federation.naem", "x"],
    "data.init_args.num_cliets is not an argument of Digits; did you mean num_clients?": (
        ["--data.init_args.num_cliets", "3"]
    ),
    "data.init_args.num_clients is 'ten', but must be int": ["--data.init_args.num_clients", "ten"],
    f"{PARTITIONER}.alpha is 'x', but must be float": [f"--{PARTITIONER}.alpha", "x"],
    "did you mean LeNet5?": ["--model.init_args.global_expert", "Lenet5"],
    "--trainer.max_epoch": ["--trainer.max_epoch", "3"],  # no abbreviations
    "none.yaml": ["--config", "none.yaml"],
    "federation.store is 'cloud', but must be 'memory' or 'disk'.": ["--federation.store", "cloud"],
    "federation.logger is 'nothing.X', which cannot be imported: No module named 'nothing'.": (
        ["--federation.logger", "nothing.X"]
    ),
    "federation.logger is 'torch.nn.Linear', which cannot be used: Import path does not correspond to a subclass of": (
        ["--federation.logger", "torch.nn.Linear"]
    ),
}


@pytest.mark.parametrize("sentence", NOT_PARSED)
def test_arguments_that_cannot_be_parsed_are_named(sentence, parser):
    assert sentence in refusal(parser, "--config", QUICKSTART, *NOT_PARSED[sentence])


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "clients_per_round: 0.5",
            "clients_pr_round: 0.5",
            "phases.clients_pr_round is not an argument of Phase; did you mean",
        ),
        (
            "shared: global",
            "shard: global",
            "phases.algorithm.init_args.shard is not an argument of FedAvg; did you mean shared?",
        ),
        ("num_clients: 20", "num_cliets: 20", "data.init_args.num_cliets is not an argument of Digits; did you mean"),
        ("class_path: FedAvg", "class_path: FedAvgg", "did you mean FedAvg?"),
        ("data:", "dat:", "dat"),
        ("{alpha: 0.5}", "{}", f"{PARTITIONER}.alpha is required, but missing"),
        ("torch.optim.SGD", "torch.optim.SGDD", "optimizer is 'torch.optim.SGDD', but torch.optim has no SGDD"),
        ("gate: LinearGate", "gate: SmallMLP", "gate is 'SmallMLP', which is not the kind of class"),
        ("  max_epochs: 2", "  max_epoch: 2", "max_epoch is not an argument"),
    ],
)
def test_a_misspelt_configuration_is_named(old, new, sentence, parser, tmp_path):
    text = Path(QUICKSTART).read_text()
    assert old in text
    (tmp_path / "wrong.yaml").write_text(text.replace(old, new))
    assert sentence in refusal(parser, "--config", str(tmp_path / "wrong.yaml"))


PHASE_ERRORS = {
    "federation.phases[2].roundz is not an argument of Phase; did you mean rounds?": (2, "roundz", 3),
    "federation.phases[1].rounds is 'x', but must be int.": (1, "rounds", "x"),
    "federation.phases[4].optimizer.init_args.lrr is not an argument of Adam; did you mean lr?": (
        *(4, "optimizer"),
        {"class_path": "torch.optim.Adam", "init_args": {"lrr": 0.1}},
    ),
    "federation.phases[3].mixing is 'both', but must be 'logits' or 'probabilities' or": (3, "mixing", "both"),
    "federation.phases[0].algorithm is 'nothing.X', which cannot be imported: No module named 'nothing'.": (
        *(0, "algorithm"),
        "nothing.X",
    ),
}


@pytest.mark.parametrize("sentence", PHASE_ERRORS)
def test_an_error_in_a_phase_has_the_number_of_the_phase(sentence, tmp_path, monkeypatch):
    index, argument, value = PHASE_ERRORS[sentence]
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    config["federation"]["phases"][index][argument] = value
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(sentence)}"):
        FederationCLI(["fit", f"--config={tmp_path / 'wrong.yaml'}"])


def test_an_error_in_a_phase_of_the_command_line_is_told_without_its_number():
    with pytest.raises(ArgumentError) as error:
        FederationCLI(["fit", "--config", QUICKSTART, "--federation.phases+={name: A, roundz: 2}"])
    assert "roundz is not an argument of Phase" in cause_of(error.value)


def test_an_overlay_without_its_base_says_so(parser):
    for name in ("opt_out_fmnist", "fedmoe_da_svhn"):
        message = refusal(parser, "--config", str(REPOSITORY / f"configs/{name}.yaml"))
        assert "model" in message and "an overlay needs the --config that it changes before it" in message


CLASSES = {  # what a class refuses, and the key that the command line must name
    f"{PARTITIONER}.alpha": (-1.0, lambda: Dirichlet(-1.0)),
    "data.init_args.num_clients": (5000, lambda: Digits(num_clients=5000, partitioner=Dirichlet(0.5)).setup()),
    "data.init_args.test_fraction": (1.5, lambda: Digits(num_clients=2, test_fraction=1.5)),
    "federation.phases[1].rounds": (0, lambda: Phase("FedAvg", FedAvg(), rounds=0)),
    "federation.phases[1].clients_per_round": (-1, lambda: Phase("FedAvg", FedAvg(), clients_per_round=-1)),
    "federation.phases[2].algorithm.init_args.gate_fraction": (2.0, lambda: PersonalizedExpert(gate_fraction=2.0)),
    "federation.phases[4].gate.init_args.weight": (1.5, lambda: ConstantGate(1.5)),
    "federation.store": ("cloud", lambda: Federation([Phase("FedAvg", FedAvg())], store="cloud")),  # pyright: ignore
    "federation.evaluate_every_n_rounds": (
        -1,
        lambda: Federation([Phase("FedAvg", FedAvg())], evaluate_every_n_rounds=-1),
    ),
    "federation.backend.init_args.clients_per_stack": (0, lambda: StackedBackend(0)),
}


@pytest.mark.parametrize("key", CLASSES)
def test_what_a_class_refuses_is_named_by_its_key(key, configuration):
    value, construct = CLASSES[key]
    with pytest.raises(MisconfigurationException) as error:
        construct()
    argument = key.rsplit(".", 1)[-1]
    assert re.search(rf"\b{argument} is '?{re.escape(str(value))}", str(error.value))
    assert f"{key} is " in with_key(str(error.value), changed(configuration, key, value))


def changed(configuration: dict, key: str, value: object) -> dict:
    """The configuration with another value; the classes that quickstart has not are put where they are refused."""
    config = copy.deepcopy(configuration)
    config["federation"]["phases"][4]["gate"] = {"class_path": "fedmoe_pl.models.ConstantGate", "init_args": {}}
    config["federation"]["backend"] = {"class_path": "fedmoe_pl.backends.StackedBackend", "init_args": {}}
    *parents, last = re.findall(r"\w+", key)
    node = config
    for parent in parents:
        node = node[int(parent) if isinstance(node, list) else parent]
    node[last] = value
    return config


PHASES = [
    {"name": "Local", "algorithm": {"class_path": "a.Local", "init_args": {"trainable": "x"}}, "rounds": 1},
    {"name": "B", "algorithm": {"class_path": "a.PFLMoE", "init_args": {"gate_fraction": 0.5}}, "rounds": 0},
    {"name": "C", "algorithm": {"class_path": "a.PFLMoE", "init_args": {"gate_fraction": 0.5}}, "rounds": 0},
    {"name": "D", "algorithm": {"class_path": "a.PFLMoE", "init_args": {"gate_fraction": 2.0}}, "rounds": 0},
]
SMALL = {
    "data": {"class_path": "a.Digits", "init_args": {"num_clients": None, "mean": [0.5], "pool": True}},
    "trainer": {"gradient_clip_val": 50, "max_epochs": 2, "callbacks": None},
    "federation": {"phases": PHASES, "store": "cloud", "callbacks": None},
    "ckpt_path": "none.ckpt",
}


@pytest.mark.parametrize(
    ("message", "completed"),
    [
        ("Phase 'C': rounds is 0, but", "Phase 'C': federation.phases[2].rounds is 0, but"),
        (
            "PFLMoE: gate_fraction is 2.0, but",
            "PFLMoE: federation.phases[3].algorithm.init_args.gate_fraction is 2.0, but",
        ),
        (
            "Phase 'C': PFLMoE: gate_fraction is 0.5, but",
            "Phase 'C': PFLMoE: federation.phases[2].algorithm.init_args.gate_fraction is 0.5, but",
        ),
        ("Phase 'B': gradient_clip_val is 50, but", "Phase 'B': trainer.gradient_clip_val is 50, but"),
        ("Dirichlet: num_clients is not set, but", "Dirichlet: data.init_args.num_clients is not set, but"),
        ("Digits: mean is [0.5], but", "Digits: data.init_args.mean is [0.5], but"),
        ("Digits: pool is true, but", "Digits: data.init_args.pool is true, but"),
        ("pool is true, but", "data.init_args.pool is true, but"),
        ("Federation: store is 'cloud', but", "Federation: federation.store is 'cloud', but"),
        ("Federation: callbacks has a PFLMoE.", "Federation: federation.callbacks has a PFLMoE."),
        ("algorithm is a Local, but", "federation.phases[0].algorithm is a Local, but"),
    ],
)
def test_an_argument_is_completed_to_its_key(message, completed):
    assert with_key(message, SMALL) == completed


@pytest.mark.parametrize(
    "message",
    [
        "PFLMoE: gate_fraction is 0.5, but",  # of two phases
        "callbacks is None, but",  # of the trainer or of the federation
        "Dirichlet: alpha is -1.0, but",  # nowhere
        "ckpt_path is 'none.ckpt', but",  # is a key as it is
        "trainer.max_epochs is 2, but",
        "trainer: `devices` selected with `CPUAccelerator` should be an int > 0.",
        "Something else went wrong.",
    ],
)
def test_a_message_whose_key_is_not_certain_stays_as_it_is(message):
    assert with_key(message, SMALL) == message


TRAINERS = {
    "accelerator": {"accelerator": "gpuu"},
    "trainer: `devices` selected with `CPUAccelerator` should be an int > 0": {"accelerator": "cpu", "devices": 0},
    "trainer.num_nodes is 2, but must be 1": {"accelerator": "cpu", "num_nodes": 2},
    "trainer.precision is 'bf16-true', but must be": {"accelerator": "cpu", "precision": "bf16-true"},
}


@pytest.mark.parametrize("sentence", TRAINERS)
def test_a_trainer_that_no_client_can_have_is_refused(sentence):
    with pytest.raises(MisconfigurationException, match=re.escape(sentence)):
        check_trainer({**LEAN_TRAINER, "max_epochs": 1, **TRAINERS[sentence]})
