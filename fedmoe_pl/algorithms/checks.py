"""What several algorithms ask of a module or of earlier phases, and the refusals if it is missing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.models import ConstantGate, FixedGate, GlobalOnly, LocalOnly, SparseMoE


def check_expert(algorithm: Algorithm, module: LightningModule, expert: str, splits: bool = False) -> None:
    """Refuses an expert that the module lacks.

    Args:
        algorithm: the algorithm, for the message.
        module: the phase's module.
        expert: name of the expert in the module, such as ``global_expert``; empty for the module itself.
        splits: whether the expert must have an ``extractor``, which computes features (B, F) or (B, ...), and a
            ``classifier``, which maps them to logits.

    Raises:
        MisconfigurationException: if there is no such part, or it must be split and cannot be.
    """
    experts = {name: part for name, part in module.named_children() if not splits or _is_split(part)}
    if not expert and (_is_split(module) or not splits):
        return
    if expert not in experts:
        split = " with an `extractor` and a `classifier`" if splits else ""
        allowed = f"; it has {', '.join(experts)}" if experts else ", and it has none"
        raise MisconfigurationException(
            f"{type(algorithm).__name__}: expert is '{expert}', but must be a part of the "
            f"{type(module).__name__}{split}{allowed}."
        )


def check_only_expert(algorithm: Algorithm, module: LightningModule, expert: str, splits: bool = False) -> None:
    """The same for an algorithm that trains this expert alone: also refuses a trained gate beside it."""
    check_expert(algorithm, module, expert, splits)
    if expert:
        check_fixed_gate(algorithm, module)


def check_both_experts(algorithm: Algorithm, module: LightningModule, splits: bool = False) -> None:
    """Refuses a module without a ``global_expert`` and a ``local_expert``; arguments as in :func:`check_expert`."""
    for expert in ("global_expert", "local_expert"):
        if not hasattr(module, expert):
            raise MisconfigurationException(
                f"{type(algorithm).__name__}: model is a {type(module).__name__}, but must have a global_expert "
                "and a local_expert, as a PersonalizedMoE has."
            )
        check_expert(algorithm, module, expert, splits)


def check_fixed_gate(algorithm: Algorithm, module: LightningModule) -> None:
    """Refuses a module whose gate has parameters to train, for an algorithm whose loss leaves the gate out.

    Args:
        algorithm: the algorithm, for the message.
        module: the phase's module; one without a ``gate`` is accepted.

    Raises:
        MisconfigurationException: if there is a gate and it is not a ``FixedGate``.
    """
    gate = getattr(module, "gate", None)
    if gate is not None and not isinstance(gate, FixedGate):
        raise MisconfigurationException(
            f"{type(module).__name__}: gate is a {type(gate).__name__}, but must be EqualWeights, GlobalOnly or "
            f"another fixed one, because {type(algorithm).__name__} trains no gate."
        )


def warn_of_mixture(algorithm: Algorithm, module: LightningModule) -> None:
    """Warns of a gate with which a mixture is evaluated, although the algorithm's clients predict with one expert.

    Args:
        algorithm: the algorithm.
        module: the phase's module; one without a ``gate`` is accepted.
    """
    gate = getattr(module, "gate", None)
    one_expert = isinstance(gate, GlobalOnly | LocalOnly) or (isinstance(gate, ConstantGate) and gate.weight in (0, 1))
    if algorithm.predicts_with_local_expert and gate is not None and not one_expert:
        rank_zero_warn(
            f"{type(algorithm).__name__}: gate is {type(gate).__name__}, so that a mixture of both experts is "
            "evaluated; with LocalOnly it is the personal model, as in the paper."
        )


def learning_rate(algorithm: Algorithm, module: LightningModule) -> float:
    """The learning rate of plain SGD.

    Args:
        algorithm: the algorithm that computes with it, for the message.
        module: a module; that of a client has the learning rate of its round.

    Raises:
        MisconfigurationException: if the module has another optimizer.
    """
    name, optimizer = type(algorithm).__name__, module.configure_optimizers()
    if not isinstance(optimizer, torch.optim.SGD) or len(optimizer.param_groups) > 1:
        raise MisconfigurationException(
            f"{name}: optimizer is {type(optimizer).__name__}, but must be torch.optim.SGD with one learning rate and "
            "no scheduler."
        )
    group = optimizer.param_groups[0]
    for argument in ("momentum", "weight_decay"):
        if group[argument]:
            raise MisconfigurationException(f"{name}: {argument} of the optimizer is {group[argument]}, but must be 0.")
    return group["lr"]


def check_sparse(
    algorithm: Algorithm, module: LightningModule, fits: Callable[[nn.Module], bool], wanted: str
) -> SparseMoE:
    """Refuses other models than a ``SparseMoE`` with a certain kind of gate and the same experts on all clients.

    Args:
        algorithm: the algorithm, for the message.
        module: the phase's module.
        fits: whether the algorithm can use a gate.
        wanted: such gates in words, for the message.

    Returns:
        The module.

    Raises:
        MisconfigurationException: if it is another model, its gate does not fit, clients differ in their experts, or
            it has a loss of its own or a balancing loss, which the likelihoods of these algorithms leave out.
    """
    name = type(algorithm).__name__
    sparse = module if isinstance(module, SparseMoE) else None
    if sparse is None or not fits(sparse.gate):
        gate = f" with a {type(sparse.gate).__name__}" if sparse else ""
        raise MisconfigurationException(
            f"{name}: model is a {type(module).__name__}{gate}, but must be a SparseMoE with {wanted}."
        )
    if isinstance(sparse.num_experts, list):
        raise MisconfigurationException(
            f"{name}: num_experts is {sparse.num_experts}, but must be one number, the same for all clients."
        )
    if sparse.criterion is not None:
        raise MisconfigurationException(
            f"{name}: loss is a {type(sparse.criterion).__name__}, but must be left out, because {name} trains with "
            "the likelihood of the classes."
        )
    if sparse.load_balancing:
        raise MisconfigurationException(
            f"{name}: load_balancing is {sparse.load_balancing}, but must be 0, because the loss of {name} has no such "
            "term."
        )
    return sparse


def trains(algorithm: Algorithm, prefix: str) -> bool:
    """Whether an algorithm trains parameters whose names start with a prefix, as far as its patterns tell."""
    patterns = [pattern for pattern in algorithm.trainable.patterns if pattern.startswith(prefix)]
    names = [f"{prefix}any", *(pattern.replace("*", "any") for pattern in patterns)]
    return any(algorithm.is_trainable(name, 0, 0) for name in names)


def _is_split(part: nn.Module) -> bool:
    return isinstance(getattr(part, "extractor", None), nn.Module) and isinstance(
        getattr(part, "classifier", None), nn.Module
    )
