"""Checkpoints of a federation: tensors and plain values only, readable with ``weights_only=True``."""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checkpoints.client_state import RemoteStates, StatesOnDisk
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.checkpoints.writing import DamagedFileError, load, load_any, replacing, save, unwritable
from fedmoe_pl.evaluation.evaluation import ClientEvaluation, Evaluation
from fedmoe_pl.trees import Tree

LAST = "last"
FILE = "checkpoints/last.ckpt"
CLIENT_STATES = "checkpoints/clients"
ROWS = "checkpoints/rows.jsonl"
PREVIOUS = "previous.ckpt"
_FORMAT = 7  # the version of the checkpoint format
# A loss of power may harm what was written since; a flush takes 10 to 50 ms, longer than some rounds.
_SECONDS_BETWEEN_FLUSHES = 10.0
_KEYS = {"seed", "partition", "normalization", "vocabulary", "configuration", "versions", "models", "phases", "rows"}


@dataclass(frozen=True)
class SavedRows:
    """The rows in ``rows.jsonl`` that belong to a checkpoint; after a kill, there may be others behind them.

    Attributes:
        count: how many they are.
        size: their bytes.
        checksum: the CRC-32 of these bytes.
    """

    count: int = 0
    size: int = 0
    checksum: int = 0


@dataclass
class CheckpointWriter:
    """Writes the checkpoints of a run.

    Attributes:
        saved_rows: the rows that are in the file beside the checkpoint.
        flushed: when a checkpoint was last flushed to the disk, in seconds of ``time.monotonic``.
    """

    saved_rows: SavedRows = field(default_factory=SavedRows)
    flushed: float = field(default_factory=time.monotonic)

    def write(
        self,
        path: Path,
        models: dict[str, Tree],
        states: dict[str, PhaseState],
        rows: list[dict[str, Any]],
        **of_run: Any,
    ) -> None:
        """Writes a checkpoint; the old one becomes ``previous.ckpt``. A kill at any moment leaves two whole files.

        Finished phases are in their own files (:func:`save_finished`), so that later rounds do not write them again,
        and so are the rows. ``of_run`` are the run's seed and data (``resume.identify``) and its ``configuration``.
        """
        self.saved_rows = append_rows(path.parents[1] / ROWS, rows, self.saved_rows)
        phases = {
            name: None if state.finished and finished_path(path, name).is_file() else _content(state)
            for name, state in states.items()
        }
        content = {"fedmoe_pl": _FORMAT, "versions": versions(), **of_run}
        content |= {"models": models, "phases": phases, "rows": asdict(self.saved_rows)}
        with replacing(path) as temporary:
            save(content, temporary)
            if time.monotonic() - self.flushed >= _SECONDS_BETWEEN_FLUSHES:
                os.sync()  # one call for all files, which are many with a store on disk
                self.flushed = time.monotonic()
            if path.is_file():
                copy_checkpoint(path, path.with_name(PREVIOUS))


def append_rows(path: Path, rows: Sequence[dict[str, Any]], saved: SavedRows) -> SavedRows:
    """Appends the rows that are not in the file, one line of JSON each, so that a round costs the same at any time.

    Rows of no checkpoint are overwritten.
    """
    new = rows[saved.count :]
    if not new:
        return saved
    lines = "".join(json.dumps(row) + "\n" for row in new).encode()  # floats with all their digits, also nan
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if saved.size else "wb") as file:
            file.truncate(saved.size)
            file.seek(saved.size)
            file.write(lines)
    except OSError as error:
        raise unwritable(path, error) from error
    return SavedRows(len(rows), saved.size + len(lines), zlib.crc32(lines, saved.checksum))


def save_finished(path: Path, name: str, state: PhaseState) -> None:
    """Writes a finished phase to its own file, before the checkpoint that leaves it out."""
    with replacing(finished_path(path, name)) as temporary:
        save({"phase": name, "state": _content(state)}, temporary)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Makes a checkpoint known by another name, too; it is not read for that if the file system has hard links."""
    with replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


@functools.cache
def versions() -> dict[str, str]:
    """The versions of this package and of those that train."""
    found = {}
    for package in ("fedmoe-pl", "torch", "lightning"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # used without an installation
            found[package] = "unknown"
    return found


def finished_path(path: Path, name: str) -> Path:
    """The file of a finished phase, beside a checkpoint."""
    return path.parent / "finished" / f"{name}.ckpt"


def _content(state: PhaseState) -> dict[str, Any]:
    """The state as dicts; not by ``asdict``, which would copy the tensors, even those that phases share."""
    content = {item.name: getattr(state, item.name) for item in fields(state)}
    for name in ("clients", "best_clients"):
        if isinstance(kept := content[name], StatesOnDisk):
            content[name] = {"phases": kept.phases, "versions": kept.versions}
        elif isinstance(kept, RemoteStates):
            content[name] = {"files": kept.files}
    content["evaluations"] = [
        {**vars(evaluation), "clients": [vars(client) for client in evaluation.clients]}
        for evaluation in state.evaluations
    ]
    return content


def _state(path: Path, content: dict[str, Any]) -> PhaseState:
    """The state from its content in the checkpoint at ``path``; the inverse of ``_content``."""
    for name in ("clients", "best_clients"):
        if "versions" in (kept := content[name]):
            content[name] = StatesOnDisk(path.parent / Path(CLIENT_STATES).name, kept["phases"], kept["versions"])
        elif "files" in kept:
            content[name] = RemoteStates(kept["files"])
    for index, evaluation in enumerate(content["evaluations"]):
        clients = [ClientEvaluation(**client) for client in evaluation.pop("clients")]
        content["evaluations"][index] = Evaluation(**evaluation, clients=clients)
    return PhaseState(**content)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint of a federation, whose ``phases`` become states by name, or one of Lightning."""
    path = Path(path)
    try:
        return _load(path)
    except DamagedFileError as error:
        raise MisconfigurationException(f"ckpt_path is '{path}', {error}{_offer(path)}.") from error


def _load(path: Path) -> dict[str, Any]:
    """The same; the texts of exceptions follow the path."""
    if not path.is_file():
        raise DamagedFileError("but there is no such file")
    try:
        content, sealed = load_any(path)
    except DamagedFileError as error:
        raise DamagedFileError("which is damaged or not a checkpoint of tensors and plain values") from error
    if not isinstance(content, dict) or not ("fedmoe_pl" in content or "state_dict" in content):
        raise DamagedFileError("which is not a checkpoint of a federation or of Lightning")
    if "fedmoe_pl" not in content:
        return content
    if content["fedmoe_pl"] == _FORMAT and not sealed:
        raise DamagedFileError("which has no checksum, so that it is not as a run wrote it")
    try:
        if content["fedmoe_pl"] != _FORMAT or _KEYS - content.keys():
            raise KeyError
        states = {name: _load_finished(path, name) if it is None else it for name, it in content["phases"].items()}
        content["phases"] = {name: _state(path, state) for name, state in states.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedFileError(
            f"which another version of this package wrote; this one reads format {_FORMAT}"
        ) from error
    return content


def _load_finished(path: Path, name: str) -> dict[str, Any]:
    finished = finished_path(path, name)
    if not finished.is_file():
        raise DamagedFileError(
            f"which needs '{finished}', but there is no such file; it must be {FILE} in the folder of its run"
        )
    try:
        content = load(finished)
    except DamagedFileError as error:
        raise DamagedFileError(f"which needs '{finished}', but that is damaged") from error
    if content["phase"] != name:
        raise DamagedFileError(f"which needs '{finished}', but that is of '{content['phase']}'")
    return content["state"]


def _offer(path: Path) -> str:
    """What to do if ``last.ckpt`` cannot be read: go on from the one before it, if it can be read."""
    previous = path.with_name(PREVIOUS)
    if path.name != Path(FILE).name or not previous.is_file():
        return ""
    try:
        rows_of(previous, load_federation(previous))
    except MisconfigurationException:
        return ""
    return f"; the checkpoint before it is whole: go on with ckpt_path '{previous}'"


def load_federation(path: Path) -> dict[str, Any]:
    """Reads a checkpoint of a federation."""
    content = load_checkpoint(path)
    if "phases" not in content:
        raise MisconfigurationException(f"ckpt_path is '{path}', but must be the checkpoint of a federation.")
    return content


def rows_of(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of ``rounds.csv`` that belong to a checkpoint in the folder of its run."""
    saved, rows, data = SavedRows(**content["rows"]), path.parents[1] / ROWS, b""
    if saved.size and rows.is_file():
        with rows.open("rb") as file:
            data = file.read(saved.size)
    if len(data) != saved.size or zlib.crc32(data) != saved.checksum:
        raise MisconfigurationException(
            f"ckpt_path is '{path}', whose rows of rounds.csv are in '{rows}', which is missing or "
            f"damaged{_offer(path)}."
        )
    return [json.loads(line) for line in data.splitlines()]


def is_of_run(path: Path) -> bool:
    """Whether a checkpoint is where a run writes its own."""
    return path.parent.name == Path(FILE).parent.name and path.parent.is_dir()


def find_checkpoint(ckpt_path: str, runs: Path) -> Path:
    """The file that ``--ckpt_path`` means: a path, or ``last`` for the newest run's last checkpoint."""
    if ckpt_path != LAST:
        return Path(ckpt_path)
    for number in sorted(run_versions(runs), reverse=True):
        path = runs / f"version_{number}" / FILE
        if path.is_file() or path.with_name(PREVIOUS).is_file():
            return path
    raise MisconfigurationException(f"ckpt_path is '{LAST}', but no run in '{runs}' has a checkpoint.")


def next_folder(runs: Path) -> Path:
    """The folder of the next run, ``version_N``."""
    return runs / f"version_{max(run_versions(runs), default=-1) + 1}"


def run_versions(runs: Path) -> list[int]:
    """The version numbers of the runs in a folder."""
    names = [path.name.removeprefix("version_") for path in runs.glob("version_*")]
    return [int(name) for name in names if name.isdigit()]
