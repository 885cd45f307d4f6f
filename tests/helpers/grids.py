"""Tiny grids on digits, and a process that takes the place of ``fedmoe fit``."""

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import yaml

TINY = {
    "seed_everything": 0,
    "model": {"class_path": "PersonalizedMoE", "init_args": {"global_expert": "SmallMLP"}},
    "data": {
        "class_path": "Digits",
        "init_args": {
            "num_clients": 4,
            "partitioner": {"class_path": "Dirichlet", "init_args": {"alpha": 0.5}},
            "batch_size": 100,
        },
    },
    "trainer": {"accelerator": "cpu", "devices": 1, "max_epochs": 1},
    "federation": {
        "logger": False,
        "phases": [
            {"name": "Local", "algorithm": {"class_path": "Local"}, "gate": "LocalOnly", "evaluate": True},
            {
                "name": "FedAvg",
                "algorithm": {"class_path": "FedAvg", "init_args": {"shared": "global_expert.*"}},
                "gate": "GlobalOnly",
                "evaluate": True,
            },
            {
                "name": "PFL-FT",
                "algorithm": {"class_path": "FineTuning"},
                "gate": "LocalOnly",
                "evaluate": True,
            },
        ],
    },
}

# Writes what `fedmoe fit` writes: its first argument says how it ends, the others are those of `fedmoe`.
_SCRIPT = """
import csv, json, os, pathlib, shutil, statistics, sys, time, yaml
kind, config, checkpoint = sys.argv[1], yaml.safe_load(open(sys.argv[4])), sys.argv[6:]
federation, seed = config["federation"], config["seed_everything"]
folder = pathlib.Path(federation["default_root_dir"]) / federation["name"] / "version_0"
finished = folder / "checkpoints/finished"
finished.mkdir(parents=True, exist_ok=True)
shutil.copy(sys.argv[4], folder / "config.yaml")
(folder / "record.json").write_text(json.dumps(config))
(folder / "checkpoints/last.ckpt").touch()
with open(folder / "began", "a") as file:
    print(*checkpoint, file=file)
print("words on stdout")
if kind == "fails" and seed == 0:
    print("Traceback ...", "fedmoe: it is broken.", "", sep="\\n", file=sys.stderr)
    sys.exit(2)
if kind == "hangs" and seed == 1 and not checkpoint:
    time.sleep(60)
texts = {"model": "an expert", "evaluation_point": "after aggregation", "selection": "last round", "clients": "all 10"}
metrics = ("local_test", "reweighted_test", "global_test", "validation")
tables = {"clients": [], "rounds": []}
for index, phase in enumerate(federation["phases"]):
    of_all = 0.5 + index / 10 + seed / 1000
    common = {"method": phase["name"], "round": 1, **texts}
    differs = [index * (client - 4.5) / 1000 for client in range(10)]  # between methods, by 0 in the mean
    of_clients = [("", of_all + client / 100 + differs[client], of_all, "") for client in range(10)]
    tables["clients"] += [
        {**common, "client": client, "mean_gate_weight": "", **dict(zip(metrics, values))}
        for client, values in enumerate(of_clients)
    ]
    row = {}
    for metric, values in zip(metrics, zip(*of_clients)):
        spread = (statistics.fmean(values), statistics.pstdev(values), min(values)) if "" not in values else [""] * 3
        row |= {f"{metric}_{name}": value for name, value in zip(("mean", "std", "worst_tenth"), spread)}
    tables["rounds"].append(common | row)
for name, rows in {**tables, "summary": tables["rounds"]}.items():
    with open(folder / f"{name}.csv", "w") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\\n")
        writer.writeheader()
        writer.writerows(rows)
for phase in federation["phases"]:
    (finished / f"{phase['name']}.ckpt").touch()
"""


def write_grid(folder: Path, **changes) -> list[str]:
    """Writes a grid of two seeds, with changed keys, and its configuration; returns the arguments that name it."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    grid = {"configs": ["tiny.yaml"], "values": {"seed_everything": [0, 1]}, "folder": str(folder / "runs")}
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid | changes))
    return ["--config", str(folder / "grid.yaml")]


def pretended_configured(arguments: list[str], check: bool) -> tuple[SimpleNamespace, None, None]:
    """Takes the place of ``command_line.configured``: what is written, without parsing and checks."""
    words, files = iter(arguments), []
    for word in words:
        if word == "--config":
            value = next(words)
            files.append(yaml.safe_load(value if "{" in value else Path(value).read_text()))
        else:
            key, _, value = word.removeprefix("--").partition("=")
            *above, last = key.split(".")
            files.append(
                functools.reduce(lambda node, name: {name: node}, reversed(above), {last: yaml.safe_load(value)})
            )
    hparams = functools.reduce(_merged, files)
    phases = [SimpleNamespace(name=phase["name"]) for phase in hparams["federation"]["phases"]]
    starts = {"Local": "initial", "FedAvg": "initial", "PFL-FT": "FedAvg"}
    return SimpleNamespace(hparams=hparams, phases=phases, starts=starts), None, None


def _merged(before, after):
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return after
    return before | {name: _merged(before.get(name), value) for name, value in after.items()}


def pretended_fit(kind: str, folder: Path) -> list[str]:
    """Makes a program that takes the place of ``fedmoe`` and writes a run's files at once.

    The kind is "ends"; "fails", with seed 0; or "hangs", with seed 1, until it is continued.
    """
    script = folder / "fit.py"
    script.write_text(_SCRIPT)
    return [sys.executable, str(script), kind]
