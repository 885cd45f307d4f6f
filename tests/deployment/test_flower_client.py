"""A client's side of Flower, as far as it can be tested without a server; needs the extra `flower`."""

import logging
import re
import socket
import ssl
import sys
import threading
import time
from contextlib import contextmanager, suppress
from email.utils import formatdate
from types import SimpleNamespace

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

pytest.importorskip("flwr", reason="needs the extra `flower`")

import httpx
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from helpers.deployed import federation
from helpers.methods import METHODS

from fedmoe_pl.cli import flower_app
from fedmoe_pl.deployment import Message, flower_processes
from fedmoe_pl.deployment.connection import Security, free_port
from fedmoe_pl.deployment.flower import packed, unpacked
from fedmoe_pl.deployment.flower_inside import LostMessageError, Tasks, has_lost_server, pulling, retries
from fedmoe_pl.deployment.flower_keys import provision
from fedmoe_pl.deployment.flower_processes import Server, answer_tasks
from fedmoe_pl.deployment.serve_and_join import own_folder


def test_a_message_is_given_up_if_its_server_was_killed_while_it_was_received(tmp_path):
    log = tmp_path / "supernode.log"
    log.write_text("INFO : Run ID 7 is not in `RUNNING` status. Ignoring message 01c2.")
    missing = SimpleNamespace(object_found=True, object_available=False)
    whole = SimpleNamespace(object_found=True, object_available=True)
    request = SimpleNamespace(run_id=7, object_id="a")
    with pytest.raises(ObjectPullError):
        pulling(lambda _: missing, log)(request)
    assert pulling(lambda _: whole, log)(request) is whole
    request.run_id = 8  # of the server that goes on, from which the rest is still on its way
    assert pulling(lambda _: missing, log)(request) is missing


@pytest.fixture
def keys(tmp_path):
    provision(tmp_path / "keys", 1, ["localhost"], 1)
    return tmp_path / "keys"


@contextmanager
def listening(answer):
    """The address of a process that answers each connection, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_all():
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with suppress(OSError), connection:
                        answer(connection)

        threading.Thread(target=answer_all, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def with_tls(keys):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server/server.pem", keys / "server/server.key")
    return listening(lambda connection: context.wrap_socket(connection, server_side=True).close())


def without_tls(connection):
    connection.recv(2**16)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("has_ca", [True, False])
def test_a_proxy_that_accepts_and_closes_is_a_server_that_is_down(keys, has_ca):
    with listening(lambda connection: None) as address:
        assert not Server(address, Security(ca=keys / "server/ca.pem" if has_ca else None))._reaches()


def test_a_server_without_tls_and_a_client_without_a_certificate_are_told_so(keys):
    ca, sentence = keys / "server/ca.pem", "has no valid certificate signed by"
    with with_tls(keys) as address, pytest.raises(MisconfigurationException, match="--keys is not given, but"):
        Server(address, Security())._reaches()
    with listening(without_tls) as address, pytest.raises(MisconfigurationException, match=sentence):
        Server(address, Security(ca=ca))._reaches()


def test_a_client_names_what_is_wrong_with_the_servers_certificate(keys, tmp_path):
    provision(tmp_path / "others", 1, ["localhost"], 1)
    sentence = r"^join: the server at .* has no valid certificate signed by '.*' \([^_]*\)\.$"
    with with_tls(keys) as address, pytest.raises(MisconfigurationException, match=sentence):
        Server(address, Security(ca=tmp_path / "others/server/ca.pem"))._reaches()


def test_a_message_whose_supernode_has_ended_is_lost_and_does_not_end_the_client(tmp_path):
    tasks = Tasks(f"127.0.0.1:{free_port()}", tmp_path / "supernode.log")
    assert tasks.next() == ""
    with pytest.raises(LostMessageError):
        tasks.answer("token", lambda content: content)


@pytest.mark.parametrize(
    ("log", "has_lost"),
    [
        ("INFO : SuperNode ID: 12\nSuperNode terminated gracefully.", True),
        ("Exit Code: 305\nFailed to initialize the connection to the SuperLink.\n[SSL: UNEXPECTED_EOF]", True),
        ("Exit Code: 305\nFailed to initialize the connection to the SuperLink.\n[code: 2004] Failed", False),
        ("Exit Code: 302\nThe SuperNode's private key is invalid.", False),
    ],
)
def test_a_supernode_that_lost_its_server_is_replaced_and_one_that_was_refused_is_not(log, has_lost, tmp_path):
    path = tmp_path / "supernode.log"
    path.write_text(log)
    assert has_lost_server(path) is has_lost


@pytest.mark.parametrize("line", ["SSL/TLS handshake error detected.", "Failed to send message 01c2: gone"])
def test_a_supernode_whose_process_goes_on_after_it_has_given_up_is_left(line, tmp_path):
    log = tmp_path / "supernode.log"
    log.write_text(f"\x1b[92mINFO \x1b[0m:      SuperNode ID: 7\n\x1b[91mERROR \x1b[0m:     {line}\n")
    lives, server = SimpleNamespace(poll=lambda: None), SimpleNamespace(look=lambda: True)
    assert not answer_tasks(pytest.fail, lives, Tasks(f"127.0.0.1:{free_port()}", log), server)


def dated(ahead):
    """A server whose clock is behind, so that the client's is ahead of it."""

    def answer(connection):
        connection.recv(2**16)
        date = formatdate(time.time() - ahead, usegmt=True)
        connection.sendall(f"HTTP/1.1 404 Not Found\r\nDate: {date}\r\nContent-Length: 0\r\n\r\n".encode())

    return answer


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (0, ""),
        (60, r"this machine's clock is (59|6\d) s ahead of the server's"),
        (-400, r"this machine's clock is (39\d|40\d) s behind the server's"),
    ],
)
@pytest.mark.parametrize("key", [None, "client_0"])
def test_a_client_compares_its_clock_with_the_servers_and_says_the_difference(ahead, said, key, caplog):
    limits = ", and Flower takes signatures at most 5 s ahead and 305 s behind" if key and said else ""
    with listening(dated(ahead)) as address, caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        server = Server(address, Security(key=key))
        server.wait()
        server.wait()
    assert re.fullmatch(said + limits, server.difference_of_clocks)
    assert len(caplog.messages) == bool(said)
    assert all(re.fullmatch(rf"join: {said}{limits}\.", message) for message in caplog.messages)


def test_a_client_that_is_refused_says_that_its_clock_may_be_the_reason(tmp_path, monkeypatch):
    @contextmanager
    def refused(command, log, home):
        log.write_text("")
        yield SimpleNamespace(poll=lambda: 1)

    monkeypatch.setattr(flower_processes, "child", refused)
    reason = r"does not take this client: it says nothing \(log: .*\); this machine's clock is \d+ s ahead of the"
    with listening(dated(60)) as address, pytest.raises(MisconfigurationException, match=reason):
        flower_processes.answer_messages(pytest.fail, tmp_path, address, Security())


def test_requests_are_tried_again_only_while_the_superlink_lives():
    tried = []

    def request(error):
        tried.append(error)
        raise error

    refused, busy, denied = httpx.ConnectError("refused"), *(status_error(status) for status in (503, 401))
    for error, lives, tries in ((refused, 2, 3), (busy, 1, 2), (refused, 0, 1), (denied, 9, 1)):
        left, tried[:] = iter([True] * lives), []
        invoker = retries(lambda left=left: next(left, False))
        invoker.wait_function = lambda seconds: None
        with pytest.raises(type(error)):
            invoker.invoke(request, error)
        assert len(tried) == tries
    tried[:] = []
    hangs = retries(lambda: True)
    hangs.max_time = 0
    with pytest.raises(httpx.ConnectError):
        hangs.invoke(request, refused)
    assert len(tried) == 1 and 60 <= retries(lambda: True).max_time <= 300


def status_error(status):
    request = httpx.Request("GET", "http://a")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize(("how", "name"), [("terminate", "SIGTERM"), ("kill", "SIGKILL")])
def test_a_server_whose_superlink_has_ended_says_so(how, name, tmp_path, monkeypatch):
    @contextmanager
    def grid_of_run(connection, secret, lives):
        assert lives()
        yield lives

    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]
    for own, replacement in (("superlink_command", lambda *_: sleeper), ("_wait_for_link", lambda *_: None)):
        monkeypatch.setattr(flower_processes, own, replacement)
    monkeypatch.setattr(flower_processes, "grid_of_run", grid_of_run)
    children, of_flower = [], flower_processes.child

    @contextmanager
    def noted(*arguments):
        with of_flower(*arguments) as process:
            children.append(process)
            yield process

    monkeypatch.setattr(flower_processes, "child", noted)
    sentence = rf"^serve: Flower's SuperLink, .*, has ended \({name}\); start serve again with --ckpt_path last .*\.$"
    with (
        pytest.raises(MisconfigurationException, match=sentence),
        flower_processes.superlink(tmp_path, f"127.0.0.1:{free_port()}", Security(), 1) as transport,
    ):
        getattr(children[0], how)()
        children[0].wait()
        assert not transport.grid()
        raise httpx.ConnectError("connection refused")


def test_flowers_own_commands_send_the_server_no_text_of_an_exception(capsys, monkeypatch):
    monkeypatch.setattr(flower_app, "FlowerMessage", lambda content, reply_to: content)
    context = SimpleNamespace(node_config={"arguments": "--config /data/patients.yaml", "client": 0})
    answer = unpacked(flower_app.answer(SimpleNamespace(content=packed(Message("describe"))), context))
    assert (answer.kind, answer.values) == ("failed", {"failure": "configuration"})
    assert "/data/patients.yaml" in capsys.readouterr().err


def test_flowers_own_commands_refuse_phases_that_need_a_client_s_memory(tmp_path, capsys, monkeypatch):
    phases = METHODS["SecureAggregation"].phases()
    monkeypatch.setattr(flower_app, "FlowerMessage", lambda content, reply_to: content)
    monkeypatch.setattr(flower_app, "objects_of", lambda _: (federation(phases, tmp_path), None, None))
    reason = "secure_aggregation is .*, but must be left out, because Flower's own commands start a client anew"
    values = {"arguments": "", "num-clients": 3, "client": 0}
    context = SimpleNamespace(run_config=values, node_config=values)
    with pytest.raises(MisconfigurationException, match=f"^{phases[0]}: {reason}"):
        flower_app.run_server(None, context)
    assert unpacked(flower_app.answer(SimpleNamespace(content=packed(Message("describe"))), context)).kind == "failed"
    assert re.search(reason, capsys.readouterr().err)


def test_with_flowers_own_commands_no_other_user_reads_what_a_client_keeps_and_no_other_process_writes_it(
    tmp_path, capsys, monkeypatch
):
    def answered(message):
        (folder / "kept").touch()
        return Message("noted")

    folder = tmp_path / "runs/client_0"
    monkeypatch.setattr(flower_app, "FlowerMessage", lambda content, reply_to: content)
    monkeypatch.setattr(flower_app, "_participant", lambda *_: SimpleNamespace(folder=folder, answer=answered))
    context, message = SimpleNamespace(node_config={"arguments": "", "client": 0}), Message("note", {"text": ""})

    def answer():
        return unpacked(flower_app.answer(SimpleNamespace(content=packed(message)), context)).kind

    assert answer() == "noted"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "kept")] == [0o700, 0o600]
    with own_folder(folder / "flower"):  # as `join` does
        assert answer() == "failed"
    assert "Another process uses" in capsys.readouterr().err
