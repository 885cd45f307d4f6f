"""The clients of a stack, before their local training, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends.features import FeatureCache, Features, no_input
from fedmoe_pl.backends.local_client import begin_client, client_batches
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data import Batches
from fedmoe_pl.data.arrays import NO_LABEL
from fedmoe_pl.trees import Tree

TRIED_SAMPLES = 4
"""Number of samples of each client in a trial."""


@dataclass
class Member:
    """A client of a stack: the constants of its loss, its module's tensors, and its batches and features of a round."""

    client: Client
    constants: dict[str, Any]
    state: Tree
    batches: Batches
    features: Features | None


def begin_member(
    training: LocalTraining,
    server: Tree,
    client_id: int,
    kept: Mapping[int, Tree],
    round: int,
    cache: FeatureCache,
    members: Sequence[Member],
) -> Member:
    """Prepares a client with a module of its own.

    In its ``state``, tensors equal to the first member's, or for the first to the initial ones, are not copied.
    """
    module = training.copies.copy()
    client, constants, samples = begin_client(training, module, server, client_id, kept, round)
    first = members[0].state if members else training.initial
    state = {
        name: first[name] if name in first and torch.equal(first[name], tensor) else tensor.detach().clone()
        for name, tensor in module.state_dict().items()
    }
    features = cache.find(training, client, constants, samples) if len(samples) else None
    batches = client_batches(training, client, samples)
    assert isinstance(batches, Batches), "samples that are read one by one are not stacked"
    return Member(client, constants, state, batches, features)


def stackable_groups(members: Sequence[Member]) -> list[list[Member]]:
    """Groups the members that have batches so that each group can be stacked: same features, constants of one form."""
    groups: list[tuple[Any, list[Member]]] = []
    for member in members:
        if not len(member.batches):
            continue
        leaves, spec = tree_flatten(member.constants)
        constants = [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        key = spec, constants, member.features and member.features.parts
        for other, group in groups:
            if other == key:
                group.append(member)
                break
        else:
            groups.append((key, [member]))
    return [group for _, group in groups]


@dataclass
class StackedShare:
    """One batch for each of several clients, given by their positions in the stack.

    Every tensor has shape (clients, batch, ...). ``rows`` are the looked-up outputs of frozen parts, by part.
    """

    clients: slice | Tensor
    x: Tensor
    y: Tensor
    rows: Tree

    def of(self, position: int) -> StackedShare:
        """The part of the share that belongs to the client at this position in it."""
        return self.apply(lambda tensor: tensor[position : position + 1])

    def apply(self, change: Callable[[Tensor], Tensor]) -> StackedShare:
        """The share with a function applied to each of its tensors."""
        rows = {name: change(table) for name, table in self.rows.items()}
        return StackedShare(self.clients, change(self.x), change(self.y), rows)


class StackedData:
    """The training samples of a stack's clients, numbered client by client; such a number is called a place.

    Attributes:
        batch_size: number of samples in the largest batch.
        steps: number of steps per epoch of each client, in descending order.
        sizes: size of each client's batch in each step, shape (clients, steps); 0 if the client has no more batches.
        first: the place of each client's first sample, shape (clients,).
        indices: index in the data set of the sample at each place.
    """

    def __init__(self, training: LocalTraining, members: Sequence[Member]) -> None:
        self.training = training
        self.members = members
        self.batch_size = min(members[0].batches.batch_size, max(member.batches.length for member in members))
        self.steps = [len(member.batches) for member in members]
        used = torch.tensor([member.batches.length for member in members])
        starts = torch.arange(self.steps[0]) * self.batch_size
        self.sizes = (used[:, None] - starts).clamp(0, self.batch_size)
        lengths = torch.tensor([len(member.batches.samples) for member in members])
        self.first = lengths.cumsum(0) - lengths
        indices = torch.cat([member.batches.samples for member in members])
        datamodule, features = training.datamodule, members[0].features
        self.indices = indices.to(datamodule.x.device)
        self._labels = datamodule.y[indices.to(datamodule.y.device)].to(training.device)
        self._reads_input = features is None or features.parts.reads_input
        self._tables: Tree = {}
        for name in features.parts.names if features else ():
            self._tables[name] = torch.cat([member.features.rows[name] for member in members if member.features])

    def share(self, clients: slice | Tensor, places: Tensor, sizes: Tensor) -> StackedShare:
        """Gathers one batch of each of some clients; samples beyond a client's size get no label."""
        device, shape = self.training.device, places.shape
        flat = places.reshape(-1)
        y = self._labels[flat.to(device)].view(*shape, *self._labels.shape[1:])
        if bool((sizes < shape[1]).any()):
            beyond = torch.arange(shape[1]) >= sizes[:, None]
            y = y.masked_fill(beyond.view(*shape, *[1] * (y.dim() - 2)).to(device), NO_LABEL)
        rows = {
            name: table.index_select(0, flat.to(device)).view(*shape, *table.shape[1:])
            for name, table in self._tables.items()
        }
        all_x = self.training.datamodule.x
        if not self._reads_input:
            return StackedShare(clients, no_input(all_x, shape).to(device), y, rows)
        x = all_x.index_select(0, self.indices[flat]).to(device)
        return StackedShare(clients, x.view(*shape, *x.shape[1:]), y, rows)

    def first_share(self, clients: slice, size: int = TRIED_SAMPLES) -> StackedShare:
        """The first few samples of some clients, equally many of each, neither shuffled nor augmented.

        Those without a label, which say nothing about a loss, come after all others of the client.
        """
        first, size = self.first[clients], min(int(self.sizes[clients, 0].min()), size)
        of_clients = self._labels.split([len(member.batches.samples) for member in self.members])[clients]
        orders = [(y.view(len(y), -1)[:, :1] == NO_LABEL).flatten().cpu().argsort(stable=True) for y in of_clients]
        places = first[:, None] + torch.stack([order[:size] for order in orders])
        return self.share(clients, places.to(self.indices.device), torch.full_like(first, size))

    def epoch(self, pads: bool) -> Iterator[Any]:
        """The steps of one epoch: each is one share of all clients that still have batches, or one per batch size.

        With ``sample_privacy``, it is a share and the mask of its samples, see ``_poisson_epoch``.
        """
        if self.training.sample_privacy is not None:
            return self._poisson_epoch()
        return self._augmented_epoch(pads) if self.members[0].batches.augment is not None else self._plain_epoch(pads)

    def _plain_epoch(self, pads: bool) -> Iterator[list[StackedShare]]:
        # short batches are padded with the client's first sample
        places = self.first[:, None].repeat(1, self.steps[0] * self.batch_size)
        for member, first, row in zip(self.members, self.first, places, strict=True):
            order = member.batches.order()
            row[: len(order)] = first + order
        for step, step_places in enumerate(places.to(self.indices.device).split(self.batch_size, dim=1)):
            yield [
                self.share(clients, step_places[clients, :size], self.sizes[clients, step])
                for clients, size in self._cut(step, pads)
            ]

    def _augmented_epoch(self, pads: bool) -> Iterator[list[StackedShare]]:
        """Batches that each member augments with its own generator."""
        iterators = [iter(member.batches) for member in self.members]
        for step in range(self.steps[0]):
            batches = [next(batches) for batches, size in zip(iterators, self.sizes[:, step], strict=True) if size]
            yield [_stacked_share(batches, clients, size) for clients, size in self._cut(step, pads)]

    def _poisson_epoch(self) -> Iterator[tuple[StackedShare, Tensor]]:
        """The steps of one epoch of Poisson batches: a share of the clients that still have batches, and a mask.

        The mask, of shape (clients, batch), is True for samples and False for padding.
        """
        is_augmented = self.members[0].batches.augment is not None
        augmented = [iter(member.batches) for member in self.members]
        plain = [iter(member.batches.places()) for member in self.members]
        for step in range(self.steps[0]):
            active = sum(step < steps for steps in self.steps)
            if is_augmented:
                x, y = zip(*map(next, augmented[:active]), strict=True)
                sizes, size = _sizes(y)
                share = StackedShare(slice(0, active), _padded(x, size), _padded(y, size), {})
            else:
                drawn = [next(places) for places in plain[:active]]
                sizes, size = _sizes(drawn)
                places = self.first[:active, None] + _padded(drawn, size)  # padding is a client's first sample
                share = self.share(slice(0, active), places.to(self.indices.device), torch.full_like(sizes, size))
            yield share, (torch.arange(size) < sizes[:, None]).to(self.training.device)

    def _cut(self, step: int, pads: bool) -> list[tuple[slice | Tensor, int]]:
        """The clients that have a batch in this step, grouped by batch size; with padding, one slice of all of them."""
        sizes = self.sizes[:, step]
        active = int((sizes > 0).sum())
        largest = int(sizes.max())
        if pads or bool((sizes[:active] == largest).all()):
            return [(slice(0, active), largest)]
        return [((sizes == size).nonzero().flatten(), size) for size in sizes[:active].unique().tolist()]


def _sizes(tensors: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The lengths of some tensors, and the largest length."""
    sizes = [len(tensor) for tensor in tensors]
    return torch.tensor(sizes), max(sizes)


def _padded(tensors: Sequence[Tensor], size: int) -> Tensor:
    """The tensors, padded with zeros at their ends and stacked, shape (tensors, size, ...)."""
    return torch.stack([torch.cat((each, each.new_zeros(size - len(each), *each.shape[1:]))) for each in tensors])


def _stacked_share(batches: list[tuple[Tensor, Tensor]], clients: slice | Tensor, size: int) -> StackedShare:
    """The batches of some clients as one share; short ones are padded with samples without a label."""
    chosen = batches[clients] if isinstance(clients, slice) else [batches[client] for client in clients]
    xs = [x if len(x) == size else torch.cat((x, x[:1].expand(size - len(x), *x.shape[1:]))) for x, _ in chosen]
    ys = nn.utils.rnn.pad_sequence([y for _, y in chosen], batch_first=True, padding_value=NO_LABEL)
    return StackedShare(clients, torch.stack(xs), ys, {})
