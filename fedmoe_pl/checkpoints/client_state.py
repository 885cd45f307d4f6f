"""The tensors that clients keep between rounds, as mappings by client."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.checkpoints.writing import DamagedFileError, load, replacing, save
from fedmoe_pl.trees import Tree

EXCHANGED = 10**9
"""Added to the round in the names of files that are written after an exchange."""
Names = Mapping[str, str]
"""The name of each tensor that is used, with its name in the file; they differ where a part starts as a copy."""


class StatesOnDisk(Mapping[int, Tree]):
    """The tensors that clients keep, by client; every access reads the client's file.

    The mapping and its files never change. A round makes a new mapping (``DiskStore.updated``), so that the best round
    and later phases can share the old one.

    Args:
        folder: holds the file ``<phase>/<client>_<round>.pt`` for every tree that a client kept.
        phases: the phases whose files are used, each with the tensors to use; None for all.
        versions: index of the phase, and the round, counted from 1, of each client's file, shape (num_clients, 2); the
            round is -1 for a client that keeps nothing.
    """

    def __init__(self, folder: Path, phases: Sequence[tuple[str, Names | None]], versions: Tensor) -> None:
        self.folder = folder
        self.phases = phases
        self.versions = versions

    def __getitem__(self, client: int) -> Tree:
        path = self.path(client)
        if path is None:
            raise KeyError(client)
        index, round = self.versions[client].tolist()
        phase, names = self.phases[index]
        return read_tree(path, names, phase=phase, client=client, round=round)

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
        return self.folder / self.phases[phase][0] / file_name(client, round) if round >= 0 else None

    def files(self, phase: str) -> dict[int, Path]:
        """The files of a phase that are referred to, by client."""
        paths = {client: self.path(client) for client in self}
        return {client: path for client, path in paths.items() if path is not None and path.parent.name == phase}

    def only(self, names: Names) -> StatesOnDisk:
        """The same files, restricted to these tensors."""
        phases = [(phase, _composed(names, shown)) for phase, shown in self.phases]
        return StatesOnDisk(self.folder, phases, self.versions)


File = tuple[str, int, Names | None]
"""A file of a client: its phase, the number that the client gave it, and the tensors to use; None for all."""


class RemoteStates(Mapping[int, Tree]):
    """What the clients of a deployed federation keep, in files on their own machines, where this one cannot read.

    Args:
        files: the files of each client that keeps something; later ones replace tensors of earlier ones.
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

    def only(self, names: Names) -> RemoteStates:
        """The same files, restricted to these tensors."""
        restricted = {
            client: [(phase, round, _composed(names, shown)) for phase, round, shown in of_client]
            for client, of_client in self.files.items()
        }
        return RemoteStates(restricted)


def check_states(*mappings: Mapping[int, Tree]) -> None:
    """Checks that all files are there, without reading them."""
    for kept in mappings:
        if isinstance(kept, StatesOnDisk):
            files = [file_names(kept.folder / phase) for phase, _ in kept.phases]
            for client, (phase, round) in enumerate(kept.versions.tolist()):
                if round >= 0 and file_name(client, round) not in files[phase]:
                    raise _unreadable(kept.folder / kept.phases[phase][0] / file_name(client, round), client)


def only(kept: Mapping[int, Tree], names: Names) -> Mapping[int, Tree]:
    """These tensors of those that clients keep, by their new names."""
    if isinstance(kept, StatesOnDisk | RemoteStates):
        return kept.only(names)
    return {client: _selected(tree, names) for client, tree in kept.items()}


def _selected(tree: Tree, names: Names) -> Tree:
    return {name: tree[old] for name, old in names.items() if old in tree}


def _composed(names: Names, shown: Names | None) -> Names:
    """The same tensors by their names in the file, of which only some are shown, by other names."""
    return names if shown is None else {name: shown[old] for name, old in names.items() if old in shown}


def readable(kept: Mapping[int, Tree]) -> Mapping[int, Tree]:
    """What can be read of it here: nothing of what clients keep on their own machines."""
    return {} if isinstance(kept, RemoteStates) else kept


class JoinedStates(Mapping[int, Tree]):
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
    return filled[0] if len(filled) == 1 else JoinedStates(filled)


def file_name(client: int, round: int) -> str:
    """The name of the file with what a client kept after a round."""
    return f"{client}_{round}.pt"


def file_names(folder: Path) -> set[str]:
    """The names of all files in a folder; none if it is missing."""
    return set(os.listdir(folder)) if folder.is_dir() else set()


def write_tree(path: Path, tree: Tree, **owner: Any) -> None:
    """Writes a file of tensors, with what it says about itself, so that no other is taken for it."""
    # clones, because a view would be written with the whole tensor that it belongs to
    tensors = {name: tensor.clone() for name, tensor in tree.items()}
    with replacing(path) as temporary:
        save({**owner, "tensors": tensors}, temporary)


def read_tree(path: Path, names: Names | None, **owner: Any) -> Tree:
    """Reads what :func:`write_tree` wrote: the tensors with these names, None for all."""
    try:
        content = load(path)
    except DamagedFileError as error:
        raise _unreadable(path, owner["client"]) from error
    if not isinstance(content, dict) or {name: content.get(name) for name in owner} != owner:
        raise _unreadable(path, owner["client"])
    tree = content["tensors"]
    return tree if names is None else _selected(tree, names)


def _unreadable(path: Path, client: int) -> MisconfigurationException:
    return MisconfigurationException(
        f"Federation: store is 'disk', but '{path}', which holds what client {client} keeps, is missing, damaged or "
        "another client's; it must be as the run wrote it."
    )
