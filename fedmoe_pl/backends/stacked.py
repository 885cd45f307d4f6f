"""Many clients in one Trainer: their parameters stacked, the loss mapped over them (DESIGN section 4)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedmoe_pl.algorithms.algorithm import Algorithm, Client
from fedmoe_pl.backends.backend import Backend, GroupUpdate, LocalTraining, Plan, group_update
from fedmoe_pl.backends.client import (
    EpochModule,
    Freezing,
    begin_client,
    client_batches,
    fit_epochs,
    has_batch_norm,
    needs_every_batch,
    on_device,
    one_thread,
    optimizer_and_scheduler,
    trainable_names,
)
from fedmoe_pl.backends.features import FeatureCache, Features, is_close, largest_value, looked_up, no_input
from fedmoe_pl.data import Batches
from fedmoe_pl.models.mixtures.sparse import dense_experts
from fedmoe_pl.trees import Tree, copy_module, load_tree

_ELEMENTWISE = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop),
}
_NO_LABEL = -100  # what cross-entropy leaves out of its mean
_MOST_ON_CPU, _MOST_ON_GPU = 32, 256
_CPU_CACHE = 8 * 2**20  # bytes of stacked parameters, beyond which a CPU waits for its memory
_TRIED_SAMPLES = 4  # of each client in a trial


class StackedBackend(Backend):
    """Trains many clients at once in one ``Trainer``.

    Their parameters are stacked along a client axis, the pure loss is mapped over them, and the clients' own optimizer
    steps the stacked parameters, element by element, as it would step each client's. What is frozen and the same for
    all clients is not stacked.

    Args:
        clients_per_stack: how many clients are trained at once; None takes what a quarter of the memory holds, at most
            32 on a CPU, fewer where their parameters would outgrow its cache, and 256 on a GPU.

    Raises:
        MisconfigurationException: if ``clients_per_stack`` is below 1; before any training, with the reason, if the
            clients of a phase cannot be stacked with the result of a ``Trainer`` per client.
    """

    def __init__(self, clients_per_stack: int | None = None) -> None:
        if clients_per_stack is not None and clients_per_stack < 1:
            raise MisconfigurationException(
                f"StackedBackend: clients_per_stack is {clients_per_stack}, but must be at least 1."
            )
        self.clients_per_stack = clients_per_stack

    def plan(self, training: LocalTraining) -> StackedPlan:
        """Stacks as many clients as was asked for, or as memory holds."""
        trial = try_to_stack(training)
        if isinstance(trial, str):
            raise MisconfigurationException(f"StackedBackend cannot stack the clients: {trial}; TrainerBackend can.")
        return StackedPlan(training, type(self).__name__, self.clients_per_stack or trial.clients_per_stack)


class StackedPlan(Plan):
    """The plan of :class:`StackedBackend`.

    Args:
        training: what all clients of the phase have in common.
        description: what trains the phase, and why, in words for the log.
        clients_per_stack: how many clients are trained at once.
    """

    def __init__(self, training: LocalTraining, description: str, clients_per_stack: int) -> None:
        super().__init__(training, description)
        self.clients_per_stack = clients_per_stack
        self.features = FeatureCache()

    def __reduce__(self) -> tuple[type, tuple[LocalTraining, str, int]]:
        """Without features, where it is sent to another process."""
        return StackedPlan, (self.training, self.description, self.clients_per_stack)

    def begin(self, training: LocalTraining) -> StackedPlan:
        """With as many clients per stack as was planned, without features yet."""
        return StackedPlan(training, self.description, self.clients_per_stack)

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """Clients of one architecture with similar numbers of samples, in groups of similar size."""
        samples, groups = self.training.datamodule.train_samples, []
        for clients in self.training.by_architecture(cohort):
            ordered = sorted(clients, key=lambda client: (-len(samples[client]), client))
            number = -(-len(clients) // self.clients_per_stack)
            size = -(-len(clients) // number)
            groups += [ordered[start : start + size] for start in range(0, len(ordered), size)]
        return groups

    def train_group(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> GroupUpdate:
        """Trains a group in one Trainer."""
        training = self.training.of(clients[0])
        with one_thread():
            module = copy_module(training.module)
            members = _begin_members(training, module, server, clients, kept, round, self.features)
            if trainable_names(training, module, round):
                for stack in _of_one_kind([member for member in members if len(member.batches)]):
                    _fit(training, module, stack, round)
            updates = []
            for member in members:
                load_tree(module, member.state)
                updates.append(training.algorithm.client_final(member.client, member.const))
        return group_update(training.algorithm, clients, updates)


@dataclass(frozen=True)
class Trial:
    """What one stacked step of two clients told.

    Attributes:
        clients_per_stack: how many clients a quarter of the memory holds.
        convolves: whether a step computes a convolution.
    """

    clients_per_stack: int
    convolves: bool


def try_to_stack(training: LocalTraining) -> Trial | str:
    """Computes one step of two clients of every architecture both ways.

    Returns:
        What it told, or why the phase's clients cannot be stacked.
    """
    trials = []
    for alike in training.by_architecture(range(training.datamodule.num_clients)):
        trial = _try_architecture(training.of(alike[0]), alike[:2])
        if isinstance(trial, str):
            return trial
        trials.append(trial)
    return Trial(min(trial.clients_per_stack for trial in trials), any(trial.convolves for trial in trials))


def _try_architecture(training: LocalTraining, clients: Sequence[int]) -> Trial | str:
    """The same for two clients of one architecture."""
    reason = needs_every_batch(training)
    if reason or training.trainer.get("callbacks"):
        return reason or "trainer.callbacks belong to a client each"
    optimizer, _ = optimizer_and_scheduler(training.module.configure_optimizers())
    if type(optimizer) not in _ELEMENTWISE:
        return f"{type(optimizer).__name__} may not step every parameter element by element"
    module = training.module
    if len([*module.named_parameters(remove_duplicate=False)]) > len([*module.parameters()]):
        return "parts of the model share parameters"
    trials = [Trial(_most_clients(training.device), convolves=False)]
    try:
        for round, epoch in training.trainable.values():
            module = copy_module(training.module)
            server = training.algorithm.server_init(module)
            members = _begin_members(training, module, server, clients, {}, round, FeatureCache())
            members = [member for member in members if len(member.batches)]
            trials += [_Stack(training, module, stack, round).trial(epoch) for stack in _of_one_kind(members)]
    except Exception as error:  # whatever a model, an algorithm or PyTorch raises, a Trainer per client may not
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        if "randomness" in reason:
            return "something random, such as dropout, would draw other numbers than in a Trainer per client"
        return str(error) if isinstance(error, _Different) else f"PyTorch cannot stack it ({reason})"
    return Trial(min(trial.clients_per_stack for trial in trials), any(trial.convolves for trial in trials))


class _Different(Exception):
    """Stacked clients do not compute what they compute alone."""


class _NoTrainer:
    """Stands for the Trainer of a module that is tried: its steps are not those of a client in a stack."""

    current_epoch = 0

    def __getattr__(self, name: str) -> Any:
        raise _Different(f"the loss reads {name} of its Trainer")


@dataclass
class _Member:
    """A client of a stack, with the tensors of its module and its batches.

    Attributes:
        client: the client.
        const: the constants of its loss, as the algorithm made them.
        state: the tensors of its module.
        batches: its training batches of this round.
        features: what its steps look up; None for nothing.
    """

    client: Client
    const: dict[str, Any]
    state: Tree
    batches: Batches
    features: Features | None


@dataclass
class _Share:
    """A batch of some clients of a stack, all of one size; the clients are a slice or indices."""

    clients: slice | Tensor
    x: Tensor
    y: Tensor
    rows: Tree

    def cut(self, size: int, unlabelled: int) -> _Share:
        """The first samples of each client, of which the last ones lose their label."""
        y = self.y[:, :size].clone()
        y[:, size - unlabelled :] = _NO_LABEL
        return _Share(self.clients, self.x[:, :size], y, {name: table[:, :size] for name, table in self.rows.items()})

    def cpu(self) -> _Share:
        """The same on the CPU."""
        rows = {name: table.cpu() for name, table in self.rows.items()}
        return _Share(self.clients, self.x.cpu(), self.y.cpu(), rows)


def _begin_members(
    training: LocalTraining,
    module: LightningModule,
    server: Tree,
    clients: Sequence[int],
    kept: Mapping[int, Tree],
    round: int,
    cache: FeatureCache,
) -> list[_Member]:
    """Lets one client after another begin in the same module, and remembers each one's tensors."""
    members: list[_Member] = []
    for client_id in clients:
        load_tree(module, training.initial)
        client, const, samples = begin_client(training, module, server, client_id, kept, round)
        first = members[0].state if members else {}
        state = {
            name: first[name] if name in first and torch.equal(first[name], tensor) else tensor.detach().clone()
            for name, tensor in module.state_dict().items()
        }
        features = cache.find(training, client, const, samples) if len(samples) else None
        members.append(_Member(client, const, state, client_batches(training, client, samples), features))
    return members


def _of_one_kind(members: Sequence[_Member]) -> list[list[_Member]]:
    """Members whose losses have equal constants, tensors aside, and look up the same parts."""
    kinds: list[tuple[Any, list[_Member]]] = []
    for member in members:
        leaves, spec = tree_flatten(member.const)
        constants = [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kind = spec, constants, member.features and member.features.parts
        for other, alike in kinds:
            if other == kind:
                alike.append(member)
                break
        else:
            kinds.append((kind, [member]))
    return [alike for _, alike in kinds]


def _fit(training: LocalTraining, module: LightningModule, members: list[_Member], round: int) -> None:
    """Trains the members in one Trainer, and puts the result into their states."""
    stack = _Stack(training, module, members, round)
    with stack.looking_up():
        fit_epochs(training, _StackedModule(stack), _StackedBatches(stack), None, Freezing(training, module, round))
    for member in stack.members:
        member.client.steps = training.max_epochs * len(member.batches)
    for name, tensor in stack.stacked.items():
        for member, own in zip(stack.members, tensor.cpu(), strict=True):
            member.state[name] = own


class _Loss(nn.Module):
    """The algorithm's loss as a module, whose parameters ``functional_call`` can replace."""

    def __init__(self, algorithm: Algorithm, module: LightningModule) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.module = module

    def forward(self, x: Tensor, y: Tensor, const: dict[str, Any]) -> Tensor:
        return self.algorithm.client_loss(self.module, (x, y), const)[0]


class _Stack:
    """The tensors of some clients, their batches and their losses.

    The clients are in descending order of their steps an epoch, so that those who still have batches come first.

    Attributes:
        stacked: tensors that differ between clients or are trained, shape (clients, ...), by name; the module holds the
            others.
        trained: names of the parameters that are trained in any epoch and that the loss depends on.
    """

    def __init__(
        self, training: LocalTraining, module: LightningModule, members: Sequence[_Member], round: int
    ) -> None:
        self.training = training
        self.module = module.to(training.device)
        self.round = round
        self.members = sorted(members, key=lambda member: -len(member.batches))
        self.steps = [len(member.batches) for member in self.members]
        self.batch_size = min(self.members[0].batches.batch_size, max(member.batches.length for member in members))
        features = self.members[0].features
        self.parts = None if features is None else features.parts
        self.lookup: Tree = {}
        self._collect_data()
        self.const_spec = tree_flatten(self.members[0].const)[1]
        leaves = zip(*(tree_flatten(member.const)[0] for member in self.members), strict=True)
        self.const = [
            torch.stack(values).to(training.device) if isinstance(values[0], Tensor) else values[0] for values in leaves
        ]
        self.trainable = trainable_names(training, module, round)
        self._find_trained()
        self._stack_tensors()

    def _collect_data(self) -> None:
        """Gathers what the members own: ``owned`` are indices of samples, ``first`` is each member's first place."""
        device, datamodule = self.training.device, self.training.datamodule
        lengths = torch.tensor([len(member.batches.samples) for member in self.members])
        self.first = lengths.cumsum(0) - lengths
        owned = torch.cat([member.batches.samples for member in self.members])
        self.owned = owned.to(datamodule.x.device)
        self.labels = datamodule.y[owned.to(datamodule.y.device)].to(device)
        self.tables: Tree = {}
        for name in self.parts.names if self.parts else ():
            self.tables[name] = torch.cat([member.features.rows[name] for member in self.members if member.features])
        used = torch.tensor([member.batches.length for member in self.members])
        starts = torch.arange(self.steps[0]) * self.batch_size
        self.sizes = (used[:, None] - starts).clamp(0, self.batch_size)  # (clients, steps)

    def _find_trained(self) -> None:
        """Finds what the loss depends on and the optimizer has, and whether batches can be padded."""
        self.module.eval()  # nothing random
        _, gradients = self.plain_gradients(self.first_share(0), self.trainable)
        self.trained = [name for name in self.trainable if gradients[name] is not None]
        self.pads = self._ignores_padding()
        self.module.train()
        optimizer, _ = optimizer_and_scheduler(self.module.configure_optimizers())
        assert optimizer is not None, "try_to_stack has refused it"
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parameters = dict(self.module.named_parameters())
        self.trained = [name for name in self.trained if id(parameters[name]) in stepped]

    def _stack_tensors(self) -> None:
        states = [member.state for member in self.members]
        names = [name for name, _ in self.module.named_buffers() if name in states[0]]
        self.buffers = [name for name in names if not self.training.is_frozen(name)]
        changing = {*self.trained, *self.buffers}
        self.stacked: Tree = {}
        for name, tensor in states[0].items():
            if name in changing or any(state[name] is not tensor for state in states):
                self.stacked[name] = torch.stack([state[name] for state in states]).to(self.training.device)

    def looking_up(self) -> Any:
        """Lets frozen parts be looked up while it is open."""
        if self.parts is None:
            return nullcontext()
        return looked_up(self.module, self.parts.names, self.lookup)

    def epoch(self) -> Iterator[list[_Share]]:
        """The batches of one epoch, step by step: one share of all active clients, or one for each size of batch."""
        if self.members[0].batches.augment is not None:
            yield from self._augmented_epoch()
            return
        places = self.first[:, None].repeat(1, self.steps[0] * self.batch_size)  # padded with a client's own sample
        for member, first, own in zip(self.members, self.first, places, strict=True):
            order = member.batches.order()
            own[: len(order)] = first + order
        places = places.to(self.owned.device)
        for step in range(self.steps[0]):
            now = places[:, step * self.batch_size : (step + 1) * self.batch_size]
            yield [
                self._share(clients, now[clients, :size], self.sizes[clients, step])
                for clients, size in self._cut(step)
            ]

    def _cut(self, step: int) -> list[tuple[slice | Tensor, int]]:
        """The clients that have a batch in this step, by size of their batches; padded, they are one slice."""
        sizes = self.sizes[:, step]
        active = int((sizes > 0).sum())
        largest = int(sizes.max())
        if self.pads or bool((sizes[:active] == largest).all()):
            return [(slice(0, active), largest)]
        return [((sizes == size).nonzero().flatten(), size) for size in sizes[:active].unique().tolist()]

    def _share(self, clients: slice | Tensor, places: Tensor, sizes: Tensor) -> _Share:
        """A share from the places (clients, batch) of its samples; samples beyond a client's size have no label."""
        device, shape = self.training.device, places.shape
        flat = places.reshape(-1)
        y = self.labels[flat.to(device)].view(shape)
        if bool((sizes < shape[1]).any()):
            beyond = torch.arange(shape[1]) >= sizes[:, None]
            y = y.masked_fill(beyond.to(device), _NO_LABEL)
        rows = {
            name: table.index_select(0, flat.to(device)).view(*shape, *table.shape[1:])
            for name, table in self.tables.items()
        }
        all_x = self.training.datamodule.x
        if self.parts is not None and not self.parts.reads_input:
            return _Share(clients, no_input(all_x, shape).to(device), y, rows)
        x = all_x.index_select(0, self.owned[flat]).to(device)
        return _Share(clients, x.view(*shape, *x.shape[1:]), y, rows)

    def _augmented_epoch(self) -> Iterator[list[_Share]]:
        """The same from the members' own batches, each augmented by its own generator."""
        batches = [iter(member.batches) for member in self.members]
        for step in range(self.steps[0]):
            own = [next(batches[client]) for client in range(int((self.sizes[:, step] > 0).sum()))]
            yield [_stacked_share(own, clients, size) for clients, size in self._cut(step)]

    def first_share(self, client: int, size: int = 0) -> _Share:
        """One client's first few samples, neither shuffled nor augmented."""
        size = min(int(self.sizes[client, 0]), size or _TRIED_SAMPLES)
        places = self.first[client] + torch.arange(size)
        return self._share(torch.tensor([client]), places[None].to(self.owned.device), torch.tensor([size]))

    def losses(self, share: _Share, names: Sequence[str]) -> tuple[Tensor, Tree]:
        """The loss of every client of a share, shape (clients,), and the tensors to differentiate it by.

        Buffers that the module changes, such as the statistics of batch normalization, are changed in ``stacked``.
        """
        trained = {name: self.stacked[name][share.clients].detach().requires_grad_() for name in names}
        others = {name: tensor[share.clients] for name, tensor in self.stacked.items() if name not in trained}
        others |= {name: others[name].clone() for name in self.buffers}  # a backward pass may still need the old ones
        const = [leaf[share.clients] if isinstance(leaf, Tensor) else leaf for leaf in self.const]
        mapped = [0 if isinstance(leaf, Tensor) else None for leaf in const]
        module = _Loss(self.training.algorithm, self.module)

        def loss(own: Tree, x: Tensor, y: Tensor, rows: Tree, const: list[Any]) -> tuple[Tensor, Tree]:
            self.lookup.update(rows)
            state = {f"module.{name}": tensor for name, tensor in own.items()}
            arguments = (x, y, tree_unflatten(const, self.const_spec))
            value = functional_call(module, state, arguments, tie_weights=False)
            return value, {name: state[f"module.{name}"] for name in self.buffers}  # as the module has left them

        inputs = trained | others, share.x, share.y, share.rows, const
        with dense_experts():
            losses, buffers = vmap(loss, in_dims=(0, 0, 0, 0, mapped))(*inputs)
        for name, tensor in buffers.items():
            self.stacked[name][share.clients] = tensor.detach()
        return losses, trained

    def plain_gradients(self, share: _Share, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Loss and gradients of a share of one client without stacking; None where the loss does not depend on it."""
        member = self.members[int(share.clients)]  # pyright: ignore[reportArgumentType]
        load_tree(self.module, member.state)
        const = on_device(member.const, share.y.device)
        parameters = dict(self.module.named_parameters())
        with self.looking_up():
            self.lookup.update({name: rows[0] for name, rows in share.rows.items()})
            loss = self.training.algorithm.client_loss(self.module, (share.x[0], share.y[0]), const)[0]
        gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
        return loss.detach(), dict(zip(names, gradients, strict=True))

    def _ignores_padding(self) -> bool:
        """Whether samples without a label change neither loss nor gradients, so that all batches can have one size."""
        if bool((self.sizes[self.sizes > 0] == self.batch_size).all()):
            return True
        share = self.first_share(0, 2 * _TRIED_SAMPLES)
        half = share.y.shape[1] // 2
        if has_batch_norm(self.module) or not half:
            return False
        # On a CPU, because a label of -100 that a loss uses as an index would end all work on a GPU.
        self.module.cpu()
        try:
            fewer = share.cut(half, unlabelled=0).cpu()
            padded = share.cut(share.y.shape[1], unlabelled=share.y.shape[1] - half).cpu()
            with torch.autocast("cpu", enabled=False):
                (loss, gradients), (expected, expected_gradients) = (
                    self.plain_gradients(batch, self.trained) for batch in (padded, fewer)
                )
        except (RuntimeError, IndexError, ValueError):
            return False
        finally:
            self.module.to(self.training.device)
        pairs = [(loss, expected), *((gradients[name], expected_gradients[name]) for name in self.trained)]
        return all(a is not None and b is not None and _equal_to_rounding(a, b) for a, b in pairs)

    def trial(self, epoch: int) -> Trial:
        """Compares a step of each member with and without stacking.

        Raises:
            _Different: if gradients or buffers differ.
        """
        Freezing(self.training, self.module, self.round).freeze(epoch)
        skip_idle_dropout(self.module)
        self.module.trainer = _NoTrainer()  # pyright: ignore[reportAttributeAccessIssue]
        names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        names = [name for name in names if name in self.trained]
        convolutions: list[nn.Module] = []
        saved: list[int] = []
        hooks = [
            part.register_forward_pre_hook(lambda part, arguments: convolutions.append(part))
            for part in self.module.modules()
            if isinstance(part, _ConvNd)
        ]
        for client in range(len(self.members)):
            share = self.first_share(client)
            with torch.autograd.graph.saved_tensors_hooks(_remember_size(saved), lambda tensor: tensor):
                _, expected = self.plain_gradients(share, names)
            state = {name: tensor.clone() for name, tensor in self.module.state_dict().items() if name in self.buffers}
            with self.looking_up():
                losses, trained = self.losses(share, names)
            found = dict(zip(trained, torch.autograd.grad(losses.sum(), [*trained.values()]), strict=True))
            largest = largest_value(expected.values())
            for name in names:
                if not is_close(found[name][0], expected[name], largest):
                    raise _Different(f"the gradient of '{name}' comes out different when stacked")
            for name in self.buffers:
                if not is_close(self.stacked[name][client], state[name]):
                    raise _Different(f"the buffer '{name}' comes out different when stacked")
        for hook in hooks:
            hook.remove()
        own = sum(tensor[0].numel() * tensor.element_size() for tensor in self.stacked.values())
        # parameters, gradients, two states of the optimizer and a temporary one; forward and backward pass
        batch = 2 * sum(saved) // len(self.members) * self.batch_size // min(self.batch_size, _TRIED_SAMPLES)
        limit = _memory(self.training.device) // 4 // (5 * own + batch + 1)
        if self.training.device.type == "cpu":
            limit = min(limit, max(_CPU_CACHE // (own + 1), 8))
        return Trial(max(1, min(limit, _most_clients(self.training.device))), bool(convolutions))

    def runs_of_equal_steps(self) -> Iterator[slice]:
        """Neighbours that make as many steps an epoch as each other, and so can share an optimizer's count of them."""
        start = 0
        for client in range(1, len(self.steps) + 1):
            if client == len(self.steps) or self.steps[client] != self.steps[start]:
                yield slice(start, client)
                start = client


class _StackedModule(EpochModule):
    """A stack as a LightningModule, whose optimizer steps the stacked parameters."""

    def __init__(self, stack: _Stack) -> None:
        arguments = stack.training.trainer
        super().__init__(arguments.get("gradient_clip_val"), arguments.get("gradient_clip_algorithm"))
        self.stack = stack
        self.module = stack.module
        self.names: list[str] = []
        self.leaves: list[tuple[_Share, Tree]] = []
        self.gradients: Tree = {}
        self.views = [
            (run, {name: nn.Parameter(stack.stacked[name][run]) for name in stack.trained})
            for run in stack.runs_of_equal_steps()
        ]

    def configure_optimizers(self) -> Any:
        """The client's own optimizer, with views of the stacked parameters in place of the client's."""
        configured = self.module.configure_optimizers()
        optimizer, _ = optimizer_and_scheduler(configured)
        assert optimizer is not None, "try_to_stack has refused it"
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for group in optimizer.param_groups:
            own = [names[parameter] for parameter in group["params"]]
            group["params"] = [view[name] for _, view in self.views for name in own if name in view]
        return configured

    def on_train_epoch_start(self) -> None:
        """Called after ``Freezing``."""
        skip_idle_dropout(self.module)
        parameters = dict(self.module.named_parameters())
        self.names = [name for name in self.stack.trained if parameters[name].requires_grad]

    def loss(self, batch: list[_Share]) -> Tensor:
        """Sum of the clients' losses, none of which depends on another client's parameters."""
        found = [self.stack.losses(share, self.names) for share in batch]
        self.leaves = [(share, trained) for share, (_, trained) in zip(batch, found, strict=True)]
        return torch.stack([losses.sum() for losses, _ in found]).sum()

    def differentiate(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Gives every run of clients with a batch its gradients, and the others none, so that they are not stepped."""
        flat = iter(torch.autograd.grad(loss, [leaf for _, leaves in self.leaves for leaf in leaves.values()]))
        found = [(share.clients, {name: next(flat) for name in leaves}) for share, leaves in self.leaves]
        if any(group.get("fused") for group in optimizer.param_groups):
            # a fused step reads gradients in the order of memory, whatever their strides
            found = [(clients, {name: own[name].contiguous() for name in own}) for clients, own in found]
        active = sum(len(share.y) for share, _ in self.leaves)
        self.gradients = found[0][1]
        if len(found) > 1:
            self.gradients = {
                name: gradient.new_empty(active, *gradient.shape[1:]) for name, gradient in found[0][1].items()
            }
            for clients, gradients in found:
                for name, gradient in gradients.items():
                    self.gradients[name][clients] = gradient
        for run, view in self.views:
            for name, parameter in view.items():
                has_batch = run.stop <= active and name in self.gradients
                parameter.grad = self.gradients[name][run] if has_batch else None

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clips every client's gradients by themselves, as ``torch.nn.utils`` does."""
        if not self.clip_val or self.clip_val < 0:
            return
        if str(self.clip_algorithm).lower().endswith("value"):  # Lightning takes any case, and its enumeration
            for gradient in self.gradients.values():
                gradient.clamp_(-self.clip_val, self.clip_val)
            return
        norms = [
            torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1) for gradient in self.gradients.values()
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)  # (clients,)
        factor = (self.clip_val / (norm + 1e-6)).clamp(max=1)
        for gradient in self.gradients.values():
            gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))


class _StackedBatches:
    """An epoch of a stack each time it is iterated."""

    def __init__(self, stack: _Stack) -> None:
        self.stack = stack

    def __iter__(self) -> Iterator[list[_Share]]:
        return self.stack.epoch()


def skip_idle_dropout(module: nn.Module) -> None:
    """Puts dropout that drops nothing into eval mode, because vmap takes every call of it for a random one."""
    for part in module.modules():
        if isinstance(part, _DropoutNd) and part.p == 0:
            part.eval()


def _stacked_share(own: list[tuple[Tensor, Tensor]], clients: slice | Tensor, size: int) -> _Share:
    """Batches of some clients as one share, shorter ones padded with samples that have no label."""
    chosen = own[clients] if isinstance(clients, slice) else [own[client] for client in clients]
    padded = [_padded_batch(x, y, size) for x, y in chosen]
    return _Share(clients, torch.stack([x for x, _ in padded]), torch.stack([y for _, y in padded]), {})


def _padded_batch(x: Tensor, y: Tensor, size: int) -> tuple[Tensor, Tensor]:
    missing = size - len(y)
    if not missing:
        return x, y
    return torch.cat((x, x[:1].expand(missing, *x.shape[1:]))), torch.cat((y, y.new_full((missing,), _NO_LABEL)))


def _equal_to_rounding(a: Tensor, b: Tensor) -> bool:
    relative = 100 * torch.finfo(a.dtype).eps
    return bool(((a - b).abs() <= relative * b.abs().max()).all())


def _remember_size(sizes: list[int]) -> Any:
    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    return pack


def _most_clients(device: torch.device) -> int:
    return _MOST_ON_CPU if device.type == "cpu" else _MOST_ON_GPU


def _memory(device: torch.device) -> int:
    """Bytes of the device, not those that happen to be free, so that a run that goes on makes the same stacks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
