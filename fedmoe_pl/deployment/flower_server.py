"""The server's side of Flower: its SuperLink as a child process, and this process as the ServerApp of a run in it."""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Flower is not installed where types are checked: it cannot be together with other extras.
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.deployment.connection import Security, local_address, split_address, tls_context
from fedmoe_pl.deployment.flower import FlowerTransport, child
from fedmoe_pl.deployment.flower_inside import HEALTH, grid_of_run, reason_in, register, superlink_command
from fedmoe_pl.deployment.flower_keys import public_keys
from fedmoe_pl.deployment.transport import LOOK

_LINK_STARTS_WITHIN = 120.0


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
