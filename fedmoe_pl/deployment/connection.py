"""How server and clients reach each other: Flower, addresses and certificates."""

from __future__ import annotations

import importlib
import ipaddress
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checks import InvalidArgumentError


def module_of_flower(command: str, name: str) -> Any:
    """A module of this part that uses Flower, or what comes with it; imported only where it is used."""
    try:
        return importlib.import_module(f"fedmoe_pl.deployment.{name}")
    except ImportError as error:
        raise MisconfigurationException(
            f"{command}: Flower is missing ({error}); install it into an environment of its own with Python 3.11 or "
            'newer: pip install ".[flower]" in the repository.'
        ) from error


@dataclass(frozen=True)
class Security:
    """How a connection is secured; nothing of it is given without TLS."""

    ca: Path | None = None  # certificate of the authority that signed the server's certificate
    certificate: Path | None = None  # the server's
    key: Path | None = None  # private: the server's, of its certificate; a client's, by which it is known
    clients: Path | None = None  # folder of the clients' public keys

    @classmethod
    def of_server(cls, address: str, keys: str | None, insecure: bool) -> Security:
        """The server's, from its folder of ``fedmoe provision``."""
        names = ("ca.pem", "server.pem", "server.key", "clients")
        security = cls(*_found("serve", address, keys, insecure, names))
        if security.files is not None:
            check_certificate(*security.files, address)
        return security

    @classmethod
    def of_client(cls, address: str, keys: str | None, insecure: bool, client: int) -> Security:
        """A client's, from its folder of ``fedmoe provision``."""
        ca, key = _found("join", address, keys, insecure, ("ca.pem", f"client_{client}"))
        return cls(ca=ca, key=key)

    @property
    def files(self) -> tuple[Path, Path, Path] | None:
        """A server's certificates and key; None without TLS."""
        if self.ca is None or self.certificate is None or self.key is None:
            return None
        return self.ca, self.certificate, self.key

    def connection(self, address: str) -> dict[str, Any]:
        """Arguments of Flower's HTTP clients."""
        root = None if self.ca is None else self.ca.read_bytes()
        return {"server_address": address, "insecure": root is None, "root_certificates": root}


def _found(
    command: str, address: str, keys: str | None, insecure: bool, names: tuple[str, ...]
) -> list[Path] | list[None]:
    """These files in the folder ``keys``; nothing without one, which is refused where other machines connect."""
    host, _ = split_address(address)
    if keys is None:
        if not insecure and not _is_loopback(host):
            raise InvalidArgumentError(
                command,
                "keys",
                keys,
                "a folder made by fedmoe provision",
                f"{address} can be reached by other machines; --insecure true goes without certificates and keys",
            )
        return [None for _ in names]
    missing = [name for name in names if not (Path(keys) / name).exists()]
    if missing:
        raise InvalidArgumentError(command, "keys", keys, f"a folder with {', '.join(names)}; {missing[0]} is missing")
    return [Path(keys) / name for name in names]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tls_context(ca: Path | None) -> ssl.SSLContext:
    """What a certificate is checked against."""
    return ssl.create_default_context(cafile=None if ca is None else str(ca))


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise InvalidArgumentError("deployment", "address", address, "a host and a port, as 127.0.0.1:8000")
    return host, int(port)


def local_address(address: str) -> str:
    """Where a server that listens at an address is reached on its own machine."""
    host, port = split_address(address)
    return f"127.0.0.1:{port}" if host == "0.0.0.0" else address


def check_certificate(ca: Path, certificate: Path, key: Path, address: str) -> None:
    """Refuses a server's certificate with which it could not connect to itself: both sides of a handshake in memory."""
    host, _ = split_address(local_address(address))
    try:
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls_context(ca)
        server.load_cert_chain(certificate, key)
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            client.wrap_bio(to_client, to_server, server_hostname=host),
            server.wrap_bio(to_server, to_client, server_side=True),
        ]
        for end in (*ends, *ends):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except OSError as error:
        raise MisconfigurationException(
            f"serve: '{certificate}' must fit '{key.name}' and '{ca.name}' and be valid now, for {host} as well, where "
            f"the server connects to itself ({problem_of_tls(error) or error})."
        ) from error


def check_is_free(address: str) -> None:
    """Refuses an address at which a server cannot reach itself, or cannot listen, such as that of another server."""
    host, port = split_address(address)
    if host != "0.0.0.0" and (":" in host or not _is_loopback(host)):
        allowed = f"127.0.0.1:{port}, or 0.0.0.0:{port} where others connect"
        because = "the server connects to itself, and lets only a peer at 127.0.0.1 start a run"
        raise InvalidArgumentError("serve", "address", address, allowed, because)
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python adds the address
        raise InvalidArgumentError("serve", "address", address, f"a free address of this machine ({reason})") from error


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def problem_of_tls(error: BaseException) -> str:
    """What TLS has against the other side; empty if there was no other side, or it went before it said who it is."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    ended = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return str(error) if isinstance(error, ssl.SSLError) and not ended else ""


def has_tls(address: str) -> bool:
    """Whether what listens at an address has TLS, with whatever certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(split_address(address), timeout=5) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False
