"""Checks of aggregations, of secure aggregation and of the privacy of samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.aggregation.aggregation import Cohort
from fedmoe_pl.algorithms.algorithm import Algorithm, averages, sends_more
from fedmoe_pl.backends import is_distributed
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models import SimilarityGate
from fedmoe_pl.models.normalization import has_batch_norm
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.fit import shared_by
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.trees import Tree, of_algorithm, same_memory


def check_aggregation(
    phase: Phase, module: LightningModule, cohort: Cohort, earlier: Sequence[Phase], trained: Collection[str]
) -> None:
    """Refuses an aggregation of what is no mean of parameters, what it refuses itself, and privacy that has a leak."""
    aggregation, algorithm, name = phase.aggregation, phase.algorithm, type(phase.algorithm).__name__
    if aggregation is None:
        return
    is_private, allowed, because = isinstance(aggregation, DifferentialPrivacy), "left out", ""
    if phase.ckpt_path is None:  # a given result is not aggregated
        server = algorithm.server_init(module)
        shared = shared_by(algorithm, server)
        idle = [name for name, _ in module.named_parameters() if name in shared and name not in trained]
        only_averages, hooks = averages(algorithm) and not of_algorithm(server), sends_more(algorithm, server)
        if not only_averages or not any(tensor.is_floating_point() for tensor in shared.values()):
            because = f"what {name} combines is not the mean of parameters"
        elif is_private and hooks:
            because = f"clients of {name} send more than their updates ({', '.join(hooks)})"
        elif is_private and phase.monitor is not None:
            because = "a select by clients' data is not in epsilon"
        elif is_private and idle:
            because = f"it adds noise to all that is shared, but nobody trains '{idle[0]}'; do not share that"
        else:
            aggregation.check(shared, {name for name, _ in module.named_parameters(remove_duplicate=False)}, cohort)
    for other in earlier if is_private else ():
        if other.algorithm.federated and not isinstance(other.aggregation, DifferentialPrivacy):
            allowed = f"given in '{other.name}', from which the phase starts, too"
            because = "its model tells about clients' data"
    if because:
        raise InvalidArgumentError(str(phase), "aggregation", aggregation, allowed, because)


def check_secure_aggregation(run: Run, phase: Phase, module: LightningModule, cohort: Cohort) -> None:
    """Refuses secure aggregation where the server needs more than a sum, and where it would hide nothing."""
    secure, aggregation, algorithm = phase.secure, phase.aggregation, phase.algorithm
    if secure is None or phase.ckpt_path is not None:
        return
    name, because = type(algorithm).__name__, ""
    server = algorithm.server_init(module) if algorithm.federated else {}
    if not averages(algorithm):
        because = f"the server of {name} needs each client's update" if algorithm.federated else f"{name} sends nothing"
    elif hooks := sends_more(algorithm, server):
        because = f"clients of {name} send more than their updates ({', '.join(hooks)})"
    elif wrong := [each for each, tensor in shared_by(algorithm, server).items() if not _is_summable(tensor)]:
        because = f"the shared '{wrong[0]}' is no mean, or not finite; use FedBN, GroupNorm, or another `shared`"
    elif not _receives_all(algorithm, server, cohort):
        because = f"clients of {name} receive others than the server's shared tensors, and send their changes"
    if because:
        raise InvalidArgumentError(str(phase), "secure_aggregation", phase.secure_aggregation, "left out", because)
    if aggregation is not None and not aggregation.averages_changes:
        allowed, because = "left out", "it needs each client's update, which secure_aggregation hides"
        raise InvalidArgumentError(str(phase), "aggregation", aggregation, allowed, because)
    size, needed = cohort.size, secure.needed(cohort.size)
    if aggregation is not None and aggregation.poisson_sampling and size < len(cohort.participants):
        because = "with secure_aggregation, cohorts of different sizes may be too small to be unmasked"
        raise InvalidArgumentError(str(phase), "clients_per_round", phase.clients_per_round, "left out", because)
    if needed <= size / 2:
        allowed = f"more than half of the cohort of {size}"
        raise InvalidArgumentError(str(phase), "secure_aggregation.threshold", secure.threshold, allowed)
    if (least := run.failures.min_clients) is not None and least > needed:
        because = f"the server of '{phase.name}' would see sums that it discards; raise secure_aggregation.threshold"
        raise InvalidArgumentError(run.failures, "min_clients", least, f"at most {needed}", because)


def _is_summable(tensor: Tensor) -> bool:
    """Whether the server takes the mean of clients' tensors, and integers can express their changes."""
    return tensor.is_floating_point() and bool(tensor.isfinite().all())


def _receives_all(algorithm: Algorithm, server: Tree, cohort: Cohort) -> bool:
    """Whether a client receives the server's shared tensors as they are."""
    sent, shared = algorithm.server_send(server, cohort.participants[0], {}), shared_by(algorithm, server)
    return all(name in sent and same_memory(sent[name], tensor) for name, tensor in shared.items())


def check_sample_privacy(
    phase: Phase,
    module: LightningModule,
    datamodule: FederatedDataModule,
    trainer: Mapping[str, Any],
    earlier: Sequence[Phase],
) -> None:
    """Refuses DP-SGD where epsilon would not hold; the backend refuses what it cannot train.

    A phase that starts from one without it is refused, also if only clients kept what that one trained: all gradients
    of a client depend on it, so that one sample more or less in the earlier phase changes each of them, and not one.
    """
    privacy, algorithm, name = phase.sample_privacy, phase.algorithm, type(phase.algorithm).__name__
    if privacy is None:
        return
    refused, because = (str(phase), "sample_privacy", privacy, "left out"), ""
    if not (algorithm.samples_in_loss_only and "samples_in_loss_only" in vars(type(algorithm))):
        because = f"{name} is not known to use samples in the gradients of its loss only (samples_in_loss_only)"
    elif has_batch_norm(module):
        because = f"batch normalization in {type(module).__name__} mixes the samples of a batch; GroupNorm does not"
    elif isinstance(getattr(module, "gate", None), SimilarityGate):
        because = "a SimilarityGate keeps features of samples as they are"
    elif phase.monitor is not None:
        because = "a select by clients' data is not in epsilon"
    elif is_distributed(trainer):
        because = "trainer.strategy divides the batches of clients"
    if because and phase.ckpt_path is None:
        raise InvalidArgumentError(*refused, because)
    sizes = algorithm.opt_out.opted_in_of_all(datamodule.train_samples, 0).sizes
    if phase.ckpt_path is None and privacy.delta * (most := int(sizes.max())) >= 1:
        because = f"a client has {most} samples, and delta allows to publish each with this probability"
        raise InvalidArgumentError(str(phase), "sample_privacy.delta", privacy.delta, f"below {1 / most:.3g}", because)
    for other in earlier:
        if other.sample_privacy is None:
            allowed = f"given in '{other.name}', from which the phase starts, too"
            because = "what it trained tells about clients' samples, and changes all gradients of this phase"
            raise InvalidArgumentError(str(phase), "sample_privacy", privacy, allowed, because)
        if privacy.target_epsilon is not None and other.ckpt_path is not None:
            because = f"'{other.name}' takes its result from a checkpoint"
            argument = "sample_privacy.target_epsilon"
            raise InvalidArgumentError(
                str(phase), argument, privacy.target_epsilon, "left out, with a noise_multiplier in its place", because
            )
    privacy.epsilon([[1.0, privacy.noise_multiplier or 1.0, 1]])  # needs Opacus
