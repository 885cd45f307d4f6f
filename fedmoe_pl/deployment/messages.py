"""What server and clients of a deployed federation send each other, as bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedmoe_pl.deployment.schema import ANSWER_TO, DTYPES, FAILURES, HEADER, problem_of_values
from fedmoe_pl.trees import Tree, bits_of, subtree, with_prefix

FAILED, UNPREPARED, NOT_BEGUN, LEAVES = "failed", "unprepared", "not begun", "leaves"
"""Kinds of answers: the client has failed; it needs ``prepare`` first; it needs ``begin`` first; it is none of the
federation's clients, and ends."""
UNREADABLE = "unreadable"
"""What stands for an answer that is no message; its only value is the reader's own ``reason``, and nobody sends it."""
SEVERAL, ANSWERS = "several", "answers"
"""Kinds of a message that stands for several, and of the answer to it."""
_LONGEST = 4000  # characters of another machine's text
_SIZE = 8  # bytes of the header's length
_LONGEST_HEADER = 2**21  # bytes; enough for the names of 10,000 tensors


class BadMessageError(Exception):
    """Bytes that are no message."""


@dataclass(frozen=True)
class Message:
    """A message, or the answer to one.

    As bytes, it is a header in JSON and then the values of its tensors, one after another and not compressed. So it
    takes no more memory than it has bytes, whatever it says of itself, and there is no code in it.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)  # plain ones: those of its kind in ``schema``
    tensors: Tree = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The message as bytes, every tensor with its data type and bits."""
        listed = [
            [name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for name, tensor in self.tensors.items()
        ]
        header = {"kind": self.kind, "values": self.values, "tensors": listed}
        text = json.dumps(header, ensure_ascii=False).encode(errors="replace")
        values = (bits_of(tensor).numpy().data for tensor in self.tensors.values())
        return b"".join((len(text).to_bytes(_SIZE, "little"), text, *values))

    @classmethod
    def from_bytes(cls, content: bytes) -> Message:
        """Reads a message.

        Raises:
            BadMessageError: if the bytes are no message, or one with values or sizes that no message has.
        """
        view = memoryview(content)
        begin = _SIZE + int.from_bytes(view[:_SIZE], "little")
        if not _SIZE < begin <= min(len(view), _SIZE + _LONGEST_HEADER):
            raise BadMessageError("the bytes are no message")
        try:
            header = json.loads(bytes(view[_SIZE:begin]))
        except (ValueError, RecursionError) as error:
            raise BadMessageError("the bytes are no message") from error
        if not HEADER(header):
            raise BadMessageError("the bytes are no message")
        if problem := problem_of_values(header["kind"], header["values"]):
            raise BadMessageError(problem)
        sizes = [math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in header["tensors"]]
        if begin + sum(sizes) != len(view):
            raise BadMessageError(f"its tensors have {sum(sizes)} bytes, but {len(view) - begin} came")
        tensors = {}
        for (name, dtype, shape), size in zip(header["tensors"], sizes, strict=True):
            flat = torch.empty(size, dtype=torch.uint8)
            flat.numpy().data[:] = view[begin : begin + size]
            # a byte other than 0 and 1 is no bool
            tensors[name] = (flat.bool() if dtype == "bool" else flat.view(DTYPES[dtype])).reshape(shape)
            begin += size
        return cls(header["kind"], header["values"], tensors)


def joined(messages: Sequence[Message]) -> Message:
    """One message for several, which agree in tensors of the same name; each has the names of its own, or gets all."""
    if len(messages) == 1:
        return messages[0]
    tensors: Tree = {}
    for each in messages:
        tensors |= each.tensors
    names = (None if len(each.tensors) == len(tensors) else [*each.tensors] for each in messages)
    parts = [[each.kind, each.values, of_part] for each, of_part in zip(messages, names, strict=True)]
    return Message(SEVERAL, {"parts": parts}, tensors)


def answer_each(message: Message, answer: Callable[[Message], Message]) -> Message:
    """Answers the messages that one stands for, in order; if one needs another message before it, with that alone."""
    answers, tensors = list[Message](), Tree()
    for kind, values, names in message.values["parts"]:
        of_part = message.tensors if names is None else {n: message.tensors[n] for n in names if n in message.tensors}
        answers.append(answer(Message(kind, values, of_part)))
        if answers[-1].kind in (UNPREPARED, NOT_BEGUN):
            return answers[-1]
    for i, each in enumerate(answers):
        tensors |= with_prefix(each.tensors, f"{i}/")
    return Message(ANSWERS, {"parts": [[each.kind, each.values] for each in answers]}, tensors)


def answers_in(answer: Message) -> list[Message]:
    """The answers that one stands for."""
    parts = enumerate(answer.values["parts"])
    return [Message(kind, values, subtree(answer.tensors, f"{i}/")) for i, (kind, values) in parts]


def problem_of_answer(kind: str, answer: Message) -> str:
    """Why an answer is none to a message of this kind, in a few words; empty if it is one."""
    if answer.kind == FAILED:
        return f"{FAILURES[answer.values['failure']]}; its own log says more"
    if answer.kind == LEAVES:
        return "its number is too high"
    if answer.kind == UNREADABLE:
        return one_line(answer.values["reason"])
    return "" if answer.kind == ANSWER_TO[kind] else f"its answer to '{kind}' is '{one_line(answer.kind)}'"


def one_line(text: str) -> str:
    """What another machine has sent as a text, on one line that is not too long, without a terminal's commands."""
    start = "".join(letter if letter.isprintable() else " " for letter in text[: 10 * _LONGEST])
    return " ".join(start.split())[:_LONGEST]


def is_same(a: Message, b: Message) -> bool:
    """Whether two messages say the same, with equal tensors."""
    return (a.kind, a.values, a.tensors.keys()) == (b.kind, b.values, b.tensors.keys()) and do_agree(a, b)


def do_agree(a: Message, b: Message) -> bool:
    """Whether the tensors that both messages have are equal."""
    pairs = [(a.tensors[name], b.tensors[name]) for name in a.tensors.keys() & b.tensors.keys()]
    return all(one is other or (one.dtype == other.dtype and torch.equal(one, other)) for one, other in pairs)
