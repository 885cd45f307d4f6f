"""A client's side of Flower: its SuperNode as a child process, and this process as what answers its messages."""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Flower is not installed where types are checked: it cannot be together with other extras.
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Error
from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info

from fedmoe_pl.deployment.connection import Security, free_port, tls_context
from fedmoe_pl.deployment.flower import packed, unpacked
from fedmoe_pl.deployment.messages import LEAVES, BadMessageError, Message
from fedmoe_pl.deployment.nodes import LOOK
from fedmoe_pl.deployment.processes import child, make_folder, reason_in

# Flower refuses a node for a minute after its process was killed, because it still counts as connected
_REFUSED_FOR = 120.0
_STILL_CONNECTED = "code: 2004"


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
    make_folder(folder)
    log, refused_since = folder / "supernode.log", None
    while True:
        _wait_for_server(address, security)
        port = free_port()
        arguments = ["flower-supernode", "--superlink", address, "--isolation", "process"]
        arguments += ["--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--insecure"] if security.ca is None else ["--root-certificates", str(security.ca)]
        arguments += ["--auth-supernode-private-key", str(security.key)] if security.key else []
        command = [str(Path(sys.executable).with_name(arguments[0])), *arguments[1:]]
        with child(command, log, folder) as process:
            ended = _answer_tasks(process, f"127.0.0.1:{port}", answer)
        if ended:
            return
        text = log.read_text(errors="replace")
        now = time.monotonic()
        refused_since = (refused_since or now) if _STILL_CONNECTED in text else None
        if refused_since is None or now - refused_since > _REFUSED_FOR:
            raise MisconfigurationException(
                f"join: the server at {address} does not take this client: {reason_in(log)}"
            )
        time.sleep(5)


def _wait_for_server(address: str, security: Security) -> None:
    """Waits until the server can be reached, and says that it does.

    Raises:
        MisconfigurationException: if one of both has TLS and the other has not, or the certificate is not of ``ca``.
    """
    url, verify = f"{'http' if security.ca is None else 'https'}://{address}/v1/fleet/", tls_context(security.ca)
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
    """Answers messages until server or client leave, or the SuperNode ends; returns whether the former was the case."""
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
            time.sleep(LOOK)
            continue
        if not task.token:
            time.sleep(LOOK)
        elif _answer_task(connect(RuntimeTokenHttpInterceptor(task.token)), answer):
            time.sleep(3)  # for the answer to reach the server
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
            answered = Message("ended") if message.kind == "end" else answer(message)
            is_end = answered.kind in ("ended", LEAVES)
            reply = FlowerMessage(packed(answered), reply_to=received)
            status = SubStatus.COMPLETED
        except BadMessageError as error:
            reply = FlowerMessage(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=received)
        push_message(client, reply, context)
    finally:
        push_task_output(client, context, status, "")
        heartbeat.stop()
        client.close()
    return is_end
