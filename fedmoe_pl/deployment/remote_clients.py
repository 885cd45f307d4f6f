"""The clients of a deployed federation as the server sees them, and what it refers to on their machines."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.backends import Failure, LocalTraining
from fedmoe_pl.checkpoints.client_state import File, RemoteStates, Store
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.deployment.messages import (
    FAILED,
    NOT_BEGUN,
    SEVERAL,
    UNPREPARED,
    Message,
    answers_in,
    joined,
    problem_of_answer,
)
from fedmoe_pl.deployment.transport import Transport
from fedmoe_pl.trees import Tree

_TRIES = 10  # messages to a client that has to be prepared for one


class NoAnswer(Failure):
    """No answer of a client, which may be asked again."""


class AtClient(dict[str, Tensor]):
    """An empty tree in place of what a client keeps on its own machine."""

    def __init__(self, keeps: int) -> None:
        super().__init__()
        self.keeps = keeps


class Clients:
    """All clients, with what each has said of itself, and in which phase each of them is.

    ``name`` is the run's name, which no other run has, and ``states`` those of its phases that have begun. In one that
    ``is_continued``, each client begins anew: it may have begun for a server that went on from another checkpoint.
    """

    def __init__(
        self, transport: Transport, descriptions: Mapping[int, dict[str, Any]], num_classes: int, max_change: float
    ) -> None:
        self.transport = transport
        self.descriptions = descriptions
        self.states: Mapping[str, PhaseState] = {}
        self.name, self.is_continued = "", False
        self.num_clients = len(descriptions)
        self.num_classes = num_classes
        self.max_change = max_change
        self._phases: dict[int, str] = {}  # the last one in which each client has begun

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_clients))

    def ask(self, training: LocalTraining, messages: Mapping[int, Message]) -> dict[int, Message | Failure]:
        """Asks clients, and prepares those that have restarted or come from another phase.

        Returns each one's answer, or why there is none, in the order of ``messages``. If the configuration fits none of
        them, that is an exception before the end of the first round.
        """
        several = self.ask_each(training, {client: [message] for client, message in messages.items()})
        return {client: answer for client, (answer,) in several.items()}

    def ask_each(
        self, training: LocalTraining, messages: Mapping[int, Sequence[Message]]
    ) -> dict[int, list[Message | Failure]]:
        """The same with several messages to a client, which travel as one."""
        asked, answers, reached = dict[int, Message](), dict[int, Message](), set[int]()
        for client, parts in messages.items():
            asked[client] = joined([replace(part, values={**part.values, "run": self.name}) for part in parts])
        failures = dict[int, Message | Failure]()
        most = max(map(len, messages.values()), default=1)
        seconds = math.inf if training.client_timeout is None else most * training.client_timeout
        end = time.monotonic() + 2 * seconds  # also for a client that answers again and again that it must be prepared
        unknown = "" if self.is_continued else training.phase_name
        elsewhere = [client for client in asked if self._phases.get(client, unknown) != training.phase_name]
        pending = asked | {client: self._begin(training, client) for client in elsewhere}
        for _ in range(_TRIES):
            left = min(seconds, end - time.monotonic())
            if not pending or left <= 0:
                break
            came = self.transport.ask(pending, None if left == math.inf else left)
            reached |= {client for client in came if pending[client] is asked[client]}
            answered = {client: answer for client, answer in came.items() if answer is not None}
            answers = {client: answer for client, answer in answers.items() if client not in pending} | answered
            pending = {}
            for client, answer in answered.items():
                if answer.kind == UNPREPARED:
                    pending[client] = self._prepare(client)
                elif answer.kind in (NOT_BEGUN, "prepared"):
                    pending[client] = self._begin(training, client)
                elif answer.kind == "begun":
                    pending[client] = asked[client]
                    self._phases[client] = training.phase_name
        self._check_configuration(answers)
        for client in asked.keys() - answers.keys():
            late, absent = NoAnswer("its answer did not come in time"), self.transport.why_absent(client)
            failures[client] = late if client in reached else NoAnswer(absent, is_absent=True)
        return {
            client: [failures[client]] * len(parts) if client in failures else _checked_each(parts, answers[client])
            for client, parts in messages.items()
        }

    def _prepare(self, client: int) -> Message:
        """What a client needs that has restarted."""
        values = {"num_clients": self.num_clients, "num_classes": self.num_classes}
        return Message("prepare", {"run": self.name, **values, "description": self.descriptions[client]})

    def _begin(self, training: LocalTraining, client: int) -> Message:
        """What a client needs that comes from another phase."""
        values = {"phase": training.phase_name, "rounds_before": training.rounds_before}
        return Message("begin", {"run": self.name, **values}, training.of(client).initial)

    def _check_configuration(self, answers: Mapping[int, Message]) -> None:
        """Ends a run that has just begun if all clients say that its configuration does not fit: one alone may lie."""
        refusals = [each.kind == FAILED and each.values["failure"] == "configuration" for each in answers.values()]
        if refusals and all(refusals) and not any(state.round for state in self.states.values()):
            client, answer = next(iter(answers.items()))
            raise MisconfigurationException(f"client {client}: {problem_of_answer('train', answer)}")


def _checked_each(messages: Sequence[Message], answer: Message) -> list[Message | Failure]:
    """A client's answers to messages that travelled as one; a failure in place of each that is none."""
    whole = _checked(SEVERAL if len(messages) > 1 else messages[0].kind, answer)
    if len(messages) == 1 or isinstance(whole, Failure):
        return [whole] * len(messages)
    parts = answers_in(whole)
    if len(parts) != len(messages):
        return [Failure(f"its answer is not one to {len(messages)} messages")] * len(messages)
    return [_checked(message.kind, part) for message, part in zip(messages, parts, strict=True)]


def _checked(kind: str, answer: Message) -> Message | Failure:
    problem = problem_of_answer(kind, answer)
    return Failure(problem) if problem else answer


def files_of(kept: Mapping[int, Tree], client: int) -> list[File]:
    """The files of a client that a mapping refers to."""
    return kept.files.get(client, []) if isinstance(kept, RemoteStates) else []


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
