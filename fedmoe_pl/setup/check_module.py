"""Checks of a module that a phase is to train: its tensors, hooks, loss, shared parameters and optimizers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from fedmoe_pl.algorithms.algorithm import overrides
from fedmoe_pl.backends import is_overridden, overridden_hooks
from fedmoe_pl.backends.optimizers import (
    OPTIMIZER,
    learning_rates,
    load_optimizer_state,
    optimizer_and_scheduler,
    optimizer_state,
)
from fedmoe_pl.checkpoints.client_state import RemoteStates
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.checks import InvalidArgumentError, naming, reason_of, tried, with_article
from fedmoe_pl.models import Gate, MixtureOfExperts, PooledMoE
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.fit import server_parameters, server_step
from fedmoe_pl.seeds import seeded
from fedmoe_pl.trees import copy_module, names_of_same_tensors

_MOST_STEPS = 1000  # steps for which a scheduler is tried; they take a few milliseconds


def check_tensors(module: LightningModule) -> None:
    """Refuses a state dict that has other values than dense numeric tensors, or lacks some of the module's tensors."""
    with tried(f"{type(module).__name__}.state_dict cannot be called as PyTorch's"):
        state = module.state_dict(keep_vars=True)
    because = "what is in a state dict is sent and averaged"
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(module, name, f"a {type(tensor).__name__}", "a tensor", because)
        if tensor.layout is not torch.strided:
            allowed = "a dense tensor, or a buffer with persistent=False"
            raise InvalidArgumentError(module, name, f"of layout {tensor.layout}", allowed, because)
        if name.endswith(_EXTRA_STATE_KEY_SUFFIX) and tensor.dtype is torch.uint8:
            raise InvalidArgumentError(module, name, "a tensor of bytes", "one of numbers", because)
    for path, part in module.named_modules():
        saved = {name: tensor for name, tensor in part._buffers.items() if name not in part._non_persistent_buffers_set}
        for own, tensor in {**part._parameters, **saved}.items():
            name = f"{path}.{own}" if path else own
            if tensor is not None and state.get(name) is not tensor:
                found = "in another form in" if name in state else "left out of"
                raise MisconfigurationException(
                    f"{type(module).__name__}: '{name}' is {found} what its state_dict returns, but must be in it as "
                    f"it is, because {because}; what no client trains takes memory and space on disk once."
                )


def check_predictions(module: LightningModule) -> None:
    """Refuses hooks that evaluations do not call, and normalization by the statistics of an evaluated batch."""
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        if is_overridden(module, name):
            because = "evaluations do not call it; change inputs in forward, or in the dataset"
            raise InvalidArgumentError(module, name, "overridden", "left as it is", because)
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is None:
            because = "a client would be evaluated with statistics of other clients' samples"
            raise InvalidArgumentError(module, f"track_running_stats of {name}", False, "True", because)


def warn_of_eval_mode(modules: Iterable[LightningModule]) -> None:
    """Warns once of parts of the modules that are in eval mode, as Lightning does in every fit."""
    found = {name or "the model itself" for each in modules for name, part in each.named_modules() if not part.training}
    if found:
        rank_zero_warn(
            f"Found {len(found)} module(s) in eval mode at the start of training, such as {min(found)}. They stay in "
            "it; to train them in train mode, call `train()` of the model before `fit`.",
            category=PossibleUserWarning,
        )


def check_parts(phase: Phase, module: LightningModule) -> None:
    """Refuses a module without the parts that the algorithm trains, copies or builds on."""
    algorithm, has = phase.algorithm, ", ".join(name for name, _ in module.named_children())
    names = [*algorithm.parts.needed, *algorithm.parts.copied]
    lacking = [name for name in names if name and not hasattr(module, name.partition(".")[0])]
    if lacking and not algorithm.federated and not isinstance(module, MixtureOfExperts):
        of_whole = hasattr(algorithm, "expert")
        allowed = "one with expert '', the module itself" if of_whole else "Local with a start, which trains it further"
        because = f"{with_article(type(module).__name__)} has no {lacking[0]}, as a PersonalizedMoE has"
        raise InvalidArgumentError(str(phase), "algorithm", algorithm, allowed, because)
    gate = getattr(module, "gate", None)
    if algorithm.parts.new_gate and isinstance(gate, Gate) and (part := gate.part_without_reset()) is not None:
        because = f"each client draws a new gate, and parameters of {type(part).__name__} would stay the same for all"
        raise InvalidArgumentError(str(phase), "gate", gate, "one with a reset_parameters of its own", because)
    try:
        with naming(phase):
            algorithm.server_init(module)
    except AttributeError as error:
        if not type(algorithm).__module__.startswith("fedmoe_pl."):
            raise
        allowed = f"one for the parts that the model has ({has})"
        raise InvalidArgumentError(str(phase), "algorithm", algorithm, allowed, reason_of(error)) from error


def check_loss(phase: Phase, module: LightningModule) -> None:
    """Refuses modules that an algorithm with a loss of its own cannot train, or whose hooks it would skip."""
    if not overrides(phase.algorithm, "client_loss") and phase.sample_privacy is None:
        return
    because, hooks, name = "", overridden_hooks(module), type(module).__name__
    is_own = isinstance(module, MixtureOfExperts) and not str(type(module).loss.__module__).startswith("fedmoe_pl.")
    if not (callable(getattr(module, "loss", None)) and module.automatic_optimization):
        because = f"it needs {name}'s method loss(batch) -> (loss, metrics), and automatic optimization"
    elif hooks:
        because = f"it calls loss(batch) itself, and would skip {name}'s hooks ({', '.join(hooks)})"
    elif {"classes", "loss_of_outputs"} & {*phase.algorithm.needs} and is_own:
        because = f"it computes experts' losses, and would skip {name}.loss; pass the loss as the argument loss instead"
    if because and phase.sample_privacy is not None:
        raise InvalidArgumentError(str(phase), "sample_privacy", phase.sample_privacy, "left out", because)
    if because:
        raise InvalidArgumentError(str(phase), "algorithm", phase.algorithm, "another", because)


def check_shared(phase: Phase, module: LightningModule, num_clients: int) -> None:
    """Refuses to share tensors that clients also keep under another name, or that some architectures lack."""
    name = type(phase.algorithm).__name__
    for names in names_of_same_tensors(module):
        shared = [name for name in names if phase.algorithm.is_shared(name)]
        others = [name for name in names if name not in shared]
        if shared and others:  # the kept tensor would overwrite the received one
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


def check_tied(phase: Phase, module: LightningModule, epochs: Iterable[tuple[int, int]]) -> None:
    """Refuses to train a tensor under one of its names but not under another, in any of the (round, epoch) pairs."""
    state, groups = module.state_dict(keep_vars=True), names_of_same_tensors(module)
    groups = [names for names in groups if state[names[0]].requires_grad]
    for pair in epochs if groups else ():
        for names in groups:
            trained = [name for name in names if phase.algorithm.is_trainable(name, *pair)]
            others = [name for name in names if name not in trained]
            if trained and others:
                raise MisconfigurationException(
                    f"{phase}: {type(phase.algorithm).__name__} trains '{trained[0]}', but not '{others[0]}', another "
                    f"name of the same tensor of the {type(module).__name__}; train all of its names or none."
                )


def check_has_optimizer(phase: Phase, module: LightningModule) -> None:
    """Refuses a module without an optimizer, because Lightning would train nothing."""
    if not module.automatic_optimization:
        return
    try:
        configured = module.configure_optimizers()
    except Exception:  # the method may need its Trainer
        return
    if configured is None:
        because = f"{phase} would train nothing"
        raise InvalidArgumentError(module, "what configure_optimizers returns", None, "an optimizer", because)


def check_optimizer(phase: Phase, module: LightningModule, max_epochs: int = 0) -> None:
    """Refuses optimizers and schedulers that cannot be made or stepped, and options that would have no effect."""
    if isinstance(module, MixtureOfExperts):
        own = "train.optimizer" if phase.train.optimizer is not None else "the model's optimizer"
        scheduler = "train.lr_scheduler" if phase.train.lr_scheduler is not None else "the model's lr_scheduler"
        with tried(f"{phase}: {own} or {scheduler} cannot be made"):
            configured = MixtureOfExperts.configure_optimizers(module)
        _check_rates(phase, own, configured["optimizer"] if isinstance(configured, dict) else configured)
        _, stepped = optimizer_and_scheduler(configured)
        if stepped is not None:
            with tried(f"{phase}: {scheduler} cannot be stepped once per epoch"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that the optimizer is not stepped
                for _ in range(min(max_epochs, _MOST_STEPS)):
                    stepped.step()
    if phase.server_optimizer is not None:
        server = phase.algorithm.server_init(module)
        parameters = [nn.Parameter(server[name].clone()) for name in server_parameters(module, server)]
        with tried(f"{phase}: server_optimizer cannot be made"):
            server_optimizer = phase.server_optimizer(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with tried(f"{phase}: server_optimizer cannot be stepped"):
            server_optimizer.step()
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
            # it may need fewer rounds
            may_end = (phase.select and phase.select.patience) or overrides(phase.algorithm, "server_final")
            learning_rates(module, phase.train.round_lr_scheduler, min(1 if may_end else _MOST_STEPS, phase.rounds - 1))


def check_kept_optimizers(phase: Phase, module: LightningModule, state: PhaseState | None) -> None:
    """Refuses optimizers whose state clients cannot keep, or that cannot load the state of a resumed run."""
    other = "must have the class and options with which the phase began, whose state it cannot go on from"
    if state is not None and state.server_optimizer and phase.server_optimizer is not None:
        new = {name: torch.ones_like(tensor) for name, tensor in state.server.items()}
        with tried(f"{phase}: server_optimizer {other}"):
            server_step(phase.server_optimizer, module, state.server, new, state.server_optimizer)
    if not phase.train.keep_optimizer:
        return
    module = copy_module(module, {name for name, each in module.named_parameters() if not each.requires_grad})
    optimizer, _ = optimizer_and_scheduler(module.configure_optimizers())
    assert optimizer is not None, "check_optimizer has refused it"
    clients = {} if state is None or isinstance(state.clients, RemoteStates) else state.clients
    kept = next((tree for tree in clients.values() if any(name.startswith(OPTIMIZER) for name in tree)), {})
    for parameter in (each for each in module.parameters() if each.requires_grad):
        parameter.grad = torch.zeros_like(parameter)
    optimizer_cannot = other if kept else "cannot be stepped"
    with seeded(0), tried(f"{phase}: with train.keep_optimizer, the optimizer {optimizer_cannot}"):
        load_optimizer_state(module.named_parameters(), optimizer, kept)
        optimizer.step(lambda: 0.0)
    with naming(phase):
        optimizer_state(module.named_parameters(), optimizer)


def _check_rates(phase: Phase, key: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuses a learning rate that is infinite or NaN, which torch accepts."""
    for rate in (float(group.get("lr") or 0) for group in optimizer.param_groups):
        if not math.isfinite(rate):
            raise InvalidArgumentError(str(phase), f"lr of {key}", rate, "a finite number")
