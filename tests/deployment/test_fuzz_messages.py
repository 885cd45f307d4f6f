"""A thousand odd messages of a client cost nobody else a round; as many of a server end no client. Nobody waits."""

import random
import re
import time
from fnmatch import fnmatchcase

import pytest
from helpers.deployed import HOSTILE, Deployment, method_of, participant
from helpers.methods import METHODS
from helpers.odd_messages import odd

from fedmoe_pl.deployment import BadMessageError, Message, descriptions
from fedmoe_pl.deployment.messages import FAILED, NOT_BEGUN, SEVERAL, UNPREPARED, UNREADABLE, answer_each

SEEDS = range(11)
ODD = 100  # messages of each seed
ANSWERS = {"description", "prepared", "begun", "requested", "given", "update", "kept", "evaluation", "finished"}
ANSWERS |= {"answers", "leaves", FAILED, UNPREPARED, NOT_BEGUN}
METHOD_NAMES = (
    *("FedPer", "FedAPEN", "FedMix", "FedPAC", "Scaffold", "FD", "FedKD", "FedProto", "PFedMoE", "TrimmedMean"),
    "FedMoEDA",
)


def method_of_seed(seed, rounds):
    """A method whose clients all train in each of many rounds."""
    return method_of(METHOD_NAMES[seed], rounds=rounds, clients_per_round=1.0, evaluate=True)


class Replayed:
    """A participant that gives the same answer to all messages of a kind, so that nothing is trained again."""

    def __init__(self, participant):
        self.participant = participant
        self.answers = {}

    def answer(self, message):
        if message.kind == SEVERAL:
            return answer_each(message, self.answer)
        if message.kind == "finish":  # it has not kept what it says
            return Message("finished", {"phases": []})
        if message.kind == "exchange":  # so that what it has trained stays its newest file
            return Message("kept", {"keeps": self.answers["train"].values["keeps"]})
        answer = self.answers.get(message.kind) or self.participant.answer(message)
        if answer.kind not in (FAILED, UNPREPARED, NOT_BEGUN):
            self.answers[message.kind] = answer
        return answer


class OddClient(Deployment):
    """A deployment in which a client's answers are odd, but for its description and until it has begun.

    Attributes:
        sent: number of odd messages.
        slowest: the largest CPU time in seconds from an odd message to the server's next one.
    """

    def __init__(self, seed, folder):
        super().__init__(method_of_seed(seed, ODD), folder)
        self.participants = {client: Replayed(each) for client, each in self.participants.items()}
        self.rng = random.Random(seed)
        self.sent = 0
        self.slowest = 0.0
        self.since = None

    def ask(self, messages, seconds):
        if self.since is not None and self.sent > 1:  # the first one waits for what is imported late
            self.slowest = max(self.slowest, time.process_time() - self.since)
        hostile = messages.get(HOSTILE)
        answers = super().ask(messages, seconds)
        self.since = time.process_time()
        if hostile and hostile.kind not in ("describe", "prepare", "begin") and answers[HOSTILE].kind != NOT_BEGUN:
            answers[HOSTILE] = self.odd_answer(answers[HOSTILE])
        return answers

    def odd_answer(self, answer):
        self.sent += 1
        try:
            return Message.from_bytes(odd(answer.to_bytes(), self.rng))
        except BadMessageError as error:
            return Message(UNREADABLE, {"reason": str(error)})


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_odd_messages_from_a_client(seed, tmp_path, recwarn):
    deployed = OddClient(seed, tmp_path)
    (state,) = deployed.run(callbacks=[], enable_checkpointing=False).run.states.values()
    assert deployed.sent >= ODD and state.round == ODD
    assert all(tensor.isfinite().all() for tensor in state.server.values())
    for warning in recwarn:
        text = str(warning.message)
        named = re.match(r".*?client (\d+)", text)
        assert named and int(named[1]) == HOSTILE, text
        assert "\n" not in text and "\x1b" not in text and len(text) < 1200
    assert deployed.slowest < 1


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_odd_descriptions_of_a_client(seed, tmp_path):
    client = participant(METHODS["FedPer"], tmp_path, 0)
    true = client.answer(Message("describe"))
    ours, phases = true.values["configuration"], ["FedPer"]
    assert not descriptions._problem_of(true, ours, phases)
    rng, content = random.Random(seed), true.to_bytes()
    for _ in range(ODD):
        try:
            answer = Message.from_bytes(odd(content, rng))
        except BadMessageError as error:
            assert len(str(error)) < 200
        else:
            assert len(descriptions._problem_of(answer, ours, phases)) <= 4000


def heard(method, folder):
    """The messages that a client gets in a run of a method, as bytes."""
    deployed = Deployment(method, folder)
    deployed.run()
    return [message.to_bytes() for client, message in deployed.passed if client == 0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_odd_messages_from_a_server(seed, tmp_path, tmp_path_factory):
    rng, method, kept = random.Random(seed), method_of_seed(seed, 2), {}
    messages = heard(method, tmp_path_factory.mktemp("run"))
    client = participant(method, tmp_path, 0)
    for content in messages[:6]:  # so that it has begun
        client.answer(Message.from_bytes(content))
    for _ in range(ODD):
        start = time.process_time()
        try:
            message = Message.from_bytes(odd(rng.choice(messages), rng))
        except BadMessageError as error:
            assert len(str(error)) < 200
        else:
            answer = Message.from_bytes(client.answer(message).to_bytes())
            assert answer.kind in ANSWERS
            assert not [name for name in answer.tensors for private in method.private if fnmatchcase(name, private)]
        assert time.process_time() - start < 1
        before, kept = kept, {path: path.read_bytes() for path in tmp_path.rglob("*_*_*.safetensors")}
        assert before.items() <= kept.items()
    assert [path.name for path in tmp_path.iterdir()] == ["client 0"]
    *_, last = (client.answer(Message.from_bytes(content)) for content in messages[:6])
    assert last.kind != FAILED
