"""What an algorithm needs (``Algorithm.needs``), and its refusal where that is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Need
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation.metrics import predicts_classes
from fedmoe_pl.evaluation.outputs import described_batches
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.phases.cohort import cohort_size, takes_all
from fedmoe_pl.phases.phase import Phase

_WORDS: dict[Need, str] = {
    "all_clients": "all clients in every round",
    "validation_samples": "validation samples of clients",
    "classes": "a class for each sample",
    "loss_of_outputs": "the loss of an expert's outputs, which only a mixture of experts knows without classes",
    "plain_steps": "the steps of plain SGD",
    "fresh_optimizers": "new optimizers in every round, in which a client may train other parameters under a name",
    "own_server_step": "its own step of the server, which sends changes of parameters",
}


class _Missing(NamedTuple):
    """The argument because of which something is missing, what it must be, and what else is to be said."""

    owner: object
    argument: str
    value: Any
    allowed: str
    detail: str = ""


def check_needs(
    phase: Phase, module: LightningModule, datamodule: FederatedDataModule, trainer: Mapping[str, Any]
) -> None:
    """Refuses a phase that lacks something of what its algorithm needs."""
    name = type(phase.algorithm).__name__
    for need in phase.algorithm.needs:
        if need not in get_args(Need):
            raise InvalidArgumentError(name, "needs", phase.algorithm.needs, f"a tuple of {', '.join(get_args(Need))}")
        if missing := _missing(need, phase, module, datamodule, trainer):
            owner = str(missing.owner) if isinstance(missing.owner, Phase) else missing.owner
            because = f"{name} needs {_WORDS[need]}{missing.detail}"
            raise InvalidArgumentError(owner, missing.argument, missing.value, missing.allowed, because)


def _missing(
    need: Need,
    phase: Phase,
    module: LightningModule,
    datamodule: FederatedDataModule,
    trainer: Mapping[str, Any],
) -> _Missing | None:
    if need == "all_clients":
        size = phase.clients_per_round
        if not takes_all(size) and cohort_size(datamodule.num_clients, size) < datamodule.num_clients:
            return _Missing(phase, "clients_per_round", size, "left out")
    elif need == "validation_samples":
        if not len(datamodule.validation_samples.indices):
            return _Missing(datamodule, "validation_fraction", datamodule.validation_fraction, "above 0")
    elif need in ("classes", "loss_of_outputs"):
        other_batches = f", and the data have {described_batches(datamodule)}" if not datamodule.has_pairs else ""
        if other_batches or not (
            predicts_classes(module, datamodule) or (need == "loss_of_outputs" and isinstance(module, MixtureOfExperts))
        ):
            has_classes = not other_batches and datamodule.num_classes
            task = f", and the task of the {type(module).__name__} is '{module.task}'" if has_classes else ""
            return _Missing(phase, "algorithm", phase.algorithm, "another", other_batches or task)
    elif need == "plain_steps":
        if trainer.get("gradient_clip_val"):
            return _Missing(phase, "trainer.gradient_clip_val", trainer["gradient_clip_val"], "left out")
    elif need == "fresh_optimizers":
        if phase.keep_optimizer:
            return _Missing(phase, "keep_optimizer", True, "False")
    elif need == "own_server_step":
        for argument in ("server_optimizer", "aggregation"):
            if getattr(phase, argument) is not None:
                return _Missing(phase, argument, getattr(phase, argument), "left out")
    return None
