"""Refuses optimizers and schedulers that cannot be made, and those that would be overlooked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from fedmoe_pl.backends.optimizers import learning_rates, optimizer_and_scheduler
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.aggregate import server_parameters

_MOST_STEPS = 10_000  # of a scheduler that is tried, which takes a tenth of a second


def check_optimizer(phase: Phase, module: LightningModule) -> None:
    """Refuses clients' optimizers and schedulers that cannot be made, and options that would be overlooked."""
    if isinstance(module, MixtureOfExperts):
        optimizer = _made(phase, "optimizer", module.optimizer, [*module.parameter_groups()])
        if module.lr_scheduler is not None:
            scheduler = _made(phase, "lr_scheduler", module.lr_scheduler, optimizer)
            if isinstance(scheduler, ReduceLROnPlateau):
                raise InvalidArgumentError(str(phase), "lr_scheduler", scheduler, "one that needs no metric")
    options = [option for option in ("round_lr_scheduler", "keep_optimizer") if getattr(phase, option)]
    if not options:
        return
    optimizer, scheduler = optimizer_and_scheduler(module.configure_optimizers())
    if optimizer is None:
        because = f"configure_optimizers of {type(module).__name__} returns more than an optimizer and its scheduler"
        raise InvalidArgumentError(str(phase), options[0], "given", "left out", because)
    if phase.round_lr_scheduler is None:
        return
    if isinstance(scheduler, OneCycleLR | CyclicLR):
        because = f"{type(scheduler).__name__}, a scheduler over epochs, has learning rates of its own"
        raise InvalidArgumentError(str(phase), "round_lr_scheduler", "given", "left out", because)
    try:
        for round in {0, 1, phase.rounds - 1}:
            learning_rates(module, phase.round_lr_scheduler, min(round, phase.rounds - 1, _MOST_STEPS))
    except Exception as error:  # whatever a scheduler raises
        allowed = f"one that is stepped once per round, without a metric ({_first_line(error)})"
        raise InvalidArgumentError(str(phase), "round_lr_scheduler", "given", allowed) from error


def check_server_optimizer(phase: Phase, module: LightningModule) -> None:
    """Refuses a server optimizer that cannot be made."""
    if phase.server_optimizer is not None:
        server = phase.algorithm.server_init(module)
        parameters = [nn.Parameter(server[name].clone()) for name in server_parameters(module, server)]
        _made(phase, "server_optimizer", phase.server_optimizer, parameters)


def _made(phase: Phase, part: str, factory: Callable[..., Any], parameters: Any) -> Any:
    """Makes an optimizer of parameters, or a scheduler of an optimizer; refuses the argument that it refuses."""
    try:
        return factory(parameters)
    except MisconfigurationException:
        raise
    except Exception as error:  # whatever an optimizer raises
        partial = factory if isinstance(factory, functools.partial) else functools.partial(factory)
        # the command line's function has the class among its arguments
        made = next((each.__name__ for each in (partial.func, *partial.args) if inspect.isclass(each)), "given")
        for name, value in partial.keywords.items():
            others = {other: partial.keywords[other] for other in partial.keywords if other != name}
            try:
                partial.func(*partial.args, parameters, **others)
            except Exception:  # another argument is wrong
                continue
            allowed = f"one that {made} accepts ({_first_line(error)})"
            raise InvalidArgumentError(made, name, value, allowed) from error
        allowed = f"one that accepts its arguments ({_first_line(error)})"
        raise InvalidArgumentError(str(phase), part, made, allowed) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
