"""The server of a deployed federation: the same rounds as in a simulation, with clients on their own machines."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import asks_clients
from fedmoe_pl.callbacks import (
    ClientCheckpoint,
    ClusterMonitor,
    FederationCallback,
    PartitionMonitor,
    RepresentationMonitor,
    ResultFiles,
)
from fedmoe_pl.checkpoints.checkpoint import find_checkpoint
from fedmoe_pl.checkpoints.files import DamagedFileError, read_json, replacing, write_json
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.client_names import ClientNames
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.deployment.descriptions import read_descriptions, settings_of, wait_for, write_descriptions
from fedmoe_pl.deployment.plan import ClientsBackend
from fedmoe_pl.deployment.remote_clients import Clients, ClientsStore
from fedmoe_pl.deployment.results import HandOver, evaluate_at_clients
from fedmoe_pl.deployment.transport import Transport
from fedmoe_pl.evaluation.evaluation import Evaluation
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.setup.data import TooManyClassesError

_NEED_DATA = (PartitionMonitor, ClientCheckpoint, RepresentationMonitor)


def check_phases(phases: Sequence[Phase]) -> None:
    """Refuses phases that need what no client sends."""
    for phase in phases:
        if phase.ckpt_path is not None:
            raise MisconfigurationException(
                f"{phase}: ckpt_path is '{phase.ckpt_path}', but must be left out in a deployed federation, because "
                "its clients keep their part of a result on their own machines."
            )
        if phase.evaluation.every_n_epochs is not None:
            raise MisconfigurationException(
                f"{phase}: evaluate.every_n_epochs is {phase.evaluation.every_n_epochs}, but must be left out in a "
                "deployed federation."
            )
        if asks_clients(phase.algorithm, {}):
            raise MisconfigurationException(
                f"{phase}: {type(phase.algorithm).__name__} cannot be deployed, because its server computes with the "
                "clients' data or models before the first round."
            )


class _StandIn(FederatedDataModule):
    """As many samples as the clients have, all of them zero, for the server's checks and counts."""

    def __init__(self, descriptions: Sequence[dict[str, Any]], batch_size: int) -> None:
        super().__init__(num_clients=len(descriptions), batch_size=batch_size)
        first, sizes = descriptions[0], torch.tensor([each["sizes"] for each in descriptions])
        total, of_test = int(sizes.sum()), max(each["global_test"] for each in descriptions)
        self.num_clients = len(descriptions)
        self.client_names = ClientNames.numbers(self.num_clients)
        self.num_classes = max(each["num_classes"] for each in descriptions)
        self.num_shared = total
        self.x = _zeros(total + of_test, first["shape"], first["dtype"])
        self.y = _zeros(total + of_test, first["target_shape"], first["target_dtype"])
        if self.num_classes:
            self.y = torch.arange(total + of_test) % self.num_classes
        ends = sizes.sum(0).cumsum(0)
        self.train_samples, self.validation_samples, self.test_samples = (
            ClientSamples(torch.arange(int(end - of_part.sum()), int(end)), of_part.contiguous())
            for end, of_part in zip(ends, sizes.T, strict=True)
        )
        self.global_test = torch.arange(total, total + of_test)
        self.classes, self.columns = first.get("classes"), first.get("columns")
        self.normalization = first["normalization"]
        self.black = torch.zeros(1, 1, 1)
        self.class_shares = self.class_counts()
        self.is_set_up = True

    def load(self) -> NoReturn:
        """Never called: there are no data."""
        raise NotImplementedError

    def class_counts(self) -> Tensor:
        """No classes: no client describes how often it has one."""
        return torch.zeros(self.num_clients, 0, dtype=torch.float64)


def _zeros(n: int, shape: Sequence[int], dtype: str) -> Tensor:
    """Zeros of shape (n, ...) that take the memory of one sample."""
    return torch.zeros(1, *shape, dtype=getattr(torch, dtype)).expand(n, *shape)


def callbacks_of_server(callbacks: Sequence[FederationCallback]) -> list[FederationCallback]:
    """The callbacks without those that need clients' data or models, which never come here; says which these are."""
    left_out = [type(callback).__name__ for callback in callbacks if isinstance(callback, _NEED_DATA)]
    if left_out:
        rank_zero_info(f"{', '.join(left_out)}: left out, because clients' data and models stay with them.")
    return [_of_server(callback) for callback in callbacks if not isinstance(callback, _NEED_DATA)]


def _of_server(callback: FederationCallback) -> FederationCallback:
    """The callback without what it would compute from clients' data."""
    if isinstance(callback, ResultFiles):
        return ResultFiles(partition=False, gate_weights=callback.gate_weights)
    return ClusterMonitor(by_client=False) if isinstance(callback, ClusterMonitor) else callback


def serve(
    federation: Any,
    model: LightningModule,
    datamodule: FederatedDataModule,
    transport: Transport,
    num_clients: int,
    ckpt_path: str | None = None,
) -> dict[str, Evaluation]:
    """Runs all phases with clients on other machines, once all of them have described their data.

    A run that is continued knows the descriptions, and waits a minute for clients that are away. The data of
    ``datamodule``, as in the clients' configuration, are not read. Phases that cannot be deployed, and clients that do
    not fit together, are refused before any training.
    """
    check_phases(federation.phases)
    ckpt_path = _existing(ckpt_path, federation.runs)
    known = read_descriptions(find_checkpoint(ckpt_path, federation.runs).parent.parent) if ckpt_path else {}
    ours = settings_of(federation, model, datamodule)
    names, at_least = [phase.name for phase in federation.phases], federation.failures.min_clients or 1
    descriptions = wait_for(transport, num_clients, ours, names, known, at_least)
    data = _StandIn([*descriptions.values()], datamodule.batch_size)
    data.withheld = federation.reports.withheld(federation.phases, federation.metrics)
    if not federation.reports.names(federation.phases, federation.metrics):
        rank_zero_info(
            "serve: clients report no accuracies or other metrics, because none is in federation.reports.metrics, and "
            "privacy covers none of them."
        )
    clients = Clients(transport, descriptions, data.num_classes, federation.failures.max_change)
    settings = replace(
        federation.settings,
        backend=ClientsBackend(clients),
        callbacks=[*callbacks_of_server(federation.callbacks), HandOver(clients)],
        evaluate=partial(evaluate_at_clients, clients),
    )
    try:
        return federation.fit_on_server(model, data, ckpt_path, partial(_make_store, clients), settings)
    except TooManyClassesError as error:
        most = [client for client, each in descriptions.items() if each["num_classes"] == data.num_classes]
        if len(most) == len(descriptions):
            raise
        who = f"client {most[0]} has" if len(most) == 1 else f"clients {', '.join(map(str, most))} have"
        owner, argument, value, allowed, because = error.args
        because = f"{because}; only {who} that many classes"
        raise TooManyClassesError(owner, argument, value, allowed, because) from error


def _existing(ckpt_path: str | None, runs: Path) -> str | None:
    """The checkpoint to continue from; as in Lightning, ``last`` begins a new run if there is none."""
    if ckpt_path is not None:
        try:
            find_checkpoint(ckpt_path, runs)
        except MisconfigurationException as error:
            rank_zero_warn(f"{error} A new run begins.")
            return None
    return ckpt_path


def _make_store(clients: Clients, run: Run) -> ClientsStore:
    """The store of a run; a resumed run has its old name, by which clients find what they keep of it."""
    path = run.folder / "deployment.json"
    if not path.is_file():
        with replacing(path) as temporary:
            write_json(temporary, {"run": uuid.uuid4().hex})
    try:
        clients.name, clients.states = read_json(path)["run"], run.states
    except DamagedFileError as error:
        raise MisconfigurationException(
            f"'{path}', which has the run's name among its clients, is damaged; it must be as the run wrote it."
        ) from error
    write_descriptions(run.folder, clients.descriptions)
    return ClientsStore()
