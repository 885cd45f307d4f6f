"""What the server knows of the tensors that clients keep: the files on their machines."""

from __future__ import annotations

from collections.abc import Mapping

from fedmoe_pl.checkpoints.client_state import File, RemoteStates
from fedmoe_pl.checkpoints.client_store import Store
from fedmoe_pl.deployment.clients import AtClient, files_of
from fedmoe_pl.trees import Tree


class ClientsStore(Store):
    """Refers to what clients keep on their own machines, where they themselves remove what has been replaced."""

    def write(self, phase: str, round: int, trees: Mapping[int, Tree]) -> dict[int, list[File]]:
        """The files that the clients have written."""
        return {
            client: [(phase, tree.keeps, None)] if isinstance(tree, AtClient) and tree.keeps else []
            for client, tree in trees.items()
        }

    def updated(self, phase: str, kept: Mapping[int, Tree], written: Mapping[int, list[File]]) -> RemoteStates:
        """Refers to the new files."""
        return RemoteStates({**{client: files_of(kept, client) for client in kept}, **written})

    def adopt(self, phase: str, round: int, kept: Mapping[int, Tree]) -> RemoteStates:
        """Refers to the same files."""
        return self.updated(phase, kept, {})
