"""Rounds without training, to show what an algorithm sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends.backend import GroupUpdate, Plan, group_updates
from fedmoe_pl.backends.fitting import one_thread
from fedmoe_pl.backends.local_client import begin_client, end_client, trainable_names
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.trees import Tree, copy_module

_NOISE = 1e-3


class DryPlan(Plan):
    """Calls all hooks of a round, but adds noise to the parameters instead of training them.

    Every parameter that would be trained thus changes, and clients keep and send it. Noise has full rank: what an
    algorithm compresses is never larger after real training.
    """

    def __init__(self, training: LocalTraining) -> None:
        super().__init__(training, "nothing is trained")

    @cached_property
    def weights(self) -> dict[int, tuple[float, int]]:
        """Each client's weight in its last update, and the number of samples that it would train on."""
        return {}

    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Adds noise to one client after another."""
        with one_thread():
            updates = {client: self._update(server, client, kept, round) for group in groups for client in group}
            return group_updates(self.training, groups, updates)

    def _update(self, server: Tree, client_id: int, kept: Mapping[int, Tree], round: int) -> Update:
        training = self.training.of(client_id)
        module = copy_module(training.module)
        client, constants, samples = begin_client(training, module, server, client_id, kept, round)
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name in trainable_names(training, module, round):
                parameters[name].add_(torch.rand_like(parameters[name]) - 0.5, alpha=_NOISE)
                client.steps = 1
        update = end_client(training, client, constants)
        self.weights[client_id] = update.weight, len(samples)
        return update
