"""A client's side of Flower: its SuperNode as a child process, and this process as what answers its messages."""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Flower is not installed where types are checked: it cannot be together with other extras.
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from flwr.app import RecordDict
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info

from fedmoe_pl.deployment.connection import Security, free_port, has_tls, problem_of_tls, tls_context
from fedmoe_pl.deployment.flower import child, packed, unpacked
from fedmoe_pl.deployment.flower_inside import (
    FLEET,
    MOST_AHEAD,
    MOST_BEHIND,
    STILL_CONNECTED,
    LostMessageError,
    Tasks,
    has_lost_server,
    reason_in,
    supernode_command,
)
from fedmoe_pl.deployment.messages import FAILED, LEAVES, BadMessageError, Message, one_line
from fedmoe_pl.deployment.transport import LOOK

_REFUSED_FOR = 120.0  # Flower refuses a node for a minute after its process was killed
_SECONDS_BETWEEN_LOOKS = 10.0  # while there is nothing to answer
_TELLING = 3.0  # seconds between two clocks; an answer's date has whole seconds, and takes some time


def answer_messages(answer: Callable[[Message], Message], folder: Path, address: str, security: Security) -> None:
    """Runs a SuperNode as a child process, and answers the messages that arrive there until the server ends.

    A SuperNode that has lost the server, or a message, is replaced by a new one.
    """
    log, server, refused_since = folder / "supernode.log", Server(address, security), None
    answering = _Answering(answer)
    while True:
        server.wait()
        port = free_port()
        with child(supernode_command(address, port, security.ca, security.key), log, folder) as process:
            answering.answer_tasks(process, Tasks(f"127.0.0.1:{port}", log), server)
        if answering.is_over:
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


class _Answering:
    """Answers the messages of one SuperNode after the other; ``is_over`` once the server has ended or it has left."""

    def __init__(self, answer: Callable[[Message], Message]) -> None:
        self.answer = answer
        self.is_over = False

    def answer_tasks(self, process: subprocess.Popen[bytes], tasks: Tasks, server: Server) -> None:
        """Answers messages until it is over, one is lost, or the SuperNode ends or fails."""
        next_look = 0.0
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
                tasks.answer(token, self._answered)
            except LostMessageError as error:
                rank_zero_info(f"join: the connection broke while an answer was sent ({error}); connecting again.")
                break
            if self.is_over:
                time.sleep(3)  # for the answer to reach the server
                break

    def _answered(self, content: RecordDict) -> RecordDict:
        try:
            message = unpacked(content)
        except BadMessageError as error:
            rank_zero_info(f"join: the server has sent a message that is none: {one_line(str(error))}.")
            return packed(Message(FAILED, {"failure": "refused"}))
        answer = Message("ended") if message.kind == "end" else self.answer(message)
        self.is_over = answer.kind in ("ended", LEAVES)
        return packed(answer)


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
