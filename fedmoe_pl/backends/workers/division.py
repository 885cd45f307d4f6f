"""Decides by rules whether the batches of a phase's clients can be divided among processes."""

from __future__ import annotations

from torch.utils.data import default_collate

from fedmoe_pl.algorithms.algorithm import overrides
from fedmoe_pl.backends.loop import trains_by_loss
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.layers import treats_samples_apart
from fedmoe_pl.models.mixtures.tasks import is_mean_over_samples, weighs_labels


def check_division(training: LocalTraining, loss_is_mean: bool) -> None:
    """Refuses a loss that is not the mean over the samples of a batch: DDP averages gradients of its parts.

    Means are the losses of this package and PyTorch's, of layers that treat samples apart. Of others, only the user
    knows it, who says so with ``loss_is_mean``.
    """
    module, because = training.module, ""
    if not module.automatic_optimization:
        because = f"{type(module).__name__} optimizes manually"
    elif getattr(module, "load_balancing", 0):
        because = "the load-balancing loss of a batch is not the mean over its samples"
    if because:
        raise InvalidArgumentError("Trainer", "trainer.strategy", training.trainer["strategy"], "left out", because)
    if not loss_is_mean and (unknown := _unknown(training)):
        allowed = "True, if the loss of a batch is the mean over its samples"
        because = f"trainer.strategy divides batches, and nothing is known of {unknown}"
        raise InvalidArgumentError("TrainerBackend", "loss_is_mean", loss_is_mean, allowed, because)


def _unknown(training: LocalTraining) -> str:
    """What may make the loss of a batch something else than the mean over its samples; empty if nothing does."""
    module, algorithm, reader = training.module, training.algorithm, training.datamodule.reader
    criterion = getattr(module, "criterion", None)
    if not type(algorithm).__module__.startswith("fedmoe_pl.") or "client_loss" in vars(algorithm):
        return f"the algorithm {type(algorithm).__name__}"
    if not isinstance(module, MixtureOfExperts) or not trains_by_loss(training):
        return f"the loss of {type(module).__name__}"
    if not is_mean_over_samples(criterion) or (weighs_labels(criterion) and overrides(algorithm, "client_loss")):
        of_algorithm = f" in the loss of {type(algorithm).__name__}" if overrides(algorithm, "client_loss") else ""
        return f"{getattr(criterion, '__name__', type(criterion).__name__)}{of_algorithm}"
    if not treats_samples_apart(module):
        return f"the layers of {type(module).__name__}, of which some may compare samples"
    return "" if reader is None or reader.data.collate_fn is default_collate else "the data's collate_fn"
