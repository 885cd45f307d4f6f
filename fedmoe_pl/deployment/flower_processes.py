"""Flower's processes as children of ours: the server's SuperLink, and a client's SuperNode.

Our own process takes the place of the ServerApp of a run in the one, or of what answers the messages of the other.
"""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Flower is not installed where types are checked: it cannot be together with other extras.
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from flwr.app import RecordDict
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info

from fedmoe_pl.deployment.connection import (
    Security,
    free_port,
    has_tls,
    local_address,
    problem_of_tls,
    split_address,
    tls_context,
)
from fedmoe_pl.deployment.flower import FlowerTransport, packed, unpacked
from fedmoe_pl.deployment.flower_inside import (
    FLEET,
    HEALTH,
    MOST_AHEAD,
    MOST_BEHIND,
    STILL_CONNECTED,
    LostMessageError,
    Tasks,
    grid_of_run,
    has_lost_server,
    reason_in,
    register,
    superlink_command,
    supernode_command,
)
from fedmoe_pl.deployment.flower_keys import public_keys
from fedmoe_pl.deployment.messages import FAILED, LEAVES, BadMessageError, Message, one_line
from fedmoe_pl.deployment.transport import LOOK

_PR_SET_PDEATHSIG = 1  # of prctl(2)
# no telemetry, no look for updates, no installation of packages
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
_LINK_STARTS_WITHIN = 120.0
_REFUSED_FOR = 120.0  # Flower refuses a node for a minute after its process was killed
_SECONDS_BETWEEN_LOOKS = 10.0  # while there is nothing to answer
_TELLING = 3.0  # seconds between two clocks; an answer's date has whole seconds, and takes some time


@contextmanager
def child(command: list[str], log: Path, home: Path) -> Iterator[subprocess.Popen[bytes]]:
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


@contextmanager
def superlink(folder: Path, address: str, security: Security, num_clients: int) -> Iterator[FlowerTransport]:
    """Runs a SuperLink as a child process, and reaches the clients through it.

    Its database is a new one: a client's key that is no longer in its folder is not known any more, and no message of
    a server that was killed is left.
    """
    of_clients = {} if security.clients is None else public_keys(security.clients, num_clients)
    folder.chmod(0o700)
    for path in folder.glob("state.db*"):
        path.unlink()
    secret = folder / "secret"
    if not secret.is_file():
        secret.touch(mode=0o600)
        secret.write_bytes(secrets.token_bytes(32))
    host, port = split_address(address)
    command = superlink_command(host, port, folder / "state.db", secret, security.files, security.clients is not None)
    log = folder / "superlink.log"
    with child(command, log, folder) as process:
        connection = security.connection(local_address(address))
        _wait_for_link(process, connection["server_address"], security, log)
        try:
            owners = {register(connection, key): client for client, key in of_clients.items()}
            with grid_of_run(connection, secret.read_bytes(), lambda: process.poll() is None) as grid:
                yield FlowerTransport(grid, num_clients, owners)
        except Exception as error:
            if isinstance(error, httpx.TransportError) or process.poll() is not None:
                raise MisconfigurationException(_lost(process, log, error)) from error
            raise


def _lost(process: subprocess.Popen[bytes], log: Path, error: Exception) -> str:
    """The sentence about a SuperLink that has ended, or does not answer."""
    what = f"does not answer ({type(error).__name__})"
    if (code := process.poll()) is not None:
        what = f"has ended ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
    return (
        f"serve: Flower's SuperLink, which carries all messages, {what}; start serve again with --ckpt_path last to go "
        f"on after the last whole round (log: {log})."
    )


def _wait_for_link(process: subprocess.Popen[bytes], address: str, security: Security, log: Path) -> None:
    url = f"{'http' if security.ca is None else 'https'}://{address}{HEALTH}"
    end = time.monotonic() + _LINK_STARTS_WITHIN
    while process.poll() is None and time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if httpx.get(url, verify=tls_context(security.ca)).is_success:
                return
        time.sleep(LOOK)
    within = f" within {_LINK_STARTS_WITHIN:.0f} s" if process.poll() is None else ""
    raise MisconfigurationException(f"serve: Flower's SuperLink does not start at {address}{within}: {reason_in(log)}.")


def answer_messages(answer: Callable[[Message], Message], folder: Path, address: str, security: Security) -> None:
    """Runs a SuperNode as a child process, and answers the messages that arrive there until the server ends.

    A SuperNode that has lost the server, or a message, is replaced by a new one.
    """
    log, server, refused_since = folder / "supernode.log", Server(address, security), None
    while True:
        server.wait()
        port = free_port()
        with child(supernode_command(address, port, security.ca, security.key), log, folder) as process:
            is_over = answer_tasks(answer, process, Tasks(f"127.0.0.1:{port}", log), server)
        if is_over:
            return
        if has_lost_server(log):
            refused_since = None
            time.sleep(1)
            continue
        if STILL_CONNECTED not in log.read_text(errors="replace"):
            raise MisconfigurationException(_refusal(address, log, server.difference_of_clocks))
        if refused_since is None:
            refused_since = time.monotonic()
            rank_zero_info(
                f"join: the server at {address} refuses this client: it does not know its key, another process of this "
                "client is running, or one was killed less than a minute ago; trying again for "
                f"{_REFUSED_FOR:.0f} s."
            )
        if time.monotonic() - refused_since > _REFUSED_FOR:
            no_key = f"the server knows no key '{security.key}', or another process uses it" if security.key else ""
            raise MisconfigurationException(_refusal(address, log, no_key, server.difference_of_clocks))
        time.sleep(5)


def _refusal(address: str, log: Path, *more: str) -> str:
    return "; ".join(
        [f"join: the server at {address} does not take this client: {reason_in(log)}", *filter(None, more)]
    )


def answer_tasks(
    answer: Callable[[Message], Message], process: subprocess.Popen[bytes], tasks: Tasks, server: Server
) -> bool:
    """Answers messages until one is lost, or the SuperNode ends or fails; returns whether the server or client ends."""
    is_over, next_look = False, 0.0

    def answered(content: RecordDict) -> RecordDict:
        nonlocal is_over
        try:
            message = unpacked(content)
        except BadMessageError as error:
            rank_zero_info(f"join: the server has sent a message that is none: {one_line(str(error))}.")
            return packed(Message(FAILED, {"failure": "refused"}))
        reply = Message("ended") if message.kind == "end" else answer(message)
        is_over = reply.kind in ("ended", LEAVES)
        return packed(reply)

    while process.poll() is None:
        if not (token := tasks.next()):
            if time.monotonic() >= next_look:
                server.look()
                if tasks.has_failed():
                    break
                next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
            time.sleep(LOOK)
            continue
        try:
            tasks.answer(token, answered)
        except LostMessageError as error:
            rank_zero_info(f"join: the connection broke while an answer was sent ({error}); connecting again.")
            break
        if is_over:
            time.sleep(3)  # for the answer to reach the server
            break
    return is_over


class Server:
    """Whether the server can be reached; what changes is said once.

    Attributes:
        ahead: seconds that this machine's clock is ahead of the server's; 0 if that is too little to tell.
    """

    def __init__(self, address: str, security: Security) -> None:
        self.address = address
        self.security = security
        self.ahead = 0.0
        self._is_there = True
        self._seen = False
        self._said_ahead = 0.0

    def wait(self) -> None:
        """Waits until the server can be reached."""
        while not self.look():
            time.sleep(1)

    def look(self) -> bool:
        """Looks whether the server can be reached."""
        was_there, self._is_there = self._is_there, self._reaches()
        if was_there and not self._is_there:
            what = "cannot be reached any more" if self._seen else "cannot be reached yet"
            rank_zero_info(f"join: the server at {self.address} {what}; waiting for it.")
        if self._is_there and not was_there and self._seen:
            rank_zero_info(f"join: the server at {self.address} can be reached again.")
        self._seen |= self._is_there
        if abs(self.ahead - self._said_ahead) >= _TELLING:
            self._said_ahead = self.ahead
            rank_zero_info(f"join: {self.difference_of_clocks or 'the clocks agree again'}.")
        return self._is_there

    @property
    def difference_of_clocks(self) -> str:
        """How much the clocks differ, as a part of a sentence; empty if they agree."""
        if not self.ahead:
            return ""
        where = f"{abs(self.ahead):.0f} s {'ahead of' if self.ahead > 0 else 'behind'} the server's"
        limits = f", and Flower takes signatures at most {MOST_AHEAD} s ahead and {MOST_BEHIND} s behind"
        return f"this machine's clock is {where}{limits if self.security.key else ''}"

    def _reaches(self) -> bool:
        """Sends it a request, whatever it answers."""
        ca = self.security.ca
        try:
            start = time.time()
            answer = httpx.get(f"{'https' if ca else 'http'}://{self.address}{FLEET}", verify=tls_context(ca))
            with suppress(KeyError, ValueError):  # a proxy may give no date, or one of its own
                date = parsedate_to_datetime(answer.headers["date"]).timestamp()
                middle, half = (start + time.time()) / 2, (time.time() - start) / 2
                difference = middle - (date + 0.5)
                self.ahead = difference if abs(difference) >= _TELLING + half else 0.0
            return True
        except httpx.HTTPError as error:  # else, it may be about to start or to end
            if ca is None and has_tls(self.address):
                raise MisconfigurationException(
                    f"join: --keys is not given, but the server at {self.address} needs TLS ({error})."
                ) from error
            if (problem := problem_of_tls(error)) and not self._seen:
                raise MisconfigurationException(
                    f"join: the server at {self.address} has no valid certificate signed by '{ca}' ({problem})."
                ) from error
        return False
