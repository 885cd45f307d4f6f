"""The clients of a deployed federation as the server sees them: how it reaches them, and what it refers to there."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.backends import Failure, LocalTraining
from fedmoe_pl.checkpoints.client_state import File, RemoteStates
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.deployment.messages import (
    ANSWERS,
    BEGUN,
    FAILED,
    NOT_BEGUN,
    NOTE,
    PREPARED,
    UNPREPARED,
    Message,
    answers_in,
    joined,
)
from fedmoe_pl.trees import Tree

_LONGEST = 1000  # characters of a client's reason
NOTED_WITHIN = 20.0
"""Seconds that the server waits until a client has shown a note."""
_TRIES = 10  # messages to a client that has to be prepared for one


class Transport(ABC):
    """Carries messages to clients, and their answers back."""

    @abstractmethod
    def ask(self, messages: Mapping[int, Message], seconds: float | None) -> Mapping[int, Message | None]:
        """Sends each client its message, and waits for the answers.

        Args:
            messages: what to send, by client.
            seconds: how long to wait; None as long as the clients are connected.

        Returns:
            The answers by client; None of a client that did not answer in time, and nothing of one to which no message
            was sent.
        """

    def why_absent(self, client: int) -> str:
        """Why no message was sent to a client."""
        return "it is not connected"

    def tell(self, texts: Mapping[int, str]) -> None:
        """Has clients show a text to whoever runs them.

        Args:
            texts: the texts by client.
        """
        self.ask({client: Message(NOTE, {"text": text}) for client, text in texts.items()}, NOTED_WITHIN)


class NoAnswer(Failure):
    """No answer of a client, which may be asked again."""


class AtClient(dict[str, Tensor]):
    """An empty tree in place of what a client keeps on its own machine."""

    def __init__(self, keeps: int) -> None:
        super().__init__()
        self.keeps = keeps


class Clients:
    """All clients, and in which phase each of them is.

    Args:
        transport: reaches them.
        descriptions: what each of them has said of itself, by id.
        num_classes: number of classes of their data.
        max_change: how many times longer than usual the change that a client sends may be.

    Attributes:
        name: the run's name, which no other run has.
        states: the states of the run's phases that have begun.
    """

    def __init__(
        self, transport: Transport, descriptions: Mapping[int, dict[str, Any]], num_classes: int, max_change: float
    ) -> None:
        self.transport = transport
        self.descriptions = descriptions
        self.states: Mapping[str, PhaseState] = {}
        self.name = ""
        self.num_clients = len(descriptions)
        self.num_classes = num_classes
        self.max_change = max_change
        self._phases: dict[int, str] = {}  # the last one in which each client has begun

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_clients))

    def ask(self, training: LocalTraining, messages: Mapping[int, Message]) -> dict[int, Message | Failure]:
        """Asks clients, and prepares those that have restarted or come from another phase.

        Args:
            training: the phase's local training.
            messages: what to ask, by client.

        Returns:
            Each client's answer, or why there is none, in the order of ``messages``.

        Raises:
            MisconfigurationException: before the end of the first round, if the configuration fits none of them.
        """
        several = self.ask_each(training, {client: [message] for client, message in messages.items()})
        return {client: answer for client, (answer,) in several.items()}

    def ask_each(
        self, training: LocalTraining, messages: Mapping[int, Sequence[Message]]
    ) -> dict[int, list[Message | Failure]]:
        """The same with several messages to a client, which travel as one."""
        asked, answers, reached = dict[int, Message](), dict[int, Message](), set[int]()
        for client, parts in messages.items():
            of_run = [replace(part, values={**part.values, "run": self.name}) for part in parts]
            asked[client] = joined(of_run) if len(of_run) > 1 else of_run[0]
        failures = dict[int, Message | Failure]()
        most = max(map(len, messages.values()), default=1)
        seconds = math.inf if training.client_timeout is None else most * training.client_timeout
        end = time.monotonic() + 2 * seconds  # also for a client that answers again and again that it must be prepared
        elsewhere = [client for client in asked if self._phases.get(client, training.phase) != training.phase]
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
                elif answer.kind in (NOT_BEGUN, PREPARED):
                    pending[client] = self._begin(training, client)
                elif answer.kind == BEGUN:
                    pending[client] = asked[client]
                    self._phases[client] = training.phase
        self._check_configuration(answers)
        for client in asked.keys() - answers.keys():
            late, absent = NoAnswer("its answer did not come in time"), self.transport.why_absent(client)
            failures[client] = late if client in reached else NoAnswer(absent, is_absent=True)
        return {
            client: [failures[client]] * len(parts)
            if client in failures
            else self._checked_each(answers[client], len(parts))
            for client, parts in messages.items()
        }

    def _prepare(self, client: int) -> Message:
        """What a client needs that has restarted."""
        values = {"num_clients": self.num_clients, "num_classes": self.num_classes}
        return Message("prepare", {"run": self.name, **values, "description": self.descriptions[client]})

    def _begin(self, training: LocalTraining, client: int) -> Message:
        """What a client needs that comes from another phase."""
        values = {"phase": training.phase, "rounds_before": training.rounds_before}
        return Message("begin", {"run": self.name, **values}, training.of(client).initial)

    def _check_configuration(self, answers: Mapping[int, Message]) -> None:
        """Ends a run that has just begun if all clients say that its configuration does not fit: one alone may lie."""
        refusals = [answer.kind == FAILED and answer.values.get("is_configuration") for answer in answers.values()]
        if refusals and all(refusals) and not any(state.round for state in self.states.values()):
            client, answer = next(iter(answers.items()))
            raise MisconfigurationException(f"client {client}: {reason_of(answer)}")

    def _checked_each(self, answer: Message, number: int) -> list[Message | Failure]:
        """The answers to so many messages of a client."""
        checked = self._checked(answer)
        if number == 1 or isinstance(checked, Failure):
            return [checked] * number
        parts = answers_in(checked) if checked.kind == ANSWERS else []
        no_answers = Failure(f"its answer is not one to {number} messages")
        return [self._checked(part) for part in parts] if len(parts) == number else [no_answers] * number

    def _checked(self, answer: Message) -> Message | Failure:
        if answer.kind in (UNPREPARED, NOT_BEGUN, PREPARED, BEGUN):
            return Failure("it starts again and again")
        return Failure(reason_of(answer)) if answer.kind == FAILED else answer


def reason_of(answer: Message) -> str:
    """Why a client has failed, as it says."""
    return one_line(answer.values.get("reason") or "it gives no reason")


def one_line(text: str) -> str:
    """What another machine has sent as a text, on one line that is not too long, without a terminal's commands."""
    start = "".join(letter if letter.isprintable() else " " for letter in text[: 10 * _LONGEST])
    return " ".join(start.split())[:_LONGEST]


def files_of(kept: Mapping[int, Tree], client: int) -> list[File]:
    """The files of a client that a mapping refers to."""
    return kept.files.get(client, []) if isinstance(kept, RemoteStates) else []
