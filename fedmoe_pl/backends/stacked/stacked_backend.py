"""Trains many clients at once in one Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends.backend import Backend, GroupUpdate, Plan, group_updates
from fedmoe_pl.backends.failures import Failure, guarded
from fedmoe_pl.backends.features import FeatureCache
from fedmoe_pl.backends.fitting import one_thread
from fedmoe_pl.backends.local_client import end_client, trainable_names
from fedmoe_pl.backends.loop import EndedTraining, in_one_step, needs_trainer
from fedmoe_pl.backends.stacked.members import Member, begin_member, stackable_groups
from fedmoe_pl.backends.stacked.stack import make_stack
from fedmoe_pl.backends.stacked.trial import NotStackable, try_to_stack
from fedmoe_pl.backends.trainer import TrainerPlan
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.checks import check_at_least
from fedmoe_pl.trees import Tree, copy_module, load_tree


class StackedBackend(Backend):
    """Trains many clients at once in one ``Trainer``.

    Their parameters are stacked along a client axis and the pure loss is mapped over them. The model's own optimizer
    steps the stacked parameters element by element, so that each client takes the same steps as alone. Frozen tensors
    that are the same for all clients are not stacked.

    If the algorithm, mixture, loss or augmentation is your own code, choosing this backend is your promise that the
    loss depends only on parameters, buffers and batch, in every epoch, and that the augmentation draws its random
    numbers from the given generator. A trial of two clients refuses violations that it finds, but it cannot find
    all. ``auto`` does not rely on promises.
    """

    def __init__(self, clients_per_stack: int | None = None) -> None:
        check_at_least(self, "clients_per_stack", clients_per_stack, 1)
        self.clients_per_stack = clients_per_stack

    def plan(self, training: LocalTraining) -> StackedPlan:
        """Tries to stack the phase's clients."""
        try:
            trial = try_to_stack(training)
        except NotStackable as reason:
            sentence = f"StackedBackend cannot stack the clients: {reason}; TrainerBackend can train them."
            raise MisconfigurationException(sentence) from reason
        return StackedPlan(training, type(self).__name__, self.clients_per_stack or trial.clients_per_stack)


class StackedPlan(Plan):
    """The plan of :class:`StackedBackend`."""

    def __init__(self, training: LocalTraining, description: str, clients_per_stack: int) -> None:
        super().__init__(training, description)
        self.clients_per_stack = clients_per_stack
        self.features = FeatureCache()
        self.alone: TrainerPlan | None = None  # of clients that cannot be stacked after all

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """Groups of similar size, each with clients of one architecture and with similar numbers of samples."""
        samples, groups = self.training.datamodule.train_samples, []
        for clients in self.training.by_architecture(cohort):
            ordered = sorted(clients, key=lambda client: (-len(samples[client]), client))
            number = -(-len(clients) // self.clients_per_stack)
            size = -(-len(clients) // number)
            groups += [ordered[start : start + size] for start in range(0, len(ordered), size)]
        return groups

    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Trains each group in one Trainer."""
        updates: dict[int, Update | Failure] = {}
        with one_thread():
            for clients in groups:
                of_group, stopped = self._train(server, clients, kept, round)
                updates |= of_group
                if stopped:  # train each alone, because the fault may be another client's or the stack's
                    self.alone = self.alone or TrainerPlan(self.training, self.description)
                    groups_of_one = [[client] for client in stopped]
                    for group in self.alone.train_groups(server, groups_of_one, kept, round):
                        answered = {} if group.update is None else dict.fromkeys(group.clients, group.update)
                        updates |= {**answered, **group.failed}
        return group_updates(self.training, groups, updates)

    def _train(
        self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int
    ) -> tuple[dict[int, Update | Failure], list[int]]:
        """Trains clients of one architecture; returns results by client, and the clients to train again alone."""
        training = self.training.of(clients[0])
        seconds = training.client_timeout
        results: dict[int, Update | Failure] = {}
        stopped: list[int] = []
        members = list[Member]()
        for client in clients:
            begin = partial(begin_member, training, server, client, kept, round, self.features, members)
            member = guarded(begin, seconds)
            if isinstance(member, Failure):
                results[client] = member
            else:
                members.append(member)
        for group in stackable_groups(members) if trainable_names(training, training.module, round) else []:
            fit = partial(_fit, training, group, round)
            failure = guarded(fit, seconds and seconds * len(group))
            if isinstance(failure, Failure):
                results |= {member.client.id: failure for member in group}
                stopped += [member.client.id for member in group if failure.error is not None]
        for member in members:
            if member.client.id not in results:
                results[member.client.id] = guarded(partial(_end, training, member), seconds)
                if needs_trainer(results[member.client.id]):
                    stopped.append(member.client.id)
        return results, stopped


def _fit(training: LocalTraining, members: list[Member], round: int) -> None:
    """Trains the members in one Trainer and puts the trained tensors into their states."""
    stack = make_stack(training, copy_module(training.module), members, round)
    in_one_step(training, stack.train)


def _end(training: LocalTraining, member: Member) -> Update:
    client = member.client
    load_tree(client.module, member.state)
    epochs = client.steps // max(len(member.batches), 1)
    with EndedTraining(client, epochs).attached(client.module):
        return end_client(training, client, member.constants)
