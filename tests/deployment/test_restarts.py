"""Clients and servers that end and start again, clients that are away, and messages that are none."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.deployed import Deployment, method_of, name_of, participant, reason_of, simulated
from helpers.methods import METHODS, Method, alone
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms import Local
from fedmoe_pl.checkpoints.checkpoint import FILE, load_federation
from fedmoe_pl.deployment import BadMessageError, Message
from fedmoe_pl.deployment.messages import FAILED
from fedmoe_pl.models import LocalOnly

METHOD = method_of("PFLMoE", 3, evaluate=True)


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    return simulated(METHOD, tmp_path_factory.mktemp("simulation"))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["train", "evaluate", "begin", "prepare"])
def test_a_client_that_restarts_before_a_message_goes_on_with_what_it_kept(kind, simulation, tmp_path):
    restarted = []

    def restart(client, message):
        if message.kind == kind and client not in restarted and len(restarted) < 4:
            restarted.append(client)
            deployed.participants[client] = deployed.started(client)

    deployed = Deployment(METHOD, tmp_path, restart)
    deployed.run()
    assert len(restarted) == 4
    deployed.assert_ends_as(simulation)


@pytest.mark.few("20")
@pytest.mark.parametrize("messages", [3, 12, 20, 33, 47])
def test_a_server_that_is_killed_goes_on_from_its_checkpoint(messages, simulation, tmp_path):
    deployed = Deployment(METHOD, tmp_path)
    deployed.run_until(lambda *_: len(deployed.heard) >= messages)
    # killed before its first checkpoint, it begins again
    deployed.run("last" if [*tmp_path.glob("server/**/last.ckpt")] else None)
    deployed.assert_ends_as(simulation)


def test_a_server_that_goes_on_has_clients_begin_as_it_does_itself(tmp_path):
    """A client may have begun the phase for a server that went on from a later checkpoint, after other rounds."""
    deployed = Deployment(METHODS["FedPer"], tmp_path)
    deployed.run_until(lambda _, message: message.kind == "train" and message.values["round"] == 1)
    for client, message in [each for each in deployed.heard if each[1].kind == "begin"]:
        begin = replace(message, values={**message.values, "rounds_before": 7})
        assert deployed.participants[client].answer(begin).kind == "begun"
    deployed.run("last")
    deployed.assert_ends_as(simulated(METHODS["FedPer"], tmp_path))


@pytest.mark.parametrize(("name", "bit"), [("run.message", 1), ("phase.message", 128)])
@pytest.mark.few(1)
def test_a_client_that_restarts_with_a_damaged_message_gets_it_again(name, bit, tmp_path):
    damaged = []

    def restart(client, message):
        path = tmp_path / f"client {client}" / name
        if message.kind == "train" and path.with_name("phase.message").is_file() and not damaged:
            damaged.append(path)
            content = bytearray(path.read_bytes())
            content[-9] ^= bit  # a letter of the description, the sign of an initial weight
            path.write_bytes(content)
            deployed.participants[client] = deployed.started(client)

    deployed = Deployment(METHODS["FedPer"], tmp_path, restart)
    deployed.run()
    assert damaged and not deployed.server.run.states["FedPer"].failed
    deployed.assert_ends_as(simulated(METHODS["FedPer"], tmp_path))


def test_a_client_whose_preparation_fails_is_prepared_again(tmp_path, monkeypatch):
    client, run = participant(METHODS["FedPer"], tmp_path, 0), {"run": "0" * 32}
    description = client.answer(Message("describe")).values
    prepare = Message("prepare", {**run, "num_clients": 5, "num_classes": 3, "description": description})
    begin = Message("begin", {**run, "phase": "FedPer", "rounds_before": 0})

    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedmoe_pl.deployment.participant.write_file", full)
        assert "No space left" in reason_of(client, prepare)
    assert [client.answer(each).kind for each in (begin, prepare, begin)] == ["unprepared", "prepared", "begun"]
    checkpoint = tmp_path / "client 0" / run["run"] / FILE
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"damaged")
    other = replace(prepare, values={**prepare.values, "run": "1" * 32})
    assert [client.answer(each).kind for each in (other, prepare, begin)] == ["prepared", FAILED, "unprepared"]


def test_a_run_whose_name_among_clients_is_damaged_does_not_go_on(tmp_path):
    deployed = Deployment(METHOD, tmp_path)
    deployed.run_until(lambda *_: len(deployed.heard) >= 20)
    (path,) = tmp_path.glob("server/**/deployment.json")
    content = path.read_text()
    path.write_text(content[:-3] + ("0" if content[-3] != "0" else "1") + content[-2:])
    with pytest.raises(MisconfigurationException, match=r"deployment\.json', which has the run's name among its clien"):
        deployed.run("last")


@pytest.mark.slow
def test_a_client_that_is_away_fails_the_round_and_is_counted_and_comes_back(tmp_path):
    away = {}

    def leave(client, message):
        if message.kind == "train" and message.values["phase"] == "FedAvg":
            if message.values["round"] == 0 and not away:
                away[client] = deployed.participants.pop(client)
            elif message.values["round"] == 1:
                deployed.participants.update(away)

    deployed = Deployment(METHOD, tmp_path, leave)
    with pytest.warns(UserWarning) as warned:
        server = deployed.run()
    (client,) = away
    assert f"round 1: client {client} is left out: it is not connected" in str(warned[0].message)
    assert server.run.states["FedAvg"].failed == 1
    assert [row["failed"] for row in server.run.rows if row["method"] == "FedAvg"] == [1, 1]
    assert not np.isnan(server.results["MF"].clients[client].global_test)


@pytest.mark.slow
def test_a_client_that_is_away_when_phases_end_has_no_accuracy_and_gets_their_results_later(tmp_path):
    """That of the last phase when the server starts again."""
    away = []

    def come_and_go(client, message):
        now = message.kind, message.values.get("phase")
        if client == 2 and now in (("evaluate", "FedAvg"), ("finish", "MF")) and 2 in deployed.participants:
            away.append(deployed.participants.pop(2))
        elif now == ("begin", "tuned"):
            deployed.participants[2] = away[0]

    deployed = Deployment(METHOD, tmp_path, come_and_go)
    with pytest.warns(UserWarning) as warned:
        server = deployed.run()
    texts = [str(warning.message) for warning in warned]
    assert any("phase 'FedAvg': client 2 is not evaluated: it is not connected" in text for text in texts)
    of_clients = [client.global_test for client in server.results["FedAvg"].clients]
    assert [np.isnan(value) for value in of_clients] == [False, False, True, False, False]
    assert server.results["FedAvg"].evaluated == "4 of 5"
    for phase in ("FedAvg", "MF"):
        assert any(f"'{phase}': client 2 has not confirmed that it has the result" in text for text in texts)

    def states(client):
        return load_federation(tmp_path / f"client {client}" / name_of(server) / FILE)["phases"]

    assert [*states(2)] == ["FedAvg", "tuned"] and [*states(3)] == ["FedAvg", "tuned", "MF"]
    assert states(2)["FedAvg"].server.keys() == states(3)["FedAvg"].server.keys()
    before, deployed.before, deployed.participants[2] = len(deployed.heard), None, away[0]
    deployed.run("last")
    assert [*states(2)] == ["FedAvg", "tuned", "MF"]
    assert {message.kind for _, message in deployed.heard[before:]} == {"describe", "begin", "finish"}


@pytest.mark.slow
def test_a_client_that_was_away_while_a_phase_was_trained_is_told_that_its_model_is_not(tmp_path):
    phases = []

    def leave_for_a_phase(client, message):
        phases.append(message.values.get("phase"))
        if client == 2 and phases[-1] == "tuned" and "MF" not in phases:
            deployed.participants.pop(client, None)
        elif phases[-1] == "MF":
            deployed.participants.update(everybody)

    deployed = Deployment(METHOD, tmp_path, leave_for_a_phase)
    everybody = {**deployed.participants}
    with pytest.warns(UserWarning) as warned:
        deployed.run()
    text = "Phase 'tuned': client 2 has not trained, so its model is the one it began with"
    assert text in [str(warning.message) for warning in warned]
    notes = [(client, message.values["text"]) for client, message in deployed.heard if message.kind == "note"]
    assert notes == [(2, text)]


def test_nobody_is_told_of_a_phase_in_which_the_client_takes_no_part(tmp_path):
    method = Method(lambda: [alone("Local", Local("local_expert.*"), gate=LocalOnly(), clients=[0, 1])])
    deployed = Deployment(method, tmp_path)
    deployed.run()  # without a warning
    assert "note" not in {message.kind for _, message in deployed.heard}


@pytest.mark.slow
def test_a_client_removes_what_it_has_gone_on_from(tmp_path):
    kept = Deployment(method_of("FedPer", rounds=8), tmp_path).run().run.states["FedPer"].clients.files
    for client in range(5):
        files = [path.name for path in tmp_path.glob(f"client {client}/*/checkpoints/clients/FedPer/*.safetensors")]
        numbers = sorted(int(name.partition("_")[0]) for name in files)
        assert kept[client][0][1] == numbers[-1] and len(files) <= 4, files


@pytest.mark.slow
def test_clients_of_another_run_keep_their_files(tmp_path):
    deployed = Deployment(METHOD, tmp_path)
    first = deployed.run()
    before = {path: path.read_bytes() for path in tmp_path.glob("client*/**/*.safetensors")}
    deployed.run()
    assert before and all(path.read_bytes() == content for path, content in before.items())
    deployed.server = first
    assert deployed.kept_by(0, "MF")


def test_a_client_answers_wrong_messages_with_a_reason(tmp_path):
    client = participant(METHOD, tmp_path, 0)
    assert reason_of(client, Message("dance")) == "it does not know messages of the kind 'dance'"
    prepare = Message("prepare", {"run": "../../etc", "num_clients": 5, "num_classes": 3})
    assert "must be 32 hexadecimal digits" in reason_of(client, prepare)
    assert client.answer(Message("train", {"run": "0" * 32})).kind == "unprepared"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"kept": [["../../it", 1, None]]}, "phase 'it' does not go on from such tensors of phase '../../it'"),
        ({"kept": [["it", 10**6, None]]}, "missing, damaged or another client's"),
        ({"kept": [["it", 1, {"gate": "gate"}]]}, "phase 'it' does not go on from such tensors"),
        ({"kept": [["it", "../1", None]]}, "which no 'exchange' has"),
        ({"round": "1/../../2"}, "its round is '1/../../2', which no 'exchange' has"),
    ],
)
def test_a_client_makes_no_paths_of_what_is_no_file_of_the_run(values, reason, tmp_path):
    client, run = participant(METHODS["FedPAC"], tmp_path, 0), {"run": "0" * 32}
    description = client.answer(Message("describe")).values
    prepare = Message("prepare", {**run, "num_clients": 5, "num_classes": 3, "description": description})
    assert client.answer(prepare).kind == "prepared"
    assert client.answer(Message("begin", {**run, "phase": "it", "rounds_before": 0})).kind == "begun"
    values = {**run, "phase": "it", "round": 0, "kept": [], **values}
    content = Message("exchange", values, {"gate.weight": torch.zeros(1)}).to_bytes()
    try:
        found = reason_of(client, Message.from_bytes(content))
    except BadMessageError as error:
        found = str(error)
    assert re.search(reason, found)
    assert not [*tmp_path.rglob("*_*_*.safetensors")]


def with_anchors():
    phases = METHODS["FedJETs"].phases()
    phases[-1].algorithm.anchors = True
    return phases


@pytest.mark.parametrize(
    ("method", "refusal"),
    [
        (replace(METHODS["FedJETs"], phases=with_anchors), "FedJETs cannot .*, because its server computes with the"),
        (METHODS["PMMoE"], "PMMoE cannot be deployed, because its server computes with the clients' data"),
        (method_of("PFLMoE", 1, ckpt_path="a.ckpt"), "ckpt_path is 'a.ckpt', but must be left out in a deployed fed"),
    ],
)
def test_what_cannot_be_deployed_is_refused(method, refusal, tmp_path):
    with pytest.raises(MisconfigurationException, match=refusal):
        Deployment(method, tmp_path).run()
    assert not [*tmp_path.glob("server/*/version_*")]
