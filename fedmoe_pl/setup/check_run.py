"""Checks of a run before any training: what would otherwise give numbers that are not those that were asked for."""

from __future__ import annotations

import copy
import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau
from torchmetrics import Metric

from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.aggregation.aggregation import Cohort
from fedmoe_pl.algorithms.algorithm import Algorithm, Need, averages, overrides, sends_more
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.shared.requirements import warn_of_mixture
from fedmoe_pl.backends import is_distributed, overridden_hooks, packages_read_once, quiet
from fedmoe_pl.backends.fitting import TRAINER_DEFAULTS, cores_of_process
from fedmoe_pl.backends.optimizers import learning_rates, optimizer_and_scheduler
from fedmoe_pl.backends.training import epochs_to_try
from fedmoe_pl.backends.workers.fork_server import FORKS
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.checks import InvalidArgumentError, check_at_least, naming, reason_of, tried
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.evaluation.metrics import predicts_classes
from fedmoe_pl.models import FixedGate, MixtureOfExperts, PooledMoE
from fedmoe_pl.models.normalization import has_batch_norm
from fedmoe_pl.phases.participation import cohort_of, cohort_size, takes_all
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import chain_of_starts, check_start, warn_of_computed_parts
from fedmoe_pl.rounds.begin import check_moments
from fedmoe_pl.rounds.fit import server_parameters, shared_by
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.setup.data import check_direction, check_metric, check_task
from fedmoe_pl.trees import Tree, copy_module, names_of_same_tensors, of_algorithm, same_memory

_NEEDS: dict[Need, str] = {
    "all_clients": "all clients in every round",
    "validation_samples": "validation samples of clients",
    "validation_samples_of_each": "validation samples of every client",
    "classes": "a class for each sample",
    "loss_of_outputs": "the loss of an expert's outputs, which only a mixture of experts knows without classes",
    "plain_steps": "the steps of plain SGD",
    "fresh_optimizers": "new optimizers in every round, in which a client may train other parameters under a name",
    "fixed_gate": "a gate without parameters, because it trains experts apart from the gate",
    "whole_batches": "whole batches, because its loss is not a mean over their samples",
    "step_of_each_batch": "a step for each batch, because their order says which part of the model they train",
    "own_server_step": "its own step of the server, whose result is not a mean of parameters",
}


def check_phases(phases: Sequence[Phase], evaluate_every_n_rounds: int) -> None:
    """Refuses phases of the same name, and one that selects a round although its rounds are not evaluated."""
    for phase in phases:
        every = phase.evaluation.every_n_rounds
        if phase.select and not (phase.evaluate and (evaluate_every_n_rounds if every is None else every)):
            raise InvalidArgumentError(str(phase), "select", "given", "left out", "its rounds are not evaluated")
    names = [phase.method(point) for phase in phases for point in phase.evaluation_points]
    if not phases or len(set(names)) < len(names):
        raise InvalidArgumentError("Federation", "phases", names, "at least one phase, and every name once")


def check_run(run: Run, read_result: Callable[[Phase, LightningModule], PhaseState]) -> None:
    """Checks a run before any training, and reads the results of phases that take theirs from a checkpoint."""
    _check_evaluated(run)
    by_name, trained = {phase.name: phase for phase in run.phases}, dict[str, set[str]]()
    for phase in run.phases:
        trainer = phase.client_trainer(run.trainer)
        if phase.train.trainer:
            check_trainer(trainer, str(phase))
        module = run.module(phase)
        check_start(phase, run.starts[phase.name], module, lambda name: run.module(by_name[name]))
        warn_of_computed_parts(phase, run.starts[phase.name], by_name)
        check_needs(phase, module, run.datamodule, trainer)
        check_phase(phase, module, run.datamodule, run.seed, run.metrics, _epochs_of_all(trainer))
        trained[phase.name] = trained_names(phase, module, trainer["max_epochs"])
        _check_gate(run, trained, phase, module)
        _warn_of_lost(run, trained, phase, module)
        cohort = cohort_of(phase, run.datamodule.num_clients, run.seed)
        _check_cohort(run, phase, cohort)
        check_aggregation(phase, module, cohort, run.phases_before(phase))
        _check_secure_aggregation(run, phase, module, cohort)
        check_sample_privacy(phase, module, run.datamodule, trainer, run.phases_before(phase))
        if trained[phase.name] and phase.ckpt_path is None:
            _check_has_optimizer(phase, module)
            _check_batches(phase, module, trainer, run.datamodule, run.seed)
            _check_monitored(phase, module, trainer, run.datamodule, run.seed)
        if phase.ckpt_path and phase.name not in run.states:
            run.given_results[phase.name] = read_result(phase, module)
        state = run.states.get(phase.name)
        if state is not None and state.evaluations:
            check_moments(phase, state)


def _check_evaluated(run: Run) -> None:
    """Refuses to evaluate more clients than there are, and none of those by whom a phase selects its result."""
    number, num_clients = run.evaluation_cohort_size, run.datamodule.num_clients
    check_at_least("Federation", "evaluation_cohort_size", number, 1, num_clients)
    for phase in run.phases:
        participants = phase.algorithm.opt_out.participants(range(num_clients), run.seed)
        if phase.monitor and not {*participants} & {*run.evaluated}:
            because = f"none of these clients takes part in '{phase.name}', which selects a round"
            raise InvalidArgumentError("Federation", "evaluation_cohort_size", number, "larger", because)


def _check_cohort(run: Run, phase: Phase, cohort: Cohort) -> None:
    """Refuses a cohort that is larger than the participants, or smaller than what must answer."""
    size = phase.clients_per_round
    if cohort.size > (most := len(cohort.participants)):
        raise InvalidArgumentError(str(phase), "clients_per_round", size, f"at most {most}, the clients that take part")
    needed, because = run.failures.needed(phase.aggregation, phase.secure, cohort.size)
    if needed > cohort.size and phase.ckpt_path is None:
        raise InvalidArgumentError(str(phase), "clients_per_round", size, f"a cohort of at least {needed}", because)


def _check_has_optimizer(phase: Phase, module: LightningModule) -> None:
    """Refuses a module without an optimizer, with which Lightning trains nothing."""
    if isinstance(module, MixtureOfExperts) or not module.automatic_optimization:
        return
    try:
        configured = module.configure_optimizers()
    except Exception:  # it may need its Trainer
        return
    if configured is None:
        because = f"{phase} would train nothing"
        raise InvalidArgumentError(module, "what configure_optimizers returns", None, "an optimizer", because)


def _epochs_of_all(trainer: Mapping[str, Any]) -> int:
    """How many epochs all clients train at least; not more than one where something may end training early."""
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    may_end = any(trainer.get(name) not in (None, -1, False) for name in ("max_steps", "max_time", "fast_dev_run"))
    may_end |= any(isinstance(each, EarlyStopping | Timer) for each in callbacks)
    return min(trainer["max_epochs"], 1) if may_end else trainer["max_epochs"]


def _check_batches(
    phase: Phase, module: LightningModule, trainer: Mapping[str, Any], datamodule: FederatedDataModule, seed: int
) -> None:
    """Refuses shares of batches that leave none to a client, and validations that its epochs never reach."""
    if trainer.get("fast_dev_run") or overrides(phase.algorithm, "client_batches"):
        return  # Lightning or the algorithm chooses the batches
    limits = [trainer.get(name) for name in ("limit_train_batches", "limit_val_batches")]
    of_validation = trainer.get("val_check_interval"), trainer.get("check_val_every_n_epoch")
    if not any(isinstance(limit, float) for limit in limits) and {*of_validation} <= {None, 1}:
        return
    train = {
        client: phase.algorithm.client_samples(Client(client, 0, seed, module, samples, {}, datamodule))
        for client, samples in enumerate(datamodule.train_samples)
    }
    held_out = phase.algorithm.opt_out.opted_in_of_all(datamodule.validation_samples, seed, validation=True)
    drop_single = has_batch_norm(module)
    fewest = {
        "limit_train_batches": _fewest_batches(datamodule, train, train, phase.train.batch_size, drop_single),
        "limit_val_batches": _fewest_batches(datamodule, train, held_out, datamodule.evaluated_at_once),
    }
    for name, (number, client) in fewest.items():
        limit = trainer.get(name)
        if isinstance(limit, float) and limit and number and not int(number * limit):
            allowed, because = "a larger share of batches, or their number", f"{client} has {number}, and none is left"
            raise InvalidArgumentError(str(phase), _key_of(phase, name), limit, allowed, because)
    if not (trainer["limit_val_batches"] and len(datamodule.validation_samples.indices)):
        return
    epochs, name, (most, client) = "check_val_every_n_epoch", "val_check_interval", fewest["limit_train_batches"]
    check_at_least(str(phase), _key_of(phase, epochs), trainer.get(epochs), 1)
    interval, limit = trainer.get(name), trainer.get("limit_train_batches")
    if limit is not None:
        most = int(most * limit) if isinstance(limit, float) else min(most, limit)
    is_share = isinstance(interval, float) and interval <= 1
    highest = math.inf if trainer.get(epochs, 1) is None else most  # else an epoch must reach it
    if most and isinstance(interval, int | float) and not is_share and not 1 <= interval <= highest:
        allowed, because = f"a share, or from 1 to {most}", f"{client} has that many batches in an epoch"
        raise InvalidArgumentError(str(phase), _key_of(phase, name), interval, allowed, because)


def _fewest_batches(
    datamodule: FederatedDataModule,
    train: Mapping[int, Tensor],
    samples: Mapping[int, Tensor] | ClientSamples,
    batch_size: int | None,
    drop_single: bool = False,
) -> tuple[int, str]:
    """Batches of the client with the fewest samples, of those that train and have any, and its name."""
    clients = [client for client, trained in train.items() if len(trained) and len(samples[client])]
    if not clients:
        return 0, ""
    client = min(clients, key=lambda client: len(samples[client]))
    number = len(datamodule.batches(samples[client], batch_size, drop_single=drop_single))
    return number, f"client {datamodule.client_names[client]}"


def _key_of(phase: Phase, name: str) -> str:
    """Where an argument of a phase's Trainers stands."""
    return f"{'train.' if name in (phase.train.trainer or {}) else ''}trainer.{name}"


_KNOWN = ("fedmoe_pl.", "lightning.")  # what is not in these packages may log any metric


def _check_monitored(
    phase: Phase, module: LightningModule, trainer: Mapping[str, Any], datamodule: FederatedDataModule, seed: int
) -> None:
    """Refuses early stopping and schedulers that wait for a metric, if the training of clients does not log it."""
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    stopping = [each for each in callbacks if isinstance(each, EarlyStopping) and each.strict]
    is_known = all(type(each).__module__.startswith(_KNOWN) for each in (*callbacks, module, phase.algorithm))
    is_known = is_known and not any(isinstance(each, LambdaCallback) for each in callbacks)  # with the user's functions
    if is_known and trainer["max_epochs"] and isinstance(module, MixtureOfExperts) and not overridden_hooks(module):
        logged = ["validation_loss", *(["train_loss", "train_loss_step", "train_loss_epoch"] * bool(trainer["logger"]))]
        for each in (each for each in stopping if each.monitor not in logged):
            argument, because = f"{type(each).__name__}.monitor", "the training of clients logs no other metric"
            raise InvalidArgumentError(str(phase), argument, each.monitor, " or ".join(logged), because)
    names = [type(each).__name__ for each in stopping if each.monitor.startswith("validation")]
    if (scheduler := _plateau(module)) is not None:
        if getattr(scheduler, "monitor", None) != "validation_loss":
            key = "train.lr_scheduler" if phase.train.lr_scheduler is not None else "the model's lr_scheduler"
            allowed = "lightning.pytorch.cli.ReduceLROnPlateau(monitor='validation_loss') or one without a metric"
            because = "the training of clients logs no other metric"
            raise InvalidArgumentError(str(phase), key, "a ReduceLROnPlateau of something else", allowed, because)
        names.append("ReduceLROnPlateau")
    if not (trainer["max_epochs"] and names):
        return
    because = f"{names[0]} follows what clients validate"
    if not trainer["limit_val_batches"]:
        value = trainer["limit_val_batches"]
        raise InvalidArgumentError(str(phase), "trainer.limit_val_batches", value, "above 0, such as 1.0", because)
    if not len(datamodule.validation_samples.indices):
        fraction = datamodule.validation_fraction
        raise InvalidArgumentError(datamodule, "validation_fraction", fraction, "above 0", because)
    if scheduler is None:
        return  # early stopping leaves alone, or fails, only the clients that cannot validate
    opt_out = phase.algorithm.opt_out
    trained = opt_out.opted_in_of_all(datamodule.train_samples, seed).sizes > 0
    validated = opt_out.opted_in_of_all(datamodule.validation_samples, seed, validation=True).sizes > 0
    if len(without := (trained & ~validated).nonzero()):
        because = f"{because}, and client {datamodule.client_names[int(without[0])]} has no sample for it"
        raise InvalidArgumentError(datamodule, "validation_fraction", datamodule.validation_fraction, "larger", because)


def _plateau(module: LightningModule) -> ReduceLROnPlateau | None:
    """The scheduler of a mixture that the federation trains, if it waits for a metric."""
    if not isinstance(module, MixtureOfExperts) or module.lr_scheduler is None or overridden_hooks(module):
        return None
    scheduler = module.lr_scheduler(module.optimizer(module.parameter_groups()))
    return scheduler if isinstance(scheduler, ReduceLROnPlateau) else None


def check_needs(
    phase: Phase, module: LightningModule, datamodule: FederatedDataModule, trainer: Mapping[str, Any]
) -> None:
    """Refuses a phase that lacks something of what its algorithm needs (``Algorithm.needs``)."""
    owner, size, algorithm = str(phase), phase.clients_per_round, phase.algorithm
    number = datamodule.num_clients if takes_all(size) else cohort_size(datamodule.num_clients, size)
    is_mixture = isinstance(module, MixtureOfExperts)  # which also knows the targets in a dict
    has_classes = (datamodule.has_pairs or is_mixture) and predicts_classes(module, datamodule)
    another = owner, "algorithm", algorithm, "another for these data and this model"
    clip, fraction = trainer.get("gradient_clip_val"), datamodule.validation_fraction
    accumulated = trainer.get("accumulate_grad_batches", 1)
    step = "server_optimizer" if phase.server_optimizer is not None else "aggregation"
    replaced, gate = getattr(phase, step), getattr(module, "gate", None)
    trains_gate = not (gate is None or isinstance(gate, FixedGate) or getattr(algorithm, "expert", None) == "")
    lacking: dict[Need, tuple[bool, tuple[object, str, Any, str]]] = {
        "all_clients": (number < datamodule.num_clients, (owner, "clients_per_round", size, "left out")),
        "validation_samples": (
            not len(datamodule.validation_samples.indices),
            (datamodule, "validation_fraction", fraction, "above 0"),
        ),
        "validation_samples_of_each": (
            bool(((datamodule.train_samples.sizes > 0) & (datamodule.validation_samples.sizes == 0)).any()),
            (datamodule, "validation_fraction", fraction, "larger" if fraction else "above 0"),
        ),
        "classes": (not has_classes, another),
        "loss_of_outputs": (not (has_classes or is_mixture), another),
        "plain_steps": (bool(clip), (owner, _key_of(phase, "gradient_clip_val"), clip, "left out")),
        "fresh_optimizers": (phase.train.keep_optimizer, (owner, "train.keep_optimizer", True, "False")),
        "fixed_gate": (trains_gate, (owner, "gate", gate, "EqualWeights, GlobalOnly or another fixed one")),
        "own_server_step": (replaced is not None, (owner, step, replaced, "left out")),
        "whole_batches": (
            is_distributed(trainer),
            (owner, "trainer.strategy", trainer.get("strategy"), "left out"),
        ),
        "step_of_each_batch": (
            accumulated != 1,
            (owner, "trainer.accumulate_grad_batches", accumulated, "left out"),
        ),
        "fixed_rounds": (False, (owner, "rounds", phase.rounds, "")),  # resumed runs are checked
    }
    if is_mixture and module.task == "causal_lm" and is_distributed(trainer):
        because = "processes would average the mean losses of different numbers of tokens"
        raise InvalidArgumentError(owner, "trainer.strategy", trainer.get("strategy"), "left out", because)
    for need in algorithm.needs:
        is_lacking, refused = lacking[need]
        if is_lacking:
            raise InvalidArgumentError(*refused, f"{type(algorithm).__name__} needs {_NEEDS[need]}")


def check_phase(
    phase: Phase,
    module: LightningModule,
    datamodule: FederatedDataModule,
    seed: int,
    metrics: Mapping[str, Metric] | None = None,
    max_epochs: int = 0,
) -> None:
    """Refuses a phase that does not fit its module or the data."""
    _check_tensors(module)
    if phase.evaluate:
        _check_predictions(module)
    _check_loss(phase, module)
    with naming(phase):
        phase.algorithm.server_init(module)
    _check_shared(phase, module, datamodule.num_clients)
    check_task(phase, module, datamodule, metrics or {})
    check_metric(str(phase), "select.monitor", phase.monitor, datamodule, metrics or {}, [module])
    check_direction(str(phase), "select.monitor", phase.monitor, metrics or {})
    _check_samples(phase, module, datamodule, seed)
    if phase.evaluate and phase.algorithm.predicts_with_local_expert:
        warn_of_mixture(phase.algorithm, module)
    check_optimizer(phase, module, max_epochs)


def _check_tensors(module: LightningModule) -> None:
    """Refuses tensors that have no memory to load others into."""
    for name, tensor in module.state_dict().items():
        if tensor.layout is not torch.strided:
            allowed = "a dense tensor, or a buffer with persistent=False"
            because = "what is in a state dict is sent and averaged"
            raise InvalidArgumentError(module, name, f"of layout {tensor.layout}", allowed, because)


def _check_predictions(module: LightningModule) -> None:
    """Refuses hooks that evaluations do not call, and normalization by the samples that an evaluation has together."""
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        if getattr(type(module), name) is not getattr(LightningModule, name):
            because = "evaluations do not call it; change inputs in forward, or in the dataset"
            raise InvalidArgumentError(module, name, "overridden", "left as it is", because)
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is None:
            because = "a client would be evaluated with statistics of other clients' samples"
            raise InvalidArgumentError(module, f"track_running_stats of {name}", False, "True", because)


def _check_loss(phase: Phase, module: LightningModule) -> None:
    """Refuses modules that an algorithm with its own loss cannot train, or whose hooks it would skip."""
    if not overrides(phase.algorithm, "client_loss") and phase.sample_privacy is None:
        return
    because, hooks, name = "", overridden_hooks(module), type(module).__name__
    if not (callable(getattr(module, "loss", None)) and module.automatic_optimization):
        because = f"it needs {name}'s method loss(batch) -> (loss, metrics), and automatic optimization"
    elif hooks:
        because = f"it calls loss(batch) itself, and would skip {name}'s hooks ({', '.join(hooks)})"
    elif {"classes", "loss_of_outputs"} & {*phase.algorithm.needs} and _has_own_loss(module):
        because = f"it computes losses of experts' outputs, and would skip {name}.loss; the argument loss it uses"
    if because and phase.sample_privacy is not None:
        raise InvalidArgumentError(str(phase), "sample_privacy", phase.sample_privacy, "left out", because)
    if because:
        raise InvalidArgumentError(str(phase), "algorithm", phase.algorithm, "another", because)


def _has_own_loss(module: LightningModule) -> bool:
    """Whether a mixture's subclass of the user's has a loss of its own for a batch."""
    return isinstance(module, MixtureOfExperts) and not type(module).loss.__module__.startswith("fedmoe_pl.")


def _check_shared(phase: Phase, module: LightningModule, num_clients: int) -> None:
    """Refuses to share what clients keep under another name, and what clients of some architectures do not have."""
    name = type(phase.algorithm).__name__
    for names in names_of_same_tensors(module):
        shared = [name for name in names if phase.algorithm.is_shared(name)]
        others = [name for name in names if name not in shared]
        if shared and others:  # what a client keeps would replace what it receives
            raise MisconfigurationException(
                f"{phase}: {name} shares '{shared[0]}', but not '{others[0]}', another name of the same tensor of the "
                f"{type(module).__name__}; share all of its names or none."
            )
    if isinstance(module, PooledMoE) and phase.ckpt_path is None and module.num_experts != num_clients:
        raise InvalidArgumentError(module, "num_experts", module.num_experts, f"num_clients, {num_clients}")
    if not isinstance(module, MixtureOfExperts):
        return
    shared = {name for name in module.state_dict() if phase.algorithm.is_shared(name)}
    for architecture in sorted({module.client_architecture(client) for client in range(num_clients)}):
        client_module = copy_module(module, {name for name, _ in module.named_parameters()})
        client_module.keep_architecture(architecture)
        if missing := sorted(shared - client_module.state_dict().keys()):
            raise MisconfigurationException(
                f"{phase}: {name} shares '{missing[0]}', which clients of architecture {architecture} do not have; "
                "only tensors that all clients have can be shared."
            )


def _check_samples(phase: Phase, module: LightningModule, datamodule: FederatedDataModule, seed: int) -> None:
    """Refuses data without the samples that the phase's selection or batch normalization needs."""
    train = datamodule.train_samples
    sizes = phase.algorithm.opt_out.opted_in_of_all(train, seed).sizes
    if phase.monitor == "reweighted_test" and ((sizes > 0) & (sizes < train.sizes)).any():
        because = "it depends on the classes of all samples of a client, also of those that opt out"
        raise InvalidArgumentError(str(phase), "select.monitor", phase.monitor, "another metric", because)
    single = (train.sizes == 1).nonzero().flatten()
    if len(single) and has_batch_norm(module):
        client = datamodule.client_names[int(single[0])]
        raise MisconfigurationException(
            f"{phase}: client {client} has one training sample, but batch normalization needs two; lower num_clients "
            "or change partition_seed."
        )


_MOST_STEPS = 1000  # of a scheduler that is tried, which take a few milliseconds


def check_optimizer(phase: Phase, module: LightningModule, max_epochs: int = 0) -> None:
    """Refuses optimizers and schedulers that cannot be made or stepped, and options that would be overlooked."""
    if isinstance(module, MixtureOfExperts):
        own = "train.optimizer" if phase.train.optimizer is not None else "the model's optimizer"
        scheduler = "train.lr_scheduler" if phase.train.lr_scheduler is not None else "the model's lr_scheduler"
        with tried(f"{phase}: {own} or {scheduler} cannot be made"):
            configured = MixtureOfExperts.configure_optimizers(module)
        _check_rates(phase, own, configured["optimizer"] if isinstance(configured, dict) else configured)
        _, stepped = optimizer_and_scheduler(configured)
        if stepped is not None:
            with tried(f"{phase}: {scheduler} cannot be stepped once per epoch"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimizer makes no step
                for _ in range(min(max_epochs, _MOST_STEPS)):
                    stepped.step()
    if phase.server_optimizer is not None:
        server = phase.algorithm.server_init(module)
        parameters = [nn.Parameter(server[name].clone()) for name in server_parameters(module, server)]
        with tried(f"{phase}: server_optimizer cannot be made"):
            server_optimizer = phase.server_optimizer(parameters)
        with tried(f"{phase}: server_optimizer cannot be stepped"):
            server_optimizer.step()  # changes nothing without gradients
        _check_rates(phase, "server_optimizer", server_optimizer)
    if phase.train.round_lr_scheduler is None and not phase.train.keep_optimizer:
        return
    optimizer, scheduler = optimizer_and_scheduler(module.configure_optimizers())
    option, because = "train.keep_optimizer" if phase.train.keep_optimizer else "train.round_lr_scheduler", ""
    if optimizer is None:
        because = f"configure_optimizers of {type(module).__name__} returns more than an optimizer and its scheduler"
    elif phase.train.round_lr_scheduler is not None and isinstance(scheduler, OneCycleLR | CyclicLR):
        because = f"{type(scheduler).__name__}, a scheduler over epochs, has learning rates of its own"
    if because:
        raise InvalidArgumentError(str(phase), option, "given", "left out", because)
    if phase.train.round_lr_scheduler is not None:
        with tried(f"{phase}: train.round_lr_scheduler cannot be stepped once per round"):
            may_end = phase.select is not None or overrides(phase.algorithm, "server_final")  # before its last round
            learning_rates(module, phase.train.round_lr_scheduler, min(1 if may_end else _MOST_STEPS, phase.rounds - 1))


def _check_rates(phase: Phase, key: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuses a learning rate that is infinite or no number, which torch does not."""
    for rate in (float(group.get("lr") or 0) for group in optimizer.param_groups):
        if not math.isfinite(rate):
            raise InvalidArgumentError(str(phase), f"lr of {key}", rate, "a finite number")


def check_aggregation(phase: Phase, module: LightningModule, cohort: Cohort, earlier: Sequence[Phase]) -> None:
    """Refuses an aggregation of what is no mean of parameters, what it refuses itself, and privacy that has a leak."""
    aggregation, algorithm, name = phase.aggregation, phase.algorithm, type(phase.algorithm).__name__
    if aggregation is None:
        return
    is_private, allowed, because = isinstance(aggregation, DifferentialPrivacy), "left out", ""
    if phase.ckpt_path is None:  # a given result is not aggregated
        server = algorithm.server_init(module)
        shared = shared_by(algorithm, server)
        only_averages, hooks = averages(algorithm) and not of_algorithm(server), sends_more(algorithm, server)
        if not only_averages or not any(tensor.is_floating_point() for tensor in shared.values()):
            because = f"what {name} combines is not the mean of parameters"
        elif is_private and hooks:
            because = f"clients of {name} send more than their updates ({', '.join(hooks)})"
        elif is_private and phase.monitor is not None:
            because = "a select by clients' data is not in epsilon"
        else:
            aggregation.check(shared, {name for name, _ in module.named_parameters(remove_duplicate=False)}, cohort)
    for other in earlier if is_private else ():
        if other.algorithm.federated and not isinstance(other.aggregation, DifferentialPrivacy):
            allowed = f"given in '{other.name}', from which the phase starts, too"
            because = "its model tells about clients' data"
    if because:
        raise InvalidArgumentError(str(phase), "aggregation", aggregation, allowed, because)


def _check_secure_aggregation(run: Run, phase: Phase, module: LightningModule, cohort: Cohort) -> None:
    """Refuses secure aggregation where the server needs more than a sum, and where it would hide nothing."""
    secure, aggregation, algorithm = phase.secure, phase.aggregation, phase.algorithm
    if secure is None or phase.ckpt_path is not None:
        return
    name, because = type(algorithm).__name__, ""
    server = algorithm.server_init(module) if algorithm.federated else {}
    if not averages(algorithm):
        because = f"the server of {name} needs each client's update" if algorithm.federated else f"{name} sends nothing"
    elif hooks := sends_more(algorithm, server):
        because = f"clients of {name} send more than their updates ({', '.join(hooks)})"
    elif wrong := [each for each, tensor in shared_by(algorithm, server).items() if not _is_summable(tensor)]:
        because = f"the shared '{wrong[0]}' is no mean, or not finite; use FedBN, GroupNorm, or another `shared`"
    elif not _receives_all(algorithm, server, cohort):
        because = f"clients of {name} receive others than the server's shared tensors, and send their changes"
    if because:
        raise InvalidArgumentError(str(phase), "secure_aggregation", phase.secure_aggregation, "left out", because)
    if aggregation is not None and not aggregation.averages_changes:
        allowed, because = "left out", "it needs each client's update, which secure_aggregation hides"
        raise InvalidArgumentError(str(phase), "aggregation", aggregation, allowed, because)
    size, needed = cohort.size, secure.needed(cohort.size)
    if aggregation is not None and aggregation.poisson_sampling and size < len(cohort.participants):
        because = "with secure_aggregation, cohorts of different sizes may be too small to be unmasked"
        raise InvalidArgumentError(str(phase), "clients_per_round", phase.clients_per_round, "left out", because)
    if needed <= size / 2:
        allowed = f"more than half of the cohort of {size}"
        raise InvalidArgumentError(str(phase), "secure_aggregation.threshold", secure.threshold, allowed)
    if (least := run.failures.min_clients) is not None and least > needed:
        because = f"the server of '{phase.name}' would see sums that it discards; raise secure_aggregation.threshold"
        raise InvalidArgumentError(run.failures, "min_clients", least, f"at most {needed}", because)


def _is_summable(tensor: Tensor) -> bool:
    """Whether the server takes the mean of clients' tensors, and integers can express their changes."""
    return tensor.is_floating_point() and bool(tensor.isfinite().all())


def _receives_all(algorithm: Algorithm, server: Tree, cohort: Cohort) -> bool:
    """Whether a client receives the server's shared tensors as they are."""
    sent, shared = algorithm.server_send(server, cohort.participants[0], {}), shared_by(algorithm, server)
    return all(name in sent and same_memory(sent[name], tensor) for name, tensor in shared.items())


def check_sample_privacy(
    phase: Phase,
    module: LightningModule,
    datamodule: FederatedDataModule,
    trainer: Mapping[str, Any],
    earlier: Sequence[Phase],
) -> None:
    """Refuses DP-SGD where epsilon would not hold; the backend refuses what it cannot train.

    A phase that starts from one without it is refused, also if only clients kept what that one trained: all gradients
    of a client depend on it, so that one sample more or less in the earlier phase changes each of them, and not one.
    """
    privacy, algorithm, name = phase.sample_privacy, phase.algorithm, type(phase.algorithm).__name__
    if privacy is None:
        return
    refused, because = (str(phase), "sample_privacy", privacy, "left out"), ""
    if not (algorithm.samples_in_loss_only and "samples_in_loss_only" in vars(type(algorithm))):
        because = f"{name} is not known to use samples in the gradients of its loss only (samples_in_loss_only)"
    elif has_batch_norm(module):
        because = f"batch normalization in {type(module).__name__} mixes the samples of a batch; GroupNorm does not"
    elif phase.monitor is not None:
        because = "a select by clients' data is not in epsilon"
    elif is_distributed(trainer):
        because = "trainer.strategy divides the batches of clients"
    if because and phase.ckpt_path is None:
        raise InvalidArgumentError(*refused, because)
    sizes = algorithm.opt_out.opted_in_of_all(datamodule.train_samples, 0).sizes
    if phase.ckpt_path is None and privacy.delta * (most := int(sizes.max())) >= 1:
        because = f"a client has {most} samples, and delta allows to publish each with this probability"
        raise InvalidArgumentError(str(phase), "sample_privacy.delta", privacy.delta, f"below {1 / most:.3g}", because)
    for other in earlier:
        if other.sample_privacy is None:
            allowed = f"given in '{other.name}', from which the phase starts, too"
            because = "what it trained tells about clients' samples, and changes all gradients of this phase"
            raise InvalidArgumentError(str(phase), "sample_privacy", privacy, allowed, because)
        if privacy.target_epsilon is not None and other.ckpt_path is not None:
            because = f"'{other.name}' takes its result from a checkpoint"
            argument = "sample_privacy.target_epsilon"
            raise InvalidArgumentError(
                str(phase), argument, privacy.target_epsilon, "left out, with a noise_multiplier in its place", because
            )
    privacy.epsilon([[1.0, privacy.noise_multiplier or 1.0, 1]])  # needs Opacus


def trained_names(phase: Phase, module: LightningModule, max_epochs: int) -> set[str]:
    """The parameters that a phase trains: by a mixture's own loss, those of the experts that are weighed.

    Refuses a phase whose epochs and rounds are too few to train any of the shared parameters.
    """
    algorithm = phase.algorithm
    epochs, shows_all = epochs_to_try(algorithm, range(phase.rounds), max(max_epochs, 1))
    if not shows_all and not phase.ckpt_path:
        rank_zero_warn(
            f"{phase}: rounds is {phase.rounds} and max_epochs is {max_epochs}, too many to know what "
            f"{type(algorithm).__name__} never trains; such parts are in train mode and computed in every step."
        )
    pairs, names = [*epochs], [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    trained = {name for name in names if not shows_all or any(algorithm.is_trainable(name, *pair) for pair in pairs)}
    shared = {name for name, _ in module.named_parameters() if algorithm.is_shared(name)}
    if shared and trained and not trained & shared and max_epochs and not phase.ckpt_path:
        because = f"{type(algorithm).__name__} trains none of the shared parameters, such as '{min(shared)}'"
        raise InvalidArgumentError(
            str(phase), "train.max_epochs", max_epochs, "higher, or other parameters shared", because
        )
    if "fresh_optimizers" in algorithm.needs:  # it trains shared ones under other names
        return trained | (shared & {*names})
    if overrides(algorithm, "client_loss"):
        return trained
    idle = tuple(f"{part}." for part in getattr(module, "idle_parts", ()))
    return {name for name in trained if not name.startswith(idle)}


def _check_gate(run: Run, trained: dict[str, set[str]], phase: Phase, module: LightningModule) -> None:
    """Refuses a gate that weighs an expert which neither the phase nor one that it starts from has trained.

    Of an expert whose parameters are all frozen, it warns: the user may have trained it.
    """

    def is_trained(part: str) -> bool:
        if part in phase.algorithm.computed_parts:
            return True
        chain = chain_of_starts(run.phases, run.starts, phase.name, part.split(".")[0])
        names = (name for other in chain for name in trained[other.name])
        return any(other.ckpt_path for other in chain) or any(name.startswith(f"{part}.") for name in names)

    for part in _weighed(module) if phase.evaluate and phase.algorithm.predictor is None else []:
        parameters = [*module.get_submodule(part).parameters()]
        if not parameters or is_trained(part):
            continue
        gate: Any = module.gate
        if any(parameter.requires_grad for parameter in parameters):
            others = ", ".join(filter(is_trained, _parts(module))) or "there is none"
            allowed = f"one that weighs trained experts only ({others})"
            because = f"no phase trains {part}; if it is pretrained, freeze its parameters"
            raise InvalidArgumentError(str(phase), "gate", gate, allowed, because)
        rank_zero_warn(
            f"{phase}: gate is {type(gate).__name__}, which weighs the module's {part}, but no phase trains it, "
            "because its parameters are frozen; is it pretrained?"
        )


def _warn_of_lost(run: Run, trained: dict[str, set[str]], phase: Phase, module: LightningModule) -> None:
    """Warns of a shared parameter that each client has trained for itself before: the server begins anew."""
    for name in (name for name, _ in module.named_parameters() if phase.algorithm.is_shared(name)):
        for other in chain_of_starts(run.phases, run.starts, phase.name, name.split(".")[0])[1:]:
            if other.algorithm.is_shared(name):
                break
            if name in trained[other.name]:
                rank_zero_warn(
                    f"{phase}: {type(phase.algorithm).__name__} shares '{name}', which the clients of "
                    f"'{other.name}' have each trained for themselves; the server begins with the initial one."
                )
                return


def _parts(module: LightningModule) -> Sequence[str]:
    """The parts of a mixture that its gate weighs, in order; none of other modules."""
    return module.weighed_parts if isinstance(module, MixtureOfExperts) else []


def _weighed(module: LightningModule) -> list[str]:
    """Those of them to which the gate gives a weight."""
    return [part for part in _parts(module) if part not in getattr(module, "idle_parts", ())]


_PROCESSES_PER_CORE = 8


def check_trainer(arguments: dict[str, Any], owner: str = "Trainer") -> list[torch.device]:
    """Refuses arguments of a Trainer that no client can have; gives a device for each process that trains clients.

    A CPU is repeated; with ``devices: auto`` there is an entry for every core that the process may use. Where processes
    cannot be forked, there is one device.
    """
    key, known = "trainer" if owner == "Trainer" else "train.trainer", inspect.signature(Trainer).parameters
    for name in (name for name in arguments if name not in known):
        similar = difflib.get_close_matches(name, known, n=1)
        because = f"it is not an argument of Trainer{f' ({similar[0]} is)' if similar else ''}"
        raise InvalidArgumentError(owner, f"{key}.{name}", arguments[name], "left out", because)
    _check_values(arguments, owner, key)
    if arguments["max_epochs"] is None:
        raise InvalidArgumentError(owner, "trainer.max_epochs", None, "the number of local epochs")
    check_at_least(owner, "trainer.max_epochs", arguments["max_epochs"], 0)
    check_at_least(owner, f"{key}.accumulate_grad_batches", arguments.get("accumulate_grad_batches"), 1)
    for name, because in _LEFT_OUT.items():
        if (value := arguments.get(name)) not in (None, TRAINER_DEFAULTS[name]):
            raise InvalidArgumentError(owner, f"{key}.{name}", value, "left out", because)
    for name in ("limit_train_batches", "max_steps"):
        if (value := arguments.get(name)) == 0:
            because = "no client would train; max_epochs: 0 is for phases that train nothing"
            raise InvalidArgumentError(owner, f"{key}.{name}", value, "above 0, or left out", because)
    with quiet(), packages_read_once(), tried(key if owner == "Trainer" else f"{owner}: {key}"):
        trainer = _trainer_with(arguments, owner, key)
        accelerator, cores = trainer.accelerator, len(cores_of_process())
        devices = arguments.get("devices", "auto")
        if devices == "auto" and not FORKS:
            devices = 1
        elif devices == "auto":
            devices = cores if isinstance(accelerator, CPUAccelerator) else accelerator.auto_device_count()
        try:
            parsed = accelerator.parse_devices(devices)
        except Exception as error:  # whatever Lightning or a library of accelerators raises
            because = reason_of(error)
            raise InvalidArgumentError(owner, f"{key}.devices", devices, "what a Trainer accepts", because) from error
    if isinstance(accelerator, CPUAccelerator) and parsed > (most := _PROCESSES_PER_CORE * cores):
        because = f"a CPU core of this process trains at most {_PROCESSES_PER_CORE} clients at the same time"
        raise InvalidArgumentError(owner, "trainer.devices", arguments["devices"], f"at most {most}", because)
    devices = accelerator.get_parallel_devices(parsed)
    if len(devices) > 1 and not FORKS:
        because = "clients are trained in several processes on Linux only"
        raise InvalidArgumentError(owner, f"{key}.devices", arguments["devices"], "1 here", because)
    _check_strategy(trainer, arguments, owner, key)
    if trainer.precision.endswith("-true") and trainer.precision != "32-true":
        because = "clients and server exchange parameters of the model's own type; .double() of the model gives 64 bits"
        raise InvalidArgumentError(owner, f"{key}.precision", trainer.precision, "32-true or mixed", because)
    return devices


_LEFT_OUT = {
    "overfit_batches": "every epoch would draw other batches; limit_train_batches limits their number",
    "limit_test_batches": "evaluations are of all samples",
    "limit_predict_batches": "predictions are of all samples",
}
_OF_KIND = {
    "callbacks": (Callback, "Callbacks"),
    "logger": (Logger | bool, "Loggers, true or false"),
    "profiler": (Profiler | str, "a Profiler or the name of one"),
}


def _check_values(arguments: Mapping[str, Any], owner: str, key: str) -> None:
    """Refuses what a Trainer would take, but not train with; ``train.trainer`` of a file may be anything."""
    for name, value in arguments.items():
        kind, allowed = _OF_KIND.get(name, (object, "an object"))
        for each in value if isinstance(value, list | tuple) else [value]:
            is_unmade = isinstance(each, Mapping) and "class_path" in each
            if is_unmade or not isinstance(each, kind | None):
                because = "its class_path is no whole import path of a class" if is_unmade else ""
                raise InvalidArgumentError(owner, f"{key}.{name}", value, allowed, because)
            if isinstance(each, float) and math.isnan(each):
                raise InvalidArgumentError(owner, f"{key}.{name}", value, "a number")


def _trainer_with(arguments: Mapping[str, Any], owner: str, key: str) -> Trainer:
    """A Trainer for one device; if it cannot be made, the argument that it does not accept alone is named."""
    # it changes a strategy that it is given; a copy of WandbLogger would open its run
    copied = {name: value if name == "logger" else copy.deepcopy(value) for name, value in arguments.items()}
    try:
        return Trainer(**{**TRAINER_DEFAULTS, **copied, "devices": 1})
    except Exception:
        # the accelerator first, because every other argument is tried with it
        for name, value in sorted(copied.items(), key=lambda argument: argument[0] != "accelerator"):
            try:
                accelerator = copied.get("accelerator", "auto")
                Trainer(**{**TRAINER_DEFAULTS, "accelerator": accelerator, name: value, "devices": 1})
            except Exception as error:
                because = reason_of(error)
                raise InvalidArgumentError(owner, f"{key}.{name}", value, "what a Trainer accepts", because) from error
        raise


def _check_strategy(trainer: Trainer, arguments: Mapping[str, Any], owner: str, key: str) -> None:
    """Refuses a folder for all clients, machines for one, and strategies that would not give one device's result."""
    if trainer.num_nodes > 1:
        because = "a client trains on one machine; RayBackend trains clients on several machines"
        raise InvalidArgumentError(owner, f"{key}.num_nodes", trainer.num_nodes, "left out", because)
    for callback in trainer.checkpoint_callbacks:
        if given := getattr(callback, "dirpath", None):
            because = "the files of all clients would be there; each client and round has a folder in default_root_dir"
            raise InvalidArgumentError(owner, f"{type(callback).__name__}.dirpath", given, "left out", because)
    strategy, given = trainer.strategy, arguments.get("strategy")
    is_plain_ddp = isinstance(strategy, DDPStrategy) and strategy._start_method == "popen"
    if not (is_plain_ddp or isinstance(strategy, SingleDeviceStrategy)):
        because = "each client's processes exist already, and each has a whole copy of the model"
        raise InvalidArgumentError(owner, f"{key}.strategy", given, "ddp, or left out", because)
