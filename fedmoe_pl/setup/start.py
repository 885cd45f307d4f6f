"""Makes a run and prepares its rounds: models, checks, workers, plans of the phases, folder, store and loggers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parameter import is_lazy

from fedmoe_pl.backends import (
    AutoBackend,
    Backend,
    DistributedBackend,
    PoolBackend,
    TrainerBackend,
    WorkersBackend,
    data_on,
    is_distributed,
    is_overridden,
)
from fedmoe_pl.backends.workers.fork_server import end_fork
from fedmoe_pl.checkpoints.checkpoint import FILE, PREVIOUS, copy_checkpoint, locked, run_versions
from fedmoe_pl.checkpoints.configuration import RECORD
from fedmoe_pl.checkpoints.files import cannot_be_made, replacing, write_file
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.checkpoints.resume import identify
from fedmoe_pl.checks import InvalidArgumentError, naming, reason_of, tried
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.logs.loggers import RunLoggers
from fedmoe_pl.models.copies import check_copies
from fedmoe_pl.phases.phase import INITIAL, Phase
from fedmoe_pl.phases.starts import sources
from fedmoe_pl.rounds.begin import freeze_shared, share_memory, sized
from fedmoe_pl.rounds.given_result import ReadResult
from fedmoe_pl.rounds.privacy import set_noise
from fedmoe_pl.rounds.run import Run, Saved, Settings
from fedmoe_pl.seeds import named_seed, seeded
from fedmoe_pl.setup.check_module import check_tensors, warn_of_eval_mode
from fedmoe_pl.setup.check_run import check_run
from fedmoe_pl.setup.check_trainer import check_trainer
from fedmoe_pl.trees import Tree, copy_module, load_tree, same_bits


def make_run(
    model: LightningModule,
    datamodule: FederatedDataModule,
    settings: Settings,
    saved: Saved,
    initial: Mapping[str, Tree],
    read_result: ReadResult,
    configuration: dict[str, str],
    record: dict[str, Any],
) -> Run:
    """Makes a run and checks all of it before any training.

    ``initial`` are saved tensors of the initial models, by the keys of ``Run.models``; ``configuration`` and ``record``
    are those of ``Run``.
    """
    devices = check_trainer(settings.trainer)
    backend = _with_workers(settings.backend, settings.trainer, devices)
    if not isinstance(backend, PoolBackend):
        end_fork()
    run = Run(
        **vars(replace(settings, backend=backend)),
        **vars(saved),
        devices=devices,
        models=_models(model, settings.phases, datamodule, settings.seed, initial),
        datamodule=datamodule,
        # workers put the samples on their devices themselves
        training_data=datamodule if isinstance(backend, WorkersBackend) else data_on(datamodule, devices[0]),
        identity=identify(settings.seed, datamodule),
        configuration=configuration,
        record=record,
    )
    check_run(run, read_result)
    set_noise(run)
    return run


def _models(
    model: LightningModule,
    phases: Sequence[Phase],
    datamodule: FederatedDataModule,
    seed: int,
    initial: Mapping[str, Tree],
) -> dict[str, LightningModule]:
    """Copies of the federation's model and of the phases' own models, sized for the data, with the initial tensors."""
    given = {INITIAL: model} | {phase.name: phase.model for phase in phases if phase.model is not None}
    for name, module in given.items():
        _check_model("Federation" if name == INITIAL else f"Phase '{name}'", module)
    for module in (*given.values(), *(phase.gate for phase in phases if phase.gate is not None)):
        check_copies(module)
    models = dict[str, LightningModule]()
    for name, module in given.items():
        models[name] = sized(_copied(module), datamodule, named_seed(seed, name))
        load_tree(models[name], initial.get(name, {}))
    return models


def _check_model(owner: str, model: LightningModule) -> None:
    """Refuses what is not a LightningModule, an unsuitable state dict, and hooks that change the model too late."""
    if not isinstance(model, LightningModule):
        allowed = "a LightningModule of lightning.pytorch, such as a PersonalizedMoE with any module as its expert"
        raise InvalidArgumentError(owner, "model", model, allowed)
    check_tensors(model)
    for hook in ("configure_model", "setup"):
        if is_overridden(model, hook):
            _check_hook(owner, model, hook)


def _check_hook(owner: str, model: LightningModule, hook: str) -> None:
    """Refuses a Trainer's hook that changes the model, because evaluations use the model without a Trainer."""
    configured = _copied(model)
    try:
        with seeded(0):
            configured.configure_model() if hook == "configure_model" else configured.setup("fit")
    except Exception as error:
        if hook == "configure_model":
            because = f"evaluations do not call it, and without a Trainer it fails with {reason_of(error)}"
            raise InvalidArgumentError(model, hook, "overridden", "left as it is", because) from error
        # `setup` needs the client's Trainer, which calls it; an evaluation that needs its result will fail
    if added := configured.state_dict().keys() - model.state_dict().keys():
        because = f"{hook} makes '{min(added)}' only after clients and server have exchanged the others"
        raise InvalidArgumentError(owner, "model", model, "one that makes all layers in its constructor", because)
    before, after = _tensors(model), _tensors(configured)
    changed = [name for name in before if name not in after or not same_bits(before[name], after[name])]
    changed += [
        name
        for name, value in vars(configured).items()
        if type(value) in (int, float) and not math.isnan(value) and getattr(model, name, value) not in (value, None)
    ]
    if changed:
        because = f"clients would call it in every round, evaluations never, and it changes '{changed[0]}'"
        raise InvalidArgumentError(model, hook, "overridden", "moved to the constructor", because)


def _tensors(model: LightningModule) -> Tree:
    """Parameters and buffers, except those whose bytes cannot be compared: lazy, sparse and quantized ones."""
    tensors = {**dict(model.named_buffers()), **model.state_dict()}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not (is_lazy(tensor) or tensor.is_quantized) and tensor.layout is torch.strided
    }


def _copied(model: LightningModule) -> LightningModule:
    with tried(f"{type(model).__name__} cannot be copied for each client"):
        return copy_module(model)


def _with_workers(backend: Backend, trainer: dict[str, Any], devices: Sequence[torch.device]) -> Backend:
    """The backend, wrapped in one with worker processes if there are several devices or all train a client together."""
    requested = trainer.get("devices", "auto")
    if isinstance(backend, WorkersBackend):
        if requested not in ("auto", 1):
            because = f"{type(backend).__name__} has its own workers"
            raise InvalidArgumentError("Trainer", "trainer.devices", requested, "left out", because)
        if is_distributed(trainer):
            because = f"{type(backend).__name__} trains each client on one device"
            raise InvalidArgumentError("Trainer", "trainer.strategy", trainer["strategy"], "left out", because)
        return backend
    if is_distributed(trainer):
        if not isinstance(backend, AutoBackend | TrainerBackend):
            because = "trainer.strategy trains one client after another, each on all devices"
            raise InvalidArgumentError("Federation", "backend", backend, "auto or TrainerBackend", because)
        return DistributedBackend(devices, getattr(backend, "loss_is_mean", False))
    if len(devices) == 1:
        return backend
    # imports in the processes take seconds, often longer than a whole run on a CPU
    lazy = devices[0].type == "cpu" and requested == "auto"
    return PoolBackend(backend, devices, lazy)


@contextmanager
def open_run(
    run: Run,
    runs: Path | None,
    ckpt_path: Path | None,
    logger: bool | Logger | list[Logger],
    below: str = "",
) -> Iterator[None]:
    """Plans a run's phases, opens its backend, folder, store and loggers for the rounds, and closes them afterwards.

    ``below`` precedes the names in loggers that were given, because they may have those of another run.
    """
    plan_phases(run)
    try:
        run.backend.open()
        with nullcontext() if runs is None else _new_folder(run, runs):
            _open_files(run, ckpt_path, logger, below)
            yield
    except BaseException:
        with suppress(Exception):  # a logger that also fails to write must not hide the first error
            run.loggers.finalize("failed")
        raise
    finally:
        run.backend.close()
    run.loggers.finalize()


def plan_phases(run: Run) -> None:
    """Plans every phase that has rounds left, and logs the plans."""
    phases, models = dict[str, list[str]](), list[LightningModule]()
    for phase in run.phases:
        state = run.states.get(phase.name) or run.given_results.get(phase.name)
        if state is not None and (state.finished or state.round == phase.rounds):
            continue
        module = run.module(phase)
        # untrained tensors, even in a resumed run, so that its plans are those of an uninterrupted run
        initial = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
        training = run.local_training(phase, module, initial)
        freeze_shared(training, state)
        share_memory(training, run.initial_model(phase))
        with naming(phase):
            plan = run.backend.plan(training)
        run.plans[phase.name] = plan
        models.append(run.initial_model(phase))
        phases.setdefault(plan.description, []).append(phase.name)
    warn_of_eval_mode(models)
    if phases:
        sentences = [f"{', '.join(names)}: {description}" for description, names in phases.items()]
        rank_zero_info("backend: " + "; ".join(sentences))
    names = [name for each in phases.values() for name in each]
    starts = []
    for name in (each for each in names if sources(run.starts[each])):
        parts = [f"{before} ({part})" if part else before for part, before in sources(run.starts[name])]
        starts.append(f"{name} from {' and '.join(parts)}")
    if starts:
        rank_zero_info("start: " + "; ".join(starts))


@contextmanager
def _new_folder(run: Run, runs: Path) -> Iterator[None]:
    """Makes the run's folder in ``runs`` and locks it in this context."""
    while True:
        run.folder = runs / f"version_{max(run_versions(runs), default=-1) + 1}"
        try:
            run.folder.mkdir(parents=True)
            break
        except (OSError, ValueError) as error:  # ValueError for a name with a zero byte
            if not (isinstance(error, FileExistsError) and run.folder.is_dir()):  # or another run has begun just now
                raise cannot_be_made(run.folder, error) from error
    if run.enable_checkpointing:
        (run.folder / FILE).parent.mkdir()
    with locked(run.folder / FILE):
        yield


def _open_files(run: Run, ckpt_path: Path | None, logger: bool | Logger | list[Logger], below: str) -> None:
    """Writes the run's record, configuration and first checkpoint, and makes its store and loggers."""
    write_file(run.folder / RECORD, json.dumps(run.record, default=str))
    if run.hparams:
        _write_configuration(run)
    if ckpt_path is None:
        run.save()
    elif run.enable_checkpointing and ckpt_path.name != (last := run.folder / FILE).name:
        # last.ckpt may be damaged or newer; the run goes on from the given checkpoint in place of both files
        copy_checkpoint(ckpt_path, last)
        copy_checkpoint(ckpt_path, last.with_name(PREVIOUS))
    run.store = run.make_store(run)
    for name, state in run.states.items():
        if not state.finished:
            state.clients = run.store.adopt(name, state.round, state.clients)
            if state.best_round:
                state.best_clients = run.store.adopt(name, state.best_round, state.best_clients)
    is_resumed = ckpt_path is not None
    completed = _completed(run) if is_resumed else {}
    run.loggers = RunLoggers(_loggers(run, logger, is_resumed), completed, "" if logger is True else below)
    if is_resumed:
        rounds = [
            f"after round {state.round} of phase '{name}'"
            + f"; clients that have trained in its next round: {len(state.trained)}" * bool(state.trained)
            for name, state in run.states.items()
        ]
        rank_zero_info(f"Resumed from {ckpt_path} {rounds[-1] if rounds else 'before the first round'}.")


def _write_configuration(run: Run) -> None:
    """Writes ``config.yaml``; renames a different one that the run had before to ``config_until_round_<step>.yaml``."""
    path, text = run.folder / "config.yaml", yaml.safe_dump(run.hparams, sort_keys=False)
    if path.is_file() and path.read_text() != text:
        path.replace(path.with_name(f"config_until_round_{run.step}.yaml"))
    with replacing(path) as temporary:
        temporary.write_text(text)


def _completed(run: Run) -> dict[str | None, int]:
    """The last logged step of a resumed run, under None, and of each method, including those that have not begun."""
    steps: dict[str | None, int] = {None: run.step}
    for phase in run.phases:
        state = run.states.get(phase.name, PhaseState({}, {}))
        has_epochs = phase.evaluation.every_n_epochs is not None or phase.client_trainer(run.trainer).get("logger")
        epochs = max(phase.epochs(run.trainer), 1) if has_epochs else 1
        evaluated_before = epochs - 1 if state.curve and not state.round else 0
        step = state.round * epochs + evaluated_before
        steps |= dict.fromkeys(map(phase.method, phase.evaluation_points), step)
    return steps


def _loggers(run: Run, logger: bool | Logger | list[Logger], is_resumed: bool) -> list[Logger]:
    if logger is True:
        purge_step = run.step + 1 if is_resumed else 0  # TensorBoard ignores the first purge
        return [TensorBoardLogger(run.folder, name="", version="", purge_step=purge_step)]
    if isinstance(logger, Logger):
        return [logger]
    return logger or []
