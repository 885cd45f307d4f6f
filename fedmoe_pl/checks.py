"""What is refused before any training."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from fedmoe_pl.algorithm import Algorithm
from fedmoe_pl.backends import has_pure_loss
from fedmoe_pl.cohort import cohort_size
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation import predict
from fedmoe_pl.models import PersonalizedMoE
from fedmoe_pl.phase import Phase


def check_phase(phase: Phase, module: LightningModule, datamodule: FederatedDataModule) -> None:
    """Refuses a phase that does not fit its module or the data.

    Args:
        phase: the phase.
        module: the phase's module.
        datamodule: who holds which data; already set up.

    Raises:
        MisconfigurationException: with one sentence that names the key, the value and what is allowed.
    """
    key = f"federation.phases '{phase.name}'"
    if cohort_size(datamodule.num_clients, phase.clients_per_round) > datamodule.num_clients:
        raise MisconfigurationException(
            f"{key}: clients_per_round is {phase.clients_per_round}, but must be at most the number of clients, "
            f"{datamodule.num_clients}."
        )
    changes_loss = type(phase.algorithm).client_loss is not Algorithm.client_loss
    if (phase.optimizer or changes_loss) and not has_pure_loss(module):
        raise MisconfigurationException(
            f"{key}: {'optimizer' if phase.optimizer else type(phase.algorithm).__name__} needs a model with a method "
            f"loss(batch) -> (loss, metrics), which {type(module).__name__} has not."
        )
    phase.algorithm.check(module)
    for metric, samples, source in (
        ("validation", datamodule.validation_samples, "validation_fraction"),
        ("local_test_held_out", datamodule.test_samples, "test_fraction"),
    ):
        if phase.monitor == metric and not any(len(indices) for indices in samples):
            raise MisconfigurationException(
                f"{key}: monitor is '{metric}', but data.init_args.{source} is 0, so that no client has such samples."
            )
    _check_outputs(module, datamodule)
    optimizer = phase.optimizer or (module.optimizer if isinstance(module, PersonalizedMoE) else None)
    if optimizer is not None:
        try:
            optimizer(module.parameters())
        except ValueError as error:
            raise MisconfigurationException(f"{key}: its optimizer refuses its arguments: {error}.") from error


def _check_outputs(module: LightningModule, datamodule: FederatedDataModule) -> None:
    samples = datamodule.train_samples[0][:1]
    shape = tuple(datamodule.x[samples[0]].shape)
    try:
        logits, _ = predict(module.eval(), datamodule, samples)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise MisconfigurationException(
            f"model is a {type(module).__name__} that does not accept the data's samples of shape {shape} ({reason})."
        ) from error
    if logits.ndim != 2 or logits.shape[1] < datamodule.num_classes:
        raise MisconfigurationException(
            f"model gives outputs of shape {tuple(logits.shape[1:])} for a sample, but the data have "
            f"{datamodule.num_classes} classes; it must give one output per class."
        )
