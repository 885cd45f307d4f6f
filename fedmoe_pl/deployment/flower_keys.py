"""Certificates and keys of a federation: what ``fedmoe provision`` makes, and the keys that ``fedmoe serve`` reads."""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# cryptography comes with Flower, which is not installed where types are checked.
import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checkpoints.files import write_file
from fedmoe_pl.checks import InvalidArgumentError

# common names, of at most 64 characters; how the server is reached is in other fields
_AUTHORITY, _SERVER = "authority of a federation", "server of a federation"
_DAYS_OF_AUTHORITY = 3650
_LOCAL = ("localhost", "127.0.0.1")  # where the server connects to itself
_SIGNS = ("key_cert_sign", "crl_sign")
_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("encipher_only", "decipher_only", *_SIGNS),
)


def provision(
    folder: Path, num_clients: int, names: Sequence[str] | None, days: int
) -> tuple[list[str], datetime, list[int]]:
    """Makes what the server and each client of a federation need; keys and certificates that are there are kept.

    The folder ``authority`` has what signs certificates, ``server`` is the server's, with the public keys of clients
    in ``server/clients``, and ``client_0``, ``client_1``, ... are the clients'. A client whose public key is there, but
    not its private one, has made these itself. One that had keys, but whose public key is gone, stays excluded. Returns
    the names of the server's certificate, when it ends, and which clients are excluded.
    """
    if wrong := [name for name in names or () if not _is_name(name)]:
        raise InvalidArgumentError("provision", "names", wrong[0], "the name or the address of a host")
    for own in (folder / "server", folder / "server/clients"):
        own.mkdir(parents=True, exist_ok=True)
        own.chmod(0o700)
    authority, server = folder / "authority", folder / "server"
    signer, ca = _private_key(authority / "ca.key"), authority / "ca.pem"
    if not ca.is_file():
        write_file(ca, _certificate(signer.public_key(), signer, _DAYS_OF_AUTHORITY))
    write_file(server / "ca.pem", ca.read_bytes())
    key = _private_key(server / "server.key").public_key()
    path, wanted = server / "server.pem", [*(names or ())]
    if not path.is_file():
        write_file(path, _certificate(key, signer, days, [*_LOCAL, *wanted]))
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    has = [str(each.value) for each in alternatives]
    if missing := [name for name in wanted if name not in has]:
        raise InvalidArgumentError(
            "provision", "names", missing[0], f"one of {', '.join(has)}", f"'{path}' is kept; delete it for a new one"
        )
    provided = server / "num_clients"
    before, excluded = int(provided.read_text()) if provided.is_file() else 0, []
    for client in range(num_clients):
        public, own = server / "clients" / f"client_{client}.pub", folder / f"client_{client}"
        if not public.is_file() and (client < before or own.is_dir()):
            excluded.append(client)
            continue
        if not public.is_file():
            write_file(public, provision_client(own, client).read_bytes())
        write_file(own / "ca.pem", ca.read_bytes())
    write_file(provided, str(max(before, num_clients)).encode())
    return has, certificate.not_valid_after_utc, excluded


def provision_client(folder: Path, client: int) -> Path:
    """Makes a client's private key, unless it is there, and its public half; returns the latter's file."""
    path = folder / f"client_{client}.pub"
    public = _private_key(path.with_suffix(""), PrivateFormat.OpenSSH, load_ssh_private_key).public_key()
    write_file(path, public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return path


def _private_key(path: Path, form: PrivateFormat = PrivateFormat.PKCS8, load: Any = load_pem_private_key) -> Any:
    """The private key in a file, which is made if it is missing."""
    if not path.is_file():
        write_file(path, ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, form, NoEncryption()))
    return load(path.read_bytes(), None)


def _certificate(public_key: Any, signer: Any, days: int, names: Sequence[str] = ()) -> bytes:
    """A certificate as PEM: that of a server with these names, or without names that of the authority."""
    now, is_authority = datetime.now(timezone.utc), not names
    of_subject, of_authority = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        for name in (_AUTHORITY if is_authority else _SERVER, _AUTHORITY)
    )
    builder = x509.CertificateBuilder(
        issuer_name=of_authority,
        subject_name=of_subject,
        public_key=public_key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - timedelta(hours=1),  # clocks differ
        not_valid_after=now + timedelta(days=days),
        extensions=[],
    )
    usage = dict.fromkeys(_USAGES, False) | dict.fromkeys(_SIGNS if is_authority else ["digital_signature"], True)
    builder = builder.add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
    builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(issuer, critical=False)
    if names:
        alternatives = x509.SubjectAlternativeName([_general_name(name) for name in dict.fromkeys(names)])
        builder = builder.add_extension(alternatives, critical=False)
    return builder.sign(signer, hashes.SHA384()).public_bytes(Encoding.PEM)


def _is_name(name: str) -> bool:
    """Whether this is a host name, whose last part is no number, or an address."""
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    labels = name.split(".")
    return not labels[-1].isdigit() and all(
        re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?", each) for each in labels
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def public_keys(folder: Path, num_clients: int) -> dict[int, bytes]:
    """The public keys of clients, as PEM, from the files ``client_0.pub``, ``client_1.pub``, ... of a folder."""
    keys: dict[int, bytes] = {}
    for path in sorted(folder.glob("*.pub")):
        name = re.fullmatch(r"client_(0|[1-9]\d*)\.pub", path.name)
        if name is None or int(name[1]) >= num_clients:
            raise MisconfigurationException(
                f"serve: '{path}' is none of the keys of {num_clients} clients (num_clients), client_0.pub to "
                f"client_{num_clients - 1}.pub."
            )
        try:
            public = load_ssh_public_key(path.read_bytes())
            if not isinstance(public, ec.EllipticCurvePublicKey):
                raise ValueError(f"it is {type(public).__name__}")
        except (ValueError, UnsupportedAlgorithm) as error:
            raise MisconfigurationException(
                f"serve: '{path}' must be a public key of the type ecdsa in OpenSSH format ({error})."
            ) from error
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        if (same := next((client for client, key in keys.items() if key == pem), None)) is not None:
            raise MisconfigurationException(f"serve: '{path}' is the key of client {same}; each must have its own.")
        keys[int(name[1])] = pem
    if not keys:
        raise MisconfigurationException(f"serve: '{folder}' has no public keys of clients, client_0.pub and so on.")
    return keys
