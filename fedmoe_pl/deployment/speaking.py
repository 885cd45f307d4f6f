"""What the terminals of clients and server say of what goes on between them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from fedmoe_pl.deployment.clients import one_line, reason_of
from fedmoe_pl.deployment.messages import ANSWERS, FAILED, NOTE, SEVERAL, Message, answer_each, answers_in
from fedmoe_pl.deployment.participant import Participant


class Speaking:
    """Answers messages as a participant does, and says what whoever runs the client needs to know, each thing once."""

    def __init__(self, participant: Participant) -> None:
        self.participant = participant
        self._phase = ""
        self._said = set[str]()

    def answer(self, message: Message) -> Message:
        """Answers a message."""
        if message.kind == NOTE:
            self._say(f"join: the server says: {one_line(message.values['text'])}.")
            return Message("noted")
        if message.kind == SEVERAL:
            return self._said_of_parts(answer_each(message, self.answer))
        phase = one_line(message.values.get("phase", self._phase))
        if phase != self._phase:
            self._phase, self._said = phase, set()
            rank_zero_info(f"join: phase '{phase}'.")
        answer = self.participant.answer(message)
        if answer.kind == "description":
            self._say(f"join: client {self.participant.client} has described its data to the server.")
        self._say_failure(answer)
        return answer

    def _said_of_parts(self, answer: Message) -> Message:
        """Says why parts have failed that were refused before they were answered."""
        for part in answers_in(answer) if answer.kind == ANSWERS else []:
            self._say_failure(part)
        return answer

    def _say_failure(self, answer: Message) -> None:
        if answer.kind == FAILED:
            self._say(f"join: this client has failed: {reason_of(answer)}.")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(text)


@contextmanager
def plain_warnings(command: str) -> Iterator[None]:
    """Says warnings as sentences of a command, without a path, and each once of those that differ only in the round."""
    said = set[str]()

    def say(message: Warning | str, *details: Any, **others: Any) -> None:
        text = " ".join(str(message).split()).rstrip(".")
        if (without_round := re.sub(r", round \d+", "", text)) not in said:
            said.add(without_round)
            rank_zero_info(f"{command}: {text}.")

    with warnings.catch_warnings():
        warnings.showwarning = say
        yield
