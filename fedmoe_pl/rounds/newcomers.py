"""Clients that join after the federation's training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedmoe_pl.backends import LocalTraining, begin_client, trains_by_loss
from fedmoe_pl.checkpoints.checkpoint import load_federation
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.checkpoints.resume import identify
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models.layers import evaluating
from fedmoe_pl.rounds.opt_in import set_up
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.trees import Tree, copy_module


def phases_of_newcomers(phases: Sequence[Phase], ckpt_path: Path, rounds: int) -> list[Phase]:
    """The phases for newcomers: federated ones take their results from the checkpoint, the others are trained.

    Args:
        phases: the federation's phases.
        ckpt_path: the federation's checkpoint.
        rounds: local rounds in a federated phase, in which newcomers train the parameters that clients keep.

    Raises:
        MisconfigurationException: if ``rounds`` is below 1, or no phase is federated.
    """
    if rounds < 1:
        raise MisconfigurationException(f"rounds is {rounds}, but must be at least 1.")
    if not any(phase.algorithm.federated for phase in phases):
        raise MisconfigurationException(
            "personalize needs a federated phase, from whose result newcomers start, but none of the phases is "
            "federated; use fit to train clients alone."
        )
    return [_phase_of_newcomers(phase, ckpt_path, rounds) for phase in phases]


def _phase_of_newcomers(phase: Phase, ckpt_path: Path, rounds: int) -> Phase:
    phase = replace(phase, clients_per_round=None, ckpt_path=None)
    if not phase.algorithm.federated:
        return phase
    return replace(
        phase,
        ckpt_path=str(ckpt_path),
        rounds=rounds,
        select=None,
        keep_optimizer=phase.keep_optimizer and rounds > 1,
    )


def freeze_shared(training: LocalTraining, state: PhaseState | None) -> None:
    """Freezes what clients share, if their training leaves the server's state as it is: they keep nothing of it.

    If the loss depends on no other parameter, such as one of an expert that the gate leaves out, nothing is trained.

    Args:
        training: the local training of the phase's clients; its module is changed. An evaluation after local training
            is of all that clients train, so that nothing is frozen for it.
        state: the phase's state; None if it has not begun and its result is not given.
    """
    if state is None or state.server_learns or training.keep_trained:
        return
    module, is_shared = training.module, training.algorithm.is_shared
    for name, parameter in module.named_parameters():
        if is_shared(name):
            parameter.requires_grad_(False)
    for name, part in module.named_modules():  # such as batch normalization without parameters
        tensors = part.state_dict(prefix=f"{name}." if name else "")
        if tensors and all(map(is_shared, tensors)):
            part.eval()
    if not _has_gradient(training, state):
        module.requires_grad_(False)


def _has_gradient(training: LocalTraining, state: PhaseState) -> bool:
    """Whether the loss of a batch depends on a parameter that is not frozen, as far as it can be tried."""
    samples_of = training.datamodule.train_samples
    client_id = max(range(training.datamodule.num_clients), key=lambda client: len(samples_of[client]))
    training = replace(training).of(client_id)  # it remembers the architectures, whose modules may still be frozen
    if not trains_by_loss(training.algorithm, training.module):
        return True
    try:
        client, const, samples = begin_client(training, copy_module(training.module), state.server, client_id, {}, 0)
        (batch,) = training.datamodule.batches(samples[:1], device=torch.device("cpu"))
        with evaluating(client.module):
            return training.algorithm.client_loss(client.module, batch, const)[0].requires_grad
    except Exception:  # a loss may need its Trainer; training reports other errors
        return True


def set_up_newcomers(
    datamodule: FederatedDataModule, path: Path, phases: Sequence[Phase], seed: int
) -> dict[str, Tree]:
    """Sets the newcomers' data up with what the federation's preprocessing has learned.

    Args:
        datamodule: the new clients and their data; nothing changes if they are already set up.
        path: the federation's checkpoint.
        phases: the newcomers' phases.
        seed: the run's seed.

    Returns:
        The tensors of the federation's initial models, by the names of ``Run.models``.

    Raises:
        MisconfigurationException: if images are normalized, or words numbered, in another way than the federation's.
    """
    content = load_federation(path)
    if not datamodule.is_set_up:
        datamodule.normalization, datamodule.vocabulary = content["normalization"], content["vocabulary"]
    set_up(datamodule, phases, seed)
    identity = identify(seed, datamodule)
    for name, what in (("normalization", "images are normalized"), ("vocabulary", "words are numbered")):
        if content[name] != identity[name]:
            raise MisconfigurationException(
                f"ckpt_path is '{path}', a federation whose {what} in another way than the newcomers' data; leave mean "
                "and std out or give the federation's, and let personalize set the data up."
            )
    if datamodule.normalization is not None:
        _warn_of_other_images(datamodule.x, *datamodule.normalization)
    return content["models"]


def _warn_of_other_images(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> None:
    """Warns if the newcomers' images are much brighter or darker than the federation's, as when they are inverted."""
    shift = x.mean(dim=(0, 2, 3)).tolist()
    if max(map(abs, shift)) <= 1:
        return
    pixels = [middle + by * scale for middle, by, scale in zip(mean, shift, std, strict=True)]
    rank_zero_warn(
        f"personalize: the mean of the newcomers' pixels is {_written(pixels)}, more than one standard deviation "
        f"({_written(std)}) from the federation's, {_written(mean)}; are the images prepared in the same way?"
    )


def _written(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
