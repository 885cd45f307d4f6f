"""Stacked clients that are trained with DP-SGD."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map, tree_unflatten

from fedmoe_pl.backends.dp_sgd import add_clipped, noisy_mean, sample_gradients, samples_at_once, zeros
from fedmoe_pl.backends.features import looked_up
from fedmoe_pl.backends.local_client import noise_of_client, on_device
from fedmoe_pl.backends.loop import Loss
from fedmoe_pl.backends.private_client import clipped_gradients
from fedmoe_pl.backends.stacked.members import Member, Share
from fedmoe_pl.backends.stacked.stack import Stack
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.models.mixtures.sparse import dense_experts
from fedmoe_pl.trees import Tree, load_tree


def make_stack(training: LocalTraining, module: LightningModule, members: Sequence[Member], round: int) -> Stack:
    """A stack of some members, private if the training is."""
    kind = Stack if training.sample_privacy is None else PrivateStack
    return kind(training, module, members, round)


class PrivateStack(Stack):
    """Stacked clients whose gradients are clipped sample by sample, each with noise of its own."""

    def __init__(self, training: LocalTraining, module: LightningModule, members: Sequence[Member], round: int) -> None:
        super().__init__(training, module, members, round)
        assert training.sample_privacy is not None
        self.max_norm = training.sample_privacy.max_grad_norm
        self._noisy_means = [self._noisy_mean(member) for member in self.members]

    def _shares(self) -> Iterator[Any]:
        """A share of all clients that still have batches, and what its samples count, for each step of an epoch."""
        return self.data.poisson_epoch()

    def loss(self, batch: tuple[Share, Tensor]) -> Tree:
        """The sums of each client's clipped gradients, shape (clients, ...)."""
        share, counts = batch  # shape (clients, batch), False for padding
        trained, others, constants = self._tensors(share, self.names)
        module = Loss(self.training.algorithm, self.module)

        def gradients(trained: Tree, others: Tree, samples: tuple[Any, ...], constants: list[Any]) -> Tree:
            def loss(parameters: Tree, sample: tuple[Tensor, Tensor, Tree]) -> Tensor:
                x, y, rows = sample
                self._lookup.update(rows)
                return module.of(parameters | others, x, y, tree_unflatten(constants, self._const_spec))

            return sample_gradients(loss, trained, samples)

        sums, size = zeros(trained), samples_at_once(trained)
        with torch.no_grad(), dense_experts():
            for start in range(0, counts.shape[1], size):
                part = slice(start, start + size)
                samples = tree_map(lambda tensor: tensor[:, part], (share.x, share.y, share.rows))  # noqa: B023
                of_part = vmap(gradients, in_dims=(0, 0, 0, self._mapped))(trained, others, samples, constants)
                add_clipped(sums, of_part, counts[:, part], self.max_norm)
        return sums

    def gradients(self, share: Share) -> Tree:
        """The sums of each client's clipped gradients, shape (clients, ...)."""
        return self.loss((share, share.y.new_ones(share.y.shape[:2], dtype=torch.bool)))

    def gradients_alone(self, member: Member, share: Share) -> Tree:
        """The same of one client's share, in the client's own module."""
        module, constants = member.client.module, on_device(member.constants, share.y.device)
        lookup, batch = {name: rows[0] for name, rows in share.rows.items()}, (share.x[0], share.y[0])
        load_tree(module, member.state)
        with looked_up(module, tuple(share.rows), lookup):
            return clipped_gradients(self.training, module, constants, self.names, batch, lookup, self.max_norm)

    def backward(self, loss: Tree, optimizer: torch.optim.Optimizer) -> None:
        """Sets the gradients of clients that have a batch, with their noise; the others get None."""
        active = len(next(iter(loss.values()), ()))
        noisy = [
            noisy_mean({name: sums[client] for name, sums in loss.items()})
            for client, noisy_mean in enumerate(self._noisy_means[:active])
        ]
        gradients = {name: torch.stack([of_client[name] for of_client in noisy]) for name in loss}
        self._set_gradients(gradients, active, optimizer)

    def _noisy_mean(self, member: Member) -> partial[Tree]:
        batches, client = member.batches, member.client
        expected = min(batches.batch_size, len(batches.samples))
        noise_multiplier, generator = self.training.noise_multiplier(client.id), noise_of_client(self.training, client)
        return partial(
            noisy_mean,
            expected=expected,
            max_norm=self.max_norm,
            noise_multiplier=noise_multiplier,
            generator=generator,
        )
