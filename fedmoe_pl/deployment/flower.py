"""Flower as the network between server and clients; the only module that uses what Flower does not document.

``fedmoe serve`` starts Flower's SuperLink as a child process, and is the ServerApp of a run in it. ``fedmoe join``
starts Flower's SuperNode as a child process, and answers the messages that arrive there. Both children run with
``--isolation process``: by default, Flower would start a new Python for every message, and import PyTorch in it. So no
code that a server sends is executed at a client, either.
"""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Flower is not installed where types are checked: it cannot be together with other extras.
import ctypes
import hashlib
import os
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Array, ArrayRecord, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fedmoe_pl.deployment.clients import Transport
from fedmoe_pl.deployment.messages import BadMessageError, Message

TYPE = "train.fedmoe_pl"
"""Flower's name for all messages between server and clients."""
_RECORD, _ARRAY, _STYPE = "message", "content", "fedmoe_pl"
_LOOK = 0.1  # seconds between two looks for messages
_LINK_STARTS_WITHIN = 120.0
# Flower refuses a node for a minute after its process was killed, because it still counts as connected
_REFUSED_FOR = 120.0
_STILL_CONNECTED = "code: 2004"
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
_APP = b"""
[project]
name = "fedmoe-pl"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedmoe-pl"
[tool.flwr.app.components]
serverapp = "fedmoe_pl.cli.flower_app:server"
clientapp = "fedmoe_pl.cli.flower_app:client"
"""
# no telemetry, no look for updates, no installation of packages
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


@dataclass(frozen=True)
class Security:
    """How a connection is secured.

    Attributes:
        ca: certificate of the authority that signed the server's certificate; None without TLS.
        certificate: the server's certificate.
        key: the private key: the server's, of its certificate; a client's, in OpenSSH format, by which it is known.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def root(self) -> bytes | None:
        """The authority's certificate."""
        return None if self.ca is None else self.ca.read_bytes()

    def connection(self, address: str) -> dict[str, Any]:
        """Arguments of Flower's HTTP clients."""
        return {"server_address": address, "insecure": self.ca is None, "root_certificates": self.root}


def packed(message: Message) -> RecordDict:
    """A message as Flower carries it: one array of bytes, because Flower sends each object by itself."""
    content = message.to_bytes()
    array = Array(dtype="uint8", shape=(len(content),), stype=_STYPE, data=content)
    return RecordDict({_RECORD: ArrayRecord({_ARRAY: array})})


def unpacked(content: RecordDict) -> Message:
    """The message in what Flower carried.

    Raises:
        BadMessageError: if there is none.
    """
    try:
        record = content[_RECORD]
        assert isinstance(record, ArrayRecord)
        return Message.from_bytes(record[_ARRAY].data)
    except (KeyError, AssertionError, TypeError) as error:
        raise BadMessageError("it has no message of fedmoe_pl") from error


class FlowerTransport(Transport):
    """Carries messages over a grid of Flower.

    Which node is which client, a node says itself when it is asked for its description.

    Args:
        grid: the grid of a run.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.nodes: dict[int, int] = {}  # by client
        self._refused: set[int] = set()  # nodes that say they are a client which another node is
        self._owed: dict[int, str] = {}  # the messages that nodes work on although nobody waits for the answer

    def ask(self, messages: Mapping[int, Message], seconds: float | None) -> dict[int, Message]:
        """Sends each client its message; looks for new nodes before."""
        self._find()
        of_nodes = {self.nodes[client]: message for client, message in messages.items() if client in self.nodes}
        answers = self._ask_nodes(of_nodes, seconds)
        return {client: answers[node] for client, node in self.nodes.items() if node in answers}

    def _find(self) -> None:
        """Asks new nodes which clients they are, and forgets those that are gone."""
        online = {*self.grid.get_node_ids()}
        self.nodes = {client: node for client, node in self.nodes.items() if node in online}
        new = online - {*self.nodes.values()} - self._refused
        for node, answer in self._ask_nodes(dict.fromkeys(new, Message("describe")), None).items():
            client = answer.values.get("client")
            if not isinstance(client, int):
                rank_zero_warn(f"node {node} is left out: {answer.values.get('reason', 'it is no client')}")
                self._refused.add(node)
            elif client in self.nodes:
                rank_zero_warn(f"node {node} is left out: it says that it is client {client}, which is connected.")
                self._refused.add(node)
            else:
                self.nodes[client] = node

    def _ask_nodes(self, messages: Mapping[int, Message], seconds: float | None) -> dict[int, Message]:
        """Sends each node its message, and collects the answers that come in time."""
        self._collect_owed()
        free = [node for node in messages if node not in self._owed]
        life = {} if seconds is None else {"ttl": seconds}
        sent = [
            FlowerMessage(packed(messages[node]), dst_node_id=node, message_type=TYPE, group_id="", **life)
            for node in free
        ]
        ids = [*self.grid.push_messages(sent)] if sent else []
        waiting = {id: node for id, node in zip(ids, free, strict=True) if id}
        answers: dict[int, Message] = {}
        end = None if seconds is None else time.monotonic() + seconds
        while waiting and (end is None or time.monotonic() < end):
            for reply in self.grid.pull_messages([*waiting]):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    rank_zero_info(f"node {node}: {reply.error.reason}")
                    continue
                try:
                    answers[node] = unpacked(reply.content)
                except BadMessageError as error:
                    answers[node] = Message("failed", {"reason": f"BadMessageError: {error}"})
            time.sleep(_LOOK)
        self._owed |= {node: id for id, node in waiting.items()}
        return answers

    def _collect_owed(self) -> None:
        """Drops answers that came too late: a node works on one message at a time."""
        if self._owed:
            for reply in self.grid.pull_messages([*self._owed.values()]):
                id = reply.metadata.reply_to_message_id
                self._owed = {node: owed for node, owed in self._owed.items() if owed != id}


@contextmanager
def superlink(folder: Path, address: str, security: Security, keys: Path | None) -> Iterator[Grid]:
    """Runs a SuperLink as a child process, and gives the grid of a new run in it.

    Args:
        folder: for Flower's database, secrets and log; made if it is missing.
        address: host and port to listen on.
        security: certificates; none without TLS.
        keys: folder of the clients' public keys, ``*.pub``; None if clients need none.

    Raises:
        MisconfigurationException: if it does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    secret = folder / "secret"
    if not secret.is_file():
        secret.touch(mode=0o600)
        secret.write_bytes(secrets.token_bytes(32))
    host, port = split_address(address)
    arguments = ["--host", host, "--port", str(port), "--isolation", "process", "--database", str(folder / "state.db")]
    arguments += ["--superexec-auth-secret-file", str(secret)]
    if security.ca is None:
        arguments += ["--insecure"]
    else:
        arguments += ["--ssl-ca-certfile", str(security.ca), "--ssl-certfile", str(security.certificate)]
        arguments += ["--ssl-keyfile", str(security.key)]
    arguments += ["--enable-supernode-auth"] if keys else []
    log = folder / "superlink.log"
    with _child([sys.executable, "-m", "fedmoe_pl.deployment.superlink", *arguments], log, folder) as process:
        local = f"127.0.0.1:{port}" if host in ("0.0.0.0", "::") else address
        _wait_for_link(process, local, security, log)
        control = ControlHttpClient.from_server_address(**security.connection(local), interceptors=[])
        for key in sorted(keys.glob("*.pub")) if keys else []:
            _register(control, key)
        with _grid(control, local, security, secret.read_bytes()) as grid:
            yield grid


def _wait_for_link(process: subprocess.Popen[bytes], address: str, security: Security, log: Path) -> None:
    url = f"{'http' if security.ca is None else 'https'}://{address}/health"
    end = time.monotonic() + _LINK_STARTS_WITHIN
    while process.poll() is None and time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if httpx.get(url, verify=_context(security.ca)).is_success:
                return
        time.sleep(_LOOK)
    raise MisconfigurationException(f"serve: Flower's SuperLink does not start at {address}: {_reason(log)}")


def _context(ca: Path | None) -> ssl.SSLContext:
    """What a certificate is checked against."""
    return ssl.create_default_context(cafile=None if ca is None else str(ca))


def _register(control: ControlHttpClient, key: Path) -> None:
    try:
        public = load_ssh_public_key(key.read_bytes())
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        control.RegisterNode(RegisterNodeRequest(public_key=pem))
    except (ValueError, UnsupportedAlgorithm, httpx.HTTPStatusError) as error:
        reason = error.response.text if isinstance(error, httpx.HTTPStatusError) else str(error)
        if "already in use" not in reason:  # a SuperLink with the same database knows it
            raise MisconfigurationException(
                f"serve: client_keys has '{key}', but must have public keys of the type ecdsa in OpenSSH format "
                f"({reason.strip()})."
            ) from error


@contextmanager
def _grid(control: ControlHttpClient, address: str, security: Security, secret: bytes) -> Iterator[Grid]:
    """Starts a run, and takes the place of its ServerApp in this process."""
    fab, _ = build_fab_from_files({"pyproject.toml": _APP})
    control.StartRun(StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))))
    interceptors = [
        RuntimeVersionHttpInterceptor(component_name="SuperExec"),
        SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE),
    ]
    asker = RuntimeHttpClient.from_server_address(**security.connection(address), interceptors=interceptors)
    while not (task := asker.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))).token:
        time.sleep(_LOOK)
    grid = HttpGrid(address, insecure=security.ca is None, root_certificates=security.root, token=task.token)
    client = grid._runtime_client
    of_run = client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = of_run.task_id, of_run.run.run_id
    TaskIdentity.node_id = of_run.context.node_id
    grid.set_run(run_from_proto(of_run.run))
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    status, details = SubStatus.FAILED, ""
    try:
        yield grid
        status = SubStatus.COMPLETED
    except BaseException as error:
        details = repr(error)
        raise
    finally:
        with suppress(httpx.HTTPError):
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
        heartbeat.stop()
        grid.close()


def answer_messages(answer: Callable[[Message], Message], folder: Path, address: str, security: Security) -> None:
    """Runs a SuperNode as a child process, and answers the messages that arrive there until the server ends.

    Args:
        answer: answers a message.
        folder: for the SuperNode's log; made if it is missing.
        address: host and port of the server.
        security: the authority's certificate and the client's key; none without TLS.

    Raises:
        MisconfigurationException: if the server refuses the client.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, refused_since = folder / "supernode.log", None
    while True:
        _wait_for_server(address, security)
        port = _free_port()
        arguments = ["flower-supernode", "--superlink", address, "--isolation", "process"]
        arguments += ["--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--insecure"] if security.ca is None else ["--root-certificates", str(security.ca)]
        arguments += ["--auth-supernode-private-key", str(security.key)] if security.key else []
        command = [str(Path(sys.executable).with_name(arguments[0])), *arguments[1:]]
        with _child(command, log, folder) as process:
            ended = _answer_tasks(process, f"127.0.0.1:{port}", answer)
        if ended:
            return
        text = log.read_text(errors="replace")
        now = time.monotonic()
        refused_since = (refused_since or now) if _STILL_CONNECTED in text else None
        if refused_since is None or now - refused_since > _REFUSED_FOR:
            raise MisconfigurationException(f"join: the server at {address} does not take this client: {_reason(log)}")
        time.sleep(5)


def _wait_for_server(address: str, security: Security) -> None:
    """Waits until the server can be reached, and says that it does.

    Raises:
        MisconfigurationException: if one of both has TLS and the other has not, or the certificate is not of ``ca``.
    """
    url, verify = f"{'http' if security.ca is None else 'https'}://{address}/v1/fleet/", _context(security.ca)
    said = False
    while True:
        try:
            httpx.get(url, verify=verify)  # whatever it answers
            return
        except httpx.RemoteProtocolError as error:
            if security.ca is None:
                raise MisconfigurationException(
                    f"join: ca is missing, but the server at {address} needs TLS ({error})."
                ) from error
        except httpx.ConnectError as error:
            if isinstance(_cause(error), ssl.SSLError):
                raise MisconfigurationException(
                    f"join: ca is '{security.ca}', but the server at {address} has no certificate that it signed "
                    f"({error})."
                ) from error
        except httpx.HTTPError:  # it may be about to start or to end
            pass
        if not said:
            rank_zero_info(f"join: there is no server at {address} yet; waiting.")
            said = True
        time.sleep(1)


def _cause(error: BaseException) -> BaseException:
    """The first exception that led to another one."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def _answer_tasks(process: subprocess.Popen[bytes], address: str, answer: Callable[[Message], Message]) -> bool:
    """Answers messages until the server says that it ends, or the SuperNode does; returns whether it was the server."""
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")

    def connect(*interceptors: Any) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=address,
            insecure=True,  # a connection within this machine
            root_certificates=None,
            interceptors=[version, *interceptors],
            retry_invoker=make_simple_http_retry_invoker() if interceptors else None,
        )

    asker = connect()
    while process.poll() is None:
        try:
            task = asker.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        except httpx.HTTPError:  # it has not started yet, or it ends
            time.sleep(_LOOK)
            continue
        if not task.token:
            time.sleep(_LOOK)
        elif _answer_task(connect(RuntimeTokenHttpInterceptor(task.token)), answer):
            time.sleep(1)  # for the answer to reach the server
            return True
    return False


def _answer_task(client: RuntimeHttpClient, answer: Callable[[Message], Message]) -> bool:
    """Answers one message; returns whether it was the last one."""
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    context, status, is_end = None, SubStatus.FAILED, False
    try:
        received, context, *_ = pull_task_input(client)
        try:
            message = unpacked(received.content)
            is_end = message.kind == "end"
            reply = FlowerMessage(packed(Message("ended") if is_end else answer(message)), reply_to=received)
            status = SubStatus.COMPLETED
        except BadMessageError as error:
            reply = FlowerMessage(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=received)
        push_message(client, reply, context)
    finally:
        push_task_output(client, context, status, "")
        heartbeat.stop()
        client.close()
    return is_end


@contextmanager
def _child(command: list[str], log: Path, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process of Flower, which ends with this context."""
    environment = {**os.environ, **_QUIET, "FLWR_HOME": str(home / "flower"), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, preexec_fn=_end_with_parent
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_with_parent() -> None:
    """Has the kernel end this process with its parent, however that ends: a SuperNode would keep its place."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _reason(log: Path) -> str:
    """The line of a log that says what is wrong: one with an error code of Flower, or the last one."""
    text = re.sub(r"\x1b\[[\d;]*m", "", log.read_text(errors="replace"))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    telling = [line for line in lines if line and not re.match(r"INFO|Exit Code|For more information", line)]
    with_code = [line for line in telling if line.startswith("[code:")]
    return f"{['it says nothing', *telling, *with_code][-1].rstrip('.')} (log: {log})"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address.

    Raises:
        MisconfigurationException: if it is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise MisconfigurationException(f"address is '{address}', but must be a host and a port, as 127.0.0.1:8000.")
    return host, int(port)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
