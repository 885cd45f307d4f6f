"""Rounds without training, which show what the algorithm sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from lightning.pytorch import LightningModule

from fedmoe_pl.backends.backend import GroupUpdate, Plan, group_update
from fedmoe_pl.backends.client import begin_client, end_client, trainable_names
from fedmoe_pl.backends.fitting import one_thread
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.trees import Tree, copy_module

_NOISE = 1e-3


class DryPlan(Plan):
    """Calls the hooks of a round as for any training, but in place of it, adds noise to the trained parameters.

    So every parameter changes that would be trained, and clients keep and send it. Noise has full rank: what an
    algorithm compresses is never larger after training.

    Attributes:
        weights: the weights of the last updates, and the numbers of samples that they were trained on, by client.
    """

    def __init__(self, training: LocalTraining) -> None:
        super().__init__(training, "nothing is trained")

    @cached_property
    def weights(self) -> dict[int, tuple[float, int]]:
        """The weights of the last updates, and the numbers of samples that they were trained on, by client."""
        return {}

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """One client per group."""
        return [[client] for client in cohort]

    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """One client after another."""
        with one_thread():
            return [self._group(server, group, kept, round) for group in groups]

    def _group(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> GroupUpdate:
        updates = []
        for client_id in clients:
            training = self.training.of(client_id)
            module = copy_module(training.module)
            client, constants, samples = begin_client(training, module, server, client_id, kept, round)
            if names := trainable_names(training, module, round):
                _add_noise(module, names)
                client.steps = 1
            updates.append(end_client(training, client, constants))
            self.weights[client_id] = updates[-1].weight, len(samples)
        return group_update(self.training, clients, updates)


@torch.no_grad()
def _add_noise(module: LightningModule, names: Sequence[str]) -> None:
    parameters = dict(module.named_parameters())
    for name in names:
        parameters[name].add_(torch.rand_like(parameters[name]) - 0.5, alpha=_NOISE)
