"""Stores the tensors that clients keep between rounds, in memory or on disk."""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.trees import Tree


class KeptOnDisk(Mapping[int, Tree]):
    """The tensors that clients keep, by client; every access reads the client's file.

    The mapping and its files never change. A round makes a new mapping (``DiskStore.updated``), so that the best round
    and later phases can share the old one.

    Args:
        folder: holds the file ``<phase>/<client>_<round>.pt`` for every tree that a client kept.
        phases: the phases whose files are used, each with the names of the tensors to use; None for all.
        versions: index of the phase, and the round, counted from 1, of each client's file, shape (num_clients, 2); the
            round is -1 for a client that keeps nothing.
    """

    def __init__(self, folder: Path, phases: Sequence[tuple[str, list[str] | None]], versions: Tensor) -> None:
        self.folder = folder
        self.phases = phases
        self.versions = versions

    def __getitem__(self, client: int) -> Tree:
        path = self.path(client)
        if path is None:
            raise KeyError(client)
        names = self.phases[int(self.versions[client, 0])][1]
        tree = _read(path, client)
        return tree if names is None else {name: tree[name] for name in names if name in tree}

    def __contains__(self, client: object) -> bool:
        return isinstance(client, int) and self.path(client) is not None

    def __iter__(self) -> Iterator[int]:
        return iter((self.versions[:, 1] >= 0).nonzero().flatten().tolist())

    def __len__(self) -> int:
        return int((self.versions[:, 1] >= 0).sum())

    def path(self, client: int) -> Path | None:
        """The file of the tensors that a client keeps; None if it keeps nothing."""
        if not 0 <= client < len(self.versions):
            return None
        phase, round = self.versions[client].tolist()
        return self.folder / self.phases[phase][0] / _name(client, round) if round >= 0 else None

    def only(self, names: Collection[str]) -> KeptOnDisk:
        """The same files, restricted to these tensors."""
        phases = [(phase, [name for name in names if shown is None or name in shown]) for phase, shown in self.phases]
        return KeptOnDisk(self.folder, phases, self.versions)


def check_kept(*mappings: Mapping[int, Tree]) -> None:
    """Checks that all files are there, without reading them.

    Args:
        mappings: the tensors that clients keep, in memory or on disk.

    Raises:
        MisconfigurationException: if a file is missing; the message names the first one.
    """
    for kept in mappings:
        if isinstance(kept, KeptOnDisk):
            file_names = [_names(kept.folder / phase) for phase, _ in kept.phases]
            for client, (phase, round) in enumerate(kept.versions.tolist()):
                if round >= 0 and _name(client, round) not in file_names[phase]:
                    raise _unreadable(kept.folder / kept.phases[phase][0] / _name(client, round), client)


def only(kept: Mapping[int, Tree], names: Collection[str]) -> Mapping[int, Tree]:
    """The tensors with these names that clients keep."""
    if isinstance(kept, KeptOnDisk):
        return kept.only(names)
    return {client: {name: tree[name] for name in names if name in tree} for client, tree in kept.items()}


class Joined(Mapping[int, Tree]):
    """The tensors that clients kept in several phases, with different names in each; read when they are accessed.

    Args:
        mappings: the tensors of each phase, by client.
    """

    def __init__(self, mappings: Sequence[Mapping[int, Tree]]) -> None:
        self.mappings = mappings

    def __getitem__(self, client: int) -> Tree:
        trees = [kept[client] for kept in self.mappings if client in kept]
        if not trees:
            raise KeyError(client)
        return {name: tensor for tree in trees for name, tensor in tree.items()}

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({client for kept in self.mappings for client in kept}))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def joined(mappings: Sequence[Mapping[int, Tree]]) -> Mapping[int, Tree]:
    """The tensors that clients kept in several phases, with different names in each; a single mapping stays itself."""
    filled = [kept for kept in mappings if len(kept)]
    return filled[0] if len(filled) == 1 else Joined(filled)


class Store(ABC):
    """Stores the tensors that clients keep between rounds."""

    @abstractmethod
    def write(self, phase: str, round: int, trees: Mapping[int, Tree]) -> Mapping[int, Any]:
        """Stores the tensors that some clients keep after a round.

        Args:
            phase: name of the phase.
            round: the round, counted from 1.
            trees: the tensors, by client; an empty tree for a client that keeps nothing.

        Returns:
            By client, what ``updated`` needs to know.
        """

    @abstractmethod
    def updated(self, phase: str, kept: Mapping[int, Tree], written: Mapping[int, Any]) -> Mapping[int, Tree]:
        """The tensors that clients keep after a round; ``kept`` is not changed.

        Args:
            phase: name of the phase.
            kept: the tensors that clients kept before the round.
            written: everything that ``write`` returned in this round.
        """

    @abstractmethod
    def adopt(self, phase: str, round: int, kept: Mapping[int, Tree]) -> Mapping[int, Tree]:
        """The tensors that clients keep when a phase starts: shared if this store holds them, else copied into it.

        Args:
            phase: name of the phase.
            round: number of completed rounds of the phase.
            kept: the tensors that clients keep, of this run or another, in memory or on disk.
        """

    @abstractmethod
    def remove_replaced(self, *needed: Mapping[int, Tree]) -> None:
        """Frees the replaced tensors of earlier rounds, once no checkpoint refers to them.

        Args:
            needed: the tensors that the phase still needs.
        """

    @abstractmethod
    def remove_rest(self, phase: str, kept: Mapping[int, Tree]) -> None:
        """Frees everything of a finished phase except its result, once no checkpoint refers to it.

        Args:
            phase: name of the phase.
            kept: the tensors that clients keep in its result.
        """


class MemoryStore(Store):
    """Keeps everything in memory, in plain dicts."""

    def write(self, phase: str, round: int, trees: Mapping[int, Tree]) -> Mapping[int, Tree]:
        """Returns the trees; there is nothing to write."""
        return trees

    def updated(self, phase: str, kept: Mapping[int, Tree], written: Mapping[int, Any]) -> dict[int, Tree]:
        """A new dict of all trees that are not empty."""
        return {client: tree for client, tree in {**kept, **written}.items() if tree}

    def adopt(self, phase: str, round: int, kept: Mapping[int, Tree]) -> dict[int, Tree]:
        """A dict; reads the files of another store."""
        return dict(kept)

    def remove_replaced(self, *needed: Mapping[int, Tree]) -> None:
        """Nothing to do."""

    def remove_rest(self, phase: str, kept: Mapping[int, Tree]) -> None:
        """Nothing to do."""


class DiskStore(Store):
    """Writes a file per client, so that memory and checkpoints do not grow with the tensors that clients keep.

    Every round writes new files, each complete or not at all. Whenever the process is killed, the checkpoint on disk
    refers to the right files.

    Args:
        folder: the folder to write to; made when it is needed.
        num_clients: number of clients.
    """

    def __init__(self, folder: Path, num_clients: int) -> None:
        self.folder = folder
        self.num_clients = num_clients
        self._replaced: list[tuple[int, Path]] = []

    def write(self, phase: str, round: int, trees: Mapping[int, Tree]) -> dict[int, int]:
        """Writes the files; returns the round of each client's file, -1 if the client keeps nothing."""
        written = {}
        for client, tree in trees.items():
            written[client] = round if tree else -1
            if tree:
                path = self.folder / phase / _name(client, round)
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_suffix(".tmp")
                # clones, because a view would be written with the whole tensor that it belongs to
                torch.save({name: tensor.clone() for name, tensor in tree.items()}, temporary)
                os.replace(temporary, path)
        return written

    def updated(self, phase: str, kept: Mapping[int, Tree], written: Mapping[int, int]) -> KeptOnDisk:
        """Refers to the new files."""
        assert isinstance(kept, KeptOnDisk) and kept.phases[-1] == (phase, None), "the phase began with `adopt`"
        files = [(client, kept.path(client)) for client in written]
        self._replaced += [(client, path) for client, path in files if path is not None and path.parent.name == phase]
        versions = kept.versions.clone()
        clients = torch.tensor([*written], dtype=torch.int64)
        versions[clients, 0] = len(kept.phases) - 1
        versions[clients, 1] = torch.tensor([*written.values()], dtype=torch.int64)
        return KeptOnDisk(self.folder, kept.phases, versions)

    def adopt(self, phase: str, round: int, kept: Mapping[int, Tree]) -> KeptOnDisk:
        """Refers to the same files if they are in this store's folder, else writes new ones."""
        if not (isinstance(kept, KeptOnDisk) and kept.folder == self.folder):
            nothing = torch.tensor([0, -1]).repeat(self.num_clients, 1)
            return self.updated(
                phase, KeptOnDisk(self.folder, [(phase, None)], nothing), self.write(phase, round, kept)
            )
        phases = kept.phases if kept.phases[-1] == (phase, None) else [*kept.phases, (phase, None)]
        return KeptOnDisk(self.folder, phases, kept.versions)

    def remove_replaced(self, *needed: Mapping[int, Tree]) -> None:
        """Removes the files that were replaced in this phase and that none of ``needed`` refers to."""
        on_disk = [kept for kept in needed if isinstance(kept, KeptOnDisk)]
        still_needed = []
        for client, path in self._replaced:
            if any(kept.path(client) == path for kept in on_disk):
                still_needed.append((client, path))
            else:
                path.unlink(missing_ok=True)
        self._replaced = still_needed

    def remove_rest(self, phase: str, kept: Mapping[int, Tree]) -> None:
        """Removes all files of the phase that ``kept`` does not refer to, including those left by a kill."""
        assert isinstance(kept, KeptOnDisk), "the phase began with `adopt`"
        last = len(kept.phases) - 1
        needed = {_name(client, round) for client, (index, round) in enumerate(kept.versions.tolist()) if index == last}
        for name in _names(self.folder / phase) - needed:
            (self.folder / phase / name).unlink()
        self._replaced = []


def _name(client: int, round: int) -> str:
    return f"{client}_{round}.pt"


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _read(path: Path, client: int) -> Tree:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise _unreadable(path, client) from error


def _unreadable(path: Path, client: int) -> MisconfigurationException:
    return MisconfigurationException(
        f"Federation: store is 'disk', but '{path}', which holds what client {client} keeps, is missing or damaged; it "
        "must be as the run wrote it."
    )
