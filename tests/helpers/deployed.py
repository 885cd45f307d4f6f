"""A deployed federation in one process: clients with data of their own, and a transport that only passes bytes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fedmoe_pl import Federation
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.checkpoints.checkpoint import CLIENT_STATES
from fedmoe_pl.checkpoints.files import read_json
from fedmoe_pl.deployment import BadMessageError, Message, Participant, Transport, serve
from fedmoe_pl.deployment.messages import (
    ANSWERS,
    FAILED,
    NOT_BEGUN,
    SEVERAL,
    UNPREPARED,
    UNREADABLE,
    answer_each,
    answers_in,
)
from fedmoe_pl.deployment.participant import read_own
from helpers import TensorData, blobs
from helpers.methods import METHODS, SIZES, Method, data
from helpers.runs import assert_same

HOSTILE = 1  # the client that is hostile where a test has one
FOUR = SIZES[:4]  # without the hostile one, enough for a trimmed mean


class Passing(Transport):
    """Passes every message to the participant as bytes.

    Attributes:
        participants: the participants by client; those left out are not connected.
        passed: every message that was passed on, with its client, in order.
        heard: the same, with those that one message stands for in its place.
        answers: the answer to each of them.
        before: called with the client and the message before it is passed on; None for nothing.
        carried: number of bytes of all messages and answers.
        calls: how often clients were asked, all at once.
    """

    def __init__(self, participants, before: Callable | None = None):
        self.participants = participants
        self.passed, self.heard, self.answers = [], [], []
        self.before = before
        self.carried = self.calls = 0

    def ask(self, messages, seconds):
        answers = {}
        self.calls += bool(messages)
        for client, message in messages.items():
            content = message.to_bytes()
            parts = parts_of(Message.from_bytes(content))
            for part in parts:
                if self.before is not None:
                    self.before(client, part)
            if client in self.participants:
                self.passed.append((client, message))
                answer = self.participants[client].answer(Message.from_bytes(content)).to_bytes()
                self.carried += len(content) + len(answer)
                try:
                    answers[client] = Message.from_bytes(answer)
                except BadMessageError as error:
                    answers[client] = Message(UNREADABLE, {"reason": str(error)})
                self.heard += [(client, part) for part in parts]
                self.answers += answers_in(answers[client]) if answers[client].kind == ANSWERS else [answers[client]]
                self.answers += [answers[client]] * (len(self.heard) - len(self.answers))
        return answers

    def sent(self, kinds) -> Counter:
        """The tensors of all messages of some kinds, as phase, round, way, client, name and bytes, and how often."""
        found = Counter()
        for (client, message), answer in zip(self.heard, self.answers, strict=True):
            if message.kind in kinds and answer.kind not in (UNPREPARED, NOT_BEGUN):
                where = message.values["phase"], message.values["round"] + 1
                for way, tensors in (("down", message.tensors), ("up", answer.tensors)):
                    found.update((*where, way, client, name, tensor.nbytes) for name, tensor in tensors.items())
        return found


def reason_of(client: Participant, message: Message) -> str:
    """Why a client fails at a message, which it says in its own log, and only what kind of failure it is to others."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_say", said.append)
        answer = client.answer(message)
    assert answer.kind == FAILED and not answer.tensors and {*answer.values} == {"failure"}
    return said[-1].removeprefix("this client has failed: ")


def parts_of(message) -> list[Message]:
    """The messages that one stands for."""
    parts: list[Message] = []
    if message.kind == SEVERAL:
        answer_each(message, lambda part: parts.append(part) or part)
    return parts or [message]


class Changing:
    """A participant whose answers of one kind are changed.

    Args:
        participant: the participant.
        kind: kind of the messages whose answers are changed.
        change: changes an answer.
        most: how many of them are changed, the first ones; None for all.
    """

    def __init__(self, participant, kind, change: Callable, most: int | None = None):
        self.participant = participant
        self.kind = kind
        self.change = change
        self.left = float("inf") if most is None else most

    def answer(self, message):
        if message.kind == SEVERAL:
            return answer_each(message, self.answer)
        answer = self.participant.answer(message)
        if message.kind != self.kind or answer.kind in (UNPREPARED, NOT_BEGUN) or not self.left:
            return answer
        self.left -= 1
        return self.change(answer)


def with_values(**changed) -> Callable:
    """A change of some of an answer's values."""
    return lambda answer: Message(answer.kind, {**answer.values, **changed}, answer.tensors)


def without(key) -> Callable:
    """A change that leaves one of an answer's values out."""
    return lambda answer: Message(answer.kind, {k: v for k, v in answer.values.items() if k != key}, answer.tensors)


def tensors(change: Callable) -> Callable:
    """A change of an answer's tensors."""
    return lambda answer: Message(answer.kind, answer.values, change(answer.tensors))


def method_of(name, number=None, **of_phases) -> Method:
    """A method with changed phases; only the first ones if their number is given."""

    def phases():
        return [replace(phase, **of_phases) for phase in METHODS[name].phases()[:number]]

    return replace(METHODS[name], phases=phases)


def federated(name, **of_phase) -> Method:
    """The first federated phase of a method alone, evaluated and changed."""

    def phases():
        phase = next(phase for phase in METHODS[name].phases() if phase.algorithm.federated)
        return [replace(phase, **{"evaluate": True, "start": None, **of_phase})]

    return replace(METHODS[name], phases=phases)


def with_hostile(name, folder, kind, change, client=HOSTILE, **of_phase) -> Federation:
    """Deploys the first federated phase of a method with a client whose answers to one kind of message are changed."""
    deployed = Deployment(federated(name, **of_phase), folder, datamodule=blobs(FOUR))
    deployed.change(client, kind, change)
    return deployed.run()


def federation(phases, folder, **settings) -> Federation:
    trainer = {"max_epochs": 2, "accelerator": "cpu"}
    defaults = {"backend": TrainerBackend(), "logger": False, "enable_progress_bar": False}
    return Federation(phases, trainer, default_root_dir=str(folder), **{**defaults, **settings})


def simulated(method, folder, datamodule=None, **settings) -> Federation:
    """A simulation of the method with the samples of all clients."""
    simulation = federation(method.phases(), folder / "simulation", **settings)
    simulation.fit(method.model(), datamodule or data())
    return simulation


def of_client(data: TensorData, client: int, **kwargs) -> TensorData:
    """A client's own data: its part of all training samples, and all test samples."""
    arrays, part = data.arrays, data.partitioner.parts[client]
    own = replace(arrays, x_train=arrays.x_train[part], y_train=arrays.y_train[part])
    test = own.x_test, own.y_test
    return TensorData(own.x_train, own.y_train, [], test, data.dtype, batch_size=data.batch_size, **kwargs)


def split(data) -> dict:
    """How the data are split into training, validation and test samples."""
    return {name: getattr(data, name) for name in ("test_fraction", "validation_fraction", "partition_seed")}


def participant(method, folder, client, datamodule=None, **settings) -> Participant:
    """A client with settings, a model, data and a folder of its own."""
    own, datamodule = folder / f"client {client}", datamodule or data()
    of_participant = federation(method.phases(), own, **settings)
    return Participant(of_participant, method.model(), of_client(datamodule, client, **split(datamodule)), client, own)


class Killed(BaseException):
    """Ends a server, wherever it is raised."""


class Deployment(Passing):
    """A method on a server, which has no data, and on all of its clients.

    Args:
        method: the method.
        folder: the folder of all of their folders.
        before: as of ``Passing``.
        datamodule: the samples of all clients.
        settings: arguments of each one's federation.

    Attributes:
        server: the federation of the server that was started last.
    """

    def __init__(self, method, folder, before=None, datamodule=None, **settings):
        self.method, self.folder, self.settings = method, folder, settings
        self.datamodule = datamodule or data()
        self.num_clients = len(self.datamodule.partitioner.parts)
        super().__init__({client: self.started(client) for client in range(self.num_clients)}, before)

    def started(self, client, **changes) -> Participant:
        """A client that starts, with other data, settings or another method if they are given."""
        defaults = {"method": self.method, "datamodule": self.datamodule, **self.settings}
        return participant(folder=self.folder, client=client, **{**defaults, **changes})

    def change(self, client, kind, change, most=None) -> None:
        """Changes a client's answers to messages of a kind, as ``Changing`` does."""
        self.participants[client] = Changing(self.participants[client], kind, change, most)

    def run(self, ckpt_path=None, **settings) -> Federation:
        """Starts the server, which is returned when it has finished."""
        server = federation(self.method.phases(), self.folder / "server", **self.settings, **settings)
        size = self.datamodule.batch_size
        empty = TensorData(torch.zeros(1, 1), torch.zeros(1), [], batch_size=size, **split(self.datamodule))
        self.server = server
        serve(server, self.method.model(), empty, self, self.num_clients, ckpt_path)
        return server

    def run_until(self, is_time: Callable[..., bool]) -> None:
        """Starts the server and kills it before the message of which a function says so; the clients go on."""

        def kill(client, message):
            if is_time(client, message):
                raise Killed

        self.before = kill
        with pytest.raises(Killed):
            self.run()
        self.before = None

    def kept_by(self, client, phase) -> dict:
        """What a client keeps of a phase, read from its own disk."""
        kept, tree = self.folder / f"client {client}" / name_of(self.server) / CLIENT_STATES, {}
        for of_phase, number, names in self.server.run.states[phase].clients.files.get(client, []):
            tree |= read_own(kept, of_phase, client, number, names)
        return tree

    def assert_ends_as(self, simulation) -> None:
        """The server and every client have, to the last bit, what they have after a simulation."""
        for phase, state in simulation.run.states.items():
            assert_same(self.server.run.states[phase].server, state.server)
            for client in range(self.num_clients):
                assert_same(self.kept_by(client, phase), state.clients.get(client, {}))


def name_of(server) -> str:
    """The name of a run, which is that of its clients' folders."""
    return read_json(server.run_dir / "deployment.json")["run"]
