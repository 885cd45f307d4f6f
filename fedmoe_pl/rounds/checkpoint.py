"""Checkpoints of a federation: tensors and plain values only, readable with ``weights_only=True``."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.rounds.evaluation import ClientEvaluation, Evaluation
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.state import PhaseState
from fedmoe_pl.rounds.store import KeptOnDisk, check_kept
from fedmoe_pl.trees import Tree

LAST = "last"
FILE = "checkpoints/last.ckpt"
KEPT = "checkpoints/kept"
_FORMAT = 3  # the version of the checkpoint format; older versions had one model and one evaluation per phase


def save_checkpoint(
    path: Path,
    models: dict[str, Tree],
    states: dict[str, PhaseState],
    rows: list[dict[str, Any]],
    identity: dict[str, Any],
) -> None:
    """Writes a checkpoint beside the old one, then replaces the old one: a kill at any moment leaves a complete file.

    Finished phases are in their own files (:func:`save_finished`), so that later rounds do not write them again.

    Args:
        path: where to write.
        models: tensors of the initial models, by the name of the phase that has it, or ``initial``.
        states: the phases begun so far, by name.
        rows: the rows of ``rounds.csv`` so far.
        identity: the run's seed and data, see :func:`identify`.
    """
    phases = {
        name: None if state.finished and _finished_path(path, name).is_file() else _content(state)
        for name, state in states.items()
    }
    _save(path, {"fedmoe_pl": _FORMAT, **identity, "models": models, "phases": phases, "rows": rows})


def save_finished(path: Path, name: str, state: PhaseState) -> None:
    """Writes a finished phase to its own file, before the checkpoint that leaves it out.

    Args:
        path: the checkpoint.
        name: the phase's name.
        state: the phase's final state.
    """
    _save(_finished_path(path, name), _content(state))


def _finished_path(path: Path, name: str) -> Path:
    return path.parent / "finished" / f"{name}.ckpt"


def _save(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    torch.save(content, temporary)
    os.replace(temporary, path)


def _content(state: PhaseState) -> dict[str, Any]:
    """The state as dicts; not by ``asdict``, which would copy the tensors, even those that phases share."""
    content = {item.name: getattr(state, item.name) for item in fields(state)}
    for name in ("kept", "best_kept"):
        if isinstance(kept := content[name], KeptOnDisk):
            content[name] = {"phases": kept.phases, "versions": kept.versions}
    content["evaluations"] = [
        {**vars(evaluation), "clients": [vars(client) for client in evaluation.clients]}
        for evaluation in state.evaluations
    ]
    return content


def _state(path: Path, content: dict[str, Any]) -> PhaseState:
    """The state from its content in the checkpoint at ``path``; the inverse of ``_content``."""
    for name in ("kept", "best_kept"):
        if "versions" in (kept := content[name]):
            content[name] = KeptOnDisk(path.parent / Path(KEPT).name, kept["phases"], kept["versions"])
    for index, evaluation in enumerate(content["evaluations"]):
        clients = [ClientEvaluation(**client) for client in evaluation.pop("clients")]
        content["evaluations"][index] = Evaluation(**evaluation, clients=clients)
    return PhaseState(**content)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint of a federation or of Lightning.

    Returns:
        The file's content; for a federation, ``phases`` is a dict of ``PhaseState`` by name.

    Raises:
        MisconfigurationException: if the file or a finished phase's file is missing, or is not a checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise MisconfigurationException(f"ckpt_path is '{path}', but there is no such file.")
    content = _load(path)
    if not isinstance(content, dict) or not ("fedmoe_pl" in content or "state_dict" in content):
        raise MisconfigurationException(
            f"ckpt_path is '{path}', which is not a checkpoint of a federation or of Lightning."
        )
    if content.get("fedmoe_pl", _FORMAT) != _FORMAT:
        raise MisconfigurationException(
            f"ckpt_path is '{path}', a checkpoint of format {content['fedmoe_pl']}, but this version needs one of "
            f"format {_FORMAT}."
        )
    for name, phase in content.get("phases", {}).items():
        finished = _finished_path(path, name)
        if phase is None and not finished.is_file():
            raise MisconfigurationException(
                f"ckpt_path is '{path}', which needs '{finished}', but there is no such file; it must be {FILE} in the "
                "folder of its run."
            )
        content["phases"][name] = _state(path, _load(finished) if phase is None else phase)
    return content


def _load(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise MisconfigurationException(
            f"ckpt_path is '{path}', which is damaged or not a checkpoint of tensors and plain values."
        ) from error


def load_federation(path: Path) -> dict[str, Any]:
    """Reads a checkpoint of a federation.

    Raises:
        MisconfigurationException: if the file is not a federation's checkpoint.
    """
    content = load_checkpoint(path)
    if "phases" not in content:
        raise MisconfigurationException(f"ckpt_path is '{path}', but must be the checkpoint of a federation.")
    return content


def load_run(path: Path, phases: Sequence[Phase], identity: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint of a run, to continue it.

    Args:
        path: ``checkpoints/last.ckpt`` in the run's folder.
        phases: the phases of the federation.
        identity: the seed and data that the run must have had, see :func:`identify`.

    Raises:
        MisconfigurationException: if it is not a checkpoint of such a run.
    """
    rounds = {phase.name: phase.rounds for phase in phases}
    content = load_checkpoint(path)
    states: dict[str, PhaseState] = content.get("phases", {})
    key = f"ckpt_path is '{path}'"
    if "phases" not in content or not set(states) <= set(rounds):
        raise MisconfigurationException(
            f"{key}, which holds the phases {[*states]}, but the federation's phases are {[*rounds]}."
        )
    if path.parent.name != Path(FILE).parent.name:
        raise MisconfigurationException(f"{key}, but must be {FILE} in the folder of the run to resume.")
    seed, partition = identity["seed"], identity["partition"]
    if content["seed"] != seed:
        raise MisconfigurationException(f"{key}, a run with the seed {content['seed']}, but now it is {seed}.")
    if content["partition"] != partition:
        raise MisconfigurationException(
            f"{key}, a run on other data or clients ({content['partition']}, now {partition}); leave ckpt_path out to "
            "start a new run."
        )
    if any(content[name] != identity[name] for name in ("normalization", "vocabulary")):
        raise MisconfigurationException(
            f"{key}, a run whose images are normalized, or words numbered, in another way than now; leave ckpt_path "
            "out to start a new run."
        )
    for name, state in states.items():
        if state.round > rounds[name] or (state.finished and not state.stopped and state.round != rounds[name]):
            raise MisconfigurationException(
                f"{key}, where '{name}' has had {state.round} rounds, but rounds is {rounds[name]}."
            )
        check_kept(state.kept, state.best_kept)
    return content


def identify(seed: int, datamodule: FederatedDataModule) -> dict[str, Any]:
    """The seed, partition, image normalization and vocabulary of a run, by which another run's are told apart."""
    read = {"normalization": datamodule.normalization, "vocabulary": datamodule.vocabulary}
    return {"seed": seed, "partition": fingerprint(datamodule), **read}


def fingerprint(datamodule: FederatedDataModule) -> str:
    """Identifies a partition by the number of clients and a checksum of each client's samples and labels."""
    checksum, owned = 0, (datamodule.train_samples.indices, datamodule.test_samples.indices)
    for tensor in (*(datamodule.y[samples] for samples in owned), *owned):
        checksum = zlib.crc32(tensor.numpy().data, checksum)
    return f"{datamodule.num_clients} clients, partition {checksum:08x}"


def find_checkpoint(ckpt_path: str, runs: Path) -> Path:
    """The file that ``--ckpt_path`` means: a path, or ``last`` for the newest run's last checkpoint.

    Args:
        ckpt_path: a path or ``last``.
        runs: the folder that holds the runs ``version_0``, ``version_1`` ...

    Raises:
        MisconfigurationException: if ``last`` is asked for and no run has a checkpoint.
    """
    if ckpt_path != LAST:
        return Path(ckpt_path)
    for version in sorted(run_versions(runs), reverse=True):
        if (path := runs / f"version_{version}" / FILE).is_file():
            return path
    raise MisconfigurationException(f"ckpt_path is '{LAST}', but no run in '{runs}' has a checkpoint.")


def next_folder(runs: Path) -> Path:
    """The folder of the next run, ``version_N``."""
    return runs / f"version_{max(run_versions(runs), default=-1) + 1}"


def run_versions(runs: Path) -> list[int]:
    """The version numbers of the runs in a folder."""
    names = [path.name.removeprefix("version_") for path in runs.glob("version_*")]
    return [int(name) for name in names if name.isdigit()]
