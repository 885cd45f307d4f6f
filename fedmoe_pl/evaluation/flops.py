"""Counts the floating-point operations of local training, by one batch for each kind of client."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from fedmoe_pl.algorithms.algorithm import overrides
from fedmoe_pl.backends import Freezing, LocalTraining, begin_client, client_of, trainable_names, trains_by_loss
from fedmoe_pl.backends.fitting import has_limit
from fedmoe_pl.seeds import seeded
from fedmoe_pl.trees import Tree

_TRIED = 3  # clients whose batch is tried before the module is assumed to run only in its Trainer


class FlopCounter:
    """Counts the operations of forward and backward passes: a measure of work that is the same on every machine.

    For every architecture and set of trained parameters, the algorithm's loss of one batch is run under PyTorch's
    ``FlopCounterMode``, and its operations are multiplied by samples and epochs. An algorithm with its own loss may do
    different work in every round; its loss is run again whenever its constants differ in more than the values of
    tensors. The constants of the cohort's first client of an architecture stand for all of its clients.
    Matrix products, convolutions and attention count, with a multiplication and an addition as two operations;
    activations, normalization and optimizers do not. Frozen parts have no backward pass, but their forward pass counts
    in every step, even if a backend looks up the outputs. A client's work before its training does not count, and
    early stopping is ignored. With ``max_steps``, ``max_time``, ``fast_dev_run`` or a ``Timer``, operations are
    unknown.
    """

    def __init__(self, training: LocalTraining) -> None:
        self.training = training
        self._counted: dict[tuple[int, frozenset[str], str], tuple[float, int]] = {}

    def of_round(self, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int) -> float:
        """Operations of a round: an integer, or NaN if they cannot be counted."""
        if has_limit(self.training.trainer):
            return math.nan
        groups = self.training.by_architecture(cohort)
        return sum(self._of_architecture(server, clients, kept, round) for clients in groups)

    def _of_architecture(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> float:
        """Operations of the local training of a cohort's clients of one architecture."""
        training, architecture = self.training.of(clients[0]), self.training.architecture(clients[0])
        samples = {client: _samples(training, client, round) for client in clients}
        if not any(samples.values()):
            return 0
        if overrides(training.algorithm, "client_loss"):
            with_samples = [client for client in clients if samples[client]]
            constants = _constants(training, server, with_samples[0], kept, round)
        else:
            with_samples, constants = self._participants(architecture, round), ""
        epochs = [
            frozenset(trainable_names(training, training.module, round, epoch)) for epoch in range(training.max_epochs)
        ]
        total = 0
        for trained, times in Counter(epochs).items():
            if not trained:
                continue
            key = architecture, trained, constants
            if key not in self._counted:
                epoch = epochs.index(trained)
                for client in islice(with_samples, _TRIED):  # several, because a client may fail in this round
                    self._counted[key] = _of_one_batch(training, server, client, kept, round, epoch)
                    if not math.isnan(self._counted[key][0]):
                        break
            operations, of_samples = self._counted[key]
            if math.isnan(operations):
                return math.nan
            total += times * int(operations) * sum(samples.values()) // of_samples
        return total

    def _participants(self, architecture: int, round: int) -> Iterator[int]:
        """Clients of an architecture with samples, participants first; in the same order in a resumed run."""
        training = self.training
        clients = range(training.datamodule.num_clients)
        # all others follow, because no new client has opted out
        ordered = dict.fromkeys([*training.algorithm.opt_out.participants(clients, training.seed), *clients])
        candidates = (client for client in ordered if training.architecture(client) == architecture)
        yield from (client for client in candidates if _samples(training.of(client), client, round))


def _samples(training: LocalTraining, client_id: int, round: int) -> int:
    """Number of samples that a client trains on in an epoch, not counting a dropped last one."""
    samples = training.algorithm.client_samples(client_of(training, training.module, client_id, {}, round))
    batches = training.datamodule.batches(samples, batch_size=training.batch_size, drop_single=training.has_batch_norm)
    limit = training.trainer.get("limit_train_batches")
    if limit is None:
        return batches.length
    most = int(limit * len(batches)) if isinstance(limit, float) else limit
    return min(batches.length, most * batches.batch_size)


def _constants(training: LocalTraining, server: Tree, client_id: int, kept: Mapping[int, Tree], round: int) -> str:
    """Describes all that an algorithm's own loss of one batch may depend on, except for the values of tensors.

    This includes the batch's size, so that a resumed run counts the same operations.
    """
    with seeded(0):
        try:
            _, constants, samples = begin_client(training, training.copies.copy(), server, client_id, kept, round)
        except Exception:  # a user's hooks may raise anything; training reports it
            return ""
    size = min(len(samples), training.datamodule.batches(samples, batch_size=training.batch_size).batch_size)
    return f"{size} samples, {tree_map(_description, constants)}"


def _description(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


def _of_one_batch(
    training: LocalTraining, server: Tree, client_id: int, kept: Mapping[int, Tree], round: int, epoch: int
) -> tuple[float, int]:
    """Operations of the forward and backward pass of one batch, counted on the CPU, and the batch's size."""
    if not trains_by_loss(training) or training.algorithm.client_batches:
        return math.nan, 1
    module = training.copies.copy()
    with seeded(0), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration on top of oneDNN")  # PyTorch warns when flags are set
        try:
            client, constants, samples = begin_client(training, module, server, client_id, kept, round)
            Freezing(training, module, round).freeze(epoch)
            batches = training.datamodule.batches(samples, batch_size=training.batch_size)
            batch = move_data_to_device(next(iter(batches)), torch.device("cpu"))
            # oneDNN's LSTM is one operation, unknown to the counter; without oneDNN, it consists of matrix products
            with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
                training.algorithm.client_loss(client.module, batch, constants).backward()
        except Exception:  # a loss may need its Trainer or the whole run; training reports other errors
            return math.nan, 1
    return counter.get_total_flops(), min(len(samples), batches.batch_size)
