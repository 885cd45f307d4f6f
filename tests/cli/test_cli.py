"""The command line: YAML in, a table out; what is wrong in one sentence."""

import copy
import signal
from pathlib import Path

import pytest
import torch
import yaml

from fedmoe_pl.cli import FederationCLI, main
from fedmoe_pl.data import FashionMNIST
from fedmoe_pl.trees import copy_module

REPOSITORY = Path(__file__).parents[2]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
QUICKSTART = str(REPOSITORY / "configs/quickstart.yaml")


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])  # LightningCLI warns of arguments beside those that it is given


@pytest.fixture
def fake_images(tmp_path):
    """Arrays in the form of the data sets that cannot be downloaded here, by number of channels."""
    import numpy as np

    rng = np.random.default_rng(0)
    for channels, shape in ((1, (28, 28)), (3, (32, 32, 3))):
        arrays = {"x_train": rng.integers(0, 256, (60, *shape), np.uint8), "y_train": rng.integers(0, 10, 60)}
        arrays |= {"x_test": rng.integers(0, 256, (40, *shape), np.uint8), "y_test": np.arange(40) % 10}
        np.savez(tmp_path / f"{channels}.npz", **arrays)
    arrays = {"x_train": rng.integers(0, 50, (60, 6)), "y_train": rng.integers(0, 4, 60)}
    np.savez(tmp_path / "texts.npz", **arrays, x_test=rng.integers(0, 50, (40, 6)), y_test=np.arange(40) % 4)
    return tmp_path


def shortened(path: Path, folder: Path) -> dict:
    """The configuration with one round, one epoch and few clients, on data that are here."""
    config = yaml.safe_load(path.read_text())
    data, federation = config["data"], config["federation"]
    if data["class_path"] != "Digits":
        parts = config["model"]["init_args"]
        part = next(parts[name] for name in ("global_expert", "embedding", "shared_extractor") if name in parts)
        network = {"in_channels": 3, "image_size": 32} | part.get("init_args", {})
        for part in (parts.get("global_expert", {}), parts.get("local_expert", {})):
            if part.get("class_path") == "LEAFCNN":  # several clusters of wide networks take long to write
                part["init_args"] |= {"conv1_channels": 4, "hidden": 16}
        data["class_path"] = "NpzFile"
        for name in ("root", "pool", "global_test_size", "split"):
            data["init_args"].pop(name, None)
        if parts.get("global_expert", {}).get("class_path") == "BiLSTM":
            data["init_args"]["path"] = str(folder / "texts.npz")
        else:
            path = str(folder / f"{network['in_channels']}.npz")
            data["init_args"] |= {"path": path, "image_size": network["image_size"]}
        federation["enable_checkpointing"] = False  # large models take long to write
        if "rotations" not in data["init_args"]:  # which say themselves who holds what
            data["init_args"]["partitioner"] = "IID"
    data["init_args"]["num_clients"] = 4
    for phase in federation["phases"]:
        phase["rounds"] = 1
        phase["max_epochs"] = min(phase.get("max_epochs", 1), 1)
        phase.pop("monitor_from_round", None)
        if phase.get("clients_per_round", 0) > 1:
            phase["clients_per_round"] = 2
    config["trainer"]["accelerator"] = "cpu"
    federation["default_root_dir"] = str(folder / "runs")
    return config


ALIKE = {  # those that differ from a faster one in their data or widths alone
    *("adaptive_experts_cifar10", "adaptive_experts_rotated_cifar10", "fedmoe_da_emnist", "fedmoe_da_mnist"),
    *("fedmoe_da_svhn", "opt_out_cifar10", "pfedmoe_cifar100"),
}


@pytest.mark.parametrize("name", sorted(ALIKE))
def test_configurations_that_are_not_run_name_what_there_is(name, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(REPOSITORY / f"configs/{name}.yaml"), "--print_config"])
    assert exit.value.code == 0 and "federation:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in ALIKE else []) for path in CONFIGS],
    ids=lambda path: path.stem,
)
def test_every_configuration_runs_one_round(path, fake_images, capfd):
    short = fake_images / "short.yaml"
    short.write_text(yaml.safe_dump(shortened(path, fake_images), sort_keys=False))
    main(["fit", "--config", str(short)])
    out, err = capfd.readouterr()
    methods = [
        phase["name"]
        for phase in yaml.safe_load(path.read_text())["federation"]["phases"]
        if phase.get("evaluate", True)
    ]
    rows = [line.split("  ")[0] for line in out.splitlines()]
    assert list(dict.fromkeys(row for row in rows if row in methods)) == methods  # CostToTarget prints them again
    for banner in ("GPU available", "TPU", "stopped", "Warning", "warn", "deprecated"):
        assert banner not in err + out
    (run,) = (fake_images / "runs").glob("*/version_0")
    written = {p.name for p in run.iterdir()}
    assert {"config.yaml", "rounds.csv", "clients.csv", "summary.csv"} <= written
    if "enable_checkpointing" in short.read_text():
        return
    assert {"checkpoints", "clients"} <= written
    main(["fit", "--config", str(run / "config.yaml")])  # the resolved configuration repeats the run
    assert (run.parent / "version_1/clients.csv").read_bytes() == (run / "clients.csv").read_bytes()


def test_cifar_and_fashion_configurations_name_data_that_exist():
    cli = FederationCLI.__new__(FederationCLI)
    assert FashionMNIST.__name__ in (REPOSITORY / "configs/pfl_moe_fmnist_lenet5.yaml").read_text()
    assert set(cli.subcommands()) == {"fit", "personalize", "validate", "test", "predict", "partition"}


def test_partition_prints_and_draws_who_holds_what(tmp_path, capsys):
    main(["partition", "--config", QUICKSTART, "--federation.default_root_dir", str(tmp_path)])
    assert (tmp_path / "quickstart/partition.png").stat().st_size > 10_000
    assert len(capsys.readouterr().out.splitlines()) > 20


def test_a_user_s_own_module_is_an_expert_by_its_class_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\nclass Mine(nn.Sequential):\n    def __init__(self, width: int = 7):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = shortened(Path(QUICKSTART), tmp_path)
    config["model"]["init_args"]["global_expert"] = {"class_path": "mine.Mine", "init_args": {"width": 9}}
    config["federation"]["phases"] = [
        phase for phase in config["federation"]["phases"] if phase["name"] in ("Local", "FedAvg")
    ]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(tmp_path / "mine.yaml")])
    (checkpoint,) = tmp_path.rglob("all_clients.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert state["global_expert.1.weight"].shape == (9, 64)


def test_copies_of_a_module_share_the_command_line_s_optimizer_factory(tmp_path):
    """The factory holds the parser and with it the data; a deep copy of it would copy the data for every client."""
    config = shortened(Path(QUICKSTART), tmp_path)
    config["federation"] |= {
        "phases": config["federation"]["phases"][:1],
        "enable_progress_bar": False,
        "logger": False,
    }
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(config))
    module = FederationCLI(["fit", "--config", str(tmp_path / "one.yaml")]).model
    copied = copy_module(module)
    assert copied.optimizer is module.optimizer
    assert copied.global_expert is not module.global_expert
    assert copy.deepcopy(module).optimizer is not module.optimizer, "nothing to guard against any more"


WRONG = {
    "federation.naem": (["--federation.naem", "x"], "--federation.naem"),
    "misspelt argument": (
        ["--data.init_args.num_cliets", "3"],
        "data.init_args.num_cliets is not an argument of Digits",
    ),
    "suggestion": (["--data.init_args.num_cliets", "3"], "did you mean num_clients?"),
    "wrong type": (["--data.init_args.num_clients", "ten"], "data.init_args.num_clients is 'ten', but must be int"),
    "alpha": (["--data.init_args.partitioner.init_args.alpha", "-1"], "alpha is -1.0, but must be"),
    "alpha of the wrong type": (
        ["--data.init_args.partitioner.init_args.alpha", "x"],
        "alpha is 'x', but must be float",
    ),
    "too many clients": (["--data.init_args.num_clients", "5000"], "data.init_args.num_clients is 5000, but"),
    "a client without samples": (
        ["--data.init_args.partitioner.init_args.alpha", "0.001"],
        "leaves client 0 of 20 without training samples",
    ),
    "unknown class": (["--model.init_args.global_expert", "Lenet5"], "did you mean LeNet5?"),
    "outputs": (
        ["--model.init_args.local_expert", "SmallMLP", "--model.init_args.local_expert.init_args.num_classes", "7"],
        "model.init_args.local_expert gives 7 outputs, but must give 10, as many as global_expert",
    ),
    "trainer": (["--trainer.accelerator", "gpuu"], "accelerator"),
    "devices": (["--trainer.devices", "0"], "trainer: `devices` selected with `CPUAccelerator` should be an int > 0"),
    "nodes": (["--trainer.num_nodes", "2"], "trainer.num_nodes is 2, but must be 1"),
    "stacking": (
        ["--federation.backend", "StackedBackend", "--trainer.accumulate_grad_batches", "2"],
        "federation.phases 'Local': StackedBackend cannot stack the clients: trainer.accumulate_grad_batches is 2",
    ),
    "stack": (
        ["--federation.backend", "StackedBackend", "--federation.backend.clients_per_stack", "0"],
        "clients_per_stack is 0, but must be at least 1",
    ),
    "precision": (["--trainer.precision", "bf16-true"], "trainer.precision is 'bf16-true', but must be"),
    "no folder": (["--federation.default_root_dir", __file__], "federation.default_root_dir"),
    "abbreviation": (["--trainer.max_epoch", "3"], "--trainer.max_epoch"),
    "no checkpoint": (["--ckpt_path", "none.ckpt"], "ckpt_path is 'none.ckpt', but there is no such file"),
    "no checkpoint at all": (["--ckpt_path", "last"], "has a checkpoint"),
    "damaged checkpoint": (["--ckpt_path", __file__], "damaged or no checkpoint"),
    "no config": (["--config", "none.yaml"], "none.yaml"),
    "no data": (["--data", "FashionMNIST", "--data.init_args.root", "nowhere"], "data.init_args.root"),
    "optimizer": (
        ["--model.init_args.optimizer", "torch.optim.SGD", "--model.init_args.optimizer.lr", "-1"],
        "learning rate: -1",
    ),
    "no such store": (["--federation.store", "cloud"], "federation.store is 'cloud', but must be 'memory' or 'disk'."),
    "store": (
        ["--federation.store", "disk", "--federation.enable_checkpointing", "false"],
        "federation.store is 'disk', which needs enable_checkpointing: true",
    ),
    "no such evaluation": (["--federation.evaluate_every_n_rounds", "-1"], "evaluate_every_n_rounds is -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_user_can_mend_ends_in_one_sentence(case, tmp_path, capsys, monkeypatch):
    arguments, sentence = WRONG[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", QUICKSTART, *arguments])
    assert exit.value.code == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("fedmoe: ")
    assert sentence in line
    assert not list(tmp_path.rglob("version_*")), "nothing was started"


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
        ("class_path: FedAvg", "class_path: FedAvgg", "did you mean FedAvg?"),
        ("rounds: 20", "rounds: 0", "federation.phases 'FedAvg': rounds is 0, but must be at least 1"),
        ("weight: 1.0", "weight: 1.5", "weight is 1.5, but the global expert's weight must be from 0 to 1"),
        ("gate_fraction: 0.25", "gate_fraction: 2", "gate_fraction is 2"),
        ("data:", "dat:", "dat"),
        ("{alpha: 0.5}", "{}", "data.init_args.partitioner.init_args.alpha is required, but missing"),
        ("torch.optim.SGD", "torch.optim.SGDD", "optimizer is 'torch.optim.SGDD', but torch.optim has no SGDD"),
        ("class_path: LinearGate", "class_path: SmallMLP", "gate is 'SmallMLP', which is not the kind of class"),
        ("  max_epochs: 2", "  max_epoch: 2", "max_epoch is not an argument"),
    ],
)
def test_a_misspelt_configuration_ends_in_one_sentence(old, new, sentence, tmp_path, capsys):
    wrong = tmp_path / "wrong.yaml"
    text = Path(QUICKSTART).read_text()
    assert old in text
    wrong.write_text(text.replace(old, new))
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(wrong), "--federation.default_root_dir", str(tmp_path)])
    assert exit.value.code == 2
    assert sentence in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("moment", ["in a client's training", "between rounds"])
def test_ctrl_c_says_how_to_go_on(moment, tmp_path, capsys, monkeypatch):
    def interrupt(*arguments, **kwargs):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    if moment == "between rounds":
        monkeypatch.setattr("fedmoe_pl.callbacks.ResultFiles.on_evaluation_end", interrupt)
    else:
        monkeypatch.setattr("fedmoe_pl.models.PersonalizedMoE.loss", interrupt)
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", QUICKSTART, "--federation.default_root_dir", str(tmp_path)])
    assert exit.value.code == 130
    assert "--ckpt_path last" in capsys.readouterr().err.strip().splitlines()[-1]
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler, "a second Ctrl-C is heard"


def test_newcomers_are_personalized_from_the_command_line(tmp_path, capsys):
    command = ["--config", QUICKSTART, "--federation.default_root_dir", str(tmp_path)]
    quick = tmp_path / "quick.yaml"
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    for phase in config["federation"]["phases"]:
        phase |= {"rounds": 1, "max_epochs": 1}
    quick.write_text(yaml.safe_dump(config))
    command[1] = str(quick)
    main(["fit", *command])
    main(["personalize", *command, "--data.init_args.num_clients", "3", "--data.init_args.partition_seed", "5"])
    table = capsys.readouterr().out
    assert "over all 3 clients" in table and "FedAvg: global expert, after aggregation, given checkpoint" in table
    checkpoints = {path.parent.name for path in (tmp_path / "quickstart/newcomers/version_0/clients").rglob("*.ckpt")}
    assert checkpoints == {phase["name"] for phase in config["federation"]["phases"]}
