"""The clients of a deployed federation as the server sees them: how it reaches them, and what it refers to there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedmoe_pl.aggregation.aggregation import PREFIX
from fedmoe_pl.algorithms.algorithm import Moment
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.overrides import chooses_model, overrides
from fedmoe_pl.backends import (
    Backend,
    Failure,
    GroupUpdate,
    LocalTraining,
    NotFiniteError,
    Plan,
    check_finite,
    one_thread,
)
from fedmoe_pl.backends.backend import group_update
from fedmoe_pl.deployment.messages import FAILED, NOT_BEGUN, UNPREPARED, Message
from fedmoe_pl.rounds.evaluation import ClientEvaluation, Evaluation
from fedmoe_pl.rounds.kept import EXCHANGED, STEPPED, File, Joined, KeptByClients
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run
from fedmoe_pl.rounds.state import PhaseState
from fedmoe_pl.rounds.store import Store
from fedmoe_pl.trees import Tree

_TRIES = 5  # of a message to a client that has to be prepared for it


class Transport(ABC):
    """Carries messages to clients, and their answers back."""

    @abstractmethod
    def ask(self, messages: Mapping[int, Message], seconds: float | None) -> dict[int, Message]:
        """Sends each client its message, and waits for the answers.

        Args:
            messages: what to send, by client.
            seconds: how long to wait; None as long as the clients are connected.

        Returns:
            The answers by client; none of a client that is not connected, or that did not answer in time.
        """


class AtClient(dict[str, Tensor]):
    """An empty tree in place of what a client keeps on its own machine.

    Args:
        keeps: whether it keeps anything.
    """

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps


class Clients:
    """All clients, and in which phase each of them is.

    Args:
        transport: reaches them.
        num_clients: number of clients.
        num_classes: number of classes of their data.

    Attributes:
        name: the run's name, which no other run has.
        needed: the files of a client that the run still needs.
    """

    def __init__(self, transport: Transport, num_clients: int, num_classes: int) -> None:
        self.transport = transport
        self.name = ""
        self.needed: Callable[[int], list[tuple[str, int]]] = lambda client: []
        self.num_clients = num_clients
        self.num_classes = num_classes

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_clients))

    def ask(self, training: LocalTraining, messages: Mapping[int, Message]) -> dict[int, Message | Failure]:
        """Asks clients, and prepares those that have restarted or come from another phase.

        Args:
            training: the phase's local training.
            messages: what to ask, by client.

        Returns:
            Each client's answer, or why there is none, in the order of ``messages``.
        """
        seconds, answers, pending = training.client_timeout, dict[int, Message](), [*messages]
        messages = {
            client: replace(message, values={**message.values, "run": self.name, "needed": self.needed(client)})
            for client, message in messages.items()
        }
        for _ in range(_TRIES):
            answers |= self.transport.ask({client: messages[client] for client in pending}, seconds)
            preparations = {
                client: self._preparation(answers[client].kind, training, client)
                for client in pending
                if client in answers and answers[client].kind in (UNPREPARED, NOT_BEGUN)
            }
            prepared = self.transport.ask(preparations, seconds) if preparations else {}
            for client in preparations:
                if client not in prepared:
                    del answers[client]
                elif prepared[client].kind == FAILED:
                    answers[client] = prepared[client]
            pending = [client for client, answer in prepared.items() if answer.kind != FAILED]
            if not pending:
                break
        return {client: _checked(answers.get(client)) for client in messages}

    def _preparation(self, kind: str, training: LocalTraining, client: int) -> Message:
        """What a client needs that has restarted, or that comes from another phase."""
        if kind == UNPREPARED:
            values = {"num_clients": self.num_clients, "num_classes": self.num_classes}
            return Message("prepare", {"run": self.name, **values})
        values = {"phase": training.phase, "rounds_before": training.rounds_before}
        return Message("begin", {"run": self.name, **values}, training.of(client).initial)


def _checked(answer: Message | None) -> Message | Failure:
    if answer is None:
        return Failure("it is not connected, or its answer did not come in time")
    if answer.kind in (UNPREPARED, NOT_BEGUN):
        return Failure("it starts again and again")
    return Failure(str(answer.values.get("reason", ""))) if answer.kind == FAILED else answer


def files_of(kept: Mapping[int, Tree], client: int) -> list[File]:
    """The files of a client that a mapping refers to."""
    if isinstance(kept, Joined):
        return [file for part in kept.mappings for file in files_of(part, client)]
    return kept.files.get(client, []) if isinstance(kept, KeptByClients) else []


class ClientsStore(Store):
    """Refers to what clients keep on their own machines.

    Args:
        clients: the clients, which it tells what is still needed.
        states: the states of all phases that have begun.
    """

    def __init__(self, clients: Clients, states: Mapping[str, PhaseState]) -> None:
        self.clients = clients
        self.states = states
        self._of_checkpoints: list[KeptByClients] = []  # what the last two checkpoints refer to
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
        of_states = [kept for state in self.states.values() for kept in (state.kept, state.best_kept)]
        of_checkpoint = {client: [f for kept in of_states for f in files_of(kept, client)] for client in self.clients}
        self._of_checkpoints = [*self._of_checkpoints[-1:], KeptByClients(of_checkpoint)]

    def remove_rest(self, phase: str, kept: Mapping[int, Tree]) -> None:
        """Nothing to do: clients remove what is not needed when they are asked next."""


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

    def begin(self, training: LocalTraining) -> ClientsPlan:
        """A plan with the phase's initial tensors."""
        return ClientsPlan(training, self.clients)

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """One client per group."""
        return [[client] for client in cohort]

    def requests(self, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> dict[int, Tree]:
        """Asks the clients, if the algorithm has requests; one that does not answer asks for nothing."""
        if not overrides(self.training.algorithm, "client_request"):
            return {client: {} for client in clients}
        answers = self._ask("request", {client: {} for client in clients}, kept, round)
        return {client: {} if isinstance(answer, Failure) else answer.tensors for client, answer in answers.items()}

    def train(self, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int) -> Iterator[GroupUpdate]:
        """Sends each client what the algorithm sends it, and yields their updates in the cohort's order."""
        answers = self._ask("train", self.sent(server, cohort, kept, round), kept, round, keep=round + 1)
        for client, answer in answers.items():
            yield group_update(self.training, [client], [self._update(client, answer)])

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
            yield client, answer if isinstance(answer, Failure) else AtClient(answer.values["keeps"])

    def exchange(
        self, server: Tree, kept: Mapping[int, Tree], failed: Collection[int], round: int
    ) -> Iterator[tuple[int, Tree, Tree]]:
        """Collects what the clients keep, lets the algorithm exchange it, and hands each client what it keeps now."""
        answers = self._ask("read", {client: {} for client in kept if client not in failed}, kept, round)
        trees = {client: answer.tensors for client, answer in answers.items() if isinstance(answer, Message)}
        exchanged, received = {}, {}
        for client, tree, from_others in self.training.algorithm.exchange(server, trees, round):
            exchanged[client], received[client] = tree, from_others
        written = self._ask("write", exchanged, kept, round, keep=EXCHANGED + round + 1)
        for client, answer in written.items():
            if isinstance(answer, Message):  # the others keep what they kept
                yield client, AtClient(answer.values["keeps"]), received[client]

    def sent(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> dict[int, Tree]:
        """What each client receives: the answer to its request, and what the aggregation adds."""
        added = {name: tensor for name, tensor in server.items() if name.startswith(PREFIX)}
        added = {} if self.training.aggregation is None else added
        sent = {}
        for client, request in self.requests(clients, kept, round).items():
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

    def _update(self, client: int, answer: Message | Failure) -> Update | Failure:
        """A client's update; a failure if it is not one that the server can use."""
        if isinstance(answer, Failure):
            return answer
        weight, keeps = answer.values.get("weight"), answer.values.get("keeps")
        if answer.kind != "update" or not isinstance(weight, int | float) or not isinstance(keeps, bool):
            return Failure("its answer is no update")
        initial = self.training.initial
        for name, tensor in answer.tensors.items():
            known = initial.get(name)
            if "/" not in name and (known is None or known.shape != tensor.shape or known.dtype != tensor.dtype):
                return Failure(f"its {name} is not as in the server's model")
        try:
            check_finite([answer.tensors], weight, initial)
        except NotFiniteError as error:
            return Failure(str(error))
        update, aggregation = Update(answer.tensors, weight, AtClient(keeps)), self.training.aggregation
        return update if aggregation is None else aggregation.of_remote_client(client, update)


def _about_result(
    kind: str,
    asked: Clients,
    training: LocalTraining,
    server: Tree,
    kept: Mapping[int, Tree],
    clients: Sequence[int],
    values: dict[str, Any],
) -> dict[int, Message]:
    """Messages with all that clients need to make their models: what they would receive, or the server's state."""
    algorithm = training.algorithm
    whole = chooses_model(algorithm) or algorithm.has_predictor
    sent = dict.fromkeys(clients, server)
    if not whole:
        sent = ClientsPlan(training, asked).sent(server, clients, kept, values["round"])
    values = {**values, "phase": training.phase, "whole": whole}
    return {
        client: Message(kind, {**values, "kept": files_of(kept, client)}, tensors) for client, tensors in sent.items()
    }


def evaluate_at_clients(
    asked: Clients,
    training: LocalTraining,
    server: Tree,
    kept: Mapping[int, Tree],
    round: int,
    moment: Moment,
    clients: Sequence[int],
    plan: Plan | None = None,
) -> list[ClientEvaluation]:
    """Has clients evaluate their models on their own samples; other arguments as in ``evaluate_clients``.

    An algorithm that chooses a client's model from the server's state gets all of it, as in a simulation.

    Args:
        asked: all clients.
        training: the phase's local training.
        server: the server's state.
        kept: what the clients keep.
        round: number of completed rounds.
        moment: the moment of the last round.
        clients: ids of the clients to evaluate.
        plan: unused; clients plan for themselves.

    Returns:
        One entry per client; that of a client which does not answer has no values.
    """
    messages = _about_result("evaluate", asked, training, server, kept, clients, {"round": round, "moment": moment})
    evaluations = []
    for client, answer in asked.ask(training, messages).items():
        if isinstance(answer, Failure):
            rank_zero_warn(f"phase '{training.phase}': client {client} is not evaluated: {answer.reason}")
            n_train = len(training.datamodule.train_samples[client])
            evaluations.append(ClientEvaluation(client, n_train, math.nan, math.nan, math.nan, math.nan))
        else:
            evaluations.append(ClientEvaluation(**{**answer.values, **answer.tensors, "client": client}))
    return evaluations


class HandOver(FederationCallback):
    """Gives every client the result of a finished phase, with which its machine works alone.

    Args:
        clients: the clients.
    """

    def __init__(self, clients: Clients) -> None:
        self.clients = clients

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Sends the result to all clients; those that are away do not get it."""
        state, training = run.states[phase.name], run.training(phase)
        of_state = {name: getattr(state, name) for name in ("round", "stopped", "best_round")}
        values = {"round": state.round, "state": of_state}
        messages = _about_result(
            "finish", self.clients, training, state.server, state.kept, range(self.clients.num_clients), values
        )
        for client, message in messages.items():
            message.values["evaluations"] = [_of_client(each, client) for each in state.evaluations]
        for client, answer in self.clients.ask(training, messages).items():
            if isinstance(answer, Failure):
                rank_zero_warn(f"{phase}: client {client} has not got the result: {answer.reason}")


def _of_client(evaluation: Evaluation, client: int) -> dict[str, Any]:
    """A client's own part of an evaluation, as plain values."""
    own = [replace(each, gate_weights=None) for each in evaluation.clients if each.client == client]
    return {**vars(evaluation), "clients": [vars(each) for each in own]}
