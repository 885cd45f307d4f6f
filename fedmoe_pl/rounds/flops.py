"""Floating-point operations of local training, counted for one batch of each kind of client (METHODS section 6.4)."""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedmoe_pl.algorithms.algorithm import Client
from fedmoe_pl.backends import LocalTraining, has_batch_norm
from fedmoe_pl.backends.client import Freezing, begin_client, trainable_names, trains_by_loss
from fedmoe_pl.trees import Tree, copy_module


class FlopCounter:
    """Counts what the forward and backward passes of local training take: a measure of work that no machine changes.

    One batch of a client's real loss is run under PyTorch's ``FlopCounterMode`` for every architecture and set of
    trained parameters, and multiplied with samples and epochs. Matrix products, convolutions and attention count, a
    multiplication and an addition as two; activations, normalization and optimizer do not. What is frozen has no
    backward pass; that its outputs may be looked up in place of being computed is a trick of the backends and does not
    count. Neither do a client's preparations before its training, nor that it may stop early.

    Args:
        training: what the clients of the phase have in common.
    """

    def __init__(self, training: LocalTraining) -> None:
        self.training = training
        self._counted: dict[tuple[int, frozenset[str]], tuple[float, int]] = {}

    def of_round(self, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int) -> float:
        """Operations of all local training of a round: an integer, or nan where a module only runs in its Trainer.

        Args:
            server: the server's state before the round.
            cohort: the clients that train in it.
            kept: what clients kept before it, by client.
            round: the round, counted from 0.
        """
        total = 0
        for clients in self.training.by_architecture(cohort):
            own = self.training.of(clients[0])
            samples = {client: _samples(own, client, round) for client in clients}
            epochs = [frozenset(trainable_names(own, own.module, round, epoch)) for epoch in range(own.max_epochs)]
            for trained, times in Counter(epochs).items():
                epoch = epochs.index(trained)
                if not trained or not any(samples.values()):
                    continue
                key = self.training.architecture(clients[0]), trained
                if key not in self._counted:
                    self._counted[key] = _of_one_batch(own, server, self._first(key[0], round), kept, round, epoch)
                operations, of_samples = self._counted[key]
                if math.isnan(operations):
                    return math.nan
                total += times * int(operations) * sum(samples.values()) // of_samples
        return total

    def _first(self, architecture: int, round: int) -> int:
        """The first client of an architecture that takes part: the same whenever a run that goes on counts anew."""
        own = self.training
        clients = range(own.datamodule.num_clients)
        first = [*own.algorithm.participants(clients, own.seed), *clients]  # newcomers have not opted out
        alike = (client for client in first if own.architecture(client) == architecture)
        return next(client for client in alike if _samples(own.of(client), client, round))


def _samples(training: LocalTraining, client_id: int, round: int) -> int:
    """Number of samples that a client trains on in an epoch, without one that makes no batch."""
    own, datamodule = training.datamodule.train_samples[client_id], training.datamodule
    client = Client(client_id, round, training.seed, training.module, own, {}, datamodule=datamodule)
    samples, drops = training.algorithm.client_samples(client), has_batch_norm(training.module)
    return datamodule.batches(samples, batch_size=training.batch_size, drop_single=drops).length


def _of_one_batch(
    training: LocalTraining, server: Tree, client_id: int, kept: Mapping[int, Tree], round: int, epoch: int
) -> tuple[float, int]:
    """Operations of a forward and a backward pass, on the CPU, and the number of samples that they were counted for."""
    if not trains_by_loss(training.algorithm, training.module):
        return math.nan, 1
    module = copy_module(training.module)
    with _same_random_numbers(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration on top of oneDNN")  # of a CPU's build, when flags are set
        try:
            client, const, samples = begin_client(training, module, server, client_id, kept, round)
            Freezing(training, module, round).freeze(epoch)
            x, y = next(iter(training.datamodule.batches(samples, batch_size=training.batch_size)))
            # oneDNN's LSTM is one operation, of which the counter knows nothing; without it, it is matrix products
            with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
                training.algorithm.client_loss(client.module, (x.cpu(), y.cpu()), const)[0].backward()
        except Exception:  # a loss may need its Trainer, or the whole run; training itself says what is wrong with it
            return math.nan, 1
    return counter.get_total_flops(), len(y)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Puts the generators back to where they were, so that counting changes no result."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        yield
    np.random.set_state(numpy_state)
    random.setstate(python_state)
