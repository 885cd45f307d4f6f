"""Secrets that noise follows from in a deployment: clients' own with DP-SGD, and the server's, for whole clients."""

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
from helpers.deployed import Deployment, name_of, participant, reason_of, simulated, with_values
from helpers.methods import Method, everything, one
from helpers.runs import assert_same
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import DPSGD
from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.checkpoints.files import read_json, write_json
from fedmoe_pl.deployment import Message
from fedmoe_pl.deployment.private_rounds import PrivateRounds, with_checksum
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.rounds.fit import aggregated
from fedmoe_pl.rounds.privacy import epsilon_of_clients

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="needs Opacus")
SIZES = (13, 8, 11)


def method(privacy, **kwargs):
    return Method(one(lambda: FedAvg("global_expert.*"), sample_privacy=privacy, **everything(**kwargs)))


PRIVATE, OPEN = method(DPSGD(0.5, 1e-3, target_epsilon=4.0)), method(None)


def run(folder, before=None, secrets_of=None):
    """A deployment that has ended, named as all others here, with secrets of its own or those of another run."""
    if secrets_of is not None:
        for client in range(len(SIZES)):
            own = folder / f"client {client}"
            (count := own / f"{1:032x}" / "private_rounds.json").parent.mkdir(parents=True)
            write_json(count, {"phases": {}})
            shutil.copy(secrets_of / f"client {client}" / "secret", own)
    deployed = Deployment(PRIVATE, folder, datamodule=blobs(SIZES))
    deployed.before = before and (lambda client, message: before(deployed, client, message))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1))
        deployed.run()
    return deployed


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(tmp_path_factory.mktemp("finished"))


def state_of(deployed):
    return deployed.server.run.states["it"]


def of_client_1(deployed):
    """The last message of each kind that client 1 has got."""
    return {message.kind: message for client, message in deployed.heard if client == 1}


def secret_of(folder, client):
    return (folder / f"client {client}" / "secret").read_bytes()


def trained(deployed, client, round=0):
    """The message with which a client was trained in a round, and its answer."""
    pairs = zip(deployed.heard, deployed.answers, strict=True)
    return next(
        (message, answer)
        for (of_client, message), answer in pairs
        if of_client == client and answer.kind == "update" and message.values["round"] == round
    )


def differ(a, b):
    return any(not torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_noise_follows_from_secrets_that_no_message_and_no_file_of_the_server_has(finished, tmp_path):
    folder, state = finished.folder, state_of(finished)
    in_simulation = simulated(PRIVATE, tmp_path, blobs(SIZES)).run.states["it"]
    assert (state.finished, state.failed, state.round) == (True, 0, 2)
    assert differ(state.server, in_simulation.server)
    assert differ(state.server, state_of(run(tmp_path / "others")).server)

    sent = [message.to_bytes() for message in (*finished.answers, *(message for _, message in finished.heard))]
    written = [path.read_bytes() for path in (folder / "server").rglob("*") if path.is_file()]
    assert sent and written
    for client in range(len(SIZES)):
        path, secret = folder / f"client {client}" / "secret", secret_of(folder, client)[:32]
        assert path.stat().st_mode & 0o777 == 0o600
        seed = finished.participants[client]._plan.training.secret_seed
        hidden = (secret, secret.hex().encode(), str(seed).encode(), f"{seed:x}".encode())
        assert not [each for content in (*sent, *written) for each in hidden if each in content]
        # by the client's own count, what a simulation counts for it
        own, of_client = finished.participants[client].run.states["it"], epsilon_of_clients(PRIVATE.phases()[0], state)
        assert of_client == epsilon_of_clients(PRIVATE.phases()[0], in_simulation)
        assert (own.sample_epsilon, own.sample_delta) == (pytest.approx(of_client[str(client)], rel=1e-9), 1e-3)
        assert own.sample_epsilon <= 4


def test_clients_that_restart_before_every_training_have_the_same_bits(finished, tmp_path):
    restarted = []

    def restart(deployed, client, message):
        if message.kind == "train" and (client, message.values["round"]) not in restarted:
            restarted.append((client, message.values["round"]))
            deployed.participants[client] = deployed.started(client)

    again = state_of(run(tmp_path, restart, secrets_of=finished.folder))
    assert len(restarted) == 2 * len(SIZES) and not again.failed
    assert_same(again.server, state_of(finished).server)


def test_a_client_trains_no_round_twice_with_the_same_noise(tmp_path, caplog):
    deployed = run(tmp_path)
    client = deployed.started(1)
    message, answer = trained(deployed, 1)
    assert_same(client.answer(message).tensors, answer.tensors)

    changed = Message("train", message.values, {name: tensor + 1 for name, tensor in message.tensors.items()})
    later = replace(message, values={**message.values, "round": 2})
    reasons = [reason_of(client, each) for each in (changed, later)]
    assert "it has trained this round with other tensors" in reasons[0] and "round 2 is none of" in reasons[1]

    begin = of_client_1(deployed)["begin"]
    assert client.answer(replace(begin, values={**begin.values, "rounds_before": 1})).kind == "begun"
    assert "it has trained this round with other tensors" in reason_of(client, message)
    assert client.answer(begin).kind == "begun" and client.answer(message).kind == "update"

    damaged = bytearray(secret_of(tmp_path, 1))
    damaged[3] ^= 1
    (tmp_path / "client 1" / "secret").write_bytes(damaged)
    reason = reason_of(deployed.started(1), begin)
    assert "secret', the secret from which noise follows, is damaged" in reason
    damaged[3] ^= 1
    (tmp_path / "client 1" / "secret").write_bytes(damaged)

    with pytest.raises(MisconfigurationException), caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        Deployment(PRIVATE, tmp_path, datamodule=blobs(SIZES)).run()
    assert re.search(r"has trained with sample_privacy in another run, 0{31}1", caplog.text)


@pytest.mark.few(1)
@pytest.mark.parametrize(("sample", "what"), [(1, "x"), (7, "x"), (20_999, "y")])
def test_a_client_trains_no_round_again_with_other_data(sample, what, tmp_path, monkeypatch):
    """Of many samples, too, and if they are read from a file, of which the configuration has only the name."""
    monkeypatch.setattr("fedmoe_pl.checkpoints.configuration._checksum", lambda array: "in a file")

    def data():
        return blobs((21_000, 8, 11), batch_size=10_500)

    changed = data()
    values = changed.arrays.x_train if what == "x" else changed.arrays.y_train
    values[sample] = values[sample] + 1 if what == "x" else (values[sample] + 1) % 3
    deployed = Deployment(method(DPSGD(0.5, 1e-5, 1.0), rounds=1), tmp_path, datamodule=data())
    deployed.run()
    message, answer = trained(deployed, 0)
    assert_same(deployed.started(0).answer(message).tensors, answer.tensors)
    reason = reason_of(deployed.started(0, datamodule=changed), message)
    assert "it has trained this round with other tensors" in reason


@pytest.mark.slow
def test_a_client_goes_on_with_no_more_rounds_than_its_noise_was_chosen_for(tmp_path):
    deployed = run(tmp_path)
    own = replace(deployed.participants[1]._plan.training, secret_seed=None)
    in_simulation = local_training(mixture(GlobalOnly()), FedAvg("global_expert.*"), blobs(SIZES))
    assert own.hash_of_samples(1) == in_simulation.hash_of_samples(1)  # only the secret tells their noise apart

    more = method(DPSGD(0.5, 1e-3, target_epsilon=4.0), rounds=9)
    client, messages = deployed.started(1, method=more), of_client_1(deployed)
    description = client.answer(messages["describe"]).values
    prepare = replace(messages["prepare"], values={**messages["prepare"].values, "description": description})
    assert client.answer(prepare).kind == "prepared"
    reason = reason_of(client, messages["begin"])
    assert "target_epsilon is 4.0, but must be higher, or rounds" in reason and "client 1 has spent" in reason


@pytest.mark.slow
def test_a_client_counts_rounds_without_noise_in_a_run_that_has_rounds_with_noise(tmp_path):
    server = run(tmp_path).server
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


def test_a_round_that_could_not_be_counted_is_counted_at_the_next_try(tmp_path, monkeypatch):
    """Otherwise a client that is started again would train it with another message, and the same noise."""
    deployed = run(tmp_path)
    training, (message, _) = deployed.participants[1]._plan.training, trained(deployed, 1)
    path = tmp_path / "client 1" / name_of(deployed.server) / "private_rounds.json"
    rounds = read_json(path)["phases"]
    digest = rounds["it"].pop("0")
    write_json(path, {"phases": rounds})
    own, of_client = PrivateRounds(tmp_path / "client 1", name_of(deployed.server), 1), deployed.participants[1].run

    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(MisconfigurationException, match="No space left"):
            own.add(of_client, training, message)
    own.add(of_client, training, message)
    assert read_json(path)["phases"]["it"]["0"] == digest


LOST = {
    "its secret": (lambda own, name: own / "secret", "'.*client 1/secret', from which .* is missing"),
    "its count": (lambda own, name: own / name / "private_rounds.json", ""),
    "all of the run": (lambda own, name: own / name, ""),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("lost", LOST)
def test_a_client_that_has_lost_its_secret_or_its_count_of_epsilon_trains_no_more(lost, tmp_path):
    """Otherwise it would have other noise in a round that it counts once, or begin anew at 0."""
    deployed = run(tmp_path)
    where, of_secret = LOST[lost]
    shutil.move(where(tmp_path / "client 1", name_of(deployed.server)), tmp_path / "away")
    of_rounds = r"/0{31}1/private_rounds\.json', in which .* is missing"
    reasons = {"1": of_secret or of_rounds, "2": "in another run, 0{31}1" if of_secret else of_rounds}
    for run_name, reason in reasons.items():
        client, messages = deployed.started(1), of_client_1(deployed)
        prepare, begin, train = (
            replace(messages[kind], values={**messages[kind].values, "run": run_name.zfill(32)})
            for kind in ("prepare", "begin", "train")
        )
        assert client.answer(prepare).kind == "prepared" and re.search(reason, reason_of(client, begin))
        assert client.answer(begin).values["failure"] == "configuration" and not client.answer(train).tensors


@pytest.mark.slow
def test_a_run_that_a_client_has_only_begun_keeps_it_from_no_other(tmp_path):
    messages = of_client_1(run(tmp_path / "elsewhere"))
    client = participant(PRIVATE, tmp_path, 1, blobs(SIZES))
    for run_name in ("2", "3", "2"):
        for kind in ("prepare", "begin"):
            answer = client.answer(replace(messages[kind], values={**messages[kind].values, "run": run_name.zfill(32)}))
        assert answer.kind == "begun"
        (tmp_path / "client 1/secret").unlink()  # as if it had been killed before it wrote that
    run(tmp_path)


def test_a_client_refuses_a_server_that_trains_without_privacy_whatever_that_says_of_the_client(tmp_path, caplog):
    of_server = participant(OPEN, tmp_path / "open", 0, blobs(SIZES)).answer(Message("describe")).values
    deployed = Deployment(PRIVATE, tmp_path, datamodule=blobs(SIZES))
    for client in range(len(SIZES)):
        deployed.change(client, "describe", with_values(configuration=of_server["configuration"]))
    deployed.method = OPEN
    with pytest.raises(MisconfigurationException), caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        deployed.run()
    assert re.search(r"this client has failed: .*sample_privacy", caplog.text)
    assert "update" not in [answer.kind for answer in deployed.answers]


def of_whole_clients(**kwargs):
    """A method whose server adds noise; by default, all clients are in all of its cohorts."""
    private = {"aggregation": DifferentialPrivacy(1.0, 1.0, 0.1), "evaluate": True, **everything(**kwargs)}
    return Method(one(lambda: FedAvg("global_expert.*"), **private))


@pytest.mark.parametrize("has_secret", [True, False])
def test_noise_of_whole_clients_follows_from_a_secret_that_only_the_server_has(has_secret, tmp_path, monkeypatch):
    """Without the secret, the same deployment has the noise of the seed, which every client knows."""
    if not has_secret:
        monkeypatch.setattr("fedmoe_pl.deployment.server._secret_of", lambda *_: None)
    simulation = simulated(of_whole_clients(), tmp_path, blobs(SIZES))
    deployed = Deployment(of_whole_clients(), tmp_path, datamodule=blobs(SIZES))
    deployed.run()
    assert differ(state_of(deployed).server, simulation.run.states["it"].server) == has_secret
    assert state_of(deployed).epsilon == simulation.run.states["it"].epsilon
    if not has_secret:
        return
    path, secret = deployed.server.run_dir / "secret", deployed.server.run.secret
    assert path.stat().st_mode & 0o777 == 0o600
    of_file = path.read_bytes()[:32]
    hidden = (of_file, of_file.hex().encode(), str(secret).encode(), f"{secret:x}".encode())
    written = [each.read_bytes() for each in tmp_path.rglob("*") if each.is_file() and each != path]
    sent = [message.to_bytes() for message in (*deployed.answers, *(message for _, message in deployed.heard))]
    assert written and sent
    assert not [content for content in (*sent, *written) for each in hidden if each in content]
    again = Deployment(of_whole_clients(), tmp_path, datamodule=blobs(SIZES)).run()
    assert again.run.secret != secret, "each run has its own"


def test_the_server_s_noise_differs_between_updates_of_a_round_and_is_the_same_for_the_same(tmp_path):
    (phase,) = of_whole_clients().phases()
    start = phase.algorithm.server_init(mixture())

    def noise(change, weight=3, secret=7, round=0):
        state = SimpleNamespace(server=start, aggregation={}, round=round)
        run = SimpleNamespace(states={"it": state}, datamodule=SimpleNamespace(num_clients=3), seed=0, secret=secret)
        sent = {name: torch.full_like(tensor, change) for name, tensor in start.items()}
        update = aggregated(run, phase, mixture(), Update(sent, weight) if weight else None)
        return torch.cat([(3 * (update.sent[name] - start[name]) - weight * sent[name]).flatten() for name in start])

    first = noise(0.5)
    assert torch.equal(noise(0.5), first) and abs(first.std() - 1) < 0.2
    others = [noise(0.25), noise(0.5, weight=2), noise(0.5, weight=0), noise(0.5, secret=8), noise(0.5, round=1)]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 0.5
    torch.testing.assert_close(noise(0.5, secret=None), noise(0.25, secret=None))  # of a simulation


def test_a_server_that_goes_on_draws_the_same_noise_and_cohorts_and_only_with_its_secret(tmp_path, monkeypatch):
    """It is killed after it has drawn the noise of the second round, and before it has saved it."""
    some = of_whole_clients(clients_per_round=2, rounds=3)
    with monkeypatch.context() as patch:
        patch.setattr("fedmoe_pl.deployment.private_rounds.secrets.token_bytes", bytes)
        whole = Deployment(some, tmp_path / "whole", datamodule=blobs(SIZES), evaluate_every_n_rounds=1)
        whole.run()
        deployed = Deployment(some, tmp_path / "killed", datamodule=blobs(SIZES), evaluate_every_n_rounds=1)
        deployed.run_until(lambda _, message: message.kind == "evaluate" and message.values["round"] == 2)
    path = deployed.server.run_dir / "secret"
    content = path.read_bytes()
    for wrong in (b"", content[:-9] + b"x" + content[-8:], with_checksum(content[:32] + 32 * b"0")):
        path.write_bytes(wrong)
        if not wrong:
            path.unlink()
        with pytest.raises(MisconfigurationException, match=r"secret', (the secret )?from which (the )?noise"):
            deployed.run("last")
    path.write_bytes(content)
    deployed.run("last")
    assert_same(state_of(deployed).server, state_of(whole).server)
    assert {*trained_in(deployed)} == {*trained_in(whole)}


def trained_in(deployed):
    """The clients and rounds of all trainings."""
    return [(client, each.values["round"]) for client, each in deployed.heard if each.kind == "train"]
