"""New clients train what they do not share: what they share is frozen."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedmoe_pl.backends import LocalTraining, begin_client, trains_by_loss
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.models.layers import evaluating
from fedmoe_pl.trees import copy_module


def freeze_shared(training: LocalTraining, state: PhaseState | None) -> None:
    """Freezes what clients share, if their training leaves the server's state as it is: they keep nothing of it.

    If the loss depends on no other parameter, such as one of an expert that the gate leaves out, nothing is trained.
    An evaluation after local training is of all that clients train, so that nothing is frozen for it.
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
        client, constants, samples = begin_client(
            training, copy_module(training.module), state.server, client_id, {}, 0
        )
        (batch,) = training.datamodule.batches(samples[:1], device=torch.device("cpu"))
        with evaluating(client.module):
            return training.algorithm.client_loss(client.module, batch, constants)[0].requires_grad
    except Exception:  # a loss may need its Trainer; training reports other errors
        return True
