"""A phase whose clients train on their own machines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.aggregation.aggregation import PREFIX
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.overrides import overrides
from fedmoe_pl.backends import (
    Backend,
    Failure,
    GroupUpdate,
    LocalTraining,
    Plan,
    one_thread,
)
from fedmoe_pl.backends.backend import fold, group_update
from fedmoe_pl.deployment.answers import cannot_be_used, kept_of, problem_of, update_of
from fedmoe_pl.deployment.clients import AtClient, Clients, files_of
from fedmoe_pl.deployment.messages import Message
from fedmoe_pl.deployment.proportions import out_of_proportion
from fedmoe_pl.rounds.kept import EXCHANGED, STEPPED
from fedmoe_pl.trees import Tree


class ClientsBackend(Backend):
    """Has clients train on their own machines.

    Args:
        clients: the clients.
    """

    def __init__(self, clients: Clients) -> None:
        self.clients = clients

    def plan(self, training: LocalTraining) -> ClientsPlan:
        """Decides nothing: each client plans for itself."""
        return ClientsPlan(training, self.clients)


class ClientsPlan(Plan):
    """Asks clients to train, and folds their updates in the order of the cohort, as a simulation does.

    Args:
        training: the local training of the phase's clients.
        clients: the clients.
    """

    def __init__(self, training: LocalTraining, clients: Clients) -> None:
        super().__init__(training, "on the clients' machines")
        self.clients = clients
        self._requests: dict[int, Tree] | None = None  # those that are not answered yet

    def begin(self, training: LocalTraining) -> ClientsPlan:
        """A plan with the phase's initial tensors."""
        return ClientsPlan(training, self.clients)

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """One client per group."""
        return [[client] for client in cohort]

    def requests(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> dict[int, Tree]:
        """Asks the clients, if the algorithm has requests; one without a request that can be met asks for nothing."""
        if not overrides(self.training.algorithm, "client_request"):
            return {client: {} for client in clients}
        answers = self._ask("request", {client: {} for client in clients}, kept, round)
        requests = {}
        for client, answer in answers.items():
            requests[client] = {} if isinstance(answer, Failure) else answer.tensors
            try:
                self.training.algorithm.server_send(server, client, requests[client])
            except Exception as error:  # whatever a client has sent
                rank_zero_warn(f"client {client}: {cannot_be_used('request', error).reason}.")
                requests[client] = {}
        self._requests = requests
        return requests

    def train(self, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int) -> Iterator[GroupUpdate]:
        """Sends each client what the algorithm sends it, and yields their updates in the cohort's order."""
        sent = self.sent(server, cohort, kept, round)
        answers = self._ask("train", sent, kept, round, keep=round + 1)
        updates = {
            client: answer if isinstance(answer, Failure) else self._update(client, answer)
            for client, answer in answers.items()
        }
        weights = self.training.algorithm.own_weights
        trees = {
            client: {name: tensor for name, tensor in update.sent.items() if not name.startswith(weights)}
            for client, update in updates.items()
            if isinstance(update, Update)
        }
        updates |= out_of_proportion(trees, sent, self.clients.max_change)
        for client, update in self._combinable(server, updates).items():
            yield group_update(self.training, [client], [update])

    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """The same for groups of one client."""
        return [*self.train(server, [client for group in groups for client in group], kept, round)]

    def step_after_aggregation(
        self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int
    ) -> Iterator[tuple[int, Tree | Failure]]:
        """Sends the new server's state to the clients of the round."""
        keep = STEPPED + round + 1
        answers = self._ask("step", self.sent(server, clients, kept, round), kept, round, keep)
        for client, answer in answers.items():
            yield client, answer if isinstance(answer, Failure) else kept_of(answer)

    def exchange(
        self, server: Tree, kept: Mapping[int, Tree], failed: Collection[int], round: int
    ) -> Iterator[tuple[int, Tree, Tree]]:
        """Collects what the clients keep, lets the algorithm exchange it, and hands each client what it keeps now."""
        answers = self._ask("read", {client: {} for client in kept if client not in failed}, kept, round)
        trees = self._trees(answers)
        try:
            exchanges = [*self.training.algorithm.exchange(server, trees, round)]
        except Exception as error:  # whatever clients have sent
            reason = cannot_be_used("tensors", error).reason.removeprefix("its ")
            rank_zero_warn(f"round {round + 1}: clients exchange nothing, because {reason}.")
            return
        received = {client: from_others for client, _, from_others in exchanges}
        exchanged = {client: tree for client, tree, _ in exchanges}
        written = self._ask("write", exchanged, kept, round, keep=EXCHANGED + round + 1)
        for client, answer in written.items():
            keeps = answer if isinstance(answer, Failure) else kept_of(answer)
            if isinstance(keeps, AtClient):  # the others keep what they kept
                yield client, keeps, received[client]

    def sent(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> dict[int, Tree]:
        """What each client receives: the answer to its last request, or to a new one, and what the aggregation adds."""
        added = {name: tensor for name, tensor in server.items() if name.startswith(PREFIX)}
        added = {} if self.training.aggregation is None else added
        sent = {}
        requests, self._requests = self._requests or self.requests(server, clients, kept, round), None
        for client, request in requests.items():
            with one_thread():
                sent[client] = {**self.training.algorithm.server_send(server, client, request), **added}
        return sent

    def _ask(
        self, kind: str, tensors: Mapping[int, Tree], kept: Mapping[int, Tree], round: int, keep: int = 0
    ) -> dict[int, Message | Failure]:
        """Sends clients messages of this phase; ``keep`` is the round in the name of the file that they write."""
        values: dict[str, Any] = {"phase": self.training.phase, "round": round}
        messages = {
            client: Message(kind, {**values, "kept": files_of(kept, client), "keep": [self.training.phase, keep]}, tree)
            for client, tree in tensors.items()
        }
        return self.clients.ask(self.training, messages)

    def _update(self, client: int, answer: Message) -> Update | Failure:
        """A client's update; a failure if it is none."""
        try:
            return update_of(answer, self.training, client)
        except Exception as error:  # whatever a client has sent
            return cannot_be_used("update", error)

    def _combinable(self, server: Tree, updates: Mapping[int, Update | Failure]) -> dict[int, Update | Failure]:
        """The updates, with a failure in place of each with which the server cannot compute beside most others."""
        checked = dict(updates)
        while usable := {client: update for client, update in checked.items() if isinstance(update, Update)}:
            (first, update), *others = usable.items()
            if failure := self._computed(server, update):
                checked[first] = failure
                continue
            failures = {client: self._computed(server, update, other) for client, other in others}
            failed = {client: failure for client, failure in failures.items() if failure is not None}
            if 2 * len(failed) <= len(others) or len(others) == 1:
                return checked | failed
            checked[first] = Failure("its update cannot be used beside most others")
        return checked

    def _computed(self, server: Tree, *updates: Update) -> Failure | None:
        """Why the server cannot compute with updates together; None if it can."""
        algorithm, aggregation = self.training.algorithm, self.training.aggregation
        try:
            combined = fold(aggregation or algorithm, updates)
            if aggregation is None:
                with one_thread():
                    algorithm.server_update(server, combined)
        except Exception as error:  # whatever a client has sent
            return cannot_be_used("update", error)
        return None

    def _trees(self, answers: Mapping[int, Message | Failure]) -> dict[int, Tree]:
        """What clients sent for an exchange; warns of tensors that cannot be those that a client keeps."""
        trees = {}
        for client, answer in answers.items():
            if isinstance(answer, Failure):
                continue
            if reason := problem_of(answer.tensors, 1, self.training.of(client).initial):
                rank_zero_warn(f"client {client} is left out of the exchange: {reason}.")
            else:
                trees[client] = answer.tensors
        for client, failure in out_of_proportion(trees, {}, self.clients.max_change).items():
            rank_zero_warn(f"client {client} is left out of the exchange: {failure.reason}.")
            del trees[client]
        return trees
