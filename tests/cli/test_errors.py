"""One line for each refusal: what does not fit the parser's types, and what a class says, with the key."""

import copy
import re
from pathlib import Path

import pytest
import yaml
from helpers.configurations import CONFIGURATIONS, QUICKSTART, REPOSITORY, files_of
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Federation, Phase
from fedmoe_pl.algorithms import FedAvg, PersonalizedExpert
from fedmoe_pl.backends import StackedBackend
from fedmoe_pl.cli import FederationCLI, main
from fedmoe_pl.cli.errors import cause_of, with_key
from fedmoe_pl.cli.faults import fault_of
from fedmoe_pl.cli.phases import with_phases
from fedmoe_pl.data import Digits, Dirichlet
from fedmoe_pl.models import ConstantGate


class Parser(Exception):
    """Carries the command line's parser out of it."""


@pytest.fixture(scope="module")
def parser():
    class OnlyParser(FederationCLI):
        @staticmethod
        def subcommands():
            return {"fit": FederationCLI.subcommands()["fit"]}

        def parse_arguments(self, parser, args):
            raise Parser(self._subcommand_parsers["fit"])

    with pytest.raises(Parser) as error:
        OnlyParser([])
    return error.value.args[0]


@pytest.fixture(scope="module")
def configuration(parser) -> dict:
    """The quickstart, parsed."""
    return parser.parse_args(["--config", QUICKSTART]).as_dict()


def refusal(parser, *arguments: str) -> str:
    with pytest.raises(Exception) as error:
        changed = with_phases(["fit", *arguments])
        fault, _ = fault_of(changed, {"fit": parser})
        if fault:
            raise MisconfigurationException(fault)
        parser.parse_args(changed[1:])
    return cause_of(error.value)


PARTITIONER = "data.init_args.partitioner.init_args"
OPTIMIZER = "model.init_args.optimizer.init_args"
NOT_PARSED = {
    "model is null, but must be a LightningModule.": ["--model=null"],
    "trainer.max_epoch is not an argument of trainer; did you mean max_epochs?": ["--trainer.max_epoch=3"],
    "print_confg is not an argument; did you mean print_config?": ["--print_confg=1"],
    "federation.naem is not an argument of federation; did you mean name?": ["--federation.naem", "x"],
    "data.init_args.num_cliets is not an argument of Digits; did you mean num_clients?": ["--data.num_cliets", "3"],
    "data.init_args.num_clients is 'ten', but must be int or null.": ["--data.init_args.num_clients", "ten"],
    f"{PARTITIONER}.alpha is 'x', but must be float.": [f"--{PARTITIONER}.alpha", "x"],
    f"{PARTITIONER}.alpha is [0.5], but must be float.": [f"--{PARTITIONER}.alpha", "[0.5]"],
    f"{OPTIMIZER}.lr is 'abc', but must be float.": [f"--{OPTIMIZER}.lr", "abc"],
    "federation.phases.label prior.rounds is 'x', but must be int.": ["--federation.phases.label prior.rounds", "x"],
    f"{OPTIMIZER}.lr is nan, but must be a finite number.": [f"--{OPTIMIZER}.lr", ".nan"],
    f"{OPTIMIZER}.weight_decay is null, but must be float.": [f"--{OPTIMIZER}.weight_decay", "null"],
    "did you mean LeNet5?": ["--model.init_args.global_expert", "Lenet5"],
    "trainer.max_epoch is not an argument of trainer; did you mean": ["--trainer.max_epoch", "3"],
    "trainer is 3, but must have keys and values.": ["--trainer", "3"],
    "config is 'none.yaml', but the file cannot be read: No such file": ["--config", "none.yaml"],
    "federation.store is 'cloud', but must be 'memory' or 'disk'.": ["--federation.store", "cloud"],
    "federation.logger is 'nothing.X', which cannot be imported: No module named 'nothing'.": (
        ["--federation.logger", "nothing.X"]
    ),
    "federation.logger is 'torch.nn.Linear', which is a Module, but must be bool or a Logger or a list of Logger; a": (
        ["--federation.logger", "torch.nn.Linear"]
    ),
    "model is 'Digits', which is a FederatedDataModule, but must be a LightningModule; a FederatedDataModule "
    "belongs in data.": ["--model", "Digits"],
    "data is 'lightning.pytorch.demos.boring_classes.BoringDataModule', but must be a FederatedDataModule; give it to "
    "FromDataModule, which deals its samples.": ["--data", "lightning.pytorch.demos.boring_classes.BoringDataModule"],
    "data.init_args.partitioner is 'Dirichlet(0.5)', which is neither a class of fedmoe_pl nor an import path; did you "
    "mean Dirichlet?": ["--data.init_args.partitioner", "Dirichlet(0.5)"],
    "federation.callbacks[0] is 'EarlyStopping', which is a Callback, but must be a FederationCallback; a Callback "
    "belongs in trainer.callbacks or a phase's callbacks.": ["--federation.callbacks", "[EarlyStopping]"],
    "trainer.callbacks[0] is 'TrafficLedger', which is a FederationCallback, but must be a Callback; a "
    "FederationCallback belongs in federation.callbacks.": ["--trainer.callbacks", "[TrafficLedger]"],
    "trainer.logger[0].init_args.save_dirr is not an argument of CSVLogger; did you mean save_dir?": (
        ["--trainer.logger", "[{class_path: CSVLogger, init_args: {save_dirr: x}}]"]
    ),
    "model.class_pat is not a key of a class; did you mean class_path?": ["--config", "{model: {class_pat: X}}"],
    "federation.callbacks[0] is 'x', which is neither a class of fedmoe_pl nor": ["--federation.callbacks", "[x]"],
    "federation.phases[0] is 3, but must be a Phase.": ["--federation.phases", "[3]"],
    "federation.phases is {}, but must be a list of Phase.": ["--federation.phases", "{}"],
    "federation.callbacks is 'RepresentationMonitor', but must be a list of FederationCallback or null, such as "
    "[RepresentationMonitor].": ["--federation.callbacks", "RepresentationMonitor"],
    "federation.phases.A.roundz is not an argument of Phase; did you mean rounds?": (
        ["--federation.phases+={name: A, algorithm: Local, roundz: 2}"]
    ),
    "modle is not an argument; did you mean model?": ["--modle", "{}"],
    "federation.backend is 'Stacked', which is neither a class of fedmoe_pl nor an import path; did you mean Stacked": (
        ["--federation.backend", "Stacked"]
    ),
    "federation.backend is 'Backend', of which no object can be made; it must be one of its kinds: AutoBackend, ": (
        ["--federation.backend", "Backend"]
    ),
    "federation.phases.PFL-MF.gate is 'Gate', of which no object can be made; it must be one of its kinds: ": (
        ["--federation.phases.PFL-MF.gate", "{class_path: Gate}"]
    ),
    "model.init_args.loss is 'mse', which is neither a class of fedmoe_pl nor an import path; it must be a Module": (
        ["--model.loss", "mse"]
    ),
    "federation.backend is 'Pool', which is neither a class of fedmoe_pl nor an import path; it must be a Backend or": (
        ["--federation.backend", "Pool"]
    ),
    "federation.phases.FedAvg.optimizer.lr is given, but federation.phases.FedAvg.optimizer has no class_path, which "
    "must name an Optimizer.": ["--federation.phases.FedAvg.optimizer.lr", "0.1"],
}


@pytest.mark.parametrize("sentence", NOT_PARSED)
def test_arguments_that_cannot_be_parsed_are_named(sentence, parser):
    assert refusal(parser, "--config", QUICKSTART, *NOT_PARSED[sentence]).startswith(sentence.split("did you")[0])
    assert sentence in refusal(parser, "--config", QUICKSTART, *NOT_PARSED[sentence])


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "clients_per_round: 0.5",
            "clients_pr_round: 0.5",
            "federation.phases.FedAvg.clients_pr_round is not an argument of Phase; did you mean",
        ),
        (
            "shared: global",
            "shard: global",
            "federation.phases.FedAvg.algorithm.init_args.shard is not an argument of FedAvg; did you mean shared?",
        ),
        ("num_clients: 20", "num_cliets: 20", "data.init_args.num_cliets is not an argument of Digits; did you mean"),
        ("class_path: FedAvg", "class_path: FedAvgg", "federation.phases.FedAvg.algorithm is 'FedAvgg', which is"),
        ("data:", "dat:", "dat is not an argument; did you mean data?"),
        ("{alpha: 0.5}", "{}", f"{PARTITIONER}.alpha is required, but missing."),
        ("torch.optim.SGD", "torch.optim.SGDD", "optimizer is 'torch.optim.SGDD', but torch.optim has no SGDD; did"),
        ("gate: LinearGate", "gate: SmallMLP", "gate is 'SmallMLP', which is a Module, but must be a Gate"),
        ("  max_epochs: 2", "  max_epoch: 2", "trainer.max_epoch is not an argument of trainer; did you mean"),
        ("rounds: 20", "rounds: null", "federation.phases.FedAvg.rounds is null, but must be int."),
        (
            "name: FedAvg",
            "names: FedAvg",
            "federation.phases[1].names is not an argument of Phase; did you mean name?",
        ),
        (
            "{shared: global_expert.*}",
            "null",
            "federation.phases.FedAvg.algorithm.init_args is null, but must have the",
        ),
        ("model:", "modle: {}\nmodel:", "modle is not an argument; did you mean model?"),
        ("trainer:", "trainer: null #", "trainer is null, but must have keys and values."),
    ],
)
def test_a_misspelt_configuration_is_named(old, new, sentence, parser, tmp_path):
    text = Path(QUICKSTART).read_text()
    assert old in text
    text = text.replace(old, new) if "null #" not in new else re.sub(r"trainer:.*\n.*\n.*\n", "trainer: null\n", text)
    (tmp_path / "wrong.yaml").write_text(text)
    assert sentence in refusal(parser, "--config", str(tmp_path / "wrong.yaml"))


PHASE_ERRORS = {
    "federation.phases.PFL-FB.roundz is not an argument of Phase; did you mean rounds?": (2, "roundz", 3),
    "federation.phases.FedAvg.rounds is 'x', but must be int.": (1, "rounds", "x"),
    "federation.phases.PFL-MF.optimizer.init_args.lrr is not an argument of Adam; did you mean lr?": (
        *(4, "optimizer"),
        {"class_path": "torch.optim.Adam", "init_args": {"lrr": 0.1}},
    ),
    "federation.phases.equal weights.mixing is 'both', but must be 'logits' or 'probabilities' or": (
        3,
        "mixing",
        "both",
    ),
    "federation.phases.Local.algorithm is 'nothing.X', which cannot be imported: No module named 'nothing'.": (
        *(0, "algorithm"),
        "nothing.X",
    ),
    "federation.phases.Local.algorithm is 'os.path', but must be an Algorithm.": (0, "algorithm", "os.path"),
    "federation.phases[2].name is 3, but must be str.": (2, "name", 3),
}


@pytest.mark.parametrize("sentence", PHASE_ERRORS)
def test_an_error_in_a_phase_has_the_name_of_the_phase(sentence, parser, tmp_path):
    index, argument, value = PHASE_ERRORS[sentence]
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    config["federation"]["phases"][index][argument] = value
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))
    assert refusal(parser, "--config", str(tmp_path / "wrong.yaml")).startswith(sentence)


def test_an_overlay_without_its_base_says_so(parser):
    for name in ("opt_out_fmnist", "fedmoe_da_svhn"):
        message = refusal(parser, "--config", str(REPOSITORY / f"configs/{name}.yaml"))
        assert "model" in message and "an overlay needs the --config that it changes before it" in message


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_nothing_in_a_configuration_of_the_repository_is_refused(path, parser):
    files = [option for name in files_of(path) for option in ("--config", name)]
    assert not fault_of(["fit", *files], {"fit": parser})[0]


UNKNOWN = {
    "modle: {}": "modle is not an argument; did you mean model?",
    "trainer: {max_epoch: {}}": "trainer.max_epoch is not an argument of trainer; did you mean max_epochs?",
    "trainer: trainer.yaml": "trainer.max_epoch is not an argument of trainer; did you mean max_epochs?",
    "federation: {phases: [{name: A, algorithm: {class_path: FedAvg, init_args: {sharde: {}}}}]}": (
        "federation.phases.A.algorithm.init_args.sharde is not an argument of FedAvg; did you mean shared?"
    ),
    "federation: {phases: [{name: A, algorithm: FedAvg, evaluate: null}]}": (
        "federation.phases.A.evaluate is null, but must be an Evaluate or bool."
    ),
    "trainer: list.yaml": "trainer is 'list.yaml', but the file must have keys and values.",
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_an_unknown_argument_of_an_overlay_is_refused_though_it_is_empty(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])
    monkeypatch.chdir(tmp_path)
    Path("overlay.yaml").write_text(text)
    Path("trainer.yaml").write_text("max_epoch: {}")
    Path("list.yaml").write_text("[1]")
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", QUICKSTART, "--config", "overlay.yaml", "--print_config"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"fedmoe: {UNKNOWN[text]}\n"


IN_A_FILE = [
    "model.init_args.optimizer.init_args.lr is 'abc', but must be float.",
    "model.init_args.optimzer is not an argument of PersonalizedMoE; did you mean optimizer?",
    "federation.phases.FedAvg.rounds is 'abc', but must be int.",
]


@pytest.mark.parametrize("sentence", IN_A_FILE)
def test_a_fault_in_a_file_that_another_one_names_has_the_key(sentence, parser, tmp_path):
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    if sentence.startswith("federation"):
        config["federation"]["phases"][1]["rounds"] = "abc"
        (tmp_path / "part.yaml").write_text(yaml.safe_dump(config["federation"]["phases"]))
        config["federation"]["phases"] = "part.yaml"
    else:
        optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": "abc"}}
        config["model"]["init_args"] |= {"optimizer" if "abc" in sentence else "optimzer": optimizer}
        (tmp_path / "part.yaml").write_text(yaml.safe_dump(config["model"]))
        config["model"] = "part.yaml"
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(config))
    assert refusal(parser, "--config", str(tmp_path / "whole.yaml")) == sentence


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model.optimizer=torch.optim.Adam", "--model.optimizer.lr=1e-3"],
        ["--federation.phases+={name: again, algorithm: FedAvg}", "--federation.phases.again.rounds=3"],
        ["--config", "{trainer: {max_epochs: 3}}", "--data.partitioner=Shards"],
        ["--trainer.callbacks+=Timer", "--trainer.callbacks.verbose=false"],
        ["--config", "{federation: {failures: {dropout: null}}}", "--federation.failures.dropout=0.1"],
        ["--config", "{data: {init_args: {num_clients: 3}}}", "--config", "{data: {class_path: MNIST}}"],
    ],
)
def test_what_lightning_takes_on_a_command_line_is_not_refused(arguments, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", QUICKSTART, *arguments, "--print_config"])
    assert not ended.value.code, capsys.readouterr().err


CLASSES = {  # what a class refuses, and the key that the command line must name
    f"{PARTITIONER}.alpha": (-1.0, lambda: Dirichlet(-1.0)),
    "data.init_args.num_clients": (5000, lambda: Digits(num_clients=5000, partitioner=Dirichlet(0.5)).setup()),
    "data.init_args.test_fraction": (1.5, lambda: Digits(num_clients=2, test_fraction=1.5)),
    "federation.phases.FedAvg.rounds": (0, lambda: Phase("FedAvg", FedAvg(), rounds=0)),
    "federation.phases.FedAvg.clients_per_round": (-1, lambda: Phase("FedAvg", FedAvg(), clients_per_round=-1)),
    "federation.phases.PFL-FB.algorithm.init_args.gate_fraction": (2.0, lambda: PersonalizedExpert(gate_fraction=2.0)),
    "federation.phases.PFL-MF.gate.init_args.weight": (1.5, lambda: ConstantGate(1.5)),
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
    names = [phase["name"] for phase in config["federation"]["phases"]]
    *parents, last = key.split(".")
    node = config
    for parent in parents:
        node = node[names.index(parent) if isinstance(node, list) else parent]
    node[last] = value
    return config
