"""How server and clients reach each other: addresses and certificates."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException


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


def tls_context(ca: Path | None) -> ssl.SSLContext:
    """What a certificate is checked against."""
    return ssl.create_default_context(cafile=None if ca is None else str(ca))


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address.

    Raises:
        MisconfigurationException: if it is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise MisconfigurationException(f"address is '{address}', but must be a host and a port, as 127.0.0.1:8000.")
    return host, int(port)


def check_is_free(address: str) -> None:
    """Refuses an address at which this machine cannot listen, such as that of another server.

    Raises:
        MisconfigurationException: if it cannot.
    """
    host, port = split_address(address)
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python adds the address
        raise MisconfigurationException(
            f"serve: address is '{address}', but must be a free address of this machine ({reason})."
        ) from error


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
