"""What clients say of their data and settings before the first round; the server waits for it, and compares it."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from fedmoe_pl.checkpoints.configuration import Change, changes, configuration
from fedmoe_pl.checkpoints.files import DamagedFileError, read_json, write_json
from fedmoe_pl.checks import shown
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.class_names import hint_of_values
from fedmoe_pl.data.map_style import difference_of_numbers
from fedmoe_pl.data.partitioners.given import AllToOne
from fedmoe_pl.deployment.messages import Message, one_line, problem_of_answer
from fedmoe_pl.deployment.transport import Transport
from fedmoe_pl.evaluation.outputs import described_batches
from fedmoe_pl.setup.data import set_up

Description = dict[str, Any]
"""What a client says, see :func:`described`."""
_FILE = "descriptions.json"
_SECONDS_BETWEEN_LOOKS = 2.0
_BACK_WITHIN = 60.0  # seconds that a server which continues a run waits for all clients
_COMMON = ("classes", "columns", "shape", "dtype", "target_shape", "target_dtype", "normalization")
_OWN = ("class_numbers", "sizes", "global_test", "num_classes")
_OF_DATA = ("data", "datamodule")  # settings that each client chooses
_LONGEST = 3000  # characters of all differences
_MOST_SAMPLES = 10**8  # of all clients; the server has numbers for each, some 40 bytes


def wait_for(
    transport: Transport,
    num_clients: int,
    settings: dict[str, str],
    phases: Sequence[str],
    known: Mapping[int, Description],
    at_least: int,
) -> dict[int, Description]:
    """Waits until every client has described itself, and checks that all fit together.

    A client with other settings than the server's, see :func:`settings_of`, is told so, and waited for: it may be
    started again with the right ones.
    """
    known = {client: each for client, each in known.items() if client < num_clients}
    descriptions = {client: each for client, each in known.items() if not _other_settings(settings, each, phases)}
    present, said, end = set[int](), set[str](), time.monotonic() + _BACK_WITHIN
    while True:
        absent = [client for client in range(num_clients) if client not in present]
        for client, answer in transport.ask(dict.fromkeys(absent, Message("describe")), None).items():
            if answer is None:
                continue
            if not (reason := _problem_of(answer, settings, phases)):
                descriptions.setdefault(client, answer.values)
                present.add(client)
                rank_zero_info(f"serve: client {client} is there, {len(present)} of {num_clients}.")
            elif (problem := f"client {client} cannot take part: {reason}") not in said:
                said.add(problem)
                rank_zero_warn(f"{problem}.")
                advice = "end this command with Ctrl-C, and start it again with matching settings"
                transport.tell({client: f"{problem}; {advice}"})
        enough = len(descriptions) == num_clients and len(present) >= at_least and time.monotonic() >= end
        if len(present) == num_clients or enough:
            break
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    _check_number_of_samples(descriptions)
    numbers: dict[str, int] = {}
    for client, description in sorted(descriptions.items()):
        if difference := difference_of_numbers(description["class_numbers"], numbers):
            raise MisconfigurationException(
                f"client {client} must number its classes as the clients before it do, but {difference}; renumber "
                "them, such as by a target_transform, with which they are not compared."
            )
        numbers |= description["class_numbers"]
        if keys := _different(descriptions[0], description, _COMMON):
            texts = [
                f"the {key.replace('_', ' ')} of its samples {'are' if key in ('classes', 'columns') else 'is'} "
                f"{shown(description.get(key))}, but must be {shown(descriptions[0].get(key))}"
                for key in keys
            ]
            raise MisconfigurationException(f"client {client}: {'; '.join(texts)}, as client 0's.")
    return dict(sorted(descriptions.items()))


def _check_number_of_samples(descriptions: Mapping[int, Description]) -> None:
    """Refuses more samples than the server has memory for, by what clients say, and names who says most."""
    number = {client: sum(each["sizes"]) + each["global_test"] for client, each in descriptions.items()}
    of_all = sum(sum(each["sizes"]) for each in descriptions.values())
    of_all += max(each["global_test"] for each in descriptions.values())  # the same for all
    if of_all > _MOST_SAMPLES:
        client = max(number, key=number.__getitem__)
        raise MisconfigurationException(
            f"client {client}: it describes {number[client]} samples, and all clients together {of_all}, which must be "
            f"at most {_MOST_SAMPLES}, so that the server's memory holds a number for each."
        )


def check_same(now: Description, before: Description, phases: Sequence[str]) -> None:
    """Refuses a client that has come back with other data or settings than it had when the run began."""
    if change := _other_settings(before["configuration"], now, phases):
        raise MisconfigurationException(f"{change}, as when the run began")
    if keys := _different(before, now, (*_COMMON, *_OWN)):
        names = {key: key.replace("_", " ") for key in keys}
        names["sizes"] = "numbers of training, validation and test samples"
        texts = [f"{names[key]} {now.get(key)} in place of {before.get(key)}" for key in keys]
        raise MisconfigurationException(f"its data have changed since the run began: {'; '.join(texts)}")


def settings_of(federation: Any, model: LightningModule, datamodule: FederatedDataModule) -> dict[str, str]:
    """What server and clients must have in common, as texts: the run's seed and configuration, without the data's."""
    texts = configuration(federation, model, datamodule)
    trees = {name: json.loads(text) for name, text in texts.items() if text}
    common = {name: {key: tree[key] for key in tree if key not in _OF_DATA} for name, tree in trees.items()}
    return {**texts, **{name: json.dumps(tree) for name, tree in common.items()}, "seed": str(federation.seed)}


def _other_settings(settings: dict[str, str], description: Description, phases: Sequence[str]) -> str:
    """How a client's settings differ, without a full stop; empty if they do not."""
    others = description["configuration"]
    found = changes(settings, others, phases)
    if (seed := others.get("seed")) != settings["seed"]:
        found.insert(0, Change("seed_everything" if settings["hparams"] else "seed", settings["seed"], str(seed)))
    texts = [f"{each.key} is {each.new}, but must be {each.old}" for each in found]
    fits = [text for text, length in zip(texts, accumulate(map(len, texts)), strict=True) if length <= _LONGEST]
    more = [f"and {len(texts) - len(fits)} more"] if len(fits) < len(texts) else []
    return "; ".join([*fits, *more])


def _different(a: Description, b: Description, keys: Sequence[str]) -> list[str]:
    return [key for key in keys if a.get(key) != b.get(key)]


def _problem_of(answer: Message, settings: dict[str, str], phases: Sequence[str]) -> str:
    """Why an answer describes no client, or one with other settings, without a full stop; empty if it fits."""
    if problem := problem_of_answer("describe", answer):
        return problem
    try:
        change = _other_settings(settings, answer.values, phases)
    except Exception:  # whatever a client has sent
        return "its configuration cannot be read"
    return change and one_line(f"{change}, as on the server")


def write_descriptions(folder: Path, descriptions: Mapping[int, Description]) -> None:
    """Writes what clients say of themselves into a run's folder, for a server that continues the run."""
    write_json(folder / _FILE, {str(client): each for client, each in descriptions.items()})


def read_descriptions(folder: Path) -> dict[int, Description]:
    """Reads what :func:`write_descriptions` wrote; nothing if the file is missing or damaged."""
    try:
        return {int(client): each for client, each in read_json(folder / _FILE).items()}
    except DamagedFileError:
        return {}


def own_data(datamodule: FederatedDataModule, client: int, federation: Any) -> FederatedDataModule:
    """Sets a client's data up: all training samples are its own."""
    name = type(datamodule).__name__
    if datamodule.rotations is not None:
        raise MisconfigurationException(
            f"{name}: rotations is {datamodule.rotations}, but must be left out where a client has its own data."
        )
    datamodule.partitioner = AllToOne(client)
    # also where a subclass passes it on as one of **kwargs
    parameters = {name for kind in type(datamodule).__mro__ for name in inspect.signature(kind.__init__).parameters}
    takes_classes = "classes" in parameters and datamodule.classes is None
    set_up(datamodule, federation.phases, federation.seed)
    if not isinstance(datamodule.dealt_by, AllToOne) or datamodule.dealt_by.client != client:
        raise MisconfigurationException(
            f"{name}: must not be set up before join, because then its samples are dealt to other clients."
        )
    if len(datamodule.labelled(datamodule.train_samples.indices)) < len(datamodule.train_samples.indices):
        raise MisconfigurationException(
            f"{name}: some training samples have no label, but must have one in a deployed federation, because the "
            "server checks the weight of an update by the client's number of samples."
        )
    numbers_classes = takes_classes and datamodule.classes is not None
    if datamodule.has_learned or numbers_classes:
        what = "vocabulary" if datamodule.normalization is None else "mean and std"
        what = "classes" if numbers_classes else what
        hint = hint_of_values(datamodule.classes or ()) if numbers_classes else ""
        raise MisconfigurationException(
            f"{name}: {what} must be given in a deployed federation, because each client would compute its own{hint}."
        )
    if not all(isinstance(tensor, Tensor) for tensor in _first_sample(datamodule)):
        raise MisconfigurationException(
            f"{name}: collate_fn gives {described_batches(datamodule)}, but must give pairs of tensors in a deployed "
            "federation, because the server knows no other samples."
        )
    return datamodule


def _first_sample(datamodule: FederatedDataModule) -> Sequence[Any]:
    """Input and target of the first sample, each as a batch of one; nothing certain if batches are no pairs."""
    if datamodule.reader is None:
        return datamodule.x[:1], datamodule.y[:1]
    (batch,) = datamodule.batches(torch.arange(1))
    if not datamodule.has_pairs:
        return [None]
    return batch[0], datamodule.y[:1] if datamodule.num_classes else batch[1]


def described(federation: Any, model: LightningModule, datamodule: FederatedDataModule, client: int) -> dict[str, Any]:
    """What a client tells the server of its data: sizes, shape and type of a sample, names of classes and columns."""
    parts = datamodule.train_samples, datamodule.validation_samples, datamodule.test_samples
    x, y = _first_sample(datamodule)
    return {
        "client": client,
        "sizes": [len(part[client]) for part in parts],
        "global_test": len(datamodule.global_test),
        "classes": datamodule.classes,
        "class_numbers": {} if datamodule.reader is None else {**datamodule.reader.data.class_numbers},
        "columns": datamodule.columns,
        "shape": [*x.shape[1:]],
        "dtype": str(x.dtype).removeprefix("torch."),
        "target_shape": [*y.shape[1:]],
        "target_dtype": str(y.dtype).removeprefix("torch."),
        "num_classes": datamodule.num_classes,
        "normalization": None if datamodule.normalization is None else [*map(list, datamodule.normalization)],
        "configuration": settings_of(federation, model, datamodule),
        "torch": str(torch.__version__),
    }
