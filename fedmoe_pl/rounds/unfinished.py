"""The clients that have trained in a round that is not complete, so that a killed run does not train them again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedmoe_pl.backends.backend import GroupUpdate
from fedmoe_pl.checkpoints.client_state import FileStore
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run

_SECONDS_BETWEEN_SAVES = 10.0  # a save takes up to 50 ms


class UnfinishedRound:
    """A round whose clients may train alone: then each one's result is complete when it has trained.

    If clients train for the server, only the sum of their updates is known here; after a kill, such a round begins
    again.

    Args:
        run: the run, before any costs of the round are counted.
        phase: the phase.
    """

    def __init__(self, run: Run, phase: Phase) -> None:
        state = run.states[phase.name]
        self.run, self.phase = run, phase
        self.before = replace(state, traffic={**state.traffic})
        self.trained = {**state.trained}
        trains_alone = not (phase.algorithm.federated and state.server_learns)
        self.is_saved = trains_alone and isinstance(run.store, FileStore)
        self._saved = time.monotonic()

    def split(self, groups: Sequence[list[int]]) -> tuple[list[list[int]], dict[int, Any]]:
        """The groups to train, and the files of the clients of all others.

        A group is trained as a whole, because the bits of a stack may depend on all of its clients.
        """
        left = [group for group in groups if not self.trained.keys() >= {*map(str, group)}]
        done = [client for group in groups if group not in left for client in group]
        self.run.logged |= {client: self.trained[str(client)][1] for client in done if self.trained[str(client)][1]}
        return left, {client: self.trained[str(client)][0] for client in done}

    def add(self, group: GroupUpdate, written: Mapping[int, Any]) -> None:
        """Notes the clients of a group that answered; saves the run if the last time was some seconds ago."""
        self.trained |= {str(client): (file, group.logged.get(client, [])) for client, file in written.items()}
        if self.is_saved and time.monotonic() - self._saved >= _SECONDS_BETWEEN_SAVES:
            self.run.save(in_round={self.phase.name: replace(self.before, trained={**self.trained})})
            self._saved = time.monotonic()

    def end(self) -> None:
        """Ends the first try, after which all clients train again, as they would without a kill."""
        self.trained, self.is_saved = {}, False
