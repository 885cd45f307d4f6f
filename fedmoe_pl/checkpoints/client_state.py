"""The tensors that clients keep between rounds, in files or, without checkpoints, in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.checkpoints.files import DamagedFileError, header_of, in_own_memory, read_tensors, write_tensors
from fedmoe_pl.trees import Tree, same_bits

EXCHANGED = 10**9
"""Added to the round in the names of files that are written after an exchange."""
Names = Mapping[str, str]
"""The name of each tensor to use, mapped to its name in the file, which differs if a part starts as a copy."""
_CACHED = 2**28  # bytes; beyond that, the operating system's file cache has to do


class ClientFiles:
    """The files of what clients keep, with a memory cache of the last used ones; no file is ever rewritten.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cached: OrderedDict[Path, Tree] = OrderedDict()
        self._size = 0

    def write(self, phase: str, client: int, round: int, tree: Tree) -> None:
        """Writes what a client keeps after a round, counted from 1."""
        path = self.path(phase, client, round)
        # remember the values as written: views would keep alive the tensors that they belong to
        self._remember(path, write_tree(path, tree, phase=phase, client=client, round=round))

    def read(self, phase: str, client: int, round: int) -> Tree:
        """What :meth:`write` wrote; its tensors must not be changed."""
        path = self.path(phase, client, round)
        if path not in self._cached:
            self._remember(path, read_tree(path, phase=phase, client=client, round=round))
        self._cached.move_to_end(path)
        return self._cached[path]

    def names(self, phase: str, client: int, round: int) -> Collection[str]:
        """The names of the tensors in a file; see :func:`header_of`."""
        path = self.path(phase, client, round)
        return self._cached[path] if path in self._cached else header_of(path).keys() - {"__metadata__"}

    def path(self, phase: str, client: int, round: int) -> Path:
        """The file of what a client kept after a round."""
        return self.folder / phase / f"{client}_{round}.safetensors"

    def remove(self, path: Path) -> None:
        """Removes a file."""
        path.unlink(missing_ok=True)
        self._size -= _size(self._cached.pop(path, {}))

    def _remember(self, path: Path, tree: Tree) -> None:
        self._size += _size(tree) - _size(self._cached.pop(path, {}))
        self._cached[path] = tree
        while self._size > _CACHED and len(self._cached) > 1:
            self._size -= _size(self._cached.popitem(last=False)[1])


def _size(tree: Tree) -> int:
    return sum(tensor.nbytes for tensor in tree.values())


class StatesOnDisk(Mapping[int, Tree]):
    """The tensors that clients keep, by client, in files; tensors of a later phase replace those of earlier phases.

    The mapping and its files never change. A round makes a new mapping (``FileStore.updated``), so that the best round
    and later phases can share the old one.

    Args:
        files: holds a file for every tree that a client kept.
        phases: the phases whose files are used, each with the names of the tensors to use; None for all tensors.
        versions: the round, counted from 1, of each client's file in each phase, shape (num_clients, phases); -1 if
            there is no file.
    """

    def __init__(self, files: ClientFiles, phases: Sequence[tuple[str, Names | None]], versions: Tensor) -> None:
        self.files = files
        self.phases = phases
        self.versions = versions

    def __getitem__(self, client: int) -> Tree:
        if client not in self:
            raise KeyError(client)
        tree: Tree = {}
        for (phase, names), round in zip(self.phases, self.versions[client].tolist(), strict=True):
            if round >= 0:
                kept = self.files.read(phase, client, round)
                tree |= kept if names is None else selected(kept, names)
        return tree

    def __contains__(self, client: object) -> bool:
        return client in range(len(self.versions)) and bool((self.versions[cast(int, client)] >= 0).any())

    def __iter__(self) -> Iterator[int]:
        return iter((self.versions >= 0).any(1).nonzero().flatten().tolist())

    def __len__(self) -> int:
        return int((self.versions >= 0).any(1).sum())

    def names(self, client: int) -> set[str]:
        """The names of the tensors that a client keeps, without reading the tensors; see :func:`header_of`."""
        names = set[str]()
        for (phase, shown), round in zip(self.phases, self.versions[client].tolist(), strict=True):
            kept = self.files.names(phase, client, round) if round >= 0 else ()
            names.update(kept if shown is None else [name for name, old in shown.items() if old in kept])
        return names

    def paths(self, client: int) -> list[Path]:
        """The files of the tensors that a client keeps."""
        if not 0 <= client < len(self.versions):
            return []
        rounds = zip(self.phases, self.versions[client].tolist(), strict=True)
        return [self.files.path(phase, client, round) for (phase, _), round in rounds if round >= 0]


File = tuple[str, int, Names | None]
"""A client's file: its phase, the number that the client gave it, and the tensors to use; None for all tensors."""


class RemoteStates(Mapping[int, Tree]):
    """What the clients of a deployed federation keep in files on their own machines, which cannot be read here.

    Args:
        files: the files of each client that keeps something; tensors in later files replace those in earlier ones.
    """

    def __init__(self, files: Mapping[int, Sequence[File]]) -> None:
        self.files = {client: [*of_client] for client, of_client in files.items() if of_client}

    def __getitem__(self, client: int) -> Tree:
        if client not in self.files:
            raise KeyError(client)
        raise MisconfigurationException(
            f"Federation: client {client} keeps its tensors on its own machine, so that they cannot be used here."
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


class Renumbered(Mapping[int, Tree]):
    """What clients keep, by other numbers than those under which it is stored, and read from there.

    Args:
        kept: what clients keep, by their old numbers.
        old: the old number of each client that keeps something, by its new number.
    """

    def __init__(self, kept: Mapping[int, Tree], old: Mapping[int, int]) -> None:
        self.kept = kept
        self.old = old

    def __getitem__(self, client: int) -> Tree:
        return self.kept[self.old[client]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.old)

    def __len__(self) -> int:
        return len(self.old)


def check_states(*mappings: Mapping[int, Tree]) -> None:
    """Checks that all files exist, without reading them."""
    for kept in mappings:
        if isinstance(kept, StatesOnDisk):
            there = {path for phase, _ in kept.phases for path in (kept.files.folder / phase).glob("*")}
            for client in kept:
                for path in kept.paths(client):
                    if path not in there:
                        raise _unreadable(path, client)


def only(kept: Mapping[int, Tree], names: Names) -> Mapping[int, Tree]:
    """What clients keep, restricted to the tensors in ``names`` and renamed accordingly."""
    if isinstance(kept, StatesOnDisk):
        phases = [(phase, _composed(names, shown)) for phase, shown in kept.phases]
        return StatesOnDisk(kept.files, phases, kept.versions)
    if isinstance(kept, RemoteStates):
        files = {
            client: [(phase, round, _composed(names, shown)) for phase, round, shown in of_client]
            for client, of_client in kept.files.items()
        }
        return RemoteStates(files)
    return {client: selected(tree, names) for client, tree in kept.items()}


def without(kept: Mapping[int, Tree], prefixes: tuple[str, ...]) -> Mapping[int, Tree]:
    """What clients keep, without the tensors whose names begin with one of the prefixes."""
    of_clients = (kept.names(client) if isinstance(kept, StatesOnDisk) else kept[client] for client in kept)
    return only(kept, {name: name for names in of_clients for name in names if not name.startswith(prefixes)})


def selected(tree: Tree, names: Names) -> Tree:
    """The tensors of a tree that are in ``names``, under their new names."""
    return {name: tree[old] for name, old in names.items() if old in tree}


def _composed(names: Names, shown: Names | None) -> Names:
    """Names for a file of which only some tensors are ``shown``, under other names: those in ``names``."""
    return names if shown is None else {name: shown[old] for name, old in names.items() if old in shown}


def readable(kept: Mapping[int, Tree]) -> Mapping[int, Tree]:
    """What can be read here of what clients keep: nothing if it is on the clients' own machines."""
    return {} if isinstance(kept, RemoteStates) else kept


def joined(mappings: Sequence[Mapping[int, Tree]]) -> Mapping[int, Tree]:
    """Joins what clients kept in several phases, under different names; some may be on disk, the others in memory."""
    filled = [kept for kept in mappings if len(kept)]
    on_disk = [kept for kept in filled if isinstance(kept, StatesOnDisk)]
    if on_disk and len(on_disk) == len(filled):  # a run may be resumed with enable_checkpointing: false
        phases = [phase for kept in on_disk for phase in kept.phases]
        return StatesOnDisk(on_disk[0].files, phases, torch.cat([kept.versions for kept in on_disk], dim=1))
    clients = sorted({client for kept in filled for client in kept})
    if remote := [kept for kept in filled if isinstance(kept, RemoteStates)]:
        return RemoteStates(
            {client: [file for kept in remote for file in kept.files.get(client, [])] for client in clients}
        )
    return {client: {n: t for kept in filled for n, t in kept.get(client, {}).items()} for client in clients}


def write_tree(path: Path, tree: Tree, **owner: object) -> Tree:
    """Writes a file of tensors that names their owner, so that files cannot be confused; returns what was written."""
    tree = {name: in_own_memory(tensor) for name, tensor in tree.items()}
    write_tensors(path, tree, **owner)
    return tree


def read_tree(path: Path, **owner: object) -> Tree:
    """Reads what :func:`write_tree` wrote."""
    try:
        return read_tensors(path, **owner)
    except DamagedFileError as error:
        raise _unreadable(path, owner["client"]) from error


def _unreadable(path: Path, client: object) -> MisconfigurationException:
    return MisconfigurationException(
        f"Federation: '{path}', which holds what client {client} keeps, is missing, damaged or another client's; it "
        "must be as the run wrote it."
    )


class Store(ABC):
    """Stores the tensors that clients keep between rounds."""

    @abstractmethod
    def write(self, phase: str, round: int, trees: Mapping[int, Tree]) -> Mapping[int, Any]:
        """Stores what some clients keep, if anything, after a round, counted from 1; returns what ``updated`` needs."""

    @abstractmethod
    def updated(self, phase: str, kept: Mapping[int, Tree], written: Mapping[int, Any]) -> Mapping[int, Tree]:
        """The mapping of what clients keep after a round; does not change ``kept``."""

    @abstractmethod
    def adopt(self, phase: str, round: int, kept: Mapping[int, Tree]) -> Mapping[int, Tree]:
        """What clients keep when a phase starts: shared if this store holds it, otherwise copied into the store."""

    def remove_replaced(self, *needed: Mapping[int, Tree]) -> None:  # noqa: B027 - optional
        """Frees replaced tensors; called after every checkpoint with what it needs, except for finished phases."""

    def remove_rest(self, phase: str, kept: Mapping[int, Tree]) -> None:  # noqa: B027 - optional
        """Frees everything of a finished phase except its result; called after the checkpoint with this result."""


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
    """Writes a file per client, so that a round costs only what its own clients keep.

    Every round writes new files, each completely or not at all. Whenever the process is killed, both checkpoints on
    disk refer to existing files, because a file that only the previous one needs is removed one checkpoint later.

    Args:
        folder: the folder to write to; made when it is needed.
        num_clients: number of clients.
    """

    def __init__(self, folder: Path, num_clients: int) -> None:
        self.files = ClientFiles(folder)
        self.num_clients = num_clients
        self._begun: dict[str, StatesOnDisk] = {}  # what clients keep when each phase begins or is resumed
        self._replaced: list[tuple[int, Path]] = []
        self._previous: list[StatesOnDisk] = []  # what the checkpoint before the next one refers to

    def write(self, phase: str, round: int, trees: Mapping[int, Tree]) -> dict[int, list[int]]:
        """Writes the tensors that files of earlier phases do not have; returns each client's row of ``versions``."""
        rows, begun = {}, self._begun[phase]
        for client, tree in trees.items():
            earlier, inherited = begun.versions[client].tolist(), begun.get(client, {})
            if not inherited.keys() <= tree.keys():  # earlier files would bring back what the client no longer keeps
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

    def metadata(self, phase: str, client: int, row: Sequence[int]) -> dict[str, str] | None:
        """The metadata, with the checksum, of the file that a client wrote in a round; None if there is no file."""
        return header_of(self.files.path(phase, client, row[-1])).get("__metadata__")

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
