"""Clients whose tensors are stacked along a client axis, so that one call computes all their losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fedmoe_pl.backends.code_of_user import code_of_user
from fedmoe_pl.backends.dp_sgd import add_clipped, noisy_mean, sample_gradients, samples_at_once, zeros
from fedmoe_pl.backends.features import looked_up
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.local_client import noise_of_client, on_device, trainable_names
from fedmoe_pl.backends.loop import Learner, Loop, Loss, OneStep
from fedmoe_pl.backends.optimizers import optimizer_and_scheduler, set_optimizer, with_strides_of
from fedmoe_pl.backends.private_client import clipped_gradients
from fedmoe_pl.backends.rounding import equal_to_rounding
from fedmoe_pl.backends.stacked.members import TRIED_SAMPLES, Member, StackedData, StackedShare
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data.arrays import NO_LABEL
from fedmoe_pl.models.layers import treats_samples_apart, trying
from fedmoe_pl.models.mixtures.sparse import dense_experts
from fedmoe_pl.trees import Tree, load_tree, precise


class Stack(Learner):
    """Stacked clients, in descending order of steps per epoch, so that clients that still have batches come first.

    Attributes:
        trained: names of the parameters that are trained in some epoch and that the loss depends on.
        stepped: names of the parameters that the optimizer steps.
        names: the names in ``trained`` that are trained in this epoch.
        buffers: names of the buffers that are not frozen.
        stacked: tensors that differ between clients or are trained, shape (clients, ...), by name.
        views: for each run of neighbours with equal numbers of steps, parameters that are views of its part of
            ``stacked``; separate ones, because an optimizer counts steps per parameter.
    """

    def __init__(self, training: LocalTraining, module: LightningModule, members: Sequence[Member], round: int) -> None:
        self.training = training
        self.module = training.copies.move(module, training.device)
        set_optimizer(module, training.learning_rates(round), {})
        self.members = sorted(members, key=lambda member: -len(member.batches))
        self.data = StackedData(training, self.members)
        self.counts_steps = len({*self.data.steps}) == 1
        self.round = round
        features = self.members[0].features
        self._parts = () if features is None else features.parts.names
        self._lookup: Tree = {}
        self._stack_constants()
        self._find_trained(trainable_names(training, module, round))
        self._stack_tensors()
        self.names = self.trained
        self.views = [
            (run, {name: nn.Parameter(self.stacked[name][run]) for name in self.trained})
            for run in _runs_of_equal_steps(self.data.steps)
        ]
        self._leaves: list[tuple[StackedShare, Tree]] = []

    def train(self, step: OneStep) -> None:
        """Trains all epochs."""
        freezing = Freezing(self.training, self.module, self.round)
        with self.looking_up():
            Loop(step.trainer, self.training, freezing).run(self)
        self.training.copies.move(self.module, torch.device("cpu"))
        for member in self.members:
            member.client.steps = freezing.stop_after * len(member.batches)
        self.unstack()

    def epoch(self) -> Iterator[Any]:
        """The steps of the next epoch."""
        with self.stepping():
            yield from self.data.epoch(self.pads)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """In this context, ``names`` are the parameters trainable now, and dropout with probability 0 is off.

        vmap would treat such dropout as random.
        """
        parameters = dict(self.module.named_parameters())
        self.names = [name for name in self.trained if parameters[name].requires_grad]
        parts = [part for part in self.module.modules() if isinstance(part, _DropoutNd) and part.training]
        off = [part for part in parts if part.p == 0]
        for part in off:
            part.training = False
        yield
        for part in off:
            part.training = True

    def configure_optimizers(self) -> Any:
        """The optimizer of the clients' module, with the stacked parameters' views in place of its parameters."""
        configured = self.module.configure_optimizers()
        optimizer, _ = optimizer_and_scheduler(configured)
        assert optimizer is not None, "try_to_stack has refused it"
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        for group in optimizer.param_groups:
            stepped = [names[parameter] for parameter in group["params"]]
            group["params"] = [view[name] for _, view in self.views for name in stepped if name in view]
        early = {names[parameter]: state for parameter, state in optimizer.state.items()}  # Adagrad has it from start
        for name, parameter in ((name, view[name]) for _, view in self.views for name in view if name in early):
            optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.expand_as(parameter).clone()
                for key, value in early[name].items()
            }
        return configured

    def loss(self, batch: Any) -> Any:
        """The sum of the clients' losses, each of which depends only on its own client's parameters."""
        of_shares = [self.losses(share, self.names) for share in batch]
        self._leaves = [(share, trained) for share, (_, trained) in zip(batch, of_shares, strict=True)]
        return torch.stack([losses.sum() for losses, _ in of_shares]).sum()

    def backward(self, loss: Any, optimizer: torch.optim.Optimizer) -> None:
        """Sets the gradients of clients that have a batch; other clients get None and are not stepped."""
        found = iter(torch.autograd.grad(loss, [leaf for _, leaves in self._leaves for leaf in leaves.values()]))
        of_shares = [(share.clients, {name: next(found) for name in leaves}) for share, leaves in self._leaves]
        active = sum(len(share.y) for share, _ in self._leaves)
        gradients = of_shares[0][1] if len(of_shares) == 1 else _in_one(of_shares, active)
        self._set_gradients(gradients, active, optimizer)

    def _set_gradients(self, gradients: Tree, active: int, optimizer: torch.optim.Optimizer) -> None:
        """Clips and sets the gradients of the first clients, each of shape (active, ...); the rest get None."""
        if any(group.get("fused") for group in optimizer.param_groups):
            gradients = {name: with_strides_of(self.stacked[name], values) for name, values in gradients.items()}
        self._clip(gradients)
        for run, view in self.views:
            for name, parameter in view.items():
                has_batch = run.stop <= active and name in gradients
                parameter.grad = gradients[name][run] if has_batch else None

    def _stack_constants(self) -> None:
        self._const_spec = tree_flatten(self.members[0].constants)[1]
        leaves = zip(*(tree_flatten(member.constants)[0] for member in self.members), strict=True)
        device = self.training.device
        self._const = [
            torch.stack(values).to(device) if isinstance(values[0], Tensor) else values[0] for values in leaves
        ]
        self._mapped = [0 if isinstance(leaf, Tensor) else None for leaf in self._const]

    def _find_trained(self, trainable: list[str]) -> None:
        """Finds the parameters that the optimizer steps and the loss depends on, and whether batches can be padded."""
        training, module, first = self.training, self.module, self.members[0]
        with trying(module):  # in train mode, because a part may compute something else in eval mode
            gradients = plain_gradients(training, module, first, self.data.first_share(slice(1)), trainable)
            used = [name for name in trainable if gradients[name] is not None]
            self.pads = ignores_padding(training, module, first, self.data, used)
        # what is not stacked is read from the module, whose buffers are the old ones again; a trial may have left noise
        load_tree(module, first.state)
        optimizer, _ = optimizer_and_scheduler(module.configure_optimizers())
        assert optimizer is not None, "try_to_stack has refused it"
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        self.stepped = [name for name, parameter in module.named_parameters() if parameter in stepped]
        self.trained = [name for name in used if name in self.stepped]

    def _stack_tensors(self) -> None:
        states = [member.state for member in self.members]
        names = [name for name, _ in self.module.named_buffers() if name in states[0]]
        frozen = tuple(f"{part}." for part in self.training.frozen_modules)
        self.buffers = [name for name in names if not name.startswith(frozen)]
        changing = {*self.trained, *self.buffers}
        self.stacked: Tree = {}
        for name, tensor in states[0].items():
            if name in changing or any(state[name] is not tensor for state in states):
                self.stacked[name] = _stacked([state[name] for state in states], self.training.device)

    def looking_up(self) -> AbstractContextManager[None]:
        """In this context, the outputs of frozen parts are looked up."""
        return looked_up(self.module, self._parts, self._lookup)

    def _tensors(self, share: StackedShare, names: Sequence[str]) -> tuple[Tree, Tree, list[Any]]:
        """A share's tensors to differentiate by, its other tensors, and the constants of the clients' losses."""
        trained = {name: self.stacked[name][share.clients].detach() for name in names}
        others = {name: tensor[share.clients] for name, tensor in self.stacked.items() if name not in trained}
        return trained, others, [leaf[share.clients] if isinstance(leaf, Tensor) else leaf for leaf in self._const]

    def losses(self, share: StackedShare, names: Sequence[str]) -> tuple[Tensor, Tree]:
        """The loss of every client of a share, shape (clients,), and the tensors to differentiate it by."""
        trained, others, constants = self._tensors(share, names)
        trained = {name: tensor.requires_grad_() for name, tensor in trained.items()}
        others |= {name: others[name].clone() for name in self.buffers}  # the backward pass may need the old values
        module = Loss(self.training.algorithm, self.module)

        def loss(tensors: Tree, x: Tensor, y: Tensor, rows: Tree, constants: list[Any]) -> tuple[Tensor, Tree]:
            self._lookup.update(rows)
            state = {f"module.{name}": tensor for name, tensor in tensors.items()}
            arguments = (x, y, tree_unflatten(constants, self._const_spec))
            value = functional_call(module, state, arguments, tie_weights=False)
            return value, {name: state[f"module.{name}"] for name in self.buffers}  # buffers after the forward pass

        inputs = trained | others, share.x, share.y, share.rows, constants
        with dense_experts():
            losses, buffers = vmap(loss, in_dims=(0, 0, 0, 0, self._mapped))(*inputs)
        for name, tensor in buffers.items():
            self.stacked[name][share.clients] = tensor.detach()
        return losses, trained

    def gradients(self, share: StackedShare) -> Tree:
        """The gradients of every client of a share, shape (clients, ...)."""
        losses, trained = self.losses(share, self.names)
        return dict(zip(trained, torch.autograd.grad(losses.sum(), [*trained.values()]), strict=True))

    def gradients_alone(self, member: Member, share: StackedShare) -> Mapping[str, Tensor | None]:
        """One client's gradients, computed in its own module; None where the loss does not depend on a parameter."""
        parameters = member.client.module.named_parameters()
        names = [name for name, parameter in parameters if parameter.requires_grad and name in self.stepped]
        return plain_gradients(self.training, member.client.module, member, share, names)

    def _clip(self, gradients: Tree) -> None:
        """Clips each client's gradients by their norm or value, as ``torch.nn.utils`` does."""
        clip_val, algorithm = (self.training.trainer.get(f"gradient_clip_{name}") for name in ("val", "algorithm"))
        if not clip_val or clip_val < 0:
            return
        if str(algorithm).lower().endswith("value"):  # Lightning accepts any case, and an enum member
            for gradient in gradients.values():
                gradient.clamp_(-clip_val, clip_val)
            return
        norms = [
            torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1) for gradient in gradients.values()
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)  # (clients,)
        factor = (clip_val / (norm + 1e-6)).clamp(max=1)
        for gradient in gradients.values():
            gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))

    def unstack(self) -> None:
        """Puts the stacked tensors into the members' states."""
        for name, tensor in self.stacked.items():
            for member, value in zip(self.members, tensor.cpu(), strict=True):
                member.state[name] = value


def _stacked(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stacks tensors on a device; a tensor that is the same for all, such as the server's, is moved once."""
    if all(tensor is tensors[0] for tensor in tensors):
        tensors = [tensors[0].to(device)] * len(tensors)
    return torch.stack([*tensors]).to(device)


def _in_one(of_shares: list[tuple[slice | Tensor, Tree]], active: int) -> Tree:
    """The gradients of several shares as one tree; each tensor has shape (active clients, ...)."""
    whole = {name: gradient.new_empty(active, *gradient.shape[1:]) for name, gradient in of_shares[0][1].items()}
    for clients, gradients in of_shares:
        for name, gradient in gradients.items():
            whole[name][clients] = gradient
    return whole


def _runs_of_equal_steps(steps: Sequence[int]) -> Iterator[slice]:
    """Slices of neighbours with equal numbers of steps per epoch."""
    for _, run in groupby(range(len(steps)), steps.__getitem__):
        clients = [*run]
        yield slice(clients[0], clients[-1] + 1)


def plain_gradients(
    training: LocalTraining, module: LightningModule, member: Member, share: StackedShare, names: Sequence[str]
) -> dict[str, Tensor | None]:
    """The gradients of the loss of one client's share."""
    load_tree(module, member.state)
    constants = on_device(member.constants, share.y.device)
    parameters = dict(module.named_parameters())
    with looked_up(module, tuple(share.rows), {name: rows[0] for name, rows in share.rows.items()}):
        loss = training.algorithm.client_loss(module, (share.x[0], share.y[0]), constants)
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return dict(zip(names, gradients, strict=True))


def ignores_padding(
    training: LocalTraining, module: LightningModule, member: Member, data: StackedData, names: Sequence[str]
) -> bool:
    """Whether samples without a label leave the gradients unchanged, so that batches can be padded to one size.

    A trial with noisy parameters decides, but only for losses and layers of this package and PyTorch: a user's loss
    may depend on the number of samples for other parameters.
    """
    if bool((data.sizes[data.sizes > 0] == data.batch_size).all()):
        return True
    if training.has_batch_norm or not treats_samples_apart(module) or code_of_user(training):
        return False
    if any(precise(member.state[name]).dtype != member.state[name].dtype for name in names):
        return False  # rounding in half precision would hide a difference
    share = data.first_share(slice(1), 2 * TRIED_SAMPLES)
    half = share.y.shape[1] // 2
    if not half or bool((share.y[:, :half] == NO_LABEL).all()):
        return False
    # on the CPU, because a loss that uses the label -100 as an index would make a GPU unusable
    training.copies.move(module, torch.device("cpu"))
    try:
        fewer, padded = share.apply(lambda tensor: tensor[:, :half].cpu()), share.apply(lambda tensor: tensor.cpu())
        padded.y = padded.y.clone()
        padded.y[:, half:] = NO_LABEL
        noisy = replace(member, state=member.state | with_noise({name: member.state[name] for name in names}))
        gradients, expected = (plain_gradients(training, module, noisy, batch, names) for batch in (padded, fewer))
    except Exception:  # the loss refuses a label that is not a class
        return False
    finally:
        training.copies.move(module, training.device)
    pairs = ((gradients[name], expected[name]) for name in names)
    return all(a is not None and b is not None and equal_to_rounding(a, b) for a, b in pairs)


def with_noise(tensors: Tree) -> Tree:
    """Adds noise to floating-point tensors: between 0 and a tenth of their mean absolute value, or 0.01 if larger.

    With noise, a trial sees terms of a loss that are 0 where training starts. Positive values, such as variances, stay
    positive, and infinite ones, as in a mask, infinite.
    """
    generator, noisy = torch.Generator().manual_seed(0), {**tensors}
    for name, tensor in ((name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point()):
        noise = torch.rand(tensor.shape, generator=generator).to(tensor)
        finite = tensor.where(tensor.isfinite(), 0)
        noisy[name] = tensor + noise * (0.1 * finite.abs().mean()).clamp_min(0.01)
    return noisy


def make_stack(training: LocalTraining, module: LightningModule, members: Sequence[Member], round: int) -> Stack:
    """A stack of some members: a ``PrivateStack`` if the training has ``sample_privacy``."""
    kind = Stack if training.sample_privacy is None else PrivateStack
    return kind(training, module, members, round)


class PrivateStack(Stack):
    """Stacked clients whose gradients are clipped sample by sample; each client gets its own noise."""

    def __init__(self, training: LocalTraining, module: LightningModule, members: Sequence[Member], round: int) -> None:
        super().__init__(training, module, members, round)
        assert training.sample_privacy is not None
        self.max_norm = training.sample_privacy.max_grad_norm
        self._noise = [self._noise_of(member) for member in self.members]

    def loss(self, batch: tuple[StackedShare, Tensor]) -> Tree:
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

    def gradients(self, share: StackedShare) -> Tree:
        """The sums of each client's clipped gradients, shape (clients, ...)."""
        return self.loss((share, share.y.new_ones(share.y.shape[:2], dtype=torch.bool)))

    def gradients_alone(self, member: Member, share: StackedShare) -> Tree:
        """The sums of one client's clipped gradients, computed in its own module."""
        module, constants = member.client.module, on_device(member.constants, share.y.device)
        lookup, batch = {name: rows[0] for name, rows in share.rows.items()}, (share.x[0], share.y[0])
        load_tree(module, member.state)
        with looked_up(module, tuple(share.rows), lookup):
            return clipped_gradients(self.training, module, constants, self.names, batch, lookup, self.max_norm)

    def backward(self, loss: Tree, optimizer: torch.optim.Optimizer) -> None:
        """Sets the noisy gradients of clients that have a batch; the rest get None."""
        active = len(next(iter(loss.values()), ()))
        noisy = [
            noisy_mean({name: sums[client] for name, sums in loss.items()}, *noise)
            for client, noise in enumerate(self._noise[:active])
        ]
        gradients = {name: torch.stack([of_client[name] for of_client in noisy]) for name in loss}
        self._set_gradients(gradients, active, optimizer)

    def _noise_of(self, member: Member) -> tuple[int, float, float, Generator]:
        """The arguments of ``noisy_mean`` for a client, after its sums."""
        expected, client = min(member.batches.batch_size, len(member.batches.samples)), member.client
        noise_multiplier = self.training.noise_multiplier(client.id)
        return expected, self.max_norm, noise_multiplier, noise_of_client(self.training, client)
