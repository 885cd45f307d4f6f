"""``fedmoe serve`` and ``fedmoe join``: their checks before anything starts, their folders, and Flower between them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from fedmoe_pl.checkpoints.files import cannot_be_made, exclusive, unwritable
from fedmoe_pl.checks import check_at_least
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.deployment.connection import Security, check_is_free, module_of_flower
from fedmoe_pl.deployment.messages import Message
from fedmoe_pl.deployment.participant import Participant
from fedmoe_pl.deployment.server import check_deployable, serve
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.phases.client_failures import RETRIES, ClientError, RoundWarning
from fedmoe_pl.phases.participation import cohort_of
from fedmoe_pl.phases.phase import Phase

DEFAULT_ADDRESS = "127.0.0.1:8000"


def run_server(
    federation: Any,
    model: LightningModule,
    datamodule: FederatedDataModule,
    num_clients: int,
    address: str,
    keys: str | None,
    insecure: bool,
    ckpt_path: str | None,
) -> dict[str, Evaluation]:
    """Runs the server of a deployed federation; arguments as in ``Federation.serve``."""
    check_at_least("serve", "num_clients", num_clients, 1)
    check_deployable(federation.phases)
    flower = module_of_flower("serve", "flower_processes")
    check_is_free(address)
    security = Security.of_server(address, keys, insecure)
    folder = federation.runs / "flower"
    superlink = flower.superlink(folder, address, security, num_clients)
    with plain_warnings("serve"), own_folder(folder), superlink as transport:
        say_thresholds(federation.phases, num_clients, federation.seed)
        rank_zero_info(f"serve: waiting for {num_clients} clients at {address}.")
        try:
            results = serve(federation, model, datamodule, transport, num_clients, ckpt_path)
        except (MisconfigurationException, ClientError) as error:
            transport.tell(dict.fromkeys(range(num_clients), f"the server has ended: {str(error).rstrip('.')}"))
            raise
        transport.ask({client: Message("end") for client in range(num_clients)}, 30)
    return results


def say_thresholds(phases: Sequence[Phase], num_clients: int, seed: int) -> None:
    """Says how many clients of a round may be away where secure aggregation needs the others."""
    for phase in phases:
        if phase.secure is None:
            continue
        size = cohort_of(phase, num_clients, seed).size
        needed = phase.secure.needed(size)
        rank_zero_info(
            f"serve: {phase}: secure aggregation needs {needed} of the {size} clients of a round, so "
            f"{f'at most {size - needed}' if needed < size else 'none'} may be away or fail. With fewer, the round is "
            f"tried again, {RETRIES} times, each after waiting for clients that are away, and then the run ends. "
            f"secure_aggregation.threshold may be {size // 2 + 1} to {size}."
        )


def run_client(
    federation: Any,
    model: LightningModule,
    datamodule: FederatedDataModule,
    client: int,
    address: str,
    keys: str | None,
    insecure: bool,
) -> None:
    """Runs a client of a deployed federation; arguments as in ``Federation.join``."""
    check_at_least("join", "client", client, 0)
    flower = module_of_flower("join", "flower_processes")
    security = Security.of_client(address, keys, insecure, client)
    folder = federation.runs / f"client_{client}"
    participant = Participant(federation, model, datamodule, client, folder)
    rank_zero_info(f"join: client {client} connects to {address}; it keeps its tensors in {folder}.")
    with plain_warnings("join"), private(folder), own_folder(folder / "flower"):
        try:
            flower.answer_messages(participant.answer, folder / "flower", address, security)
        finally:
            participant.close()
    if participant.leaves:
        raise MisconfigurationException(f"join: {participant.leaves}.")
    if participant.checkpoint is not None:
        print(f"The server has ended. This client's models: {participant.checkpoint}")


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Makes a folder for Flower's files, and keeps other processes from it until this context ends."""
    taken = f"Another process uses '{folder}'; end that one first."
    with exclusive(folder / "lock", taken, lambda error: cannot_be_made(folder, error)):
        yield


@contextmanager
def private(folder: Path) -> Iterator[None]:
    """Makes a folder that no other user of the machine can enter, nor read what this process writes meanwhile."""
    before = os.umask(0o077)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        except OSError as error:
            raise unwritable(folder, error) from error
        yield
    finally:
        os.umask(before)


@contextmanager
def plain_warnings(command: str) -> Iterator[None]:
    """Says warnings as sentences of a command, without a path, and each once of those that differ only in the round."""
    said = set[str]()

    def say(message: Warning | str, *details: Any, **others: Any) -> None:
        text = " ".join(str(message).split()).rstrip(".")
        if (same := message.without_round if isinstance(message, RoundWarning) else text) not in said:
            said.add(same)
            rank_zero_info(f"{command}: {text}.")

    with warnings.catch_warnings():
        warnings.showwarning = say
        yield
