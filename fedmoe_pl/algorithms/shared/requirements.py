"""What several algorithms ask of a module or of earlier phases."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import ConstantGate, GlobalOnly, LocalOnly, SparseMoE


def check_mixing(algorithm: Algorithm, module: LightningModule, mixing: str) -> None:
    """Refuses a mixture that mixes something else than the algorithm."""
    if getattr(module, "mixing", None) != mixing:
        because = f"{type(algorithm).__name__} mixes {mixing}"
        raise InvalidArgumentError(module, "mixing", getattr(module, "mixing", None), f"'{mixing}'", because)


def warn_of_mixture(algorithm: Algorithm, module: LightningModule) -> None:
    """Warns of a gate with which a mixture is evaluated, although the paper's clients predict with one expert."""
    gate = getattr(module, "gate", None)
    one_expert = isinstance(gate, GlobalOnly | LocalOnly) or (isinstance(gate, ConstantGate) and gate.weight in (0, 1))
    if gate is not None and not one_expert:
        rank_zero_warn(
            f"{type(algorithm).__name__}: gate is {type(gate).__name__}, so that a mixture of both experts is "
            "evaluated; with LocalOnly it is the personal model, as in the paper."
        )


def learning_rate(algorithm: Algorithm, module: LightningModule) -> float:
    """The learning rate of the module's plain SGD, which a client's module has of its round; refuses others."""
    optimizer = module.configure_optimizers()
    because = f"{type(algorithm).__name__} computes with its steps"
    if not isinstance(optimizer, torch.optim.SGD) or len(optimizer.param_groups) > 1:
        allowed = "torch.optim.SGD with one learning rate and no scheduler"
        raise InvalidArgumentError(module, "optimizer", optimizer, allowed, because)
    group = optimizer.param_groups[0]
    for argument in ("momentum", "weight_decay"):
        if group[argument]:
            raise InvalidArgumentError("SGD", argument, group[argument], "0", because)
    return group["lr"]


def check_sparse(algorithm: Algorithm, module: LightningModule, fits: Callable[[nn.Module], bool], wanted: str) -> None:
    """Refuses all but a ``SparseMoE`` of the same experts for all clients, such a gate, and no loss but likelihood."""
    if not isinstance(module, SparseMoE) or not fits(module.gate):
        raise InvalidArgumentError(algorithm, "model", module, f"a SparseMoE with {wanted}")
    if isinstance(module.num_experts, list):
        raise InvalidArgumentError(module, "num_experts", module.num_experts, "one number, the same for all clients")
    because = f"{type(algorithm).__name__} trains with the likelihood of the classes"
    if module.criterion is not None:
        raise InvalidArgumentError(module, "loss", module.criterion, "left out", because)
    if module.load_balancing:
        raise InvalidArgumentError(module, "load_balancing", module.load_balancing, "0", because)


def trains(algorithm: Algorithm, prefix: str) -> bool:
    """Whether an algorithm trains parameters whose names start with a prefix, as far as its patterns tell."""
    patterns = [pattern for pattern in algorithm.trainable.patterns if pattern.startswith(prefix)]
    names = [f"{prefix}any", *(pattern.replace("*", "any") for pattern in patterns)]
    return any(algorithm.is_trainable(name, 0, 0) for name in names)
