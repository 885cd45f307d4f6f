"""What is wrong in a configuration is one sentence with the key: jsonargparse's message, and what a class refuses."""

import os
from pathlib import Path

import pytest
import yaml
from helpers.configurations import QUICKSTART, REPOSITORY
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.cli import FederationCLI
from fedmoe_pl.cli.command_line import configured
from fedmoe_pl.cli.errors import with_key


def refusal(*arguments: str) -> str:
    """What the command line says of arguments of ``fit``."""
    with pytest.raises(MisconfigurationException) as error:
        configured(arguments, False)
    assert "\n" not in str(error.value)
    return str(error.value)


OPTIMIZER = "model.init_args.optimizer.init_args"
REFUSED = {
    "trainer.max_epoch is not an argument; did you mean trainer.max_epochs?": ["--trainer.max_epoch=3"],
    "dat is not an argument; did you mean data?": [*("--config", "{dat: {init_args: {num_clients: 3}}}")],
    "data.init_args.num_cliets is not an argument of Digits; did you mean num_clients?": ["--data.num_cliets", "3"],
    "data.init_args.num_clients is 'ten', but must be int or null.": ["--data.init_args.num_clients", "ten"],
    "federation.phases.FedAvg.rounds is True, but must be int.": [  # although true == 1, which was right before
        *("--federation.phases", "[{name: FedAvg, algorithm: FedAvg, rounds: 1}]"),
        *("--federation.phases", "[{name: FedAvg, algorithm: FedAvg, rounds: true}]"),
    ],
    "data.init_args.partitioner.init_args.alpha is nan, but must be a finite number.": [
        *("--data.init_args.partitioner.init_args.alpha", ".nan")
    ],
    "data.init_args.partition_seed is None, but must be int.": ["--data.init_args.partition_seed=null"],  # by kwargs
    "model.init_args.optimizer is None, but must be Optimizer.": ["--model.init_args.optimizer=null"],
    f"{OPTIMIZER}.lr is 'abc', but must be float or Tensor.": [f"--{OPTIMIZER}.lr", "abc"],
    f"{OPTIMIZER}.lrr is not an argument of SGD; did you mean lr?": [f"--{OPTIMIZER}.lrr", "0.1"],
    "federation.backend is 'Stacked', but must be Backend or 'auto'; did you mean StackedBackend?": (
        ["--federation.backend", "Stacked"]
    ),
    "federation.backend is 'Backend', but must be a class that can be made; it is abstract.": (
        ["--federation.backend", "Backend"]
    ),
    "seed is not an argument; did you mean seed_everything?": ["--seed", "3"],
    "max_epochs is not an argument; did you mean trainer.max_epochs?": ["--max_epochs", "3"],
    "rounds is not an argument; did you mean federation.phases.NAME.rounds?": ["--rounds", "3"],
    "logger is not an argument; did you mean trainer.logger or federation.logger?": ["--logger", "false"],
    "federation.phases[0].rounds is 'x', but must be int.": [
        *("--federation.phases", "[{name: '', algorithm: Local, rounds: x}]")
    ],
    "model is 'Digits', but must be LightningModule; `fedmoe list": ["--model", "Digits"],
    "data.class_path is 'Digitz', but must be FederatedDataModule or its import path; did you mean Digits?": (
        ["--data.class_path", "Digitz"]
    ),
    "data.class_path is 'fedmoe_pl.federation.Federatio', but fedmoe_pl.federation has no Federatio; did you": (
        ["--data.class_path", "fedmoe_pl.federation.Federatio"]
    ),
    "data.class_path is 'fedmoe_pl.data.Digitz', but fedmoe_pl.data has no Digitz; did you mean Digits?": (
        ["--data.class_path", "fedmoe_pl.data.Digitz"]
    ),
    "model.init_args.gate.class_path is 'fedmoe_pl.models.Constant', but fedmoe_pl.models has no Constant; did you "
    "mean ConstantGate?": ["--model.init_args.gate", "{class_path: fedmoe_pl.models.Constant}"],
    f"federation.logger is 'nothing.X', but there is no module nothing in {os.getcwd()}, PYTHONPATH or the installed "
    "packages; install nothing, run fedmoe from the folder that has nothing.py, or add that folder": [
        "--federation.logger",
        "nothing.X",
    ],
    "model.init_args.global_expert is 3, but must be Module, such as SmallMLP or {class_path: my_": [
        *("--model.global_expert", "3")
    ],
    "model.init_args.optimizer is 0.1, but must be Optimizer, such as {class_path: torch.optim.SGD, init_args: {lr:": [
        *("--model.optimizer", "0.1")
    ],
    "federation.phases.FedAvg.train.lr_scheduler is 'cosine', but must be LRScheduler or ReduceLROnPlateau or null; did"
    " you mean CosineAnnealingLR?": ["--federation.phases.FedAvg.train.lr_scheduler", "cosine"],
    "federation.phases.FedAvg.gate is 'none', but must be Gate or null; `fedmoe list gates` has those": [  # no KNNPer
        *("--federation.phases.FedAvg.gate", "none")
    ],
    "federation.metrics.f1 is 3, but must be Metric, such as torchmetrics.MeanSquaredError.": [
        *("--federation.metrics", "{f1: 3}")
    ],
    "federation.metrics.b.init_args.taks is not an argument of F1Score; did you mean task?": [
        "--federation.metrics",
        "{a: torchmetrics.MeanSquaredError, b: {class_path: torchmetrics.F1Score, init_args: {taks: binary}}}",
    ],
    "federation.metrics is 'torchmetrics.F1Score', but must be dict[str, Metric] or null, such as {error": [
        *("--federation.metrics", "torchmetrics.F1Score")
    ],
    "config is '{config: [quickstart]}', but it cannot be read: its key config must be one file": [
        *("--config", "{config: [quickstart]}")
    ],
    "model.init_args.optimizer is 'Adamm', but must be Optimizer or its import path; did you mean Adam?": (
        ["--model.init_args.optimizer", "Adamm"]
    ),
    "model.init_args.optimizer is 'torch.optim.AdamWW', but torch.optim has no AdamWW; did you mean AdamW?": (
        ["--model.init_args.optimizer", "torch.optim.AdamWW"]
    ),
    "federation.callbacks[1] is 'EarlyStopping', but must be FederationCallback or its import path; `fedmoe list": [
        "--federation.callbacks",
        "[TrafficLedger, EarlyStopping]",
    ],
    "trainer.logger[0].init_args.save_dirr is not an argument of CSVLogger; did you mean save_dir?": (
        ["--trainer.logger", "[{class_path: CSVLogger, init_args: {save_dirr: x}}]"]
    ),
    "federation.metrics.e.init_args.squard is not an argument of MeanSquaredError; did you mean squared?": [
        "--federation.metrics",
        "{e: {class_path: torchmetrics.MeanSquaredError, init_args: {squard: false}}}",
    ],
    "trainer.callbacks[0] is 'GateMonitor', but must be Callback; `fedmoe list": [
        "--trainer.callbacks",
        "[GateMonitor]",
    ],
    "federation.phases.FedAvg.algorithm is 'SmallMLP', but must be Algorithm; `fedmoe list": [
        *("--federation.phases.FedAvg.algorithm", "SmallMLP")
    ],
    "federation.phases[0] is 'FedAvg', but must be Phase, such as {name: FedAvg, algorithm: FedAvg}.": [
        "--federation.phases",
        "[FedAvg]",
    ],
    "federation.phases[0] is 3, but must be Phase, such as": ["--federation.phases", "[3]"],
    "model.init_args.gate.iinit_args is not a key beside class_path; did you mean init_args?": [
        *("--model.init_args.gate", "{class_path: LinearGate, iinit_args: {in_features: 64}}")
    ],
    "model.init_args.global_expert has arguments beside class_path; they belong in its init_args.": [
        *("--model.init_args.global_expert", "{class_path: SmallMLP, hidden: 3}")
    ],
    "federation.phases is {}, but must be list": ["--federation.phases", "{}"],
    "federation.phases.A.roundz is not an argument of Phase; did you mean rounds?": (
        ["--federation.phases+={name: A, algorithm: Local, roundz: 2}"]
    ),
    "trainer is 3, but must have arguments, as": ["--trainer", "3"],
    "trainer is 3, but must have arguments": ["--config", "{trainer: 3}"],
    "federation.failures is None, but must have arguments": ["--config", "{federation: {failures: null}}"],
    "federation.phases.FedAvg.train is 3, but must have arguments": ["--federation.phases.FedAvg.train", "3"],
    "federation.phases.FedAvg.train.max_epoch is not an argument of Phase; did you mean train.max_epochs?": [
        *("--federation.phases.FedAvg.train.max_epoch", "3")  # no abbreviation
    ],
    "federation.phases.FedAvg.max_epochs is not an argument of Phase; did you mean train.max_epochs?": [
        *("--federation.phases.FedAvg.max_epochs", "3")
    ],
    "federation.phases.FedAvg.train.optimizer is 'SGDD', but must be Optimizer or null; did you mean SGD?": [
        *("--federation.phases.FedAvg.train.optimizer", "SGDD")
    ],
    "federation.phases.Local.train.optimizer.init_args.lr is not an argument of Optimizer; "
    "a class_path must be given.": [*("--federation.phases.Local.train.optimizer.lr", "0.1")],
    "model must be given, as in a file after --config. An overlay needs the --config that it changes before it.": [
        "--model=null"
    ],
    "argument --model: expected one argument.": ["--model"],
    "data.class_path is 'Digit', but must be FederatedDataModule or its import path; did you mean Digits?": [
        *("--data", "{class_path: Digit, init_args: {num_clients: 3}}")
    ],
    "federation.phases.FedAvg.gate.class_path is 'FeatreGate', but must be Gate or null; did you mean FeatureGate?": [
        *("--federation.phases.FedAvg.gate", "{class_path: FeatreGate}")
    ],
    "trainer.callbacks[0] is 'EarlyStoping', but must be Callback or its import path; did you mean EarlyStopping?": [
        *("--trainer.callbacks", "[EarlyStoping]")
    ],
    "federation.callbacks[0] is 'AccuracyMonitr', but must be FederationCallback or its import path; "
    "did you mean AccuracyMonitor?": ["--federation.callbacks", "[AccuracyMonitr]"],
    "federation.metrics.f.init_args.task must be given for F1Score: 'binary' or 'multiclass' or 'multilabel'.": [
        *("--federation.metrics", "{f: torchmetrics.F1Score}")
    ],
    "model.init_args must have arguments, as in {name: value}.": ["--model.init_args", "[1]"],
    "trainer.callbacks.init_args.monitor must be given for EarlyStopping: str.": [
        *("--trainer.callbacks", "EarlyStopping")
    ],
    "federation.callbacks is 'GateMonitor', but must be a list, as in [GateMonitor].": [
        *("--federation.callbacks", "GateMonitor")
    ],
    "federation.logger is 'TensorboardLogger', but must be Logger or list[Logger] or bool; did you mean TensorBoardL": [
        *("--federation.logger", "TensorboardLogger")
    ],
    "data.init_args.augmentation is 'RandomCorp', but must be list[Augmentation] or null; did you mean RandomCrop?": [
        *("--data.augmentation", "RandomCorp")
    ],
    "data.init_args.augmentation[0] is 'RandomCorp', but must be Augmentation or its import path; did you mean R": [
        *("--data.augmentation", "[RandomCorp]")
    ],
    "federation.phases.FedAvg.train.lr is not an argument of Phase; it belongs to an optimizer (model.init_args.": [
        *("--federation.phases.FedAvg.train.lr", "0.1")
    ],
    "trainer.lr is not an argument; it belongs to an optimizer (": ["--trainer.lr", "0.1"],
    "data.init_args.alpha is not an argument of Digits; it belongs to Dirichlet": ["--data.alpha", "0.1"],
    "federation.phases.FedAvg.mu is not an argument of Phase; it belongs to FedProx (federation.phases.NAME.algorithm)."
    "": ["--federation.phases.FedAvg.mu", "0.1"],
    "model.init_args.in_features is not an argument of PersonalizedMoE; it belongs to SmallMLP": [
        *("--model.in_features", "12")
    ],
    "fit is not an argument; a file with the section fit comes before the command, as in fedmoe --config FILE": [
        *("--config", "{fit: {model: 1}}")
    ],
    "federation.rounds is not an argument; it belongs to a phase, as federation.phases.NAME.rounds.": [
        *("--config", "{federation: {rounds: 3}}")
    ],
    "federation.phases is {'FedAvg': {'rounds': 3}}, but must be list[Phase], such as [{name: ": [
        *("--config", "{federation: {phases: {FedAvg: {rounds: 3}}}}")
    ],
    "federation.failures is 'ignore', but must have arguments, as": ["--federation.failures", "ignore"],
    "federation.phases.FedAvg.gate is 0.5, but must be Gate or null; `fedmoe list gates` has": [
        *("--federation.phases.FedAvg.gate", "0.5")
    ],
    "federation.phases.FedAvg.select is 'best', but must be Select or null, such as {monitor: global_test}.": [
        *("--federation.phases.FedAvg.select", "best")
    ],
    "federation.metrics is ['accuracy'], but must be dict[str, Metric] or null, such as {error: torchmetrics.": [
        *("--federation.metrics", "[accuracy]")
    ],
    "federation.logger is 'wandb', but must be Logger or list[Logger] or bool; did you mean WandbLogger?": [
        *("--federation.logger", "wandb")
    ],
    "data is 'cifar10', but must be FederatedDataModule or its import path; did you mean CIFAR10?": [
        *("--data", "cifar10")
    ],
    "federation.phases.FedAvg.aggregation is 'Median', but must be Aggregation or null; did you mean CoordinateM": [
        *("--federation.phases.FedAvg.aggregation", "Median")
    ],
    "init_args is not an argument; it belongs below what it is of, as in model: {class_path:": [
        *("--config", "{model: PersonalizedMoE, init_args: {mixing: logits}}")
    ],
    "federation.phases.FedAvg.train cannot be read: line 1 has the key 'max_epochs' again.": [
        *("--federation.phases.FedAvg.train", "{max_epochs: 1, max_epochs: 2}")
    ],
    "model is 'other.yaml', but there is no such file here, or it is not YAML.": ["--config", "{model: other.yaml}"],
    "federation.phases is {'FedAvg': {'rounds': 3}}, but must be list[Phase], such as": [
        *("--config", "{federation.phases.FedAvg.rounds: 3}")
    ],
    "run.yaml is not an argument; a file comes after --config, as in --config run.yaml.": ["run.yaml"],
    "seed_everything is True, but must be int.": ["--seed_everything", "true"],
    "seed_everything is None, but must be int.": ["--seed_everything", "null"],
    "model.init_args.optimizer.init_args.learning_rate is not an argument of SGD; it has lr, momentum, dampening, ": [
        *("--model.init_args.optimizer.init_args.learning_rate", "0.1")
    ],
    "data is a file that is no text; a file of data is given to a class, as in {class_path: NpzFile, init_args:": [
        *("--data", str(Path(__file__).parent / "../../docs/tensorboard_curves.png"))
    ],
    "federation.phases.L2.algorithm must be given for Phase: Algorithm.": [
        *("--federation.phases+=Phase", "--federation.phases.name=L2")
    ],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("sentence", REFUSED)
def test_an_argument_that_cannot_be_parsed_is_named(sentence):
    assert refusal("--config", QUICKSTART, *REFUSED[sentence]).startswith(sentence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("1 +", "invalid syntax"), ("raise RuntimeError('of mine')", "of mine."), ("assert False", "AssertionError.")],
)
def test_an_own_module_that_fails_while_it_is_imported_is_named_by_its_key(fault, reason, tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(fault)
    monkeypatch.syspath_prepend(tmp_path)
    places = {
        "trainer.callbacks[1]": ["--trainer.callbacks", "[Timer, faulty.X]"],
        "federation.callbacks[0]": ["--federation.callbacks+=faulty.X"],
        "federation.phases.FedAvg": ["--federation.phases.FedAvg.algorithm", "faulty.X"],
        "federation.phases.A": ["--federation.phases", "[{name: A, algorithm: faulty.X}]"],
        "federation.phases.FedAvg.gate": ["--federation.phases.FedAvg.gate", "faulty.X"],
    }
    for key, arguments in places.items():
        message = refusal("--config", QUICKSTART, *arguments)
        assert message.startswith(key) and f": {reason}" in message


OF_PHASE = "federation.phases.FedAvg"
UNKNOWN = [  # what is changed, the key that is named then, its owner, and what it is like
    ("clients_per_round: 0.5", "clients_pr_round: 0.5", "clients_pr_round", "Phase", "clients_per_round"),
    ("shared: global", "shard: global", "algorithm.init_args.shard", "FedAvg", "shared"),
    ("rounds: 20", "optimizer: {lr: 0.1}", "optimizer", "Phase", "train.optimizer"),
    ("rounds: 20", "evaluate_after: both", "evaluate_after", "Phase", "evaluate.after"),
    ("rounds: 20", "patience: 3", "patience", "Phase", "select.patience"),
    ("rounds: 20", "train: {max_epoch: 3}", "train.max_epoch", "Phase", "train.max_epochs"),
]
WRONG = [  # what is changed, and what is said of the phase
    (
        "class_path: FedAvg",
        "class_path: FedAvgg",
        "algorithm.class_path is 'FedAvgg', but must be Algorithm or its import path",
    ),
    ("rounds: 20", "rounds: null", "rounds is None, but must be int."),
    ("rounds: 20", "rounds: x", "rounds is 'x', but must be int."),
    ("rounds: 20", "train: 3", "train is 3, but must have arguments, as in {name: value}."),
    (
        "rounds: 20",
        "train: {callbacks: [TrafficLedger]}",
        "train.callbacks[0] is 'TrafficLedger', but must be Callback; `fedmoe list client_callbacks` has",
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        *(
            (old, new, f"{OF_PHASE}.{key} is not an argument of {owner}; did you mean {meant}?")
            for old, new, key, owner, meant in UNKNOWN
        ),
        *((old, new, f"{OF_PHASE}.{sentence}") for old, new, sentence in WRONG),
        ("{alpha: 0.5}", "{}", "data.init_args.partitioner.init_args.alpha must be given for Dirichlet: float."),
        (
            "torch.optim.SGD",
            "torch.optim.SGDD",
            "model.init_args.optimizer.class_path is 'torch.optim.SGDD', but torch.optim has no SGDD; did you mean SGD",
        ),
        ("name: FedAvg", "names: FedAvg", "federation.phases[1].names is not an argument of Phase; did you mean name?"),
    ],
)
def test_a_fault_in_a_phase_or_in_an_object_is_named(old, new, sentence, tmp_path):
    text = Path(QUICKSTART).read_text()
    assert old in text
    (tmp_path / "wrong.yaml").write_text(text.replace(old, new))
    assert refusal("--config", str(tmp_path / "wrong.yaml")).startswith(sentence)


@pytest.mark.parametrize("section", ["model", "federation"])
def test_a_fault_in_a_file_that_another_one_names_has_the_key(section, tmp_path):
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    if section == "federation":
        config["federation"]["phases"][1]["rounds"] = "abc"
        owner, name, sentence = config["federation"], "phases", "federation.phases.FedAvg.rounds is 'abc', but"
    else:
        config["model"]["init_args"]["optimzer"] = config["model"]["init_args"].pop("optimizer")
        owner, name, sentence = config, "model", "model.init_args.optimzer is not an argument of PersonalizedMoE; "
    (tmp_path / "part.yaml").write_text(yaml.safe_dump(owner[name]))
    owner[name] = "part.yaml"
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(config))
    assert refusal("--config", str(tmp_path / "whole.yaml")).startswith(sentence)


def test_an_overlay_without_its_base_says_so():
    message = refusal("--config", str(REPOSITORY / "configs/opt_out_fmnist.yaml"))
    assert message.startswith("model.") and "An overlay needs the --config that it changes" in message


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "a command must be given, as in"),
        (
            ["--config", "quickstart", "fit"],
            "seed_everything is not an argument; options come after the command, as in fedmoe",
        ),
        (["serve", "--config", QUICKSTART], "num_clients must be given."),
        (["completion"], "shell must be given."),
        (["fit", "--config", "{data: {init_args: {batch_size: 16}}}"], "data must have a class_path. An overlay needs"),
        (["fit", "--config", "{configs: [a.yaml]}"], "configs is not an argument; a file comes after --config, and"),
        (
            ["fit", "--config", QUICKSTART, "--config", "{seed_everything: null}"],
            "seed_everything is None, but",
        ),
    ],
)
def test_a_command_line_without_what_it_needs(arguments, sentence):
    with pytest.raises(MisconfigurationException) as error:
        FederationCLI(arguments)
    assert str(error.value).startswith(sentence)


GATE = {"class_path": "a.LinearGate"}
PHASES = [
    {"name": "B", "algorithm": {"class_path": "a.PFLMoE", "init_args": {"gate_fraction": 0.5}}, "gate": None},
    {"name": "C", "algorithm": {"class_path": "a.PFLMoE", "init_args": {"gate_fraction": 0.5}}, "rounds": 0},
    {"name": "D", "algorithm": {"class_path": "a.PFLMoE", "init_args": {"gate_fraction": 2.0}}, "gate": GATE},
    {"name": "E", "select": {"patience": 0}},
]
SMALL = {
    "model": {"class_path": "a.A", "init_args": {"gate": GATE}},
    "data": {"class_path": "a.Digits", "init_args": {"num_clients": None, "mean": [0.5]}},
    "trainer": {"gradient_clip_val": 50, "callbacks": None},
    "federation": {
        "phases": PHASES,
        "name": "../runs",
        "callbacks": None,
        "metrics": {"f1": {"class_path": "a.F1Score"}},
    },
    "ckpt_path": "none.ckpt",
}


@pytest.mark.parametrize(
    ("owner", "argument", "value", "key"),
    [
        ("Phase 'C'", "rounds", 0, "federation.phases.C.rounds"),
        ("Phase 'E'", "select.patience", 0, "federation.phases.E.select.patience"),
        ("Select", "patience", 0, "federation.phases.E.select.patience"),
        ("PFLMoE", "gate_fraction", 2.0, "federation.phases.D.algorithm.init_args.gate_fraction"),
        (
            *("PFLMoE", "gate_fraction", 0.5),
            "federation.phases.B.algorithm.init_args.gate_fraction or "
            "federation.phases.C.algorithm.init_args.gate_fraction",
        ),
        ("Digits", "mean", [0.5], "data.init_args.mean"),
        ("Federation", "name", "../runs", "federation.name"),
        ("Phase 'B'", "gradient_clip_val", 50, "trainer.gradient_clip_val"),  # of all phases
        ("Federation", "callbacks", None, "federation.callbacks"),
        ("Federation", "metrics.f1", 7, "federation.metrics.f1"),  # what torchmetrics makes is of another class
        ("Dirichlet", "alpha", -1.0, "alpha"),  # nowhere
        ("Elsewhere", "callbacks", None, "callbacks"),  # of the trainer or of the federation
    ],
)
def test_a_refused_argument_is_named_by_its_key(owner, argument, value, key):
    error = InvalidArgumentError(owner, argument, value, "another one")
    assert with_key(error, SMALL).removeprefix(f"{owner}: ") == f"{key} is {value!r}, but must be another one."
