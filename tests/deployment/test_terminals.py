"""What the terminals of a server and of its clients say, and what keeps two of them apart; without Flower."""

import logging
import os
import re
import socket
import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.deployed import Deployment, federation, participant
from helpers.methods import METHODS, data
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.callbacks import (
    ClusterMonitor,
    FederationCallback,
    GateMonitor,
    PartitionMonitor,
    ResultFiles,
    SampleMonitor,
    TokenGateMonitor,
)
from fedmoe_pl.deployment import Message, serve_and_join
from fedmoe_pl.deployment.connection import Security, check_is_free, free_port, split_address
from fedmoe_pl.deployment.serve_and_join import own_folder, plain_warnings, private
from fedmoe_pl.deployment.server import callbacks_of_server
from fedmoe_pl.phases.client_failures import RoundWarning

METHOD = METHODS["FedPer"]


@pytest.fixture
def lines(caplog):
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        yield lambda: caplog.messages


def test_a_client_says_once_that_it_has_reached_the_server_what_that_says_each_phase_and_failures(tmp_path, lines):
    client = participant(METHOD, tmp_path, 1)
    for _ in range(3):
        assert client.answer(Message("describe")).kind == "description"
    for text in ("lr is 2\nand more", "lr is 2\nand more", "the end"):
        assert client.answer(Message("note", {"text": text})).kind == "noted"
    client._answer = lambda message: client._failed("MemoryError", "no memory")
    for phase in ("A", "A", "B"):
        assert client.answer(Message("train", {"phase": phase})).kind == "failed"
    failed = "join: this client has failed: no memory."
    assert lines() == [
        "join: client 1 has described its data to the server.",
        *("join: the server says: lr is 2 and more.", "join: the server says: the end."),
        *("join: phase 'A'.", failed, "join: phase 'B'.", failed),
    ]


@pytest.mark.filterwarnings("always")
def test_a_client_that_is_away_is_named_once_in_each_phase_and_without_paths(lines):
    with plain_warnings("serve"):
        for phase in ("A", "B"):
            for round in range(1, 6):
                text = "client 1 is left out: it is not connected"
                warnings.warn(RoundWarning(phase, round, text), stacklevel=1)
    away = "client 1 is left out: it is not connected."
    assert lines() == [f"serve: A, round 1: {away}", f"serve: B, round 1: {away}"]


def test_no_other_user_of_the_machine_reads_what_a_client_keeps(tmp_path):
    folder = tmp_path / "runs/client_0"
    folder.mkdir(parents=True)  # by an older version
    before = os.umask(0o022)
    try:
        with private(folder):
            (folder / "kept").mkdir()
            (folder / "kept/0_1.safetensors").touch()
        assert [path.stat().st_mode & 0o777 for path in (folder, folder / "kept")] == [0o700, 0o700]
        assert (folder / "kept/0_1.safetensors").stat().st_mode & 0o777 == 0o600
        (tmp_path / "of_others").touch()
        assert (tmp_path / "of_others").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_clients_are_told_why_the_server_has_ended(tmp_path, monkeypatch):
    transport = Deployment(METHOD, tmp_path)
    transport.participants = {client: transport.participants[client] for client in (0, 1)}

    def refuse(*args):
        raise MisconfigurationException("client 1: the shape of its samples is [3].")

    flower = SimpleNamespace(superlink=lambda *args: nullcontext(transport))
    monkeypatch.setattr(serve_and_join, "module_of_flower", lambda *args: flower)
    monkeypatch.setattr(serve_and_join, "serve", refuse)
    settings = federation(METHOD.phases(), tmp_path)
    with pytest.raises(MisconfigurationException, match="the shape"):
        serve_and_join.run_server(settings, METHOD.model(), data(), 2, f"127.0.0.1:{free_port()}", None, False, None)
    text = "the server has ended: client 1: the shape of its samples is [3]"
    assert [(client, message.values["text"]) for client, message in transport.heard] == [(0, text), (1, text)]


def test_an_address_that_another_process_has_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(MisconfigurationException, match=f"serve: address is '{address}', but must be a free"):
            check_is_free(address)
    check_is_free(address)


@pytest.mark.parametrize("address", ["10.1.2.3:8000", "server.example:8000", "::1:8000", ":::8000"])
@pytest.mark.parametrize("secured", [(None, False), (None, True), ("nowhere", False)])
def test_an_address_at_which_a_server_cannot_reach_itself_is_refused(address, secured, tmp_path, monkeypatch):
    monkeypatch.setattr(serve_and_join, "module_of_flower", lambda *args: pytest.fail)
    settings, allowed = federation(METHOD.phases(), tmp_path), "127.0.0.1:8000, or 0.0.0.0:8000 where others connect"
    with pytest.raises(MisconfigurationException, match=f"serve: address is '{address}', but must be {allowed}"):
        serve_and_join.run_server(settings, METHOD.model(), data(), 2, address, *secured, None)


@pytest.mark.parametrize("address", ["8000", "server", "server:http", "server:0", "http://server:8000"])
def test_what_is_no_address_is_refused(address, tmp_path):
    with pytest.raises(MisconfigurationException, match=f"address is '{address}', but must be a host and a port"):
        split_address(address)
    with pytest.raises(MisconfigurationException, match=f"address is '{address}', but must be a host and a port"):
        Security.of_client(address, str(tmp_path), False, 0)


def test_two_processes_do_not_share_a_folder(tmp_path):
    with (
        own_folder(tmp_path / "client_0"),
        pytest.raises(MisconfigurationException, match=r"Another process uses '.*client_0'; end that one"),
        own_folder(tmp_path / "client_0"),
    ):
        pass
    with own_folder(tmp_path / "client_0"):
        pass


def test_the_server_draws_nothing_that_it_would_compute_from_clients_data():
    """Its stand-in for the data is zeros, with which it would choose a cluster for each client."""

    class Own(FederationCallback):
        needs_clients = True

    gates, of_clients = GateMonitor(), [PartitionMonitor(), SampleMonitor(), TokenGateMonitor(), Own()]
    files, clusters, other = callbacks_of_server([*of_clients, ResultFiles(), ClusterMonitor(), gates])
    assert (files.partition, files.gate_weights) == (False, True)
    assert isinstance(clusters, ClusterMonitor) and not clusters.by_client
    assert other is gates


def test_the_server_says_how_many_clients_secure_aggregation_can_miss(lines):
    (phase,) = METHODS["SecureAggregation"].phases()
    phases = [replace(phase, clients_per_round=share) for share in (1.0, 4)] + METHOD.phases()
    serve_and_join.say_thresholds(phases, 3, 0)
    serve_and_join.say_thresholds(phases, 8, 0)
    needs = [re.search(r"needs (\d) of the (\d) clients of a round, so (.*) may be away", line) for line in lines()]
    assert [each and each.groups() for each in needs] == [
        ("3", "3", "none"),
        ("3", "4", "at most 1"),
        ("6", "8", "at most 2"),
        ("3", "4", "at most 1"),
    ]
    assert lines()[0].endswith("secure_aggregation.threshold may be 2 to 3.")
