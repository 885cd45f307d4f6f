"""Checks of clients' optimizers and schedulers, and of the server's optimizer."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from fedmoe_pl.backends.optimizers import learning_rates, optimizer_and_scheduler
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.server_step import server_parameters, server_step


def check_optimizer(phase: Phase, module: LightningModule) -> None:
    """Refuses arguments that the optimizer refuses, and options that need one optimizer if there are others.

    Args:
        phase: the phase.
        module: the phase's module.

    Raises:
        MisconfigurationException: if an optimizer or scheduler does not fit.
    """
    if isinstance(module, MixtureOfExperts):
        try:
            configured = module.configure_optimizers()
        except ValueError as error:
            raise MisconfigurationException(f"{phase}: its optimizer refuses its arguments: {error}.") from error
        if isinstance(configured, dict) and isinstance(configured.get("lr_scheduler"), ReduceLROnPlateau):
            raise MisconfigurationException(
                f"{phase}: lr_scheduler is ReduceLROnPlateau, but must be a scheduler that needs no metric."
            )
    for option in ("round_lr_scheduler", "keep_optimizer"):
        if getattr(phase, option) and optimizer_and_scheduler(module.configure_optimizers())[0] is None:
            raise MisconfigurationException(
                f"{phase}: {option} is given, but configure_optimizers of {type(module).__name__} returns more than an "
                "optimizer and a scheduler that is stepped once per epoch."
            )
    if phase.round_lr_scheduler is None and not phase.keep_optimizer:
        return
    optimizer, scheduler = optimizer_and_scheduler(module.configure_optimizers())
    if phase.keep_optimizer and isinstance(optimizer, SGD) and not any(g["momentum"] for g in optimizer.param_groups):
        raise MisconfigurationException(
            f"{phase}: keep_optimizer is True, but must be False for SGD without momentum, which has no state."
        )
    if phase.round_lr_scheduler is None:
        return
    if isinstance(scheduler, OneCycleLR | CyclicLR):
        raise MisconfigurationException(
            f"{phase}: round_lr_scheduler is given, but must be left out with {type(scheduler).__name__}, a scheduler "
            "over epochs that has learning rates of its own."
        )
    try:
        learning_rates(module, phase.round_lr_scheduler, max(phase.rounds - 1, 1))
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(
            f"{phase}: round_lr_scheduler cannot be stepped once per round, without a metric: {error}."
        ) from error


def check_server_optimizer(phase: Phase, module: LightningModule) -> None:
    """Refuses a server optimizer without a parameter to step, and one that cannot take a step.

    Args:
        phase: the phase.
        module: the phase's module.

    Raises:
        MisconfigurationException: if the server holds no parameter of the module, or the optimizer refuses its
            arguments, the parameters or a gradient, or needs more than a gradient.
    """
    if phase.server_optimizer is None:
        return
    server = phase.algorithm.server_init(module)
    names = server_parameters(module, server)
    if not names:
        raise MisconfigurationException(
            f"{phase}: server_optimizer is given, but must be left out, because {type(phase.algorithm).__name__} "
            "averages no parameter of the model."
        )
    try:
        name = type(phase.server_optimizer([nn.Parameter(server[name].clone()) for name in names])).__name__
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(
            f"{phase}: server_optimizer refuses its arguments: {_first_line(error)}."
        ) from error
    moved = {**server, **{name: server[name] + 1 for name in names}}
    try:
        server_step(phase.server_optimizer, module, server, moved, {})
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, AssertionError) as error:
        raise MisconfigurationException(
            f"{phase}: server_optimizer is {name}, but must be an optimizer that can take a step with a gradient only "
            f"({_first_line(error)})."
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
