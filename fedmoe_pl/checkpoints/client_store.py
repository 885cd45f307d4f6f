"""Stores the tensors that clients keep between rounds: in files or, without checkpoints, in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedmoe_pl.checkpoints.client_state import ClientFiles, StatesOnDisk
from fedmoe_pl.checkpoints.tensor_files import same_bits
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


class FileStore(Store):
    """Writes a file per client, so that a round costs what its clients keep, whatever the others do.

    Every round writes new files, each complete or not at all. Whenever the process is killed, the checkpoint on disk
    refers to the right files, and so does the one before it: files that only this one needs go a checkpoint later.

    Args:
        folder: the folder to write to; made when it is needed.
        num_clients: number of clients.
    """

    def __init__(self, folder: Path, num_clients: int) -> None:
        self.files = ClientFiles(folder)
        self.num_clients = num_clients
        self._begun: dict[str, StatesOnDisk] = {}  # what clients keep as a phase begins, or goes on
        self._replaced: list[tuple[int, Path]] = []
        self._previous: list[StatesOnDisk] = []  # what the checkpoint before the next one refers to

    def write(self, phase: str, round: int, trees: Mapping[int, Tree]) -> dict[int, list[int]]:
        """Writes what files of earlier phases do not have; returns the row of ``versions`` of each client."""
        rows, begun = {}, self._begun[phase]
        for client, tree in trees.items():
            earlier, inherited = begun.versions[client].tolist(), begun.get(client, {})
            if not inherited.keys() <= tree.keys():  # their files would bring back what it does not keep any longer
                earlier, inherited = [-1] * len(earlier), {}
            own = {
                name: tensor
                for name, tensor in tree.items()
                if name not in inherited or not same_bits(tensor, inherited[name])
            }
            if own:
                self.files.write(phase, client, round, own)
            rows[client] = [*earlier, round if own else -1]
        return rows

    def updated(self, phase: str, kept: Mapping[int, Tree], written: Mapping[int, list[int]]) -> StatesOnDisk:
        """Refers to the new files."""
        assert isinstance(kept, StatesOnDisk) and kept.phases[-1] == (phase, None), "the phase began with `adopt`"
        versions = kept.versions.clone()
        for client, row in written.items():
            self._replaced += [(client, path) for path in kept.paths(client) if path.parent.name == phase]
            versions[client] = torch.tensor(row)
        return StatesOnDisk(self.files, kept.phases, versions)

    def adopt(self, phase: str, round: int, kept: Mapping[int, Tree]) -> StatesOnDisk:
        """Refers to the same files if they are in this store's folder, else writes new ones."""
        nothing = torch.full((self.num_clients, 1), -1)
        phases, versions, is_own = [], nothing[:, :0], False
        if isinstance(kept, StatesOnDisk) and kept.files.folder == self.files.folder:
            phases, versions, is_own = kept.phases, kept.versions, True
        if (phase, None) not in phases[-1:]:
            phases, versions = [*phases, (phase, None)], torch.cat((versions, nothing), dim=1)
        adopted = StatesOnDisk(self.files, phases, versions)
        self._begun[phase] = StatesOnDisk(self.files, phases[:-1], versions[:, :-1])
        if not is_own:
            return self.updated(phase, adopted, self.write(phase, round, kept))
        self._previous.append(adopted)
        return adopted

    def remove_replaced(self, *needed: Mapping[int, Tree]) -> None:
        """Removes the replaced files that neither this checkpoint nor the one before it refers to."""
        on_disk = [kept for kept in needed if isinstance(kept, StatesOnDisk)]
        still_needed = []
        for client, path in self._replaced:
            if any(path in kept.paths(client) for kept in (*on_disk, *self._previous)):
                still_needed.append((client, path))
            else:
                self.files.remove(path)
        self._replaced, self._previous = still_needed, on_disk

    def remove_rest(self, phase: str, kept: Mapping[int, Tree]) -> None:
        """Removes all files of the phase that neither checkpoint refers to, including those left by a kill."""
        needed, *before = (
            {(client, path) for client in one for path in one.paths(client) if path.parent.name == phase}
            for one in (kept, *self._previous)
            if isinstance(one, StatesOnDisk)
        )
        of_previous = set().union(*before)
        for path in {*(self.files.folder / phase).glob("*")} - {path for _, path in needed | of_previous}:
            self.files.remove(path)
        of_other_phases = [(client, path) for client, path in self._replaced if path.parent.name != phase]
        self._replaced = [*of_other_phases, *(of_previous - needed)]
        self._previous = []  # the checkpoint of the result is the next one's previous one
