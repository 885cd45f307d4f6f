"""Checks of clients' optimizers and schedulers, and of the server's optimizer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from fedmoe_pl.backends.optimizers import learning_rates, optimizer_and_scheduler
from fedmoe_pl.checks import is_finite
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.aggregate import server_parameters, server_step

_MOST_STEPS = 10_000  # of a scheduler that is tried, which takes a tenth of a second
_SHARES = ("momentum", "dampening")  # PyTorch accepts any of the first from 0, and any of the second


def check_optimizer(phase: Phase, module: LightningModule, max_epochs: int) -> None:
    """Refuses arguments that the optimizer refuses or should, and options that need one optimizer if there are others.

    Args:
        phase: the phase.
        module: the phase's module.
        max_epochs: local epochs of a client in a round.

    Raises:
        MisconfigurationException: if an optimizer or scheduler does not fit.
    """
    if isinstance(module, MixtureOfExperts):
        _check_own_optimizer(phase, module, max_epochs)
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
        last = min(phase.rounds - 1, _MOST_STEPS)
        rates = [learning_rates(module, phase.round_lr_scheduler, round) for round in (min(last, 1), last)]
    except Exception as error:  # whatever a scheduler raises
        raise MisconfigurationException(
            f"{phase}: round_lr_scheduler cannot be stepped once per round, without a metric: {_first_line(error)}."
        ) from error
    for of_round in rates:
        _check_rates(f"{phase}: round_lr_scheduler", of_round)


def _check_own_optimizer(phase: Phase, module: MixtureOfExperts, max_epochs: int) -> None:
    """Refuses arguments of the mixture's optimizer and scheduler, which may be the phase's."""
    optimizer = _made(phase, "optimizer", module.optimizer, module.parameter_groups())
    _check_numbers(phase, "optimizer", optimizer)
    if module.lr_scheduler is None:
        return
    scheduler = _made(phase, "lr_scheduler", module.lr_scheduler, optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise MisconfigurationException(
            f"{phase}: lr_scheduler is ReduceLROnPlateau, but must be a scheduler that needs no metric."
        )
    imitation = SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": g["lr"]} for g in optimizer.param_groups])
    name = f"{phase}: lr_scheduler"
    try:
        scheduler = module.lr_scheduler(imitation)
        for _ in range(min(max_epochs, _MOST_STEPS)):  # as often as in a round, for it may be made for no more
            imitation.step()
            scheduler.step()  # pyright: ignore[reportCallIssue]  ReduceLROnPlateau is refused
            _check_rates(name, [group["lr"] for group in imitation.param_groups])
    except MisconfigurationException:
        raise
    except Exception as error:  # whatever a scheduler raises
        raise MisconfigurationException(
            f"{name} is {type(scheduler).__name__}, but must be one that can be stepped once per epoch "
            f"({_first_line(error)})."
        ) from error


def _made(phase: Phase, part: str, factory: Callable[..., Any], parameters: Iterable[Any] | Optimizer) -> Any:
    """Makes an optimizer or a scheduler; refuses arguments that it refuses.

    Args:
        phase: the phase; messages name it if it has this part itself.
        part: its name among the phase's arguments.
        factory: makes it.
        parameters: the parameters of an optimizer, the optimizer of a scheduler.
    """
    parameters = parameters if isinstance(parameters, Optimizer) else [*parameters]
    try:
        return factory(parameters)
    except MisconfigurationException as error:
        raise MisconfigurationException(f"{_prefix(phase, part)}{error}") from error
    except Exception as error:  # whatever an optimizer raises
        partial = factory if isinstance(factory, functools.partial) else functools.partial(factory)
        # the command line's function has the class among its arguments
        made = next((each for each in (partial.func, *partial.args) if inspect.isclass(each)), None)
        made = made.__name__ if made else "given"
        for name, value in partial.keywords.items():
            others = {other: partial.keywords[other] for other in partial.keywords if other != name}
            try:
                partial.func(*partial.args, parameters, **others)
            except Exception:  # another argument is wrong
                continue
            raise MisconfigurationException(
                f"{_prefix(phase, part)}{made}: {name} is {value}, but must be one that {made} accepts "
                f"({_first_line(error)})."
            ) from error
        raise MisconfigurationException(
            f"{phase}: {part} is {made}, but refuses its arguments: {_first_line(error)}."
        ) from error


def _check_numbers(phase: Phase, part: str, optimizer: Optimizer) -> None:
    """Refuses numbers that PyTorch accepts although no training can go well with them."""
    prefix = f"{_prefix(phase, part)}{type(optimizer).__name__}"
    parameters = inspect.signature(type(optimizer)).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name in defaults and value == defaults[name]:  # such as a bound that is infinite
                continue
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            numbers = [number for number in numbers if isinstance(number, (int, float))]
            if not all(isinstance(number, bool) or is_finite(number) for number in numbers):
                raise MisconfigurationException(f"{prefix}: {name} is {value}, but must be finite.")
            if name in _SHARES and not all(0 <= number < 1 for number in numbers):
                raise MisconfigurationException(f"{prefix}: {name} is {value}, but must be at least 0 and below 1.")


def _check_rates(name: str, rates: list[Any]) -> None:
    if not all(is_finite(float(rate)) and rate >= 0 for rate in rates):
        raise MisconfigurationException(
            f"{name} gives a learning rate of {rates[0]}, but must give finite ones of at least 0."
        )


def _prefix(phase: Phase, part: str) -> str:
    """The phase in messages about an optimizer or a scheduler; empty for the model's own."""
    return "" if getattr(phase, part) is None else f"{phase}: "


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
    parameters = [nn.Parameter(server[name].clone()) for name in names]
    optimizer = _made(phase, "server_optimizer", phase.server_optimizer, parameters)
    _check_numbers(phase, "server_optimizer", optimizer)
    name = type(optimizer).__name__
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
