"""Checkpoints of a federation: JSON files that refer to tensors in other files, which change only if the tensors do."""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checkpoints.client_state import ClientFiles, RemoteStates, StatesOnDisk
from fedmoe_pl.checkpoints.files import (
    DamagedFileError,
    TensorFiles,
    exclusive,
    missing_file,
    read_sealed,
    replacing,
    unwritable,
    write_json,
)
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.evaluation.results import ClientEvaluation, Evaluation
from fedmoe_pl.trees import Tree

LAST = "last"
FILE = "checkpoints/last.ckpt"
CLIENT_STATES = "checkpoints/clients"
ROWS = "checkpoints/rows.jsonl"
PREVIOUS = "previous.ckpt"
LOCK = "lock"
_FORMAT = 12  # the version of the checkpoint format
_OF_ANOTHER_VERSION = f"which another version of this package wrote; this one reads format {_FORMAT}"
_TENSORS = "tensors"  # the folder of the tensors' files, beside the checkpoints
# A power failure may damage what was written after the last flush; a flush takes 10 to 50 ms, longer than some rounds.
_SECONDS_BETWEEN_FLUSHES = 10.0
_IDENTITY = {"seed", "partition", "test_set", "client_names", "classes", "columns", "normalization", "vocabulary"}
_KEYS = _IDENTITY | {"configuration", "versions", "models", "phases", "rows"}


@dataclass(frozen=True)
class SavedRows:
    """The rows in ``rows.jsonl`` that belong to a checkpoint; after a kill, other rows may follow them.

    Attributes:
        count: the number of rows.
        size: the number of their bytes.
        checksum: the CRC-32 of these bytes.
    """

    count: int = 0
    size: int = 0
    checksum: int = 0


class CheckpointWriter:
    """Writes the checkpoints of a run.

    Args:
        path: the file of the last checkpoint; the checkpoint before it is ``previous.ckpt`` in the same folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = TensorFiles(path.parent / _TENSORS)
        self.saved_rows = SavedRows()
        self.finished: dict[str, list[int]] = {}  # the tensor files that each finished phase refers to
        self.files: set[int] = set()  # the tensor files of the last checkpoint
        self._flushed = time.monotonic()

    def write(
        self, models: dict[str, Tree], states: dict[str, PhaseState], rows: list[dict[str, Any]], **of_run: Any
    ) -> None:
        """Writes a checkpoint; the old one becomes ``previous.ckpt``. A kill at any moment leaves both files intact.

        Finished phases (:meth:`write_finished`) and rows have files of their own, so that later rounds do not rewrite
        them. ``of_run`` is the run's seed and data (``resume.identify``) and its ``configuration``.
        """
        self.saved_rows = append_rows(self.path.parents[1] / ROWS, rows, self.saved_rows)
        staying = {file for files in self.finished.values() for file in files}
        phases = {name: self.finished.get(name) or _content(state) for name, state in states.items()}
        content, files = self.tensors.write({"models": models, "phases": phases}, staying)
        content |= {"fedmoe_pl": _FORMAT, "versions": versions(), **of_run, "rows": asdict(self.saved_rows)}
        write_json(self.path, {**content, "files": [*(files | staying)]}, self._flush_and_keep_previous)
        self.tensors.keep(files | staying, self.files)
        self.files = files | staying

    def _flush_and_keep_previous(self) -> None:
        if time.monotonic() - self._flushed >= _SECONDS_BETWEEN_FLUSHES:
            if hasattr(os, "sync"):  # not on Windows
                os.sync()  # one call for all files, of which there are many if clients keep tensors
            self._flushed = time.monotonic()
        if self.path.is_file():
            copy_checkpoint(self.path, self.path.with_name(PREVIOUS))

    def write_finished(self, name: str, state: PhaseState) -> None:
        """Writes a finished phase to its own file, before the first checkpoint that only refers to it."""
        content, files = self.tensors.write({"phases": {name: _content(state)}}, self.files)
        write_json(finished_path(self.path, name), {"phase": name, "state": content["phases"][name]})
        self.finished[name] = [*files]


def append_rows(path: Path, rows: Sequence[dict[str, Any]], saved: SavedRows) -> SavedRows:
    """Appends the rows that are not in the file, one line of JSON each: late rounds cost no more than early ones.

    Rows in the file that belong to no checkpoint are overwritten.
    """
    new = rows[saved.count :]
    if not new:
        return saved
    lines = "".join(json.dumps(row) + "\n" for row in new).encode()  # floats keep all digits; NaN is allowed
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if saved.size else "wb") as file:
            file.truncate(saved.size)
            file.seek(saved.size)
            file.write(lines)
    except OSError as error:
        raise unwritable(path, error) from error
    return SavedRows(len(rows), saved.size + len(lines), zlib.crc32(lines, saved.checksum))


def copy_checkpoint(source: Path, target: Path) -> None:
    """Gives a checkpoint a second name: a hard link, or a copy if the file system has no hard links."""
    with replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


@functools.cache
def versions() -> dict[str, str]:
    """The versions of this package, torch and lightning."""
    found = {}
    for package in ("fedmoe-pl", "torch", "lightning"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # the package is used without being installed
            found[package] = "unknown"
    return found


def finished_path(path: Path, name: str) -> Path:
    """The file of a finished phase, in a folder beside a checkpoint."""
    return path.parent / "finished" / f"{name}.ckpt"


def _content(state: PhaseState) -> dict[str, Any]:
    """The state as dicts; ``asdict`` would copy the tensors, even those that phases share."""
    content = {item.name: getattr(state, item.name) for item in fields(state)}
    for name in ("clients", "best_clients"):
        if isinstance(kept := content[name], StatesOnDisk):
            content[name] = {"phases": kept.phases, "versions": kept.versions}
        elif isinstance(kept, RemoteStates):
            content[name] = {"files": kept.files}
        else:
            content[name] = {"trees": kept}
    content["evaluations"] = [
        {**vars(evaluation), "clients": [vars(client) for client in evaluation.clients]}
        for evaluation in state.evaluations
    ]
    return content


def _state(files: ClientFiles, content: dict[str, Any]) -> PhaseState:
    """Makes a state from its content; the inverse of ``_content``."""
    for name in ("clients", "best_clients"):
        kept = content[name]
        if "versions" in kept:
            of_phases = [(str(phase), None if names is None else dict(names)) for phase, names in kept["phases"]]
            if kept["versions"].shape[1:] != (len(of_phases),):
                raise ValueError
            content[name] = StatesOnDisk(files, of_phases, kept["versions"])
        elif "files" in kept:
            of_clients = {int(client): [*map(tuple, of_client)] for client, of_client in kept["files"].items()}
            content[name] = RemoteStates(of_clients)
        else:
            content[name] = {int(client): tree for client, tree in kept["trees"].items()}
    for index, evaluation in enumerate(content["evaluations"]):
        clients = [ClientEvaluation(**client) for client in evaluation.pop("clients")]
        content["evaluations"][index] = Evaluation(**evaluation, clients=clients)
    for name, default in vars(PhaseState({}, {})).items():
        kind = Mapping if isinstance(default, dict) else list if isinstance(default, list) else int | float
        if not isinstance(content[name], kind) and (default is not None or content[name] is not None):
            raise TypeError
    return PhaseState(**content)


def load_checkpoint(path: str | Path, writer: CheckpointWriter | None = None) -> dict[str, Any]:
    """Reads a checkpoint of a federation, with ``phases`` as states by name, or a checkpoint of Lightning.

    If a ``writer`` is given, its next checkpoint refers to the files of this one for tensors that have not changed.
    """
    path = Path(path)
    try:
        return _load(path, writer or CheckpointWriter(path))
    except DamagedFileError as error:
        raise MisconfigurationException(f"ckpt_path is '{path}', {error}{_offer(path)}.") from error


def _load(path: Path, writer: CheckpointWriter) -> dict[str, Any]:
    """Reads a checkpoint; messages of its exceptions go on after "ckpt_path is '...', "."""
    if path.is_dir():
        raise DamagedFileError(f"but must be a file, such as {path / FILE}")
    if not path.is_file():
        raise DamagedFileError("but there is no such file")
    try:
        data = read_sealed(path)
    except DamagedFileError:
        return _load_lightning(path)
    try:
        if "phase" in (content := json.loads(data)):
            raise DamagedFileError(
                f"which holds a single phase; the run's checkpoint is {path.parent.parent / Path(FILE).name}"
            )
        if content["fedmoe_pl"] != _FORMAT or _KEYS - content.keys():
            raise KeyError
        content = json.loads(data, object_hook=writer.tensors.read)
        del content["crc32"]
        writer.saved_rows, writer.files = SavedRows(**content["rows"]), {*content.pop("files")}
        if not all(isinstance(number, int) for number in (*vars(writer.saved_rows).values(), *writer.files)):
            raise TypeError
        files = ClientFiles(path.parent / Path(CLIENT_STATES).name)
        for name, state in content["phases"].items():
            if isinstance(state, list):
                writer.finished[name], state = state, _load_finished(path, name, writer)
            content["phases"][name] = _state(files, state)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedFileError(_OF_ANOTHER_VERSION) from error
    return content


def _load_lightning(path: Path) -> dict[str, Any]:
    """The content of a Lightning checkpoint; verifies the archive's checksums, which ``torch.load`` does not."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                # torch does not compress; a compressed part may take forever to unpack
                is_compressed = sum(part.file_size for part in archive.infolist()) > path.stat().st_size
                if is_compressed or archive.testzip():
                    raise ValueError
        content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # given arbitrary bytes, torch.load may raise anything, such as a KeyError
        raise DamagedFileError("which is damaged or not a checkpoint of tensors and plain values") from error
    if isinstance(content, dict) and "fedmoe_pl" in content:  # older checkpoints of a federation were archives, too
        raise DamagedFileError(_OF_ANOTHER_VERSION)
    if not isinstance(content, dict) or not isinstance(state := content.get("state_dict"), dict):
        raise DamagedFileError("which is not a checkpoint of a federation or of Lightning")
    return content | {"state_dict": {name: value for name, value in state.items() if _has_values(value)}}


def _has_values(value: Any) -> bool:
    """Whether this is a tensor with values of its own in memory: none that is sparse, or only has a shape."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta


def _load_finished(path: Path, name: str, writer: CheckpointWriter) -> dict[str, Any]:
    finished = finished_path(path, name)
    try:
        data = read_sealed(finished)
    except DamagedFileError as error:
        raise missing_file(finished) from error
    content = json.loads(data, object_hook=writer.tensors.read)
    if content["phase"] != name:
        raise missing_file(finished)
    return content["state"]


def _offer(path: Path) -> str:
    """Advice if ``last.ckpt`` cannot be read: to go on from the checkpoint before it, if that can be read."""
    previous = path.with_name(PREVIOUS)
    if path.name != Path(FILE).name or not previous.is_file():
        return ""
    try:
        rows_of(previous, load_federation(previous))
    except MisconfigurationException:
        return ""
    return f"; the checkpoint before it is whole: go on with ckpt_path '{previous}'"


def load_federation(path: Path, writer: CheckpointWriter | None = None) -> dict[str, Any]:
    """Reads a checkpoint of a federation and refuses other ones; see :func:`load_checkpoint`."""
    content = load_checkpoint(path, writer)
    if "phases" not in content:
        raise MisconfigurationException(f"ckpt_path is '{path}', but must be the checkpoint of a federation.")
    return content


def rows_of(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of ``rounds.csv`` that belong to a checkpoint, which must be in its run's folder."""
    saved, rows, data = SavedRows(**content["rows"]), path.parents[1] / ROWS, b""
    if rows.is_file() and 0 < saved.size <= rows.stat().st_size:
        with rows.open("rb") as file:
            data = file.read(saved.size)
    if len(data) == saved.size and zlib.crc32(data) == saved.checksum:
        with suppress(ValueError, RecursionError):
            return [json.loads(line) for line in data.splitlines()]
    raise MisconfigurationException(
        f"ckpt_path is '{path}', whose rows of rounds.csv are in '{rows}', which is missing or damaged{_offer(path)}."
    )


def is_of_run(path: Path) -> bool:
    """Whether a checkpoint is in the folder where a run writes its checkpoints."""
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


def run_versions(runs: Path) -> list[int]:
    """The version numbers of the runs in a folder."""
    names = [path.name.removeprefix("version_") for path in runs.glob("version_*")]
    return [int(name) for name in names if name.isdigit()]


@contextmanager
def locked(checkpoint: Path) -> Iterator[None]:
    """In this context, keeps other processes from training the run that a checkpoint belongs to."""
    if not is_of_run(checkpoint):
        yield
        return
    path = checkpoint.with_name(LOCK)
    taken = f"ckpt_path is '{checkpoint}', but another process trains this run now; wait until it ends, or end it."
    with exclusive(path, taken, lambda error: unwritable(path, error)):
        yield
