"""Hyperparameters with short names, for loggers: of a run from the command line or from Python alike."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from pydoc import locate
from typing import Any

from lightning.pytorch import Trainer

from fedmoe_pl.backends.fitting import LEAN_TRAINER, listed
from fedmoe_pl.checkpoints.configuration import as_text, parameters_of
from fedmoe_pl.logs.loggers import method_tag
from fedmoe_pl.phases.phase import Evaluate, Phase, Select, Train

_GROUPS = ("trainer", "model", "data", "train")  # keys of a phase's `train` replace those of the others
_ALWAYS = {"max_epochs", "lr", "rounds", "num_clients", "batch_size"}  # shown, too, where they have their default
_WITHOUT_MEANING = {
    *("evaluate_every_n_rounds", "every_n_rounds", "every_n_epochs", "evaluation_cohort_size"),
    *("partition_seed", "start", "name"),
}

Path = tuple[str, ...]


def method_hparams(configuration: Mapping[str, str], seed: int) -> dict[str, dict[str, Any]]:
    """The hyperparameters of each phase, by its name.

    They are what differs from the default: of the model, the data and the clients' Trainers and, in place of these, of
    the phase. A name is the last part of a key, with the part before it if several keys end in the same way.

    Example:
        >>> phases = [{"name": "FedAvg", "rounds": 5, "algorithm": {"class_path": "fedmoe_pl.algorithms.FedProx"}}]
        >>> model = {"class_path": "a.Net", "optimizer": {"class_path": "torch.optim.SGD", "lr": 0.1, "momentum": 0}}
        >>> method_hparams({"hparams": "", "objects": json.dumps({"model": model, "phases": phases})}, seed=3)
        {'FedAvg': {'model': 'Net', 'optimizer': 'SGD', 'lr': 0.1, 'rounds': 5, 'algorithm': 'FedProx', 'seed': 3}}
    """
    of_all, of_phases = _leaves_of_run(configuration)
    names = short_names([*of_all, *(path for leaves in of_phases.values() for path in leaves)])
    hparams = {}
    for name, leaves in of_phases.items():
        replaced = {path[0] for path in leaves}  # such as the model's optimizer, if the phase has one
        kept = {path: value for path, value in of_all.items() if path[0] not in replaced}
        hparams[name] = {names[path]: value for path, value in (kept | leaves).items()} | {"seed": seed}
    return hparams


def run_hparams(configuration: Mapping[str, str], seed: int) -> dict[str, Any]:
    """The same hyperparameters in one dictionary: those of a phase have its name and a dot before them."""
    of_all, of_phases = _leaves_of_run(configuration)
    names = short_names(of_all)
    hparams = {"seed": seed} | {names[path]: value for path, value in of_all.items()}
    for phase, leaves in of_phases.items():
        names = short_names(leaves)
        hparams |= {f"{method_tag(phase)}.{names[path]}": value for path, value in leaves.items()}
    return hparams


def _leaves_of_run(configuration: Mapping[str, str]) -> tuple[dict[Path, Any], dict[str, dict[Path, Any]]]:
    """The values that are the same for all phases, and those of each phase, by name; with the path to each."""
    tree = json.loads(configuration["hparams"] or configuration["objects"] or "{}")
    federation = tree.get("federation", {}) if configuration["hparams"] else tree
    trainer = tree.get("trainer") or {}
    groups = {
        "dropout": federation.get("failures", {}).get("dropout") or None,
        "trainer": _trainer(trainer),
        "model": tree.get("model"),
        "data": tree.get("datamodule", tree.get("data")),
    }
    phases = {}
    for phase in federation.get("phases", []):
        arguments = _without_defaults(phase, Phase)
        for name, kind in (("train", Train), ("select", Select), ("evaluate", Evaluate)):
            settings = arguments.pop(name, None)
            arguments[name] = _without_defaults(settings, kind) if isinstance(settings, Mapping) else {}
        train = arguments["train"]
        own = train.pop("trainer", None) or {}
        if train.get("callbacks"):  # in addition to the Trainer's
            train["callbacks"] = [*listed({**trainer, **own}, "callbacks"), *train["callbacks"]]
        arguments["train"] = {**own, **train}
        phases[phase["name"]] = dict(_leaves(arguments))
    return dict(_leaves(groups)), phases


def _trainer(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the clients' Trainers that do not have their default."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()}
    defaults |= LEAN_TRAINER
    return {key: value for key, value in arguments.items() if key in _ALWAYS or not _same(value, defaults.get(key))}


def _leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values in a tree that are not their class's default, and the names of classes, with the path to each."""
    if isinstance(node, Mapping) and "class_path" in node:
        class_path = node["class_path"]
        yield path, class_path.rpartition(".")[2]
        if not class_path.startswith("torch.nn."):
            arguments = node.get("init_args") or {key: value for key, value in node.items() if key != "class_path"}
            yield from _leaves(_without_defaults(arguments, locate(class_path)), path)
    elif isinstance(node, Mapping):
        within = () if path and path[-1] in _GROUPS else path  # "num_clients", not "data.num_clients"
        for key, value in node.items():
            if key not in _WITHOUT_MEANING:
                yield from _leaves(value, (*within, key))
    elif node is not None and node != [] and path:
        yield path, node if isinstance(node, bool | int | float | str) else json.dumps(node)


def _without_defaults(arguments: Mapping[str, Any], made: object) -> dict[str, Any]:
    """The arguments that do not have the default of the class, as far as they are arguments of its constructor."""
    plain = {key: _plain(value) for key, value in arguments.items()}
    if not isinstance(made, type):  # of a script, or made in a function
        return plain
    parameters = parameters_of(made)
    return {
        key: value
        for key, value in plain.items()
        if key in parameters and (key in _ALWAYS or not _same(value, parameters[key].default))
    }


def _plain(value: Any) -> Any:
    """Patterns of parameters, which are an object in Python, as the command line has them."""
    patterns = value.get("patterns") if isinstance(value, Mapping) else value
    if isinstance(patterns, list) and patterns and all(isinstance(pattern, str) for pattern in patterns):
        return ", ".join(patterns)
    return value


def _same(value: Any, default: Any) -> bool:
    return as_text(value) == as_text(default)


def short_names(paths: Iterable[Path]) -> dict[Path, str]:
    """The last part of each path; of those with the same last part, as much as tells them apart.

    Example:
        >>> short_names([("model", "optimizer", "lr"), ("model", "gate"), ("phase", "lr")])
        {('model', 'optimizer', 'lr'): 'optimizer.lr', ('model', 'gate'): 'gate', ('phase', 'lr'): 'phase.lr'}
    """
    paths = [*dict.fromkeys(paths)]
    names = {}
    for path in paths:
        others = [other for other in paths if other != path and other[-1] == path[-1]]
        length = next((n for n in range(1, len(path)) if all(other[-n:] != path[-n:] for other in others)), len(path))
        names[path] = ".".join(path[-length:])
    return names
