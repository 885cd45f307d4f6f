"""Training rides on the evaluation before it: a round is one message to each client, and the model travels once."""

import re
from collections import Counter
from functools import partial

import pytest
import torch
from helpers.deployed import Deployment, federated, parts_of, simulated, with_hostile
from helpers.methods import METHODS, ledger

from fedmoe_pl import ClientFailures, Evaluate, Select, Train
from fedmoe_pl.callbacks import FederationCallback, TrafficLedger
from fedmoe_pl.deployment import BadMessageError, Message
from fedmoe_pl.deployment.messages import ANSWERS, FAILED, SEVERAL

CLIENTS, ROUNDS = range(5), 3
EVERY = {"evaluate_every_n_rounds": 1}


def method_of(name, **of_phase):
    """A method with one phase of some rounds, in which all clients train, and which is evaluated after each."""
    return federated(name, **{"rounds": ROUNDS, "clients_per_round": 1.0, **of_phase})


def run(method, tmp_path, callbacks=None, **settings):
    """A deployment that has ended with the bits of a simulation."""
    deployed = Deployment(method, tmp_path, **EVERY, **settings)
    deployed.run(callbacks=callbacks)
    deployed.assert_ends_as(simulated(method, tmp_path, callbacks=callbacks, **EVERY, **settings))
    return deployed


def since_begun(deployed):
    """The messages that a client has got, once it had begun."""
    messages = [message for client, message in deployed.passed if client == 0]
    (begun,) = (i for i, message in enumerate(messages) if message.kind == "begin")
    return messages[begun + 1 :]


def kinds(deployed):
    return Counter(message.kind for message in since_begun(deployed))


ONE_MESSAGE = [
    *((name, None) for name in ("FedAvg", "FedPer", "DifferentialPrivacy", "PFedMoE", "IFCA", "FedRoD")),
    *((name, "both") for name in ("FedPer", "IFCA")),
]


@pytest.mark.few("FedAvg-None")
@pytest.mark.parametrize(("name", "evaluation_points"), ONE_MESSAGE)
def test_a_round_is_one_message(name, evaluation_points, tmp_path):
    deployed = run(method_of(name, evaluate=Evaluate(after=evaluation_points)), tmp_path)
    last = "evaluate" if evaluation_points is None else SEVERAL
    assert kinds(deployed) == Counter(["train", *[SEVERAL] * (ROUNDS - 1), last, "finish"])
    if name == "FedAvg":
        has_model = ["global_expert.classifier.1.weight" in message.tensors for message in since_begun(deployed)]
        assert sum(has_model) == ROUNDS + 2, "once a round, for the last evaluation, and as the result"


class Unanswered(Deployment):
    """A client gets one message to train in the second round, but does not answer, or is not connected then."""

    def __init__(self, folder, away, evaluate):
        super().__init__(method_of("FedAvg", evaluate=evaluate), folder, **EVERY)
        self.away = away  # or busy with the message

    def ask(self, messages, seconds):
        of_training = {
            client
            for client, message in messages.items()
            if client == 0 and any((part.kind, part.values.get("round")) == ("train", 1) for part in parts_of(message))
        }
        reached = {client: each for client, each in messages.items() if client not in of_training or not self.away}
        self.away |= bool(of_training)
        answers = super().ask(reached, seconds)
        return {client: None if client in of_training else answer for client, answer in answers.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("evaluate", [False, True])  # with an evaluation, in whose message training rides
def test_what_was_sent_is_counted_whether_a_client_answers_or_not(away, evaluate, tmp_path):
    with pytest.warns(UserWarning) as warned:
        server = Unanswered(tmp_path, away, evaluate).run(callbacks=[TrafficLedger()])
    assert "round 2: client 0 is left out" in str(warned[-1].message)
    sizes = Counter()
    for row in ledger(server):
        if row["direction"] == "down":
            sizes[int(row["round"]), int(row["client"])] += int(row["bytes"])
    assert (2, 0) in sizes or away
    assert len(sizes) == ROUNDS * len(CLIENTS) - away and len({*sizes.values()}) == 1
    assert server.run.states["it"].traffic["bytes_down"] == sum(sizes.values())


@pytest.mark.slow
def test_a_part_gets_its_own_tensors(tmp_path):
    """For an evaluation of Ditto, clients get the server's state; they train with less."""
    deployed = run(method_of("Ditto"), tmp_path)
    of_one = [message for message in since_begun(deployed) if message.kind == SEVERAL]
    names = [{kind: names for kind, _, names in message.values["parts"]} for message in of_one]
    assert len(of_one) == ROUNDS - 1 and all(each["evaluate"] is None for each in names)
    assert all(name.startswith("global_expert.") for each in names for name in each["train"])


@pytest.mark.slow
def test_clients_that_are_not_evaluated_train_in_the_same_round_trip(tmp_path):
    deployed = run(method_of("FedAvg"), tmp_path, evaluation_cohort_size=2)
    of_each = [[message.kind for client, message in deployed.passed if client == each] for each in CLIENTS]
    evaluated = [SEVERAL in kinds_of_one for kinds_of_one in of_each]
    assert sorted(evaluated) == [False] * 3 + [True] * 2
    # the first round asks twice: everyone must prepare and begin
    assert all(kinds_of_one.count("train") == 1 + ROUNDS for kinds_of_one in of_each if SEVERAL not in kinds_of_one)
    described, first_round, last_evaluation, finished = 1, 4, 1, 1
    assert deployed.calls == described + first_round + (ROUNDS - 1) + last_evaluation + finished


class Halved(FederationCallback):
    """Halves the server's tensors after an evaluation, when the next training has begun."""

    def on_evaluation_end(self, run, phase, evaluation):
        state = run.states[phase.name]
        if state.round == 2:
            state.server = {name: tensor / 2 for name, tensor in state.server.items()}


@pytest.mark.slow
def test_training_with_what_was_changed_since_is_done_again(tmp_path):
    deployed = run(method_of("FedAvg"), tmp_path, callbacks=[Halved()])
    assert kinds(deployed) == Counter(["train", "train", *[SEVERAL] * (ROUNDS - 1), "evaluate", "finish"])


@pytest.mark.slow
def test_where_a_monitor_may_end_the_phase_nothing_is_trained_ahead(tmp_path):
    """With a learning rate of 0 the first round stays the best."""
    still = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda round: 0.0)
    of_phase = {"rounds": 4, "select": Select("global_test", patience=2), "train": Train(round_lr_scheduler=still)}
    deployed = run(method_of("FedAvg", **of_phase), tmp_path)
    rounds = [message.values["round"] for client, message in deployed.heard if (client, message.kind) == (0, "train")]
    assert [*dict.fromkeys(rounds)] == [0, 1, 2]


@pytest.mark.slow
def test_a_client_that_fails_ahead_has_failed_in_that_round(tmp_path):
    failed = []

    def fail_once(answer):
        failed.append(answer)
        return Message(FAILED, {"failure": "MemoryError"}) if len(failed) == 2 else answer

    with pytest.warns(UserWarning, match="round 2: client 1 is left out: it raised a MemoryError"):
        deployed = with_hostile("FedAvg", tmp_path, "train", fail_once, rounds=ROUNDS, clients_per_round=1.0)
    (state,) = deployed.run.states.values()
    assert state.failed == 1 and len(failed) == ROUNDS


def test_a_client_that_does_not_answer_is_asked_again(tmp_path):
    asked = []

    def leave(client, message):
        if client == 3 and message.kind in ("evaluate", "train"):
            asked.append(message.kind)
            if asked[-3:] == ["evaluate", "train", "train"]:  # after both at once, training again
                deployed.participants[3] = away
            elif asked.count("evaluate") == 1:
                deployed.participants.pop(3, None)

    deployed = Deployment(method_of("FedAvg"), tmp_path, leave, **EVERY)
    away = deployed.participants[3]
    with pytest.warns(UserWarning, match="client 3 is not evaluated: it is not connected"):
        (state,) = deployed.run().run.states.values()
    assert state.failed == 0


ANSWERS_OF_NONE = [
    lambda message: Message(ANSWERS, {"parts": []}),
    lambda message: Message(ANSWERS, {"parts": [["kept", {"keeps": 1}]] * 2}),
    lambda message: Message(ANSWERS, {"parts": [["failed", {}], ["update", {"weight": "3"}]]}),
    lambda message: Message("update", {"weight": 1.0, "keeps": 0}),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("answer", ANSWERS_OF_NONE)
def test_answers_that_are_none_cost_the_client_its_round(answer, tmp_path):
    class Odd:
        def answer(self, message):
            return answer(message) if message.kind == SEVERAL else client.answer(message)

    deployed = Deployment(method_of("FedAvg", rounds=2), tmp_path, **EVERY)
    client, deployed.participants[3] = deployed.participants[3], Odd()
    with pytest.warns(UserWarning) as warned:
        (state,) = deployed.run().run.states.values()
    found = [re.search("client 3 is (not evaluated|left out): its ", str(warning.message)) for warning in warned]
    assert [match and match[1] for match in found] == ["not evaluated", "left out"]
    assert state.failed == 1 and state.round == 2


@pytest.mark.parametrize("kind", ["begin", "note", SEVERAL])
def test_no_other_message_is_a_part(kind):
    whole = Message(SEVERAL, {"parts": [[kind, {}, None]]})
    with pytest.raises(BadMessageError, match=r"its parts is .*, which no 'several' has"):
        Message.from_bytes(whole.to_bytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "evaluation_points"),
    [("unprepared", None), ("not begun", None), ("begun", None), ("begun", "both")],
)
def test_a_client_that_is_never_prepared_costs_two_timeouts_a_message(kind, evaluation_points, tmp_path, monkeypatch):
    """It answers just in time, always that it must be prepared."""
    now, waited, timeout, parts = [0.0], [], 100.0, 2 if evaluation_points is None else 3
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Slow(Deployment):
        def ask(self, messages, seconds):
            hostile = messages.get(1)
            if hostile and hostile.kind != "describe" and seconds is not None:
                now[0] += 0.99 * seconds
                waited.append(0.99 * seconds)
                return super().ask({c: m for c, m in messages.items() if c != 1}, seconds) | {1: Message(kind)}
            return super().ask(messages, seconds)

    method = method_of("FedAvg", evaluate=Evaluate(after=evaluation_points))
    with pytest.warns(UserWarning) as warned:
        Slow(method, tmp_path, failures=ClientFailures(timeout=timeout), **EVERY).run()
    sentence = f"client 1 .*: its answer to '[a-z]*' is '{kind}'"
    assert all(re.search(sentence, str(warning.message)) for warning in warned)
    finish, messages = 2, 1 + (ROUNDS - 1) * parts + (parts - 1)
    assert sum(waited) <= 2 * timeout * (messages + finish)


@pytest.mark.slow
def test_a_phase_begins_with_two_messages(tmp_path):
    deployed = Deployment(METHODS["PFLMoE"], tmp_path, **EVERY)
    deployed.run()
    kinds = [message.kind for client, message in deployed.passed if client == 0]
    begins = [i for i, kind in enumerate(kinds) if kind == "begin"]
    assert len(begins) == len(METHODS["PFLMoE"].phases())
    assert [kinds[i - 1 : i + 2] for i in begins[1:]] == [["finish", "begin", "train"]] * (len(begins) - 1)
