"""The clients of a stack, before their local training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends.client import begin_client, client_batches
from fedmoe_pl.backends.features import FeatureCache, Features
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data import Batches
from fedmoe_pl.trees import Tree, load_tree


@dataclass
class Member:
    """A client of a stack.

    Attributes:
        client: the client.
        const: the constants of its loss, as the algorithm made them.
        state: the tensors of its module, by name.
        batches: its training batches of this round.
        features: the outputs of frozen parts that its steps look up; None if there are none.
    """

    client: Client
    const: dict[str, Any]
    state: Tree
    batches: Batches
    features: Features | None


def begin_members(
    training: LocalTraining,
    module: LightningModule,
    server: Tree,
    clients: Sequence[int],
    kept: Mapping[int, Tree],
    round: int,
    cache: FeatureCache,
) -> list[Member]:
    """Prepares one client after another in the same module, and keeps the tensors of each.

    Tensors that equal the first member's are the same object, so that tensors that all clients share exist once.
    """
    members: list[Member] = []
    for client in clients:
        members.append(begin_member(training, module, server, client, kept, round, cache, members))
    return members


def begin_member(
    training: LocalTraining,
    module: LightningModule,
    server: Tree,
    client_id: int,
    kept: Mapping[int, Tree],
    round: int,
    cache: FeatureCache,
    members: Sequence[Member],
) -> Member:
    """Prepares a client in a module that other members have used; see :func:`begin_members`."""
    load_tree(module, training.initial)
    client, const, samples = begin_client(training, module, server, client_id, kept, round)
    first = members[0].state if members else {}
    state = {
        name: first[name] if name in first and torch.equal(first[name], tensor) else tensor.detach().clone()
        for name, tensor in module.state_dict().items()
    }
    features = cache.find(training, client, const, samples) if len(samples) else None
    batches = client_batches(training, client, samples)
    assert isinstance(batches, Batches), "samples that are read one by one are not stacked"
    return Member(client, const, state, batches, features)


def stackable_groups(members: Sequence[Member]) -> list[list[Member]]:
    """Groups the members that have batches into those that can share a stack.

    The members of a group look up the same parts. The constants of their losses have the same structure: tensors have
    equal shapes, and other values are equal.
    """
    groups: list[tuple[Any, list[Member]]] = []
    for member in members:
        if not len(member.batches):
            continue
        leaves, spec = tree_flatten(member.const)
        constants = [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        key = spec, constants, member.features and member.features.parts
        for other, group in groups:
            if other == key:
                group.append(member)
                break
        else:
            groups.append((key, [member]))
    return [group for _, group in groups]
