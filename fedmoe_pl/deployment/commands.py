"""``fedmoe serve`` and ``fedmoe join``: their checks before anything starts, and Flower between them."""

from __future__ import annotations

import importlib
import ipaddress
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.deployment.connection import Security, check_certificate, check_is_free, split_address
from fedmoe_pl.deployment.messages import Message
from fedmoe_pl.deployment.participant import Participant
from fedmoe_pl.deployment.processes import own_folder, private
from fedmoe_pl.deployment.server import check_phases, serve
from fedmoe_pl.deployment.speaking import Speaking, plain_warnings
from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.failures import ClientError
from fedmoe_pl.rounds.run_maker import RunMaker

DEFAULT_ADDRESS = "127.0.0.1:8000"


def run_server(
    federation: RunMaker,
    model: LightningModule,
    datamodule: FederatedDataModule,
    num_clients: int,
    address: str,
    files: dict[str, str | None],
    insecure: bool,
    ckpt_path: str | None,
) -> dict[str, Evaluation]:
    """Runs the server of a deployed federation; arguments as in ``Federation.serve``.

    Args:
        federation: the settings.
        model: the initial model.
        datamodule: as in the clients' configuration; its data are not read.
        num_clients: number of clients.
        address: host and port to listen on.
        files: ``ca``, ``certificate``, ``certificate_key`` and ``client_keys``; None for those not given.
        insecure: whether to listen without TLS where other machines can connect.
        ckpt_path: checkpoint of a run to continue.
    """
    if num_clients < 1:
        raise MisconfigurationException(f"serve: num_clients is {num_clients}, but must be at least 1.")
    check_phases(federation.phases)
    flower_server = module_of_flower("serve", "flower_server")
    security, keys = _security_of_server(address, files, insecure)
    check_is_free(address)
    folder = federation.runs / "flower"
    superlink = flower_server.superlink(folder, address, security, keys, num_clients)
    with plain_warnings("serve"), own_folder(folder), superlink as transport:
        rank_zero_info(f"serve: waiting for {num_clients} clients at {address}.")
        try:
            results = serve(federation, model, datamodule, transport, num_clients, ckpt_path)
        except (MisconfigurationException, ClientError) as error:
            transport.tell(dict.fromkeys(range(num_clients), f"the server has ended: {str(error).rstrip('.')}"))
            raise
        transport.ask({client: Message("end") for client in range(num_clients)}, 30)
    return results


def _security_of_server(address: str, files: dict[str, str | None], insecure: bool) -> tuple[Security, Path | None]:
    """Certificates of the server, and the folder of its clients' keys; arguments as in :func:`run_server`.

    Raises:
        MisconfigurationException: if some are missing, or contradict each other.
    """
    host, _ = split_address(address)
    tls = ("ca", "certificate", "certificate_key")
    given = [name for name in tls if files[name] is not None]
    if given and len(given) < len(tls):
        missing = next(name for name in tls if name not in given)
        raise MisconfigurationException(f"serve: {missing} is missing; with TLS, {', '.join(tls)} must be given.")
    if files["client_keys"] and not given:
        raise MisconfigurationException("serve: client_keys is given, but must be left out without TLS (ca).")
    if not given and not insecure and not _is_loopback(host):
        raise MisconfigurationException(
            f"serve: address is '{address}', where other machines can connect, so that ca, certificate and "
            "certificate_key must be given; --insecure true listens without TLS all the same."
        )
    paths = {name: _existing("serve", name, value) for name, value in files.items()}
    security = Security(paths["ca"], paths["certificate"], paths["certificate_key"])
    if security.files is not None:
        check_certificate(*security.files, address)
    keys = paths["client_keys"]
    if keys is not None and not [*keys.glob("*.pub")]:
        raise MisconfigurationException(f"serve: client_keys is '{keys}', but must be a folder with files *.pub.")
    return security, keys


def run_client(
    federation: RunMaker,
    model: LightningModule,
    datamodule: FederatedDataModule,
    client: int,
    address: str,
    ca: str | None,
    key: str | None,
    insecure: bool,
) -> None:
    """Runs a client of a deployed federation; arguments as in ``Federation.join``."""
    if client < 0:
        raise MisconfigurationException(f"join: client is {client}, but must be at least 0.")
    flower_client = module_of_flower("join", "flower_client")
    host, _ = split_address(address)
    if ca is None and not insecure and not _is_loopback(host):
        raise MisconfigurationException(
            f"join: address is '{address}', another machine, so that ca must be given; --insecure true connects "
            "without TLS all the same."
        )
    if key is not None and ca is None:
        raise MisconfigurationException(f"join: key is '{key}', but must be left out without TLS (ca).")
    security = Security(ca=_existing("join", "ca", ca), key=_existing("join", "key", key))
    folder = federation.runs / f"client_{client}"
    participant = Participant(federation, model, datamodule, client, folder)
    rank_zero_info(f"join: client {client} connects to {address}; it keeps its tensors in {folder}.")
    with plain_warnings("join"), private(folder), own_folder(folder / "flower"):
        flower_client.answer_messages(Speaking(participant).answer, folder / "flower", address, security)
    if participant.leaves:
        raise MisconfigurationException(f"join: {participant.leaves}.")
    if participant.checkpoint is not None:
        print(f"The server has ended. This client's models: {participant.checkpoint}")


def module_of_flower(command: str, name: str) -> Any:
    """A module of this part that uses Flower, or what comes with it.

    Raises:
        MisconfigurationException: if Flower is not installed.
    """
    try:
        return importlib.import_module(f"fedmoe_pl.deployment.{name}")
    except ImportError as error:
        raise MisconfigurationException(
            f"{command}: Flower is missing ({error}); install it into an environment of its own, with "
            'pip install "fedmoe-pl[flower]" and Python 3.11 or newer.'
        ) from error


def _existing(command: str, name: str, value: str | None) -> Path | None:
    """The path, if it is given.

    Raises:
        MisconfigurationException: if there is nothing.
    """
    if value is not None and not Path(value).exists():
        raise MisconfigurationException(f"{command}: {name} is '{value}', but there is no such file or folder.")
    return None if value is None else Path(value)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
