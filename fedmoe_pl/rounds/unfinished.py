"""The clients that have trained in a round that is not complete, so that a killed run does not train them again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedmoe_pl.algorithms.algorithm import overrides
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
        state, store = run.states[phase.name], run.store
        self.run, self.phase = run, phase
        self.before = replace(state, traffic={**state.traffic})
        begins = overrides(phase.algorithm, "server_begin")  # a resumed first round would call it again
        trains_alone = not (state.server_learns and (phase.algorithm.federated or begins))
        self.store = store if trains_alone and isinstance(store, FileStore) else None
        self.logs = bool(phase.client_trainer(run.trainer).get("logger"))
        self.trained = {**state.trained}
        self._saved = time.monotonic()

    def split(self, groups: Sequence[list[int]]) -> tuple[list[list[int]], dict[int, Any]]:
        """The groups to train, and the files of the clients of all others.

        A group is trained as a whole, because the bits of a stack may depend on all of its clients.
        """
        are_done = [bool(self.trained) and all(map(self._is_done, group)) for group in groups]
        left = [group for group, is_done in zip(groups, are_done, strict=True) if not is_done]
        done = [client for group, is_done in zip(groups, are_done, strict=True) if is_done for client in group]
        self.run.logged |= {client: self.trained[str(client)][2] for client in done if self.logs}
        return left, {client: self.trained[str(client)][0] for client in done}

    def _is_done(self, client: int) -> bool:
        """Whether its result is there: another configuration may have written the file anew, or logged nothing."""
        if self.store is None or str(client) not in self.trained:
            return False
        row, metadata, logged = self.trained[str(client)]
        return metadata == self.store.metadata(self.phase.name, client, row) and bool(logged) == self.logs

    def add(self, group: GroupUpdate, written: Mapping[int, Any]) -> None:
        """Notes the clients of a group that answered; saves the run if the last time was some seconds ago."""
        if self.store is None:
            return
        for client, row in written.items():
            metadata = self.store.metadata(self.phase.name, client, row)
            self.trained[str(client)] = row, metadata, group.logged.get(client, [])
        if time.monotonic() - self._saved >= _SECONDS_BETWEEN_SAVES:
            self.run.save(in_round={self.phase.name: replace(self.before, trained={**self.trained})})
            self._saved = time.monotonic()

    def end(self) -> None:
        """Ends the first try, after which all clients train again, as they would without a kill."""
        self.store = None
