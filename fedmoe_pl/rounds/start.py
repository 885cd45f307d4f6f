"""Prepares a run before its rounds: workers, plans for the phases, folder, store and loggers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from fedmoe_pl.backends import Backend, PoolBackend, WorkersBackend, data_on
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.rounds.checkpoint import FILE, KEPT, PREVIOUS, copy_checkpoint, next_folder
from fedmoe_pl.rounds.lock import locked
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.rounds.store import DiskStore, MemoryStore
from fedmoe_pl.rounds.writing import replacing


def with_workers(backend: Backend, trainer: dict[str, Any], devices: Sequence[torch.device]) -> Backend:
    """The backend; with a worker process for each device if there are several.

    Args:
        backend: how clients are trained.
        trainer: arguments of all clients' Trainers.
        devices: the devices to train on, one for each client that is trained at the same time.

    Raises:
        MisconfigurationException: if the trainer asks for several devices and the backend has its own workers.
    """
    requested = trainer.get("devices", "auto")
    if isinstance(backend, WorkersBackend):
        if requested not in ("auto", 1):
            raise MisconfigurationException(
                f"trainer.devices is {requested}, but must be left out, because {type(backend).__name__} has its own "
                "workers."
            )
        return backend
    if len(devices) == 1:
        return backend
    # A process takes seconds to start, often longer than a whole run on a CPU.
    lazy = devices[0].type == "cpu" and requested == "auto"
    return PoolBackend(backend, devices, lazy)


def place_data(datamodule: FederatedDataModule, backend: Backend, device: torch.device) -> FederatedDataModule:
    """The data module with its samples on the device; workers place them themselves."""
    return datamodule if isinstance(backend, WorkersBackend) else data_on(datamodule, device)


def plan_phases(run: Run) -> None:
    """Plans the training of every phase that has rounds left, and logs the plans.

    Raises:
        MisconfigurationException: if the backend cannot train a phase.
    """
    phases: dict[str, list[str]] = {}
    for phase in run.phases:
        state = run.states.get(phase.name) or run.given_results.get(phase.name)
        if state is not None and (state.finished or state.round == phase.rounds):
            continue
        module = run.module(phase)
        # the untrained tensors, also in a resumed run, so that its plans are those of the whole run
        initial = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
        try:
            plan = run.backend.plan(run.local_training(phase, module, initial))
        except MisconfigurationException as error:
            raise MisconfigurationException(f"{phase}: {error}") from error
        run.plans[phase.name] = plan
        phases.setdefault(plan.description, []).append(phase.name)
    if phases:
        sentences = [f"{', '.join(names)}: {description}" for description, names in phases.items()]
        rank_zero_info("backend: " + "; ".join(sentences))


@contextmanager
def new_folder(run: Run, runs: Path) -> Iterator[None]:
    """Makes the run's folder, and locks it.

    Args:
        run: the run.
        runs: the folder in which to make the run's own.

    Raises:
        MisconfigurationException: if the folder cannot be made.
    """
    run.folder = _make_folder(runs)
    if run.enable_checkpointing:
        (run.folder / FILE).parent.mkdir()
    with locked(run.folder / FILE):
        yield


def open_run(run: Run, ckpt_path: Path | None, store: str, logger: bool | Logger | list[Logger]) -> None:
    """Writes the run's configuration and first checkpoint, and makes its store and its loggers.

    Args:
        run: the run; it has a folder.
        ckpt_path: the checkpoint with which a resumed run goes on; None for a new run.
        store: ``memory`` or ``disk``.
        logger: True for TensorBoard, False for none, or any loggers.

    Raises:
        MisconfigurationException: if a file cannot be written.
    """
    if run.hparams:
        _write_configuration(run)
    if ckpt_path is None:
        run.save()
    elif ckpt_path.name != (last := run.folder / FILE).name:
        # last.ckpt may be damaged, or newer: then the next rows replace those that both checkpoints have
        copy_checkpoint(ckpt_path, last)
        copy_checkpoint(ckpt_path, last.with_name(PREVIOUS))
    run.store = MemoryStore() if store == "memory" else DiskStore(run.folder / KEPT, run.datamodule.num_clients)
    for name, state in run.states.items():
        if not state.finished:  # a resumed run may have had the other store
            state.kept = run.store.adopt(name, state.round, state.kept)
            if state.best_round:
                state.best_kept = run.store.adopt(name, state.best_round, state.best_kept)
    run.loggers = _loggers(run, logger)


def _make_folder(runs: Path) -> Path:
    while True:
        folder = next_folder(runs)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:  # of a run that began at the same time
            continue
        except OSError as error:
            raise MisconfigurationException(
                f"Federation: default_root_dir must be a folder in which '{folder}' can be made ({error.strerror})."
            ) from error
        return folder


def _write_configuration(run: Run) -> None:
    """Writes ``config.yaml``; that of a run which goes on with another one is kept under the number of its rounds."""
    path, text = run.folder / "config.yaml", yaml.safe_dump(run.hparams, sort_keys=False)
    if path.is_file() and path.read_text() != text:
        path.replace(path.with_name(f"config_until_round_{run.step}.yaml"))
    with replacing(path) as temporary:
        temporary.write_text(text)


def _loggers(run: Run, logger: bool | Logger | list[Logger]) -> list[Logger]:
    if logger is True:
        resumed: dict[str, Any] = {"purge_step": run.step + 1} if run.step else {}
        return [TensorBoardLogger(run.folder, name="", version="", **resumed)]
    if isinstance(logger, Logger):
        return [logger]
    return logger or []
