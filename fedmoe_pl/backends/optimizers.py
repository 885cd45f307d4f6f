"""Optimizers across rounds: a client's learning rate in each round, and the optimizer state that is kept."""

from __future__ import annotations

import math
import types
from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fedmoe_pl.checks import shown
from fedmoe_pl.trees import Tree, subtree

OPTIMIZER = "optimizer/"
"""Name prefix of optimizer state: ``optimizer/<parameter>/<state>``, such as ``optimizer/fc.bias/exp_avg``."""
_GROUP = "param_groups."  # followed by a group's index, in place of a parameter's name
_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "momentum")  # not kept
NamedParameters = Iterable[tuple[str, Tensor]]


def optimizer_and_scheduler(configured: Any) -> tuple[torch.optim.Optimizer | None, LRScheduler | None]:
    """Finds the optimizer and the scheduler, stepped once per epoch, in what ``configure_optimizers`` returned."""
    if isinstance(configured, (list, tuple)) and len(configured) == 1:
        (configured,) = configured
    if isinstance(configured, dict) and set(configured) == {"optimizer"}:
        configured = configured["optimizer"]
    if isinstance(configured, torch.optim.Optimizer):
        return configured, None
    if isinstance(configured, dict) and set(configured) == {"optimizer", "lr_scheduler"}:
        scheduler = configured["lr_scheduler"]
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if isinstance(scheduler, LRScheduler) and not plateau:
            return configured["optimizer"], scheduler
    return None, None


def set_optimizer(module: LightningModule, rates: list[float] | None, kept: Tree) -> None:
    """Replaces a module's ``configure_optimizers``, which from then on applies the round's rates and the kept state."""
    has_state = any(name.startswith(OPTIMIZER) for name in kept)
    if rates is None and not has_state:
        return
    replaced = module.configure_optimizers.__func__  # the class's method, or one that the user set on the module

    def configure_optimizers(module: LightningModule) -> Any:
        configured = replaced(module)
        optimizer, scheduler = optimizer_and_scheduler(configured)
        assert optimizer is not None, "check_optimizer has refused it"
        if has_state:
            load_optimizer_state(module.named_parameters(), optimizer, kept)
        if rates is not None:
            _set_learning_rates(optimizer, scheduler, rates)
        return configured

    module.configure_optimizers = types.MethodType(configure_optimizers, module)  # copies of the module bind it anew


def with_strides_of(parameters: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in the parameters' memory format, because a fused step reads both in memory order."""
    same_shape = tensor.dim() == parameters.dim() and tensor.shape[1:] == parameters.shape[1:]
    if not same_shape or tensor.stride() == parameters.stride():
        return tensor
    return tensor.new_empty_strided(tensor.shape, parameters.stride()).copy_(tensor)


def optimizer_state(parameters: NamedParameters, optimizer: torch.optim.Optimizer) -> Tree:
    """The optimizer's state, on the CPU, in the form in which a client or a phase keeps it."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters}
    kept: Tree = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise MisconfigurationException(
                    f"{type(optimizer).__name__}: {key} of its state is {shown(value)}, but must be a tensor to be "
                    "kept from round to round, as in SGD and Adam."
                )
            kept[f"{OPTIMIZER}{names[parameter]}/{key}"] = value.detach().cpu().clone()
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():  # where some optimizers count their steps
            is_number = isinstance(value, (int, float)) and math.isfinite(value) and key not in _SCHEDULED
            if is_number and value != optimizer.defaults.get(key):
                dtype = torch.float64 if isinstance(value, float) else None
                kept[f"{OPTIMIZER}{_GROUP}{index}/{key}"] = torch.tensor(value, dtype=dtype)
    return kept


def load_optimizer_state(parameters: NamedParameters, optimizer: torch.optim.Optimizer, kept: Tree) -> None:
    """Loads the state that :func:`optimizer_state` returned into an optimizer; ignores other tensors in ``kept``."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters}
    of_optimizer = subtree(kept, OPTIMIZER)
    groups, loaded = optimizer.state_dict()["param_groups"], {}
    indices = [index for group in groups for index in group["params"]]
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, stepped, strict=True):
        if state := subtree(of_optimizer, f"{names[parameter]}/"):
            # cloned, because the optimizer changes its state in place
            loaded[index] = {key: with_strides_of(parameter, value.clone()) for key, value in state.items()}
    for index, group in enumerate(groups):
        group |= {key: value.item() for key, value in subtree(of_optimizer, f"{_GROUP}{index}/").items()}
    optimizer.load_state_dict({"state": loaded, "param_groups": groups})


def learning_rates(module: LightningModule, factory: LRSchedulerCallable, round: int) -> list[float]:
    """The learning rate of each parameter group in a round, from a scheduler that is stepped once per round."""
    optimizer, _ = optimizer_and_scheduler(module.configure_optimizers())
    assert optimizer is not None, "check_optimizer has refused it"
    groups = [
        {"params": [nn.Parameter(torch.zeros(1))], "lr": _initial_rate(group)} for group in optimizer.param_groups
    ]
    imitation = torch.optim.SGD(groups, lr=0.0)  # for its learning rates only: it has no gradients
    scheduler = factory(imitation)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError("ReduceLROnPlateau needs a metric")
    for _ in range(round):
        imitation.step()
        scheduler.step()
    return [group["lr"] for group in imitation.param_groups]


def _initial_rate(group: dict[str, Any]) -> float:
    return group.get("initial_lr", group["lr"])  # a scheduler over epochs may have changed "lr" already


def _set_learning_rates(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, rates: list[float]) -> None:
    """Scales the learning rates of an optimizer, and of its scheduler over epochs, to those of the round."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * (group["lr"] / _initial_rate(group)) if _initial_rate(group) else rate
        group["initial_lr"] = rate
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):  # SequentialLR and ChainedScheduler have parts
        if isinstance(part, LRScheduler) and hasattr(part, "base_lrs"):
            part.base_lrs = [*rates]
