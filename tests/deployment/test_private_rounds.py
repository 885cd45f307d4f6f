"""DP-SGD on clients' own machines: what their noise follows from, what they refuse, and what they count."""

import logging
import math
import re
import shutil
import uuid
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from helpers import blobs, mixture
from helpers.backends import local_training
from helpers.deployed import (
    Changing,
    Passing,
    deploy,
    federation,
    name_of,
    participant,
    participants,
    reason_of,
    with_values,
)
from helpers.methods import Method, everything, one
from helpers.runs import assert_same
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import DPSGD
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.checkpoints.files import write_json
from fedmoe_pl.deployment import Message
from fedmoe_pl.deployment.private_rounds import PrivateRounds
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.rounds.privacy import epsilon_of_clients

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="needs Opacus")
SIZES = (13, 8, 11)
OF_TRAINER = {"backend": TrainerBackend()}


WITH_NOISE = everything(sample_privacy=DPSGD(0.5, 1e-5, 1.0))


def method(privacy, **kwargs):
    return Method(one(lambda: FedAvg("global_expert.*"), sample_privacy=privacy, **everything(**kwargs)))


PRIVATE, OPEN = method(DPSGD(0.5, 1e-3, target_epsilon=4.0)), method(None)


def run(folder, before=None, secrets_of=None):
    """A deployed run named as all others here, with secrets of its own or those of another run; and its transport."""
    if secrets_of is not None:
        for client in range(len(SIZES)):
            own = folder / f"client {client}"
            (count := own / f"{1:032x}" / "private_rounds.json").parent.mkdir(parents=True)
            write_json(count, {"phases": {}})
            shutil.copy(secrets_of / f"client {client}" / "secret", own)
    transport = Passing(participants(PRIVATE, blobs(SIZES), folder, **OF_TRAINER))
    transport.before = before and (lambda client, message: before(transport, client, message))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1))
        return deploy(PRIVATE, blobs(SIZES), folder, transport, **OF_TRAINER), transport


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployed")
    return folder, *run(folder)


def secret_of(folder, client):
    return (folder / f"client {client}" / "secret").read_bytes()


def trained(transport, client, round=0):
    """The message with which a client was trained in a round, and its answer."""
    pairs = zip(transport.heard, transport.answers, strict=True)
    return next(
        (message, answer)
        for (of_client, message), answer in pairs
        if of_client == client and answer.kind == "update" and message.values["round"] == round
    )


def differ(a, b):
    return any(not torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_noise_follows_from_secrets_that_no_message_and_no_file_of_the_server_has(deployed, tmp_path):
    folder, server, transport = deployed
    simulated = federation(PRIVATE.phases(), tmp_path / "simulated", **OF_TRAINER)
    simulated.fit(PRIVATE.model(), blobs(SIZES))
    state, in_simulation = server.run.states["it"], simulated.run.states["it"]
    assert (state.finished, state.failed, state.round) == (True, 0, 2)
    assert differ(state.server, in_simulation.server)
    other, _ = run(tmp_path / "others")
    assert differ(state.server, other.run.states["it"].server)

    sent = [message.to_bytes() for message in (*transport.answers, *(message for _, message in transport.heard))]
    written = [path.read_bytes() for path in (folder / "server").rglob("*") if path.is_file()]
    assert sent and written
    for client in range(len(SIZES)):
        path, secret = folder / f"client {client}" / "secret", secret_of(folder, client)[:32]
        assert path.stat().st_mode & 0o777 == 0o600
        seed = transport.participants[client]._plan.training.secret_seed
        hidden = (secret, secret.hex().encode(), str(seed).encode(), f"{seed:x}".encode())
        assert not [each for content in (*sent, *written) for each in hidden if each in content]
        # by the client's own count, what a simulation counts for it
        own, of_client = transport.participants[client].run.states["it"], epsilon_of_clients(PRIVATE.phases()[0], state)
        assert of_client == epsilon_of_clients(PRIVATE.phases()[0], in_simulation)
        assert (own.sample_epsilon, own.sample_delta) == (pytest.approx(of_client[str(client)], rel=1e-9), 1e-3)
        assert own.sample_epsilon <= 4


def test_clients_that_restart_before_every_training_have_the_same_bits(deployed, tmp_path):
    restarted = []

    def restart(transport, client, message):
        if message.kind == "train" and (client, message.values["round"]) not in restarted:
            restarted.append((client, message.values["round"]))
            transport.participants[client] = participant(PRIVATE, blobs(SIZES), tmp_path, client, **OF_TRAINER)

    again, _ = run(tmp_path, restart, secrets_of=deployed[0])
    assert len(restarted) == 2 * len(SIZES) and not again.run.states["it"].failed
    assert_same(again.run.states["it"].server, deployed[1].run.states["it"].server)


def test_a_client_trains_no_round_twice_with_the_same_noise(tmp_path, caplog):
    _, transport = run(tmp_path)
    client = participant(PRIVATE, blobs(SIZES), tmp_path, 1, **OF_TRAINER)
    message, answer = trained(transport, 1)
    assert_same(client.answer(message).tensors, answer.tensors)

    changed = Message("train", message.values, {name: tensor + 1 for name, tensor in message.tensors.items()})
    later = replace(message, values={**message.values, "round": 2})
    reasons = [reason_of(client, each) for each in (changed, later)]
    assert "it has trained this round with other tensors" in reasons[0] and "round 2 is none of" in reasons[1]

    begin = next(each for of_client, each in transport.heard if of_client == 1 and each.kind == "begin")
    assert client.answer(replace(begin, values={**begin.values, "rounds_before": 1})).kind == "begun"
    assert "it has trained this round with other tensors" in reason_of(client, message)
    assert client.answer(begin).kind == "begun" and client.answer(message).kind == "update"

    damaged = bytearray(secret_of(tmp_path, 1))
    damaged[3] ^= 1
    (tmp_path / "client 1" / "secret").write_bytes(damaged)
    restarted = participant(PRIVATE, blobs(SIZES), tmp_path, 1, **OF_TRAINER)
    assert "secret', from which the noise of this client follows, is damaged" in reason_of(restarted, begin)
    damaged[3] ^= 1
    (tmp_path / "client 1" / "secret").write_bytes(damaged)

    with pytest.raises(MisconfigurationException), caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        deploy(PRIVATE, blobs(SIZES), tmp_path, **OF_TRAINER)
    assert re.search(r"has trained with sample_privacy in another run, 0{31}1", caplog.text)


@pytest.mark.few(1)
@pytest.mark.parametrize(("sample", "what"), [(1, "x"), (7, "x"), (20_999, "y")])
def test_a_client_trains_no_round_again_with_other_data(sample, what, tmp_path, monkeypatch):
    """Of many samples, too, and if they are read from a file, of which the configuration has only the name."""
    monkeypatch.setattr("fedmoe_pl.checkpoints.configuration._checksum", lambda array: "in a file")

    def data():
        return blobs((21_000, 8, 11), batch_size=10_500)

    changed, method = data(), replace(PRIVATE, phases=one(lambda: FedAvg("global_expert.*"), rounds=1, **WITH_NOISE))
    values = changed.arrays.x_train if what == "x" else changed.arrays.y_train
    values[sample] = values[sample] + 1 if what == "x" else (values[sample] + 1) % 3
    transport = Passing(participants(method, data(), tmp_path, **OF_TRAINER))
    deploy(method, data(), tmp_path, transport, **OF_TRAINER)
    message, answer = trained(transport, 0)
    again = participant(method, data(), tmp_path, 0, **OF_TRAINER)
    assert_same(again.answer(message).tensors, answer.tensors)
    other = participant(method, changed, tmp_path, 0, **OF_TRAINER)
    assert "it has trained this round with other tensors" in reason_of(other, message)


def test_a_client_goes_on_with_no_more_rounds_than_its_noise_was_chosen_for(tmp_path):
    _, transport = run(tmp_path)
    own = replace(transport.participants[1]._plan.training, secret_seed=None)
    simulated = local_training(mixture(GlobalOnly()), FedAvg("global_expert.*"), blobs(SIZES))
    assert own.hash_of_samples(1) == simulated.hash_of_samples(1)  # only the secret tells their noise apart

    more = method(DPSGD(0.5, 1e-3, target_epsilon=4.0), rounds=9)
    client = participant(more, blobs(SIZES), tmp_path, 1, **OF_TRAINER)
    messages = {message.kind: message for of_client, message in transport.heard if of_client == 1}
    description = client.answer(messages["describe"]).values
    prepare = replace(messages["prepare"], values={**messages["prepare"].values, "description": description})
    assert client.answer(prepare).kind == "prepared"
    reason = reason_of(client, messages["begin"])
    assert "target_epsilon is 4.0, but must be higher, or rounds" in reason and "client 1 has spent" in reason


def test_a_client_counts_rounds_without_noise_in_a_run_that_has_rounds_with_noise(tmp_path):
    server, _ = run(tmp_path)
    own = PrivateRounds(tmp_path / "client 1", name_of(server), 1)
    before = own.steps(["it"])
    assert PRIVATE.phases()[0].sample_privacy.epsilon(before) <= 4
    own.add(server.run, SimpleNamespace(phase_name="it", sample_privacy=None), Message("train", {"round": 2}))
    for counted in (own, PrivateRounds(tmp_path / "client 1", name_of(server), 1)):
        assert counted.steps(["it"]) == [*before, [1.0, 0.0, 1]]
        assert PRIVATE.phases()[0].sample_privacy.epsilon(counted.steps(["it"])) == math.inf
    without = PrivateRounds(tmp_path / "elsewhere", name_of(server), 1)
    without.add(server.run, SimpleNamespace(phase_name="it", sample_privacy=None), Message("train", {"round": 0}))
    assert not (tmp_path / "elsewhere").exists()


LOST = {
    "its secret": (lambda own, name: own / "secret", "'.*client 1/secret', from which .* is missing"),
    "its count": (lambda own, name: own / name / "private_rounds.json", ""),
    "all of the run": (lambda own, name: own / name, ""),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("lost", LOST)
def test_a_client_that_has_lost_its_secret_or_its_count_of_epsilon_trains_no_more(lost, tmp_path):
    """Otherwise it would have other noise in a round that it counts once, or begin anew at 0."""
    server, transport = run(tmp_path)
    where, of_secret = LOST[lost]
    shutil.move(where(tmp_path / "client 1", name_of(server)), tmp_path / "away")
    of_rounds = r"/0{31}1/private_rounds\.json', in which .* is missing"
    reasons = {"1": of_secret or of_rounds, "2": "in another run, 0{31}1" if of_secret else of_rounds}
    for run_name, reason in reasons.items():
        client = participant(PRIVATE, blobs(SIZES), tmp_path, 1, **OF_TRAINER)
        messages = {message.kind: message for of_client, message in transport.heard if of_client == 1}
        prepare, begin, train = (
            replace(messages[kind], values={**messages[kind].values, "run": run_name.zfill(32)})
            for kind in ("prepare", "begin", "train")
        )
        assert client.answer(prepare).kind == "prepared" and re.search(reason, reason_of(client, begin))
        assert client.answer(begin).values["failure"] == "configuration" and not client.answer(train).tensors


@pytest.mark.slow
def test_a_run_that_a_client_has_only_begun_keeps_it_from_no_other(tmp_path):
    _, transport = run(tmp_path / "elsewhere")
    client = participant(PRIVATE, blobs(SIZES), tmp_path, 1, **OF_TRAINER)
    messages = {message.kind: message for of_client, message in transport.heard if of_client == 1}
    for run_name in ("2", "3", "2"):
        for kind in ("prepare", "begin"):
            answer = client.answer(replace(messages[kind], values={**messages[kind].values, "run": run_name.zfill(32)}))
        assert answer.kind == "begun"
        (tmp_path / "client 1/secret").unlink()  # as if it had been killed before it wrote that
    run(tmp_path)


def test_a_client_refuses_a_server_that_trains_without_privacy_whatever_that_says_of_the_client(tmp_path, caplog):
    data = blobs(SIZES)
    of_server = participant(OPEN, data, tmp_path / "open", 0, **OF_TRAINER).answer(Message("describe")).values
    passing = participants(PRIVATE, data, tmp_path, **OF_TRAINER)
    transport = Passing(
        {
            client: Changing(each, "describe", with_values(configuration=of_server["configuration"]))
            for client, each in passing.items()
        }
    )
    with pytest.raises(MisconfigurationException), caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        deploy(OPEN, data, tmp_path, transport, **OF_TRAINER)
    assert re.search(r"this client has failed: .*sample_privacy", caplog.text)
    assert "update" not in [answer.kind for answer in transport.answers]
