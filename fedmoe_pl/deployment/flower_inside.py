"""All that this package uses of Flower without its being documented, as read in Flower 1.41 and 1.42.

Flower would start a new Python for every message, and import PyTorch in it; here, server and clients are one process
each, which take the places of Flower's ServerApp and ClientApp. So no code that a server sends is executed at a client.
``tests/deployment/test_flower_inside.py`` says which of these interfaces a newer Flower has changed.

As a script, this module is the SuperLink, of which other machines reach only the part for clients. Flower has one port
for clients (``/v1/fleet``), for those who start runs (``/v1/control``) and for the processes that execute them
(``/v1/runtime``). Keys of clients guard the first only: whoever reaches the others can register a key and start a run
with code of his own. So the SuperLink answers only its own machine there. A reverse proxy on the same machine, through
which others seem to come from it, must let only paths below ``/v1/fleet/`` through. A script imports nothing else of
this package, and no PyTorch.
"""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Flower is not installed where types are checked: it cannot be together with other extras.
import hashlib
import ipaddress
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE, TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import RetryInvoker, constant
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

HEALTH, FLEET = "/health", "/v1/fleet/"
"""Paths of the SuperLink: whether it has started, and what is for clients."""
STILL_CONNECTED = "[code: 2004]"
"""What a SuperNode says whose key is unknown, or counts as connected: for a minute after its process was killed."""
MOST_AHEAD, MOST_BEHIND = SYSTEM_TIME_TOLERANCE, SYSTEM_TIME_TOLERANCE + TIMESTAMP_TOLERANCE
"""Seconds that the clock of a SuperNode with a key may differ from the SuperLink's."""
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
_PASSING = (502, 503, 504)  # statuses of a server that is busy
_RETRIES_WITHIN = 120.0  # seconds in which a SuperLink must answer whose process goes on; the machine may be busy
_App = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]  # of ASGI


class LostMessageError(Exception):
    """A message, or the answer to it, is lost, because server or SuperNode ended."""


def superlink_command(
    host: str, port: int, database: Path, secret: Path, tls: Sequence[Path] | None, with_keys: bool
) -> list[str]:
    """The command of a SuperLink; ``tls`` are the authority's certificate, the certificate and its private key."""
    # -P, because the script's folder has modules of this package
    command = [sys.executable, "-P", __file__, "--host", host, "--port", str(port), "--isolation", "process"]
    command += ["--database", str(database), "--superexec-auth-secret-file", str(secret)]
    names = ("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile")
    command += ["--insecure"] if tls is None else [f"{name}={path}" for name, path in zip(names, tls, strict=True)]
    return command + (["--enable-supernode-auth"] if with_keys else [])


def supernode_command(address: str, port: int, ca: Path | None, key: Path | None) -> list[str]:
    """The command of a SuperNode, which connects to an address, and is asked for messages at a port of this machine."""
    command = [str(Path(sys.executable).with_name("flower-supernode")), "--superlink", address]
    command += ["--isolation", "process", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--insecure"] if ca is None else ["--root-certificates", str(ca)]
    return command + (["--auth-supernode-private-key", str(key)] if key else [])


def reason_in(log: Path) -> str:
    """The line of a log that says what is wrong: one with an error code of Flower, or the last one."""
    text = re.sub(r"\x1b\[[\d;]*m", "", log.read_text(errors="replace"))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    telling = [line for line in lines if line and not re.match(r"INFO|WARNING|Exit Code|For more information", line)]
    with_code = [line for line in telling if line.startswith("[code:")]
    return f"{['it says nothing', *telling, *with_code][-1].rstrip('.')} (log: {log})"


def has_lost_server(log: Path) -> bool:
    """Whether a SuperNode ended because the server did: it was connected, or no answer of the server refused it."""
    text = log.read_text(errors="replace")
    return "SuperNode ID: " in text or ("Exit Code: 305" in text and "[code: " not in text)


def register(connection: dict[str, Any], public_key: bytes) -> int:
    """Registers a client's public key at a SuperLink; returns the id of the node that has it."""
    try:
        with ControlHttpClient.from_server_address(**connection, interceptors=[]) as control:
            return control.RegisterNode(RegisterNodeRequest(public_key=public_key)).node_id
    except httpx.HTTPStatusError as error:
        raise ValueError(error.response.text.strip()) from error


def retries(lives: Callable[[], bool]) -> RetryInvoker:
    """Has requests tried again while the SuperLink's process lives; Flower's own retries go on for ever."""

    def is_lasting(error: Exception) -> bool:
        is_status = isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in _PASSING
        return is_status or not lives()

    errors = (httpx.TransportError, httpx.HTTPStatusError)
    return RetryInvoker(lambda: constant(0.5), errors, None, _RETRIES_WITHIN, jitter=None, should_giveup=is_lasting)


@contextmanager
def grid_of_run(connection: dict[str, Any], secret: bytes, lives: Callable[[], bool]) -> Iterator[Grid]:
    """Starts a run in a SuperLink, and takes the place of its ServerApp in this process.

    Requests raise an ``httpx.HTTPError`` once the SuperLink does not live any more, as ``lives`` says.
    """
    fab, _ = build_fab_from_files({"pyproject.toml": _APP})
    with ControlHttpClient.from_server_address(**connection, interceptors=[]) as control:
        control.StartRun(StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))))
    interceptors = [
        RuntimeVersionHttpInterceptor(component_name="SuperExec"),
        SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE),
    ]
    with RuntimeHttpClient.from_server_address(**connection, interceptors=interceptors) as asker:
        while not (task := asker.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))).token:
            time.sleep(0.1)
    address, insecure, root = connection["server_address"], connection["insecure"], connection["root_certificates"]
    grid = HttpGrid(address, insecure, root, token=task.token)
    grid._retry_invoker = invoker = retries(lives)
    client = grid._runtime_client
    of_run = client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = of_run.task_id, of_run.run.run_id
    TaskIdentity.node_id = of_run.context.node_id
    grid.set_run(run_from_proto(of_run.run))
    heartbeat = HeartbeatSender(_heartbeat_of(client))
    heartbeat.start()
    status, details = SubStatus.FAILED, ""
    try:
        yield grid
        status = SubStatus.COMPLETED
    except BaseException as error:
        details, invoker.max_time = repr(error), 0
        raise
    finally:
        with suppress(httpx.HTTPError):
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
        heartbeat.stop()
        grid.close()


class Tasks:
    """What a SuperNode at an address of this machine has received, one message after the other."""

    def __init__(self, address: str, log: Path) -> None:
        self.address = address
        self.log = log
        self._asker = self._client()

    def _client(self, *interceptors: Any) -> RuntimeHttpClient:
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        of_this_machine = {"server_address": self.address, "insecure": True, "root_certificates": None}
        # without Flower's retries, which go on for ever when the SuperNode has ended
        return RuntimeHttpClient.from_server_address(**of_this_machine, interceptors=[version, *interceptors])

    def next(self) -> str:
        """The token of the next message; empty if there is none, or the SuperNode has not started yet."""
        try:
            return self._asker.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])).token
        except httpx.HTTPError:
            return ""

    def has_failed(self) -> bool:
        """Whether the SuperNode has given up, after which its process goes on, or has lost a message."""
        return "ERROR" in self.log.read_text(errors="replace")

    def answer(self, token: str, answer: Callable[[RecordDict], RecordDict]) -> None:
        """Answers the message with a token."""
        client = self._client(RuntimeTokenHttpInterceptor(token))
        client.PullObject = pulling(client.PullObject, self.log)
        heartbeat = HeartbeatSender(_heartbeat_of(client))
        heartbeat.start()
        try:
            with _lost():
                received, context, *_ = pull_task_input(client)
            reply = Message(answer(received.content), reply_to=received)
            with _lost():
                push_message(client, reply, context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        finally:
            heartbeat.stop()
            client.close()


@contextmanager
def _lost() -> Iterator[None]:
    """What Flower raises when a SuperNode has ended, or has forgotten a message whose server was killed."""
    try:
        yield
    except (ObjectPullError, ObjectPushError, RuntimeError, httpx.HTTPError) as error:
        raise LostMessageError(f"{type(error).__name__}: {error}") from error


def _heartbeat_of(client: RuntimeHttpClient) -> Callable[[], bool]:
    """Says that a task is worked on; Flower's own would interrupt this process if nobody waits for it any more."""

    def beat() -> bool:
        try:
            return client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
        except httpx.HTTPError:
            return False

    return beat


def pulling(pull: Callable[[Any], Any], log: Path) -> Callable[[Any], Any]:
    """Gives a message up whose server was killed while the SuperNode received it.

    Flower would wait for the rest of it for more than an hour, although the SuperNode's log says that it ignores it.
    """

    def pull_or_give_up(request: Any) -> Any:
        response = pull(request)
        ignored = f"Run ID {request.run_id} is not in `RUNNING` status"
        if response.object_found and not response.object_available and ignored in log.read_text(errors="replace"):
            raise ObjectPullError(request.object_id, "the server was killed")
        return response

    return pull_or_give_up


class FleetOnly:
    """An application that answers only what comes from this machine, and what is for clients."""

    def __init__(self, app: _App) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answers a request; signature of ASGI."""
        if scope["type"] in ("http", "websocket") and not is_allowed(scope["path"], scope["client"]):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"only the server's own machine may do this"})
            return
        await self.app(scope, receive, send)


def is_allowed(path: str, client: tuple[str, int] | None) -> bool:
    """Whether a request may pass."""
    if client is not None and ipaddress.ip_address(client[0]).is_loopback:
        return True
    return path.startswith(FLEET) and ".." not in path


def main() -> None:
    """Runs the SuperLink; takes the arguments of ``flower-superlink``."""
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    config = _parse_superlink_lifespan_config()
    uvicorn.run(
        FleetOnly(create_app(config, SuperLinkLifespan)),
        host=config.host,
        port=config.port,
        log_config=get_uvicorn_log_config(console_handler.level),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        # else an environment variable decides whose headers may claim to be this machine
        forwarded_allow_ips="127.0.0.1",
        workers=1,
        timeout_graceful_shutdown=2,  # seconds; requests for messages that never come would hold it up
    )


if __name__ == "__main__":
    main()
