"""Rounds with secure aggregation between machines: exact sums, no update at the server, and who is at fault."""

import logging
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import cast

import pytest
import torch
from helpers import blobs, mixture
from helpers.backends import local_training
from helpers.deployed import Deployment, method_of, participant, reason_of, simulated, tensors, with_values
from helpers.methods import METHODS, SIZES
from helpers.odd_messages import odd
from helpers.runs import assert_same
from helpers.secrets import held

from fedmoe_pl import DPSGD, Update
from fedmoe_pl.aggregation import SecureAggregation
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import Failure
from fedmoe_pl.deployment import BadMessageError, Message
from fedmoe_pl.deployment.messages import FAILED, SEVERAL
from fedmoe_pl.deployment.private_rounds import PrivateRounds
from fedmoe_pl.deployment.remote_clients import AtClient, Clients
from fedmoe_pl.deployment.secure import masked_round, protocol
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.phases.client_failures import ClientError
from fedmoe_pl.rounds.privacy import epsilon_of_clients

CLIENTS, STEPS = range(5), ("train masked", "share", "mask", "confirm", "unmask")
AFTER_MASKING = STEPS[3:]
NAME = "global_expert.extractor.1.weight"
PRIVATE = DPSGD(0.5, 1e-3, target_epsilon=4.0)
needs_opacus = pytest.mark.skipif(find_spec("opacus") is None, reason="needs Opacus")


def method(**of_phase):
    return method_of("SecureAggregation", **{"clients_per_round": 1.0, "rounds": 1, "evaluate": False, **of_phase})


@pytest.fixture
def own_logs(caplog):
    """What clients say to whoever runs them."""
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        yield caplog


@pytest.fixture
def trained(monkeypatch):
    """What each client has trained last, as integers, by client."""
    found = {}
    init = masked_round.MaskedUpdate.__init__

    def note(update, client, threshold, message, sent, *sizes):
        found[client] = {name: tensor.clone() for name, tensor in sent.items()}
        init(update, client, threshold, message, sent, *sizes)

    monkeypatch.setattr(masked_round.MaskedUpdate, "__init__", note)
    return found


class Leaving(Deployment):
    """Clients are gone from a step of the round to its end."""

    def __init__(self, method, folder, step, leaving):
        super().__init__(method, folder)
        self.step, self.leaving, self.all, self.unmasked = step, leaving, self.participants, []

    def ask(self, messages, seconds):
        kinds = {message.kind for message in messages.values()}
        if self.step in kinds:
            self.participants = {c: each for c, each in self.all.items() if c not in self.leaving}
        elif "finish" in kinds:
            self.participants = self.all
        answers = super().ask(messages, seconds)
        self.unmasked += [client for client, answer in answers.items() if answer.kind == "unmasked"]
        return answers


def state_after(deployed):
    (state,) = deployed.run().run.states.values()
    return state


def expected_after(trained, clients):
    """The server's tensor after the round, by Python's integers."""
    start = METHODS["SecureAggregation"].model().state_dict()[NAME]
    total = [sum(values) for values in zip(*(trained[each][NAME].flatten().tolist() for each in clients), strict=True)]
    mean = torch.tensor([value / 2**32 / sum(SIZES[each] for each in clients) for value in total], dtype=start.dtype)
    return start + mean.reshape(start.shape)


@needs_opacus
@pytest.mark.few(STEPS[-1])
@pytest.mark.parametrize("step", STEPS)
def test_a_client_that_drops_out_in_any_step_costs_its_own_update_alone_and_its_epsilon(step, tmp_path, trained):
    """The server counts epsilon in any case, because it cannot know whether the client has trained."""
    private, is_left_out = method(sample_privacy=PRIVATE), step not in AFTER_MASKING
    deployed, sentence = Leaving(private, tmp_path, step, {2}), "round 1: client 2 is left out: it is not connected"
    with pytest.warns(UserWarning, match=sentence) if is_left_out else nullcontext():
        state = state_after(deployed)
    expected = expected_after(trained, [client for client in CLIENTS if client != 2 or not is_left_out])
    torch.testing.assert_close(state.server[NAME], expected, rtol=0, atol=1e-15)
    assert state.failed == is_left_out and deployed.unmasked == [client for client in CLIENTS if client != 2]
    by_server = epsilon_of_clients(private.phases()[0], state)
    for client, each in deployed.all.items():
        (own,) = each.run.states.values()
        spent = 0.0 if (client, step) == (2, "train masked") else by_server[str(client)]
        assert own.sample_epsilon == pytest.approx(spent, rel=1e-9)
        assert 0 < by_server[str(client)] <= 4


@pytest.mark.few(STEPS[-1])
@pytest.mark.parametrize("step", STEPS)
def test_with_fewer_than_the_threshold_nothing_is_unmasked(step, tmp_path):
    deployed = Leaving(method(), tmp_path, step, {1, 2})
    with pytest.warns(UserWarning) as warned, pytest.raises(ClientError) as error:
        deployed.run()
    sentence = "clients answered, but secure aggregation needs 4"
    assert sentence in str(error.value) and sum(sentence in str(each.message) for each in warned) == 3
    assert f": 3 of 5 {sentence}, also after 3 more tries; client 1: it is not connected" in str(error.value)
    if step not in AFTER_MASKING:
        assert "unmask" not in [message.kind for _, message in deployed.heard]


@pytest.mark.slow
@needs_opacus
def test_masks_hide_what_clients_with_noise_of_their_own_would_send_without_them(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(PrivateRounds, "begin", lambda self, training: 1 + self.client)  # in place of their secrets
    without = Deployment(method(sample_privacy=PRIVATE, secure_aggregation=False), tmp_path / "without")
    without.run()
    private = method(sample_privacy=PRIVATE)
    Deployment(private, tmp_path / "masked").run()
    start = private.model().state_dict()
    sent = [answer for answer in without.answers if answer.kind == "update"]
    assert len(sent) == len(trained) == 5
    for client, answer in enumerate(sent):
        update = Update(answer.tensors, answer.values["weight"])
        assert_same(trained[client], SecureAggregation().encoded(update, start, 5).sent)


@needs_opacus
@pytest.mark.slow
def test_with_the_run_s_seed_for_its_noise_a_deployment_has_the_bits_of_a_simulation(tmp_path, monkeypatch):
    monkeypatch.setattr(PrivateRounds, "begin", lambda self, training: None)
    private = method(sample_privacy=PRIVATE, rounds=2)
    simulation, deployed = simulated(private, tmp_path), Deployment(private, tmp_path)
    there, (here,) = state_after(deployed), simulation.run.states.values()
    deployed.assert_ends_as(simulation)
    assert there.counted_steps == here.counted_steps and 0 < there.sample_epsilon == here.sample_epsilon <= 4


@needs_opacus
def test_a_round_that_is_tried_again_has_the_same_noise_below_other_masks(tmp_path, trained):
    deployed, tried = Leaving(method(sample_privacy=PRIVATE), tmp_path, "share", {1, 2}), []
    deployed.before = lambda client, message: tried.append(trained.get(4)) if message.kind == "train masked" else None
    with pytest.warns(UserWarning), pytest.raises(ClientError, match="3 of 5 clients answered"):
        deployed.run()
    first, *others = {id(each): each for each in (*tried, trained[4]) if each is not None}.values()
    assert len(others) == 3
    for other in others:
        assert_same(other, first)
    assert len(deployed.all[4]._private.steps(["FedAvg"])) == 1
    keys = [answer.tensors[masked_round.KEYS] for answer in deployed.answers if answer.kind == "trained"]
    assert len({tuple(each.flatten().tolist()) for each in keys}) == len(keys) == 5 + 3 * 3


def state_with_changed(change, kind, tmp_path):
    deployed = Deployment(method(), tmp_path)
    deployed.change(1, kind, change)
    return state_after(deployed)


def flipped(name):
    return tensors(lambda tree: {**tree, name: tree[name] ^ 1})


NOT_MASKED = [
    ("train masked", with_values(weight=9), "its weight is"),
    ("train masked", tensors(lambda tree: {}), "its keys have not 2 times 32 bytes"),
    ("train masked", lambda answer: Message("update", answer.values), "its answer to 'train masked' is 'update'"),
    ("share", tensors(lambda tree: {**tree, "shares": tree["shares"][1:]}), "its shares have not 4 times 148 bytes"),
    ("share", tensors(lambda tree: {"shares": tree["shares"]}), "its commitment have not 1 times 32 bytes"),
    ("mask", tensors(lambda tree: {**tree, NAME: tree[NAME].double()}), f"its {NAME} is not masked"),
    ("mask", tensors(lambda tree: {**tree, NAME: tree[NAME][1:]}), f"its {NAME} is not as in the server's model"),
    ("mask", tensors(lambda tree: {}), "its update has no global_expert"),
    ("mask", tensors(lambda tree: {**tree, "own/x": tree[NAME]}), "its update has own/x, which no client sends"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "change", "reason"), NOT_MASKED)
def test_an_answer_that_is_none_is_the_failure_of_who_sent_it(kind, change, reason, tmp_path):
    with pytest.warns(UserWarning, match=f"round 1: client 1 is left out: {reason}"):
        state = state_with_changed(change, kind, tmp_path)
    assert state.failed == 1 and state.round == 1


UNKNOWN = "because a client of the round, it is unknown which, has sent something wrong"
ALTERED = [
    ("share", flipped("shares"), "the shares from client 1 are not what it has sent in this round"),
    ("share", flipped("commitment"), f"{UNKNOWN}: the shares of client 1's own mask do not fit its commitment"),
    ("unmask", flipped("shares"), f"{UNKNOWN}: (the shares give no key|.* own mask do not fit its commitment)"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "change", "reason"), ALTERED)
def test_what_is_altered_is_noticed_and_the_round_is_refused(kind, change, reason, tmp_path, own_logs):
    with pytest.warns(UserWarning), pytest.raises(ClientError) as error:
        state_with_changed(change, kind, tmp_path)
    assert re.search(reason, f"{error.value} {own_logs.text}")


def test_a_client_lets_its_update_leave_only_as_its_own_configuration_says(tmp_path):
    """Whatever the server's plan is."""
    for name, kind, needs in (("SecureAggregation", "train", "only masked"), ("FedAvg", "train masked", "as they are")):
        deployed = Deployment(METHODS[name], tmp_path / name)
        deployed.run()
        usual = next(message for _, message in deployed.heard if message.kind in ("train", "train masked"))
        reason = reason_of(deployed.participants[0], replace(usual, kind=kind))
        assert re.search(f"its own configuration says that updates of phase .* leave it {needs}", reason)


def test_a_client_that_is_started_again_has_lost_what_it_had_trained(tmp_path, own_logs):
    def restart(client, message):
        if (client, message.kind) == (3, "mask"):
            deployed.participants[3] = deployed.started(3)

    deployed = Deployment(method(), tmp_path, restart)
    with pytest.warns(UserWarning, match="client 3 is left out: it refuses the message"):
        assert state_after(deployed).failed == 1
    assert "it has trained nothing since it was started" in own_logs.text


@pytest.mark.few(1)
@pytest.mark.parametrize("masks", [True, False])
def test_the_server_s_memory_messages_and_files_have_no_update(masks, tmp_path, trained, monkeypatch):
    """Looked for in every byte, before each message and at the end; without masks, all are found."""
    if not masks:
        monkeypatch.setattr(protocol, "_add_mask", lambda tensors, key, sign: None)
    halves, found = [], set()

    class Noted(protocol.ServerHalf):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            halves.append(self)

    monkeypatch.setattr(masked_round, "ServerHalf", Noted)

    def look(*roots):
        for client, tree in trained.items():
            as_integers = tree[NAME].numpy().tobytes()
            if held([as_integers], *roots, beyond=deployed.participants.values()):
                found.add(client)

    deployed = Deployment(method(rounds=2), tmp_path, lambda *_: look(halves, deployed.answers))
    server = deployed.run()
    files = [path.read_bytes() for path in (tmp_path / "server").rglob("*") if path.is_file()]
    look(server, files, [message for _, message in deployed.passed], deployed.answers)
    assert len(halves) == 2 and len(trained) == 5 and len(files) > 3
    assert found == (set() if masks else {*CLIENTS})
    total = halves[-1]._sum[NAME].numpy().tobytes()
    assert held([total], halves), "what it holds is looked through"


@pytest.mark.slow
def test_training_goes_with_the_evaluation_before_it_and_four_messages_follow(tmp_path):
    deployed = Deployment(method(rounds=3, evaluate=True), tmp_path, evaluate_every_n_rounds=1)
    deployed.run()
    kinds = [message.kind for client, message in deployed.passed if client == 0]
    steps = [*STEPS[1:]]
    expected = ["train masked", *steps, SEVERAL, *steps, SEVERAL, *steps, "evaluate", "finish"]
    assert kinds[kinds.index("begin") + 1 :] == expected


class Trained:
    """Clients that have trained, in memory; those that are gone send no masked tensors."""

    name = "a run"

    def __init__(self, sent, weights, gone):
        self.sent, self.weights, self.gone, self.updates = sent, weights, gone, {}

    def ask(self, training, messages):
        return {client: self._answer(client, message) for client, message in messages.items()}

    def _answer(self, client, message):
        message = replace(message, values={**message.values, "run": self.name})
        if message.kind == "train masked":
            sent = {name: tensor.clone() for name, tensor in self.sent[client].items()}
            self.updates[client] = masked_round.MaskedUpdate(client, 3, message, sent, 4, 4)
            values = {"weight": self.weights[client], "keeps": 10 + client}
            return Message("trained", values, self.updates[client].keys)
        gone = message.kind == "mask" and client in self.gone
        return Failure("it is gone") if gone else self.updates[client].answer(message)


def test_a_sum_has_the_weight_the_traffic_and_the_files_of_those_whose_updates_are_in_it():
    module, sizes = mixture(GlobalOnly()), (13, 8, 11, 6)
    training = local_training(module, FedAvg("global_expert.*"), blobs(sizes))
    training = replace(training, secure_aggregation=SecureAggregation(3), phase_name="it")
    server = training.algorithm.server_init(module)
    sent = {
        client: {name: torch.full(tensor.shape, 10**client) for name, tensor in server.items()} for client in range(4)
    }
    clients = Trained(sent, sizes, gone={0})
    (group,) = masked_round.MaskedPlan(training, cast(Clients, clients)).train(
        server, [[0], [1], [2], [3]], {}, round=0
    )
    assert group.update is not None and group.update.weight == 8 + 11 + 6
    assert_same(group.update.sent, {name: torch.full(tensor.shape, 1110) for name, tensor in server.items()})
    number = sum(tensor.numel() for tensor in server.values())
    assert group.sent == (3 * number, 3 * 8 * number)
    assert {client: cast(AtClient, kept).keeps for client, kept in group.clients.items()} == {1: 11, 2: 12, 3: 13}
    assert [*group.failed] == [0]


def test_tensors_that_are_not_those_of_most_clients_are_left_out_whoever_is_first():
    usual, odd = {"a": torch.zeros(2)}, {"a": torch.zeros(3)}
    for place in range(3):
        masked, failed = {client: odd if client == place else usual for client in range(3)}, {}
        assert [*masked_round._same_layout(masked, failed)] == [client for client in range(3) if client != place]
        assert [*failed] == [place]


VALUES = {"run": "a run", "phase": "it", "round": 0, "clients": [0]}


def masked_update(threshold, num_clients):
    return masked_round.MaskedUpdate(
        0, threshold, Message("train masked", VALUES), {"a": torch.arange(8)}, num_clients, num_clients
    )


@pytest.mark.parametrize("other", [{"run": "another"}, {"phase": "another"}, {"round": 1}])
def test_a_message_about_another_round_is_refused(other):
    update = masked_update(1, 1)
    with pytest.raises(protocol.MaskingError, match="it has trained in another round"):
        update.answer(Message("share", VALUES | other, update.keys))
    assert update.answer(Message("share", VALUES, update.keys)).kind == "shared"


def test_a_client_that_was_asked_for_its_tensors_no_longer_has_them_whatever_it_was_sent():
    update, content = masked_update(2, 3), [torch.arange(8).numpy().tobytes()]
    assert held(content, update) == content
    with pytest.raises(protocol.MaskingError, match="in order"):
        update.answer(Message("mask", VALUES, {masked_round.SHARES: masked_round.as_rows([], protocol.ENCRYPTED)}))
    assert not held(content, update)


@pytest.mark.slow
def test_odd_messages_end_no_client_and_get_no_update_out_of_it(tmp_path, trained):
    first = Deployment(method(), tmp_path / "run")
    first.run()
    messages = [message for client, message in first.passed if client == 0]
    client, rng = participant(method(), tmp_path, 0), random.Random(0)
    until_begun = messages[: [message.kind for message in messages].index("begin") + 1]
    for message in until_begun:
        client.answer(message)
    answers = []
    for message in [each for each in messages if each.kind in STEPS] * 25:
        try:
            answers.append(client.answer(Message.from_bytes(odd(message.to_bytes(), rng))))
        except BadMessageError:
            continue
    assert {answer.kind for answer in answers} >= {"trained", FAILED}
    assert not held([trained[0][NAME].numpy().tobytes()], answers)
    for message in until_begun[1:]:
        client.answer(message)
    assert client.answer(messages[len(until_begun)]).kind == "trained"
