"""The configurations of the repository, shortened so that each runs in a few seconds on data that are here."""

import contextlib
import copy
import functools
import io
import re
from pathlib import Path

import numpy as np
import yaml

from fedmoe_pl.cli import main

REPOSITORY = Path(__file__).parents[2]
CONFIGURATIONS = sorted((REPOSITORY / "configs").glob("*.yaml"))
HERE = {"Digits", "Diabetes", "SyntheticMultilabel", "SyntheticShapes", "SyntheticTimeSeries"}
QUICKSTART = str(REPOSITORY / "configs/quickstart.yaml")


def files_of(path: Path) -> list[str]:
    """The files that the command at the top of a configuration names: the file itself, an overlay's base before it."""
    (command,) = re.findall(r"^# fedmoe fit (.*)$", path.read_text(), re.MULTILINE)
    return [str(REPOSITORY / name) for name in re.findall(r"--config (\S+)", command)]


def needs_no_download(path: Path) -> bool:
    """Whether the configuration, or the base of an overlay, reads data that come with scikit-learn or are made."""
    # not parsed as YAML, because every process that collects tests would parse all configurations
    (name,) = re.findall(r"^data:\n(?: *#.*\n)*  class_path: (\S+)", Path(files_of(path)[0]).read_text(), re.MULTILINE)
    return name.split(".")[-1] in HERE


def _is_here(config: dict) -> bool:
    return config["data"]["class_path"].split(".")[-1] in HERE


def printed(path: Path) -> dict:
    """What ``--print_config`` prints of a configuration: all files together, with all defaults."""
    return copy.deepcopy(_printed(path))


@functools.cache
def _printed(path: Path) -> dict:
    out = io.StringIO()
    options = [option for name in files_of(path) for option in ("--config", name)]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["fit", *options, "--print_config"])
    return yaml.safe_load(out.getvalue())


def short_file(path: Path, folder: Path) -> Path:
    """A file in the folder with the configuration, of one round, one epoch and few clients."""
    short = folder / f"{path.stem}.yaml"
    config = yaml.safe_load(path.read_text()) if len(files_of(path)) == 1 else printed(path)
    config = shortened(config, folder)
    if path.stem == "board":  # t-SNE of many samples is slow
        monitor = {"class_path": "RepresentationMonitor", "init_args": {"samples_per_client": 10}}
        config["federation"]["callbacks"] = [monitor]
    else:
        config["federation"]["logger"] = False
    short.write_text(yaml.safe_dump(config, sort_keys=False))
    return short


def shortened(config: dict, folder: Path) -> dict:
    """The configuration with one round, one epoch and few clients, on digits or on arrays that are made up."""
    data, federation = config["data"]["init_args"], config["federation"]
    if not _is_here(config):
        _use_made_up_arrays(config, folder)
        # large models take long to write
        federation |= {"enable_checkpointing": False, "logger": False}
    else:
        data["batch_size"] = 100  # few steps
    if "num_clients" in data or not _is_here(config):  # otherwise the samples know their clients
        data["num_clients"] = 4
    for phase in federation["phases"]:
        phase["rounds"] = 1
        train = phase["train"] = dict(phase.get("train") or {})
        train["max_epochs"] = min(1 if train.get("max_epochs") is None else train["max_epochs"], _fewest_epochs(phase))
        (phase.get("select") or {}).pop("from_round", None)
        if (phase.get("clients_per_round") or 0) > 1:
            phase["clients_per_round"] = 1 if _most_opt_out(phase) else 2
        if (phase.get("model") or {}).get("class_path", "").endswith("PooledMoE"):
            pooled = phase["model"]["init_args"]
            pooled["num_experts"] = pooled["gate"]["init_args"]["num_experts"] = data["num_clients"]
    config["trainer"]["accelerator"] = "cpu"
    federation["default_root_dir"] = str(folder / "runs")
    return config


def _fewest_epochs(phase: dict) -> int:
    """The number of epochs from which on the phase trains what clients share."""
    algorithm = phase["algorithm"]
    algorithm = {"class_path": algorithm} if isinstance(algorithm, str) else algorithm
    head_epochs = (algorithm.get("init_args") or {}).get("head_epochs", 0)
    return 2 if algorithm["class_path"].endswith("FedPAC") else head_epochs + 1


def _most_opt_out(phase: dict) -> bool:
    """Whether one of the four clients is left."""
    algorithm = phase["algorithm"]
    return isinstance(algorithm, dict) and (algorithm.get("init_args") or {}).get("opt_out_clients", 0) > 0.5


def _use_made_up_arrays(config: dict, folder: Path) -> None:
    """Puts arrays in the place of data that would have to be downloaded."""
    data, parts = config["data"]["init_args"], config["model"]["init_args"]
    classes = {"CIFAR100": 100, "EMNIST": 26}.get(config["data"]["class_path"].split(".")[-1], 10)
    config["data"]["class_path"] = "NpzFile"
    for name in ("root", "download", "pool", "global_test_size", "split"):
        data.pop(name, None)
    if data.get("rotations") is None:  # these tell who holds what
        data["partitioner"] = "IID"
    if parts.get("global_expert") == "BiLSTM":
        data["path"] = str(_arrays(folder / "texts.npz", (6,), classes=4, values=50))
        return
    for expert in (parts.get("global_expert"), parts.get("local_expert")):
        if isinstance(expert, dict) and expert["class_path"] == "LEAFCNN":  # wide networks of several clusters are slow
            expert["init_args"] |= {"conv1_channels": 4, "hidden": 16}
    part = next(parts[name] for name in ("global_expert", "embedding", "shared_extractor") if name in parts)
    network = {"in_channels": 3, "image_size": 32} | (part.get("init_args", {}) if isinstance(part, dict) else {})
    data["image_size"] = network["image_size"]
    shape = (28, 28) if network["in_channels"] == 1 else (32, 32, 3)
    data["path"] = str(_arrays(folder / f"{network['in_channels']}.npz", shape, classes, values=256))


def _arrays(path: Path, shape: tuple[int, ...], classes: int, values: int) -> Path:
    """Writes 60 training and 40 test samples in the form of a data set."""
    rng = np.random.default_rng(0)
    kind = np.uint8 if values == 256 else np.int64
    y_train = rng.integers(0, classes, 60)
    y_train[0] = classes - 1  # the data have this many classes
    np.savez(
        path,
        x_train=rng.integers(0, values, (60, *shape), kind),
        y_train=y_train,
        x_test=rng.integers(0, values, (40, *shape), kind),
        y_test=np.arange(40) % classes,
    )
    return path


def run_short(path: Path, folder: Path, capfd) -> Path:
    """Runs a shortened configuration; its methods are in the table, its files in the folder that is returned."""
    short = short_file(path, folder)
    main(["fit", "--config", str(short)])
    out, err = capfd.readouterr()
    phases = yaml.safe_load(short.read_text())["federation"]["phases"]
    methods = [phase["name"] for phase in phases if phase.get("evaluate", True)]
    rows = [line.split("  ")[0] for line in out.splitlines()]
    assert list(dict.fromkeys(row for row in rows if row in methods)) == methods  # CostToTarget prints them again
    for banner in ("GPU available", "TPU", "stopped", "Warning", "warn", "deprecated"):
        assert banner not in err + out
    (run,) = (folder / "runs").glob("*/version_0")
    assert {"config.yaml", "rounds.csv", "clients.csv", "summary.csv"} <= {file.name for file in run.iterdir()}
    return run
