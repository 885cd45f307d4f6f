"""A phase whose clients train on their own machines."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fedmoe_pl.aggregation.aggregation import PREFIX
from fedmoe_pl.algorithms.algorithm import needs_server_state
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import Backend, Failure, GroupUpdate, LocalTraining, Plan, one_thread
from fedmoe_pl.backends.backend import fold, group_updates, updated_server
from fedmoe_pl.deployment.answers import cannot_be_used, out_of_proportion, problem_of, update_of
from fedmoe_pl.deployment.connection import module_of_flower
from fedmoe_pl.deployment.messages import Message, do_agree, is_same
from fedmoe_pl.deployment.remote_clients import AtClient, Clients, NoAnswer, files_of
from fedmoe_pl.trees import Tree, of_parts, with_prefix

_BACK_WITHIN = 60.0  # seconds; Flower refuses a client for as long whose process was killed
_SECONDS_BETWEEN_LOOKS = 2.0


class ClientsBackend(Backend):
    """Has clients train on their own machines."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients

    def plan(self, training: LocalTraining) -> ClientsPlan:
        """Decides nothing but whether updates are masked: each client plans for itself."""
        if training.secure_aggregation is not None:
            return module_of_flower("serve", "secure.masked_round").MaskedPlan(training, self.clients)
        return ClientsPlan(training, self.clients)


class ClientsPlan(Plan):
    """Asks clients to train, and folds their updates in the order of the cohort, as a simulation does.

    Attributes:
        trains: the kind of the messages that do so.
    """

    trains = "train"

    def __init__(self, training: LocalTraining, clients: Clients) -> None:
        super().__init__(training, "on the clients' machines")
        self.clients = clients
        self._requests: dict[int, Tree] | None = None  # those that are not answered yet
        self._announced: dict[int, Message] = {}  # the messages with which clients are trained next
        self._ahead: dict[int, tuple[Message, Message | Failure]] = {}  # those that were sent, with their answers
        self._unanswered = set[int]()  # clients to which such a message was sent, but which have not answered

    def requests(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> dict[int, Tree]:
        """Asks the clients, if the algorithm has requests; one without a request that can be met asks for nothing."""
        if not self.training.algorithm.messages.request:
            return {client: {} for client in clients}
        messages = self._messages("request", {client: {} for client in clients}, kept, round)
        requests = {}
        for client, answer in self.clients.ask(self.training, messages).items():
            requests[client] = {} if isinstance(answer, Failure) else answer.tensors
            try:
                self.training.algorithm.server_send(server, client, requests[client])
            except Exception as error:  # whatever a client has sent
                rank_zero_warn(f"client {client}: {cannot_be_used('request', error).reason}.")
                requests[client] = {}
        self._requests = requests
        return requests

    def announce(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> None:
        """Notes what clients will be trained with, so that it goes with the message before.

        Not where clients are asked for requests, whose answers would be sent later, and not where those that were not
        in a round exchange what they have trained last.
        """
        algorithm = self.training.algorithm
        exchanges_with_others = algorithm.messages.exchanged and "all_clients" not in algorithm.needs
        if not algorithm.messages.request and not exchanges_with_others:
            self._announced = self._messages(self.trains, self.sent(server, clients, kept, round), kept, round)

    def ask_before_training(self, messages: Mapping[int, Sequence[Message]]) -> dict[int, list[Message | Failure]]:
        """Asks clients, and has those train that are trained next, all in one message each.

        What they answer to that waits for :meth:`train`, which asks them again if it sends anything else.
        """
        announced, self._announced = self._announced, {}
        several = {client: [*messages.get(client, ())] for client in {**messages, **announced}}
        for client, message in announced.items():
            if all(do_agree(message, each) for each in several[client]):
                several[client].append(message)
        answers = self.clients.ask_each(self.training, {client: each for client, each in several.items() if each})
        for client, message in announced.items():
            if several[client][-1] is message:
                answer = answers[client].pop()
                if not isinstance(answer, NoAnswer):
                    self._ahead[client] = message, answer
                elif not answer.is_absent:
                    self._unanswered.add(client)
        return {client: answers[client] for client in messages}

    def train(
        self, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree], round: int
    ) -> Iterator[GroupUpdate]:
        """Sends each client what the algorithm sends it, and yields their updates in order, each as a group."""
        sent = self.sent(server, [client for group in groups for client in group], kept, round)
        answers = self.trained(sent, kept, round)
        updates = {
            client: answer if isinstance(answer, Failure) else self._update(client, answer, round)
            for client, answer in answers.items()
        }
        weights = self.training.algorithm.messages.weights
        trees = {
            client: {name: tensor for name, tensor in update.sent.items() if not name.startswith(weights)}
            for client, update in updates.items()
            if isinstance(update, Update)
        }
        updates |= out_of_proportion(trees, sent, self.clients.max_change)
        for client, update in self._combinable(server, updates).items():
            yield from group_updates(self.training, [[client]], {client: update})

    def before_another_try(self) -> None:
        """Waits until all clients are connected, for at most a minute."""
        end, said = time.monotonic() + _BACK_WITHIN, False
        while (away := self.clients.transport.away()) and time.monotonic() < end:
            if not said:
                who = f"client {away[0]} is" if len(away) == 1 else f"clients {', '.join(map(str, away))} are"
                rank_zero_info(f"serve: {who} away; the next try waits for {_BACK_WITHIN:.0f} s at most.")
                said = True
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def trained(self, sent: Mapping[int, Tree], kept: Mapping[int, Tree], round: int) -> dict[int, Message | Failure]:
        """The answers of clients that train with what they are sent, also of those that have done so ahead."""
        messages, ahead = self._messages(self.trains, sent, kept, round), self._ahead
        self._ahead = {}
        answers = {client: answer for client, (message, answer) in ahead.items() if is_same(message, messages[client])}
        answers |= self.clients.ask(
            self.training, {client: message for client, message in messages.items() if client not in answers}
        )
        for client in self._unanswered:
            if isinstance(answer := answers.get(client), Failure):  # it has gone since
                answers[client] = replace(answer, is_absent=False)
        self._unanswered = set()
        return {client: answers[client] for client in messages}

    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """The same for groups of one client."""
        return [*self.train(server, [[*group] for group in groups], kept, round)]

    def exchange(
        self, server: Tree, kept: Mapping[int, Tree], failed: Collection[int], round: int
    ) -> Iterator[tuple[int, Tree, Tree, Tree]]:
        """Passes on what clients send each other; those that do not send what they should are left out."""
        exchange, clients = self.training.algorithm.exchange, [client for client in kept if client not in failed]
        parts = [of_senders for _, _, of_senders in exchange(server, clients, round)]
        asked = {
            sender: list(dict.fromkeys(part for of_senders in parts for part in of_senders.get(sender, ())))
            for sender in sorted({sender for of_senders in parts for sender in of_senders})
        }
        given = self._given(asked, kept, round)
        clients = [client for client in clients if client in given or client not in asked]
        sent: dict[int, tuple[Tree, Tree]] = {}
        for client, of_server, of_senders in exchange(server, clients, round):
            received: Tree = {}
            for sender, of_sender in of_senders.items():
                received |= with_prefix(of_parts(given[sender], of_sender), f"{sender}.")
            sent[client] = of_server, received
        messages = self._messages("exchange", {client: {**a, **b} for client, (a, b) in sent.items()}, kept, round)
        for client, answer in self.clients.ask(self.training, messages).items():
            if not isinstance(answer, Failure):  # the others keep what they kept
                yield client, AtClient(answer.values["keeps"]), *sent[client]

    def sent(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> dict[int, Tree]:
        """What each client receives: the answer to its last request, or to a new one, and what the aggregation adds.

        Clients that train alone receive nothing: the server's state is that of the beginning, which they know.
        """
        if not self.training.algorithm.federated:
            return {client: {} for client in clients}
        added = {name: tensor for name, tensor in server.items() if name.startswith(PREFIX)}
        added = {} if self.training.aggregation is None else added
        sent = {}
        requests, self._requests = self._requests or self.requests(server, clients, kept, round), None
        for client, request in requests.items():
            with one_thread():
                sent[client] = {**self.training.algorithm.server_send(server, client, request), **added}
        return sent

    def about_result(
        self, kind: str, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int
    ) -> dict[int, Message]:
        """Messages with all that clients need to make their models: what they would receive, or the server's state.

        An algorithm that chooses a client's model from the server's state gets all of it, as in a simulation.
        """
        if needs_server_state(self.training.algorithm):
            sent = dict.fromkeys(clients, server)
        else:
            sent = self.sent(server, clients, kept, round)
        return self._messages(kind, sent, kept, round)

    def _messages(
        self, kind: str, tensors: Mapping[int, Tree], kept: Mapping[int, Tree], round: int
    ) -> dict[int, Message]:
        """Messages of this phase to clients, each with its tensors and the files that it goes on from."""
        values = {"phase": self.training.phase_name, "round": round}
        return {
            client: Message(kind, {**values, "kept": files_of(kept, client)}, tree) for client, tree in tensors.items()
        }

    def _update(self, client: int, answer: Message, round: int) -> Update | Failure:
        try:
            return update_of(answer, self.training, client, round)
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
                    updated_server(algorithm, server, combined)
        except Exception as error:  # whatever a client has sent
            return cannot_be_used("update", error)
        return None

    def _given(self, parts: Mapping[int, list[str]], kept: Mapping[int, Tree], round: int) -> dict[int, Tree]:
        """What clients give each other, by sender; warns of tensors that are not those that were asked for."""
        messages = self._messages("read", {client: {} for client in parts}, kept, round)
        for client, message in messages.items():
            message.values["parts"] = parts[client]
        given = {}
        for client, answer in self.clients.ask(self.training, messages).items():
            if isinstance(answer, Failure):
                rank_zero_warn(f"client {client} is left out of the exchange: {answer.reason}.")
                continue
            initial = self.training.of(client).initial
            if answer.tensors.keys() != of_parts(initial, parts[client]).keys():
                rank_zero_warn(f"client {client} is left out of the exchange: its tensors are not those of its parts.")
            elif reason := problem_of(answer.tensors, 1, initial):
                rank_zero_warn(f"client {client} is left out of the exchange: {reason}.")
            else:
                given[client] = answer.tensors
        for client, failure in out_of_proportion(given, {}, self.clients.max_change).items():
            rank_zero_warn(f"client {client} is left out of the exchange: {failure.reason}.")
            del given[client]
        return given
