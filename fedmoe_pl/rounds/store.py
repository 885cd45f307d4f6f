"""Stores the tensors that clients keep between rounds, in memory or on disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmoe_pl.rounds.kept import KeptInFiles, KeptOnDisk, file_name, file_names, write_kept
from fedmoe_pl.trees import Tree


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
        """Frees the replaced tensors of earlier rounds; called after every checkpoint.

        Args:
            needed: the tensors that the checkpoint refers to, unless they belong to a finished phase.
        """

    @abstractmethod
    def remove_rest(self, phase: str, kept: Mapping[int, Tree]) -> None:
        """Frees everything of a finished phase except its result; called after the checkpoint of this result.

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


class FileStore(Store):
    """Keeps a file per client and round, wherever a subclass has them.

    Every round writes new files, each complete or not at all. Whenever the process is killed, the checkpoint on disk
    refers to the right files, and so does the one before it: files that only this one needs go a checkpoint later.

    Args:
        num_clients: number of clients.
    """

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.replaced: list[tuple[int, str, int]] = []  # the client, phase and round of each file
        self.previous: list[KeptInFiles] = []  # what the checkpoint before the next one refers to

    @abstractmethod
    def write_file(self, phase: str, round: int, client: int, tree: Tree) -> bool:
        """Writes a client's file; returns whether the client keeps anything."""

    @abstractmethod
    def remove_file(self, phase: str, round: int, client: int) -> None:
        """Removes a client's file, if there is one."""

    @abstractmethod
    def mapping(self, phases: Sequence[tuple[str, list[str] | None]], versions: Tensor) -> KeptInFiles:
        """The mapping of these files, whose arguments these are."""

    @abstractmethod
    def is_own(self, kept: Mapping[int, Tree]) -> bool:
        """Whether the mapping refers to files of this store."""

    def write(self, phase: str, round: int, trees: Mapping[int, Tree]) -> dict[int, int]:
        """Writes the files; returns the round of each client's file, -1 if the client keeps nothing."""
        return {client: round if self.write_file(phase, round, client, tree) else -1 for client, tree in trees.items()}

    def updated(self, phase: str, kept: Mapping[int, Tree], written: Mapping[int, int]) -> KeptInFiles:
        """Refers to the new files."""
        assert isinstance(kept, KeptInFiles) and kept.phases[-1] == (phase, None), "the phase began with `adopt`"
        before = [(client, kept.version(client)) for client in written]
        self.replaced += [(client, *version) for client, version in before if version and version[0] == phase]
        versions = kept.versions.clone()
        clients = torch.tensor([*written], dtype=torch.int64)
        versions[clients, 0] = len(kept.phases) - 1
        versions[clients, 1] = torch.tensor([*written.values()], dtype=torch.int64)
        return self.mapping(kept.phases, versions)

    def adopt(self, phase: str, round: int, kept: Mapping[int, Tree]) -> KeptInFiles:
        """Refers to the same files if they are in this store, else writes new ones."""
        if not (isinstance(kept, KeptInFiles) and self.is_own(kept)):
            nothing = torch.tensor([0, -1]).repeat(self.num_clients, 1)
            return self.updated(phase, self.mapping([(phase, None)], nothing), self.write(phase, round, kept))
        phases = kept.phases if kept.phases[-1] == (phase, None) else [*kept.phases, (phase, None)]
        adopted = self.mapping(phases, kept.versions)
        self.previous.append(adopted)
        return adopted

    def remove_replaced(self, *needed: Mapping[int, Tree]) -> None:
        """Removes the replaced files that neither this checkpoint nor the one before it refers to."""
        in_files = [kept for kept in needed if isinstance(kept, KeptInFiles)]
        still_needed = []
        for client, phase, round in self.replaced:
            if any(kept.version(client) == (phase, round) for kept in (*in_files, *self.previous)):
                still_needed.append((client, phase, round))
            else:
                self.remove_file(phase, round, client)
        self.replaced, self.previous = still_needed, in_files

    def remove_rest(self, phase: str, kept: Mapping[int, Tree]) -> None:
        """Removes all files of the phase that neither checkpoint refers to."""
        assert isinstance(kept, KeptInFiles), "the phase began with `adopt`"
        needed = {(client, *version) for client in kept if (version := kept.version(client))}
        before = {
            (client, *version) for other in self.previous for client in other if (version := other.version(client))
        }
        self.remove_others(phase, needed | before)
        others = [file for file in self.replaced if file[1] != phase]
        self.replaced = [*others, *(file for file in before - needed if file[1] == phase)]
        self.previous = []  # the checkpoint of the result is the next one's previous one

    @abstractmethod
    def remove_others(self, phase: str, needed: Collection[tuple[int, str, int]]) -> None:
        """Removes all files of a phase but these (client, phase, round), including those left by a kill."""


class DiskStore(FileStore):
    """Writes the files to a folder, so that memory and checkpoints do not grow with the tensors that clients keep.

    Args:
        folder: the folder to write to; made when it is needed.
        num_clients: number of clients.
    """

    def __init__(self, folder: Path, num_clients: int) -> None:
        super().__init__(num_clients)
        self.folder = folder

    def write_file(self, phase: str, round: int, client: int, tree: Tree) -> bool:
        """Writes the file if the tree is not empty."""
        if tree:
            write_kept(self.folder, phase, client, round, tree)
        return bool(tree)

    def remove_file(self, phase: str, round: int, client: int) -> None:
        """Removes the file."""
        (self.folder / phase / file_name(client, round)).unlink(missing_ok=True)

    def mapping(self, phases: Sequence[tuple[str, list[str] | None]], versions: Tensor) -> KeptOnDisk:
        """The files in the folder."""
        return KeptOnDisk(self.folder, phases, versions)

    def is_own(self, kept: Mapping[int, Tree]) -> bool:
        """Whether they are in the same folder."""
        return isinstance(kept, KeptOnDisk) and kept.folder == self.folder

    def remove_others(self, phase: str, needed: Collection[tuple[int, str, int]]) -> None:
        """Removes all other files in the phase's folder."""
        names = {file_name(client, round) for client, of_phase, round in needed if of_phase == phase}
        for name in file_names(self.folder / phase) - names:
            (self.folder / phase / name).unlink()
