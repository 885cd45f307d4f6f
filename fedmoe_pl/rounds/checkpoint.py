"""The state of a federation on disk: tensors and plain values only, readable with ``weights_only=True``."""

from __future__ import annotations

import math
import os
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.backends.traffic import no_traffic
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.rounds.evaluation import ClientEvaluation, Evaluation
from fedmoe_pl.rounds.store import KeptOnDisk, check_kept
from fedmoe_pl.trees import Tree

LAST = "last"
FILE = "checkpoints/last.ckpt"
KEPT = "checkpoints/kept"


@dataclass
class PhaseState:
    """Where a phase stands; tensors are never changed in place, so that states may share them.

    Attributes:
        initial: tensors of the phase's module before the first round, by name.
        server: the server's state.
        kept: what clients kept, by client, in memory or on disk.
        round: number of completed rounds.
        finished: whether the phase's result stands.
        best_metric: best mean of the monitored metric so far; a loss with its sign reversed.
        improved_metric: the same, where it improved by more than ``Phase.min_delta`` for the last time.
        improved_round: the round of this improvement.
        stopped: whether the phase ended before its last round.
        best_round: the round it was reached in, counted from 1.
        best_server: the server's state then.
        best_kept: what clients had kept then.
        given: where the result comes from another checkpoint, the round it was reached in there (0: unknown).
        evaluation: the final evaluation.
        traffic: what was sent so far: ``parameters`` and ``bytes``, ``_down`` from the server to clients, ``_up`` from
            clients to the server, ``_between_clients`` past it.
        flops: floating-point operations of local training so far (``flops.FlopCounter``); nan where not countable.
    """

    initial: Tree
    server: Tree
    kept: Mapping[int, Tree] = field(default_factory=dict)
    round: int = 0
    finished: bool = False
    best_metric: float | None = None
    improved_metric: float | None = None
    improved_round: int = 0
    stopped: bool = False
    best_round: int = 0
    best_server: Tree = field(default_factory=dict)
    best_kept: Mapping[int, Tree] = field(default_factory=dict)
    given: int | None = None
    evaluation: Evaluation | None = None
    traffic: dict[str, int] = field(default_factory=no_traffic)
    flops: float = 0

    def remember_best(self, metric: float, min_delta: float = 0.0) -> None:
        """Remembers this round if its metric, of which more is better and nan is never any, is the best so far.

        Args:
            metric: of this round.
            min_delta: how much more than the last improvement counts as one.
        """
        if math.isnan(metric):
            return  # nothing would ever compare as better
        if self.improved_metric is None or metric > self.improved_metric + min_delta:
            self.improved_metric, self.improved_round = metric, self.round
        if self.best_metric is None or metric > self.best_metric:
            self.best_metric, self.best_round = metric, self.round
            self.best_server, self.best_kept = self.server, self.kept

    def costs(self) -> dict[str, float]:
        """Traffic and operations so far, by the columns of ``rounds.csv``."""
        return {**self.traffic, "flops": self.flops}

    def select_best(self) -> None:
        """Goes back to the best round, and forgets the last one."""
        self.server, self.kept, self.best_server, self.best_kept = self.best_server, self.best_kept, {}, {}


def save_checkpoint(
    path: Path,
    model: Tree,
    states: dict[str, PhaseState],
    rows: list[dict[str, Any]],
    identity: dict[str, Any],
) -> None:
    """Writes a checkpoint beside the old one and then replaces it, so that a kill at any moment leaves a whole one.

    Finished phases are left to their own files, so that no later round writes them again.

    Args:
        path: where to write.
        model: tensors of the initial model.
        states: the phases begun so far, by name.
        rows: the rows of ``rounds.csv`` so far.
        identity: what tells this run from others, see :func:`identify`.
    """
    phases = {
        name: None if state.finished and _finished_path(path, name).is_file() else _content(state)
        for name, state in states.items()
    }
    _save(path, {"fedmoe_pl": 1, **identity, "model": model, "phases": phases, "rows": rows})


def save_finished(path: Path, name: str, state: PhaseState) -> None:
    """Writes a finished phase to a file of its own, before the checkpoint that leaves it out.

    Args:
        path: the checkpoint.
        name: the phase's name.
        state: where it stands for good.
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
    """The state as dicts; not asdict, which would copy tensors, and cut those that phases share."""
    content = {item.name: getattr(state, item.name) for item in fields(state)}
    for name in ("kept", "best_kept"):
        if isinstance(kept := content[name], KeptOnDisk):
            content[name] = {"phases": kept.phases, "versions": kept.versions}
    if state.evaluation is not None:
        clients = [vars(client) for client in state.evaluation.clients]
        content["evaluation"] = {**vars(state.evaluation), "clients": clients}
    return content


def _state(path: Path, content: dict[str, Any]) -> PhaseState:
    """The state that has this content in the checkpoint at ``path``."""
    for name in ("kept", "best_kept"):
        if "versions" in (kept := content[name]):
            content[name] = KeptOnDisk(path.parent / Path(KEPT).name, kept["phases"], kept["versions"])
    if content["evaluation"] is not None:
        clients = [ClientEvaluation(**client) for client in content["evaluation"].pop("clients")]
        content["evaluation"] = Evaluation(**content["evaluation"], clients=clients)
    return PhaseState(**content)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint of a federation or of Lightning.

    Returns:
        The file's content; a federation's has ``phases``, a dict of ``PhaseState`` by name.

    Raises:
        MisconfigurationException: if there is no such file, a part of it is missing, or it is not a checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise MisconfigurationException(f"ckpt_path is '{path}', but there is no such file.")
    content = _load(path)
    if not isinstance(content, dict) or not ("fedmoe_pl" in content or "state_dict" in content):
        raise MisconfigurationException(
            f"ckpt_path is '{path}', which is no checkpoint of a federation or of Lightning."
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
            f"ckpt_path is '{path}', which is damaged or no checkpoint of tensors and plain values."
        ) from error


def load_run(path: Path, rounds: dict[str, int], identity: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint of a run, to go on with it.

    Args:
        path: ``checkpoints/last.ckpt`` in the run's folder.
        rounds: number of rounds of every phase that may be in it, by name.
        identity: what it must have of :func:`identify`.

    Raises:
        MisconfigurationException: if it is the checkpoint of something else, or none.
    """
    content = load_checkpoint(path)
    states: dict[str, PhaseState] = content.get("phases", {})
    key = f"ckpt_path is '{path}'"
    if "phases" not in content or not set(states) <= set(rounds):
        raise MisconfigurationException(
            f"{key}, which holds the phases {[*states]}, but federation.phases are {[*rounds]}."
        )
    if path.parent.name != Path(FILE).parent.name:
        raise MisconfigurationException(f"{key}, but must be {FILE} in the folder of the run that goes on.")
    seed, partition = identity["seed"], identity["partition"]
    if content["seed"] != seed:
        raise MisconfigurationException(f"{key}, a run with seed_everything {content['seed']}, but now it is {seed}.")
    if content["partition"] != partition:
        raise MisconfigurationException(
            f"{key}, a run on other data or clients ({content['partition']}, now {partition}); start anew without it."
        )
    for name, state in states.items():
        if state.round > rounds[name] or (state.finished and not state.stopped and state.round != rounds[name]):
            raise MisconfigurationException(
                f"{key}, where '{name}' has had {state.round} rounds, but rounds is {rounds[name]}."
            )
        check_kept(state.kept, state.best_kept)
    return content


def identify(seed: int, datamodule: FederatedDataModule) -> dict[str, Any]:
    """What tells a run from others: its seed, who holds which data, how images are normalized, and words' ids."""
    read = {"normalization": datamodule.normalization, "vocabulary": datamodule.vocabulary}
    return {"seed": seed, "partition": fingerprint(datamodule), **read}


def fingerprint(datamodule: FederatedDataModule) -> str:
    """Tells one partition from another: the number of clients, and a checksum of who holds which labels."""
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
        MisconfigurationException: if no run has a checkpoint.
    """
    if ckpt_path != LAST:
        return Path(ckpt_path)
    for version in sorted(run_versions(runs), reverse=True):
        if (path := runs / f"version_{version}" / FILE).is_file():
            return path
    raise MisconfigurationException(f"ckpt_path is '{LAST}', but no run in '{runs}' has a checkpoint.")


def run_versions(runs: Path) -> list[int]:
    """Numbers of the runs in a folder."""
    names = [path.name.removeprefix("version_") for path in runs.glob("version_*")]
    return [int(name) for name in names if name.isdigit()]
