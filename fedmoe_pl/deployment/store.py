"""What the server knows of the tensors that clients keep: the files on their machines."""

from __future__ import annotations

from collections.abc import Mapping

from fedmoe_pl.deployment.clients import AtClient, Clients, files_of
from fedmoe_pl.rounds.kept import File, Joined, KeptByClients
from fedmoe_pl.rounds.state import PhaseState
from fedmoe_pl.rounds.store import Store
from fedmoe_pl.trees import Tree


class ClientsStore(Store):
    """Refers to what clients keep on their own machines.

    Args:
        clients: the clients, which it tells what is still needed.
        states: the states of all phases that have begun.
    """

    def __init__(self, clients: Clients, states: Mapping[str, PhaseState]) -> None:
        self.clients = clients
        self.states = states
        self._of_checkpoints: list[Joined] = []  # what the last two checkpoints refer to
        clients.needed = self.needed

    def write(self, phase: str, round: int, trees: Mapping[int, Tree]) -> dict[int, list[File]]:
        """The files that the clients have written."""
        return {
            client: [(phase, round, None)] if isinstance(tree, AtClient) and tree.keeps else []
            for client, tree in trees.items()
        }

    def updated(self, phase: str, kept: Mapping[int, Tree], written: Mapping[int, list[File]]) -> KeptByClients:
        """Refers to the new files."""
        return KeptByClients({**{client: files_of(kept, client) for client in kept}, **written})

    def adopt(self, phase: str, round: int, kept: Mapping[int, Tree]) -> KeptByClients:
        """Refers to the same files."""
        return self.updated(phase, kept, {})

    def needed(self, client: int) -> list[tuple[str, int]]:
        """The files of a client that the run or one of its last two checkpoints refers to."""
        of_states = [kept for state in self.states.values() for kept in (state.kept, state.best_kept)]
        files = [file for kept in (*of_states, *self._of_checkpoints) for file in files_of(kept, client)]
        return sorted({(phase, round) for phase, round, _ in files})

    def remove_replaced(self, *needed: Mapping[int, Tree]) -> None:
        """Remembers what the new checkpoint refers to; clients remove the rest when they are asked next."""
        self._of_checkpoints = [*self._of_checkpoints[-1:], Joined(needed)]

    def remove_rest(self, phase: str, kept: Mapping[int, Tree]) -> None:
        """Nothing to do: clients remove what is not needed when they are asked next."""
