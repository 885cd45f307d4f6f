"""The tensors of some clients, stacked along a client axis, and the loss mapped over them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.backends.client import on_device, trainable_names
from fedmoe_pl.backends.features import looked_up
from fedmoe_pl.backends.optimizers import optimizer_and_scheduler
from fedmoe_pl.backends.rounding import equal_to_rounding
from fedmoe_pl.backends.stacked.batches import TRIED_SAMPLES, Member, Share, StackedData
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.models.layers import evaluating
from fedmoe_pl.models.mixtures.sparse import dense_experts
from fedmoe_pl.trees import Tree, load_tree


class Stack:
    """The tensors of some clients and their losses.

    Attributes:
        members: the clients in descending order of their steps per epoch, so that in every step those that still have
            batches come first.
        data: their training samples.
        trained: names of the parameters that are trained in any epoch and that the loss depends on.
        pads: whether short batches may be padded with samples without a label.
        buffers: names of the buffers that are not frozen.
        stacked: tensors that differ between clients or are trained, shape (clients, ...), by name.
    """

    def __init__(self, training: LocalTraining, module: LightningModule, members: Sequence[Member], round: int) -> None:
        self.training = training
        self.module = module.to(training.device)
        self.members = sorted(members, key=lambda member: -len(member.batches))
        self.data = StackedData(training, self.members)
        features = self.members[0].features
        self._parts = () if features is None else features.parts.names
        self._lookup: Tree = {}
        self._seen = torch.zeros(len(members), device=training.device)  # of each client, as in Client.losses
        self._stack_constants()
        self._find_trained(trainable_names(training, module, round))
        self._stack_tensors()

    def _stack_constants(self) -> None:
        self._const_spec = tree_flatten(self.members[0].constants)[1]
        leaves = zip(*(tree_flatten(member.constants)[0] for member in self.members), strict=True)
        device = self.training.device
        self._const = [
            torch.stack(values).to(device) if isinstance(values[0], Tensor) else values[0] for values in leaves
        ]

    def _find_trained(self, trainable: list[str]) -> None:
        """Finds the parameters that the optimizer steps and the loss depends on, and whether batches can be padded."""
        training, module, first = self.training, self.module, self.members[0]
        with evaluating(module):
            _, gradients = plain_gradients(training, module, first, self.data.first_share(0), trainable)
            used = [name for name in trainable if gradients[name] is not None]
            self.pads = ignores_padding(training, module, first, self.data, used)
        optimizer, _ = optimizer_and_scheduler(module.configure_optimizers())
        assert optimizer is not None, "try_to_stack has refused it"
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parameters = dict(module.named_parameters())
        self.trained = [name for name in used if id(parameters[name]) in stepped]

    def _stack_tensors(self) -> None:
        states = [member.state for member in self.members]
        names = [name for name, _ in self.module.named_buffers() if name in states[0]]
        self.buffers = [name for name in names if not self.training.is_frozen(name)]
        changing = {*self.trained, *self.buffers}
        self.stacked: Tree = {}
        for name, tensor in states[0].items():
            if name in changing or any(state[name] is not tensor for state in states):
                self.stacked[name] = torch.stack([state[name] for state in states]).to(self.training.device)

    def looking_up(self) -> AbstractContextManager[None]:
        """In this context, the outputs of frozen parts are looked up."""
        return looked_up(self.module, self._parts, self._lookup)

    def losses(self, share: Share, names: Sequence[str]) -> tuple[Tensor, Tree]:
        """The loss of every client of a share, shape (clients,), and the tensors to differentiate it by.

        Buffers that the module changes, such as the statistics of batch normalization, are changed in ``stacked``.
        """
        trained = {name: self.stacked[name][share.clients].detach().requires_grad_() for name in names}
        others = {name: tensor[share.clients] for name, tensor in self.stacked.items() if name not in trained}
        others |= {name: others[name].clone() for name in self.buffers}  # a backward pass may still need the old ones
        constants = [leaf[share.clients] if isinstance(leaf, Tensor) else leaf for leaf in self._const]
        mapped = [0 if isinstance(leaf, Tensor) else None for leaf in constants]
        module = _Loss(self.training.algorithm, self.module)

        def loss(tensors: Tree, x: Tensor, y: Tensor, rows: Tree, constants: list[Any]) -> tuple[Tensor, Tree]:
            self._lookup.update(rows)
            state = {f"module.{name}": tensor for name, tensor in tensors.items()}
            arguments = (x, y, tree_unflatten(constants, self._const_spec))
            value = functional_call(module, state, arguments, tie_weights=False)
            return value, {name: state[f"module.{name}"] for name in self.buffers}  # buffers after the forward pass

        inputs = trained | others, share.x, share.y, share.rows, constants
        with dense_experts():
            losses, buffers = vmap(loss, in_dims=(0, 0, 0, 0, mapped))(*inputs)
        for name, tensor in buffers.items():
            self.stacked[name][share.clients] = tensor.detach()
        # 0 times infinity is not a number
        seen = torch.add(self._seen[share.clients], losses.detach(), alpha=0)
        self._seen[share.clients] = seen.to(self._seen)  # losses may be of another type
        return losses, trained

    def unstack(self) -> None:
        """Puts the stacked tensors into the members' states, and tells clients whether their losses were finite."""
        for member, seen in zip(self.members, self._seen, strict=True):
            member.client.losses = seen
        for name, tensor in self.stacked.items():
            for member, value in zip(self.members, tensor.cpu(), strict=True):
                member.state[name] = value


class _Loss(nn.Module):
    """The algorithm's loss as a module, so that ``functional_call`` can replace the parameters."""

    def __init__(self, algorithm: Algorithm, module: LightningModule) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.module = module

    def forward(self, x: Tensor, y: Tensor, constants: dict[str, Any]) -> Tensor:
        return self.algorithm.client_loss(self.module, (x, y), constants)[0]


def plain_gradients(
    training: LocalTraining, module: LightningModule, member: Member, share: Share, names: Sequence[str]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of one client's share."""
    load_tree(module, member.state)
    constants = on_device(member.constants, share.y.device)
    parameters = dict(module.named_parameters())
    with looked_up(module, tuple(share.rows), {name: rows[0] for name, rows in share.rows.items()}):
        loss = training.algorithm.client_loss(module, (share.x[0], share.y[0]), constants)[0]
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return loss.detach(), dict(zip(names, gradients, strict=True))


def ignores_padding(
    training: LocalTraining, module: LightningModule, member: Member, data: StackedData, names: Sequence[str]
) -> bool:
    """Whether samples without a label change neither loss nor gradients, so that all batches can have one size."""
    if bool((data.sizes[data.sizes > 0] == data.batch_size).all()):
        return True
    share = data.first_share(0, 2 * TRIED_SAMPLES)
    half = share.y.shape[1] // 2
    if training.has_batch_norm or not half:
        return False
    # on a CPU, because a GPU becomes unusable if a loss uses the label -100 as an index
    module.cpu()
    try:
        fewer = share.cut(half, unlabelled=0).cpu()
        padded = share.cut(share.y.shape[1], unlabelled=share.y.shape[1] - half).cpu()
        with torch.autocast("cpu", enabled=False):
            (loss, gradients), (expected, expected_gradients) = (
                plain_gradients(training, module, member, batch, names) for batch in (padded, fewer)
            )
    except (RuntimeError, IndexError, ValueError):
        return False
    finally:
        module.to(training.device)
    pairs = [(loss, expected), *((gradients[name], expected_gradients[name]) for name in names)]
    return all(a is not None and b is not None and equal_to_rounding(a, b) for a, b in pairs)
