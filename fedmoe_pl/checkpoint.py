"""The state of a federation on disk: tensors and plain values only, readable with ``weights_only=True``."""

from __future__ import annotations

import os
import pickle
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.aggregation import Tree
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation import ClientEvaluation, Evaluation

LAST = "last"
FILE = "checkpoints/last.ckpt"


@dataclass
class PhaseState:
    """Where a phase stands; tensors are never changed in place, so that states may share them.

    Attributes:
        initial: tensors of the phase's module before the first round, by name.
        server: the server's state.
        kept: what clients kept, by client.
        round: number of completed rounds.
        finished: whether the phase's result stands.
        best_metric: best mean of the monitored metric so far.
        best_round: the round it was reached in, counted from 1.
        best_server: the server's state then.
        best_kept: what clients had kept then.
        given: where the result comes from another checkpoint, the round it was reached in there (0: unknown).
        evaluation: the final evaluation.
    """

    initial: Tree
    server: Tree
    kept: dict[int, Tree] = field(default_factory=dict)
    round: int = 0
    finished: bool = False
    best_metric: float | None = None
    best_round: int = 0
    best_server: Tree = field(default_factory=dict)
    best_kept: dict[int, Tree] = field(default_factory=dict)
    given: int | None = None
    evaluation: Evaluation | None = None

    def remember_best(self, metric: float) -> None:
        """Remembers this round if its metric is the best so far."""
        if self.best_metric is None or metric > self.best_metric:
            self.best_metric, self.best_round = metric, self.round
            self.best_server, self.best_kept = self.server, self.kept

    def select_best(self) -> None:
        """Goes back to the best round, and forgets the last one."""
        self.server, self.kept, self.best_server, self.best_kept = self.best_server, self.best_kept, {}, {}


def save_checkpoint(
    path: Path, model: Tree, states: dict[str, PhaseState], rows: list[dict[str, Any]], seed: int, partition: str
) -> None:
    """Writes a checkpoint beside the old one and then replaces it, so that a kill at any moment leaves a whole one.

    Args:
        path: where to write.
        model: tensors of the initial model.
        states: the phases begun so far, by name.
        rows: the rows of ``rounds.csv`` so far.
        seed: the run's seed.
        partition: tells the clients' samples from those of another partition.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    phases = {}
    for name, state in states.items():  # not asdict: it would copy tensors that phases share
        phases[name] = {item.name: getattr(state, item.name) for item in fields(state)}
        phases[name]["evaluation"] = None if state.evaluation is None else asdict(state.evaluation)
    temporary = path.with_suffix(".tmp")
    content = {"fedmoe_pl": 1, "seed": seed, "partition": partition, "model": model, "phases": phases, "rows": rows}
    torch.save(content, temporary)
    os.replace(temporary, path)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint of a federation or of Lightning.

    Returns:
        The file's content; a federation's has ``phases``, a dict of ``PhaseState`` by name.

    Raises:
        MisconfigurationException: if there is no such file, or it is not a checkpoint.
    """
    if not Path(path).is_file():
        raise MisconfigurationException(f"ckpt_path is '{path}', but there is no such file.")
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise MisconfigurationException(
            f"ckpt_path is '{path}', which is damaged or no checkpoint of tensors and plain values."
        ) from error
    if not isinstance(content, dict) or not ("fedmoe_pl" in content or "state_dict" in content):
        raise MisconfigurationException(
            f"ckpt_path is '{path}', which is no checkpoint of a federation or of Lightning."
        )
    for name, state in content.get("phases", {}).items():
        if state["evaluation"] is not None:
            clients = [ClientEvaluation(**client) for client in state["evaluation"].pop("clients")]
            state["evaluation"] = Evaluation(**state["evaluation"], clients=clients)
        content["phases"][name] = PhaseState(**state)
    return content


def load_run(path: Path, rounds: dict[str, int], seed: int, partition: str) -> dict[str, Any]:
    """Reads the checkpoint of a run, to go on with it.

    Args:
        path: ``checkpoints/last.ckpt`` in the run's folder.
        rounds: number of rounds of every phase that may be in it, by name.
        seed: the seed it must have.
        partition: the partition it must have.

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
    if content["seed"] != seed:
        raise MisconfigurationException(f"{key}, a run with seed_everything {content['seed']}, but now it is {seed}.")
    if content["partition"] != partition:
        raise MisconfigurationException(
            f"{key}, a run on other data or clients ({content['partition']}, now {partition}); start anew without it."
        )
    for name, state in states.items():
        if state.round > rounds[name] or (state.finished and state.round != rounds[name]):
            raise MisconfigurationException(
                f"{key}, where '{name}' has had {state.round} rounds, but rounds is {rounds[name]}."
            )
    return content


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
