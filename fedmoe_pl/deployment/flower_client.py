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
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
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
from fedmoe_pl.deployment.processes import child, reason_in

# Flower refuses a node for a minute after its process was killed, because it still counts as connected
_REFUSED_FOR = 120.0
_STILL_CONNECTED = "code: 2004"
_SECONDS_BETWEEN_LOOKS = 10.0  # while there is nothing to answer


def answer_messages(answer: Callable[[Message], Message], folder: Path, address: str, security: Security) -> None:
    """Runs a SuperNode as a child process, and answers the messages that arrive there until the server ends.

    Args:
        answer: answers a message.
        folder: for the SuperNode's log.
        address: host and port of the server.
        security: the authority's certificate and the client's key; none without TLS.

    Raises:
        MisconfigurationException: if the server refuses the client.
    """
    log, server, refused_since = folder / "supernode.log", _Server(address, security), None
    while True:
        server.wait()
        port = free_port()
        with child(_supernode(address, port, security), log, folder) as process:
            if _answer_tasks(process, f"127.0.0.1:{port}", answer, server, log):
                return
        if _STILL_CONNECTED not in log.read_text(errors="replace"):
            raise MisconfigurationException(_refusal(address, log))
        if refused_since is None:
            refused_since = time.monotonic()
            rank_zero_info(
                f"join: the server at {address} refuses this client, as it does for a minute after the client was "
                f"killed; trying again for {_REFUSED_FOR:.0f} s."
            )
        if time.monotonic() - refused_since > _REFUSED_FOR:
            no_key = f"; the server knows no key '{security.key}', or another client uses it"
            raise MisconfigurationException(_refusal(address, log) + (no_key if security.key else ""))
        time.sleep(5)


def _supernode(address: str, port: int, security: Security) -> list[str]:
    """The command of a SuperNode; arguments as in :func:`answer_messages`."""
    arguments = ["--superlink", address, "--isolation", "process", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--insecure"] if security.ca is None else ["--root-certificates", str(security.ca)]
    arguments += ["--auth-supernode-private-key", str(security.key)] if security.key else []
    return [str(Path(sys.executable).with_name("flower-supernode")), *arguments]


def _refusal(address: str, log: Path) -> str:
    return f"join: the server at {address} does not take this client: {reason_in(log)}"


class _Server:
    """Whether the server can be reached; what changes is said once.

    Args:
        address: its host and port.
        security: the authority's certificate.
    """

    def __init__(self, address: str, security: Security) -> None:
        self.address = address
        self.security = security
        self._is_there = True
        self._seen = False
        self._next_look = 0.0

    def wait(self) -> None:
        """Waits until the server can be reached."""
        while not self._look():
            time.sleep(1)

    def look(self) -> None:
        """Looks whether the server can be reached, unless it did so a short time ago."""
        if time.monotonic() >= self._next_look:
            self._look()
            self._next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS

    def _look(self) -> bool:
        was_there, self._is_there = self._is_there, self._reaches()
        if was_there and not self._is_there:
            what = "cannot be reached any more" if self._seen else "cannot be reached yet"
            rank_zero_info(f"join: the server at {self.address} {what}; waiting for it.")
        if self._is_there and not was_there and self._seen:
            rank_zero_info(f"join: the server at {self.address} can be reached again.")
        self._seen |= self._is_there
        return self._is_there

    def _reaches(self) -> bool:
        """Sends it a request, whatever it answers.

        Raises:
            MisconfigurationException: if one of both has TLS and the other has not, or the certificate is not of
                ``ca``.
        """
        ca = self.security.ca
        try:
            httpx.get(f"{'https' if ca else 'http'}://{self.address}/v1/fleet/", verify=tls_context(ca))
            return True
        except httpx.RemoteProtocolError as error:
            if ca is None and not self._seen:  # later, it was killed while it answered
                raise MisconfigurationException(
                    f"join: ca is missing, but the server at {self.address} needs TLS ({error})."
                ) from error
        except httpx.ConnectError as error:
            if isinstance(_cause(error), ssl.SSLError) and not self._seen:
                raise MisconfigurationException(
                    f"join: ca is '{ca}', but the server at {self.address} has no certificate that it signed ({error})."
                ) from error
        except httpx.HTTPError:  # it may be about to start or to end
            pass
        return False


def _cause(error: BaseException) -> BaseException:
    """The first exception that led to another one."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def _answer_tasks(
    process: subprocess.Popen[bytes], address: str, answer: Callable[[Message], Message], server: _Server, log: Path
) -> bool:
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
            server.look()
            time.sleep(LOOK)
        elif _answer_task(connect(RuntimeTokenHttpInterceptor(task.token)), answer, log):
            time.sleep(3)  # for the answer to reach the server
            return True
    return False


def pulling(pull: Callable[[Any], Any], log: Path) -> Callable[[Any], Any]:
    """Gives a message up whose server was killed while the SuperNode received it.

    Flower would wait for the rest of it for more than an hour, and receive no other message.

    Args:
        pull: asks the SuperNode for a part of a message.
        log: the SuperNode's log, in which it says that it ignores the message.
    """

    def pull_or_give_up(request: Any) -> Any:
        response = pull(request)
        ignored = f"Run ID {request.run_id} is not in `RUNNING` status"
        if response.object_found and not response.object_available and ignored in log.read_text(errors="replace"):
            raise ObjectPullError(request.object_id, "the server was killed")
        return response

    return pull_or_give_up


def _answer_task(client: RuntimeHttpClient, answer: Callable[[Message], Message], log: Path) -> bool:
    """Answers one message; returns whether it was the last one."""
    client.PullObject = pulling(client.PullObject, log)
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
    except ObjectPullError:  # nobody waits for the answer
        pass
    finally:
        push_task_output(client, context, status, "")
        heartbeat.stop()
        client.close()
    return is_end
