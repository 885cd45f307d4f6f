"""Clients and servers that end and start again, clients that are away, and messages that are none."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.deployed import (
    Passing,
    assert_ends_as,
    deploy,
    federation,
    kept_by,
    killed,
    name_of,
    participant,
    participants,
    reason_of,
)
from helpers.methods import METHODS, data
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.checkpoints.checkpoint import FILE, load_federation
from fedmoe_pl.deployment import BadMessageError, Message

METHOD = replace(METHODS["PFLMoE"], phases=lambda: [replace(p, evaluate=True) for p in METHODS["PFLMoE"].phases()[:3]])
OF_TRAINER = {"backend": TrainerBackend()}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    run = federation(METHOD.phases(), tmp_path_factory.mktemp("simulation"), **OF_TRAINER)
    run.fit(METHOD.model(), data())
    return run


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["train", "evaluate", "begin", "prepare"])
def test_a_client_that_restarts_before_a_message_goes_on_with_what_it_kept(kind, simulated, tmp_path):
    restarted = []

    def restart(client, message):
        if message.kind == kind and client not in restarted and len(restarted) < 4:
            restarted.append(client)
            transport.participants[client] = participant(METHOD, data(), tmp_path, client, **OF_TRAINER)

    transport = Passing(participants(METHOD, data(), tmp_path, **OF_TRAINER), restart)
    deployed = deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    assert len(restarted) == 4
    assert_ends_as(simulated, deployed, tmp_path)


@pytest.mark.few("20")
@pytest.mark.parametrize("messages", [3, 12, 20, 33, 47])
def test_a_server_that_is_killed_goes_on_from_its_checkpoint(messages, simulated, tmp_path):
    transport = killed(METHOD, data(), tmp_path, messages, **OF_TRAINER)
    # killed before its first checkpoint, it begins again
    checkpoint = "last" if [*tmp_path.glob("server/**/last.ckpt")] else None
    deployed = deploy(METHOD, data(), tmp_path, transport, checkpoint, **OF_TRAINER)
    assert_ends_as(simulated, deployed, tmp_path)


@pytest.mark.parametrize(("name", "bit"), [("run.message", 1), ("phase.message", 128)])
@pytest.mark.few(1)
def test_a_client_that_restarts_with_a_damaged_message_gets_it_again(name, bit, tmp_path):
    method, damaged = METHODS["FedPer"], []

    def restart(client, message):
        path = tmp_path / f"client {client}" / name
        if message.kind == "train" and path.with_name("phase.message").is_file() and not damaged:
            damaged.append(path)
            content = bytearray(path.read_bytes())
            content[-9] ^= bit  # a letter of the description, the sign of an initial weight
            path.write_bytes(content)
            transport.participants[client] = participant(method, data(), tmp_path, client, **OF_TRAINER)

    transport = Passing(participants(method, data(), tmp_path, **OF_TRAINER), restart)
    deployed = deploy(method, data(), tmp_path, transport, **OF_TRAINER)
    simulation = federation(method.phases(), tmp_path / "simulation", **OF_TRAINER)
    simulation.fit(method.model(), data())
    assert damaged and not deployed.run.states["FedPer"].failed
    assert_ends_as(simulation, deployed, tmp_path)


def test_a_run_whose_name_among_clients_is_damaged_does_not_go_on(tmp_path):
    killed(METHOD, data(), tmp_path, 20, **OF_TRAINER)
    (path,) = tmp_path.glob("server/**/deployment.json")
    content = path.read_text()
    path.write_text(content[:-3] + ("0" if content[-3] != "0" else "1") + content[-2:])
    with pytest.raises(MisconfigurationException, match=r"deployment\.json', which has the run's name among its clien"):
        deploy(METHOD, data(), tmp_path, None, "last", **OF_TRAINER)


def test_a_client_that_is_away_fails_the_round_and_is_counted_and_comes_back(tmp_path):
    others = participants(METHOD, data(), tmp_path, **OF_TRAINER)
    away = {}

    def leave(client, message):
        if message.kind == "train" and message.values["phase"] == "FedAvg":
            if message.values["round"] == 0 and not away:
                away[client] = transport.participants.pop(client)
            elif message.values["round"] == 1:
                transport.participants.update(away)

    transport = Passing(others, leave)
    with pytest.warns(UserWarning) as warned:
        deployed = deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    (client,) = away
    assert f"round 1: client {client} is left out: it is not connected" in str(warned[0].message)
    assert deployed.run.states["FedAvg"].failed == 1
    rows = [row for row in deployed.run.rows if row["method"] == "FedAvg"]
    assert [row["failed"] for row in rows] == [1, 1]
    assert not np.isnan(deployed.results["MF"].clients[client].global_test)


@pytest.mark.slow
def test_a_client_that_is_away_when_models_are_evaluated_has_no_accuracy(tmp_path):
    def leave(client, message):
        if message.kind == "evaluate" and client == 2:
            transport.participants.pop(2, None)

    transport = Passing(participants(METHOD, data(), tmp_path, **OF_TRAINER), leave)
    with pytest.warns(UserWarning) as warned:
        deployed = deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    assert "phase 'FedAvg': client 2 is not evaluated: it is not connected" in str(warned[0].message)
    of_clients = [client.global_test for client in deployed.results["FedAvg"].clients]
    assert [np.isnan(value) for value in of_clients] == [False, False, True, False, False]
    assert deployed.results["FedAvg"].evaluated == "4 of 5"


def test_a_client_removes_what_it_has_gone_on_from(tmp_path):
    method = replace(METHODS["FedPer"], phases=lambda: [replace(METHODS["FedPer"].phases()[0], rounds=8)])
    deployed = deploy(method, data(), tmp_path, **OF_TRAINER)
    kept = deployed.run.states["FedPer"].clients.files
    for client in range(5):
        files = [path.name for path in tmp_path.glob(f"client {client}/*/checkpoints/clients/FedPer/*.safetensors")]
        numbers = sorted(int(name.partition("_")[0]) for name in files)
        assert kept[client][0][1] == numbers[-1] and len(files) <= 4, files


@pytest.mark.slow
def test_clients_of_another_run_keep_their_files(tmp_path):
    transport = Passing(participants(METHOD, data(), tmp_path, **OF_TRAINER))
    first = deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    before = {path: path.read_bytes() for path in tmp_path.glob("client*/**/*.safetensors")}
    deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    assert before and all(path.read_bytes() == content for path, content in before.items())
    assert kept_by(tmp_path, first, "MF", 0)


@pytest.mark.slow
def test_a_client_that_was_away_at_the_end_of_a_phase_gets_its_result_later(tmp_path):
    away = {}

    def leave(client, message):
        if message.kind == "finish" and message.values["phase"] == "FedAvg" and client == 2 and not away:
            away[client] = transport.participants.pop(client)
        elif message.kind == "begin" and message.values["phase"] == "tuned":
            transport.participants.update(away)

    transport = Passing(participants(METHOD, data(), tmp_path, **OF_TRAINER), leave)
    with pytest.warns(UserWarning, match="'FedAvg': client 2 has not confirmed that it has the result"):
        deployed = deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    states = [load_federation(tmp_path / f"client {client}" / name_of(deployed) / FILE)["phases"] for client in (2, 3)]
    assert [*states[0]] == [*states[1]] == ["FedAvg", "tuned", "MF"]
    assert [*away] == [2] and states[0]["FedAvg"].server.keys() == states[1]["FedAvg"].server.keys()


@pytest.mark.slow
def test_a_client_that_was_away_while_a_phase_was_trained_is_told_that_its_model_is_not(tmp_path):
    everybody, phases = participants(METHOD, data(), tmp_path, **OF_TRAINER), []

    def leave_for_a_phase(client, message):
        phases.append(message.values.get("phase"))
        if client == 2 and phases[-1] == "tuned" and "MF" not in phases:
            transport.participants.pop(client, None)
        elif phases[-1] == "MF":
            transport.participants.update(everybody)

    transport = Passing({**everybody}, leave_for_a_phase)
    with pytest.warns(UserWarning) as warned:
        deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    text = "Phase 'tuned': client 2 was away, so its model is not trained"
    assert text in [str(warning.message) for warning in warned]
    notes = [(client, message.values["text"]) for client, message in transport.heard if message.kind == "note"]
    assert notes == [(2, text)]


@pytest.mark.slow
def test_a_client_that_was_away_at_the_very_end_gets_the_result_when_the_server_starts_again(tmp_path):
    everybody = participants(METHOD, data(), tmp_path, **OF_TRAINER)

    def leave(client, message):
        if message.kind == "finish" and message.values["phase"] == "MF" and client == 2:
            transport.participants.pop(client, None)

    transport = Passing({**everybody}, leave)
    with pytest.warns(UserWarning, match="'MF': client 2 has not confirmed that it has the result"):
        deploy(METHOD, data(), tmp_path, transport, **OF_TRAINER)
    (path,) = (tmp_path / "client 2").glob(f"*/{FILE}")
    assert [*load_federation(path)["phases"]] == ["FedAvg", "tuned"]
    transport = Passing(everybody)
    deploy(METHOD, data(), tmp_path, transport, "last", **OF_TRAINER)
    assert [*load_federation(path)["phases"]] == ["FedAvg", "tuned", "MF"]
    assert {message.kind for _, message in transport.heard} == {"describe", "finish"}


def test_a_client_answers_wrong_messages_with_a_reason(tmp_path):
    client = participant(METHOD, data(), tmp_path, 0)
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
    client, run = participant(METHODS["FedPAC"], data(), tmp_path, 0), {"run": "0" * 32}
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


def refusal(tmp_path, method=METHOD, of_clients=METHOD, datamodule=None, **kwargs):
    with pytest.raises(MisconfigurationException) as error:
        transport = Passing(participants(of_clients, datamodule or data(), tmp_path))
        deploy(method, datamodule or data(), tmp_path, transport, **kwargs)
    return str(error.value)


def with_anchors():
    phases = METHODS["FedJETs"].phases()
    phases[-1].algorithm.anchors = True
    return phases


@pytest.mark.parametrize("name", ["FedJETs", "PMMoE"])
def test_methods_whose_server_needs_the_clients_before_the_first_round_are_refused(name, tmp_path):
    method = METHODS[name] if name == "PMMoE" else replace(METHODS[name], phases=with_anchors)
    assert f"{name} cannot be deployed, because its server computes with the clients' data" in refusal(
        tmp_path, method, method
    )
    assert not [*tmp_path.glob("server/*/version_*")]


def test_a_result_from_a_checkpoint_is_refused(tmp_path):
    method = replace(METHOD, phases=lambda: [replace(p, ckpt_path="some.ckpt") for p in METHOD.phases()[:1]])
    assert "ckpt_path is 'some.ckpt', but must be left out in a deployed federation" in refusal(tmp_path, method)
