"""Stores the tensors that clients keep between rounds, in memory or on disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedmoe_pl.checkpoints.client_state import StatesOnDisk, file_name, file_names, write_tree
from fedmoe_pl.trees import Tree


class Store(ABC):
    """Stores the tensors that clients keep between rounds."""

    @abstractmethod
    def write(self, phase: str, round: int, trees: Mapping[int, Tree]) -> Mapping[int, Any]:
        """Stores what some clients keep after a round, counted from 1, or nothing; returns what ``updated`` needs."""

    @abstractmethod
    def updated(self, phase: str, kept: Mapping[int, Tree], written: Mapping[int, Any]) -> Mapping[int, Tree]:
        """The tensors that clients keep after a round; ``kept`` is not changed."""

    @abstractmethod
    def adopt(self, phase: str, round: int, kept: Mapping[int, Tree]) -> Mapping[int, Tree]:
        """The tensors that clients keep when a phase starts: shared if this store holds them, else copied into it."""

    def remove_replaced(self, *needed: Mapping[int, Tree]) -> None:  # noqa: B027 - optional
        """Frees replaced tensors; called after every checkpoint with what it needs, but for finished phases."""

    def remove_rest(self, phase: str, kept: Mapping[int, Tree]) -> None:  # noqa: B027 - optional
        """Frees everything of a finished phase except its result; called after the checkpoint of this result."""


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


class DiskStore(Store):
    """Writes a file per client, so that memory and checkpoints do not grow with the tensors that clients keep.

    Every round writes new files, each complete or not at all. Whenever the process is killed, the checkpoint on disk
    refers to the right files, and so does the one before it: files that only this one needs go a checkpoint later.

    Args:
        folder: the folder to write to; made when it is needed.
        num_clients: number of clients.
    """

    def __init__(self, folder: Path, num_clients: int) -> None:
        self.folder = folder
        self.num_clients = num_clients
        self._replaced: list[tuple[int, Path]] = []
        self._previous: list[StatesOnDisk] = []  # what the checkpoint before the next one refers to

    def write(self, phase: str, round: int, trees: Mapping[int, Tree]) -> dict[int, int]:
        """Writes the files; returns the round of each client's file, -1 if the client keeps nothing."""
        written = {}
        for client, tree in trees.items():
            written[client] = round if tree else -1
            if tree:
                path = self.folder / phase / file_name(client, round)
                write_tree(path, tree, phase=phase, client=client, round=round)
        return written

    def updated(self, phase: str, kept: Mapping[int, Tree], written: Mapping[int, int]) -> StatesOnDisk:
        """Refers to the new files."""
        assert isinstance(kept, StatesOnDisk) and kept.phases[-1] == (phase, None), "the phase began with `adopt`"
        files = [(client, kept.path(client)) for client in written]
        self._replaced += [(client, path) for client, path in files if path is not None and path.parent.name == phase]
        versions = kept.versions.clone()
        clients = torch.tensor([*written], dtype=torch.int64)
        versions[clients, 0] = len(kept.phases) - 1
        versions[clients, 1] = torch.tensor([*written.values()], dtype=torch.int64)
        return StatesOnDisk(self.folder, kept.phases, versions)

    def adopt(self, phase: str, round: int, kept: Mapping[int, Tree]) -> StatesOnDisk:
        """Refers to the same files if they are in this store's folder, else writes new ones."""
        if not (isinstance(kept, StatesOnDisk) and kept.folder == self.folder):
            nothing = torch.tensor([0, -1]).repeat(self.num_clients, 1)
            return self.updated(
                phase, StatesOnDisk(self.folder, [(phase, None)], nothing), self.write(phase, round, kept)
            )
        phases = kept.phases if kept.phases[-1] == (phase, None) else [*kept.phases, (phase, None)]
        adopted = StatesOnDisk(self.folder, phases, kept.versions)
        self._previous.append(adopted)
        return adopted

    def remove_replaced(self, *needed: Mapping[int, Tree]) -> None:
        """Removes the replaced files that neither this checkpoint nor the one before it refers to."""
        on_disk = [kept for kept in needed if isinstance(kept, StatesOnDisk)]
        still_needed = []
        for client, path in self._replaced:
            if any(kept.path(client) == path for kept in (*on_disk, *self._previous)):
                still_needed.append((client, path))
            else:
                path.unlink(missing_ok=True)
        self._replaced, self._previous = still_needed, on_disk

    def remove_rest(self, phase: str, kept: Mapping[int, Tree]) -> None:
        """Removes all files of the phase that neither checkpoint refers to, including those left by a kill."""
        assert isinstance(kept, StatesOnDisk), "the phase began with `adopt`"
        needed = {path.name for path in kept.files(phase).values()}
        before = {path.name: (client, path) for other in self._previous for client, path in other.files(phase).items()}
        for name in file_names(self.folder / phase) - needed - before.keys():
            (self.folder / phase / name).unlink()
        of_other_phases = [(client, path) for client, path in self._replaced if path.parent.name != phase]
        self._replaced = [*of_other_phases, *(item for name, item in before.items() if name not in needed)]
        self._previous = []  # the checkpoint of the result is the next one's previous one
