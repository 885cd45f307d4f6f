"""Decides whether the clients of a phase can be stacked, by a trial step of two clients with and without stacking."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedmoe_pl.algorithms.algorithm import overrides
from fedmoe_pl.backends.contents import Contents
from fedmoe_pl.backends.features import FeatureCache, looked_up
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.local_client import on_device
from fedmoe_pl.backends.loop import needs_every_batch
from fedmoe_pl.backends.optimizers import optimizer_and_scheduler
from fedmoe_pl.backends.private_client import check_private, clipped_gradients
from fedmoe_pl.backends.rounding import in_full_precision, is_close, largest_value
from fedmoe_pl.backends.stacked.members import TRIED_SAMPLES, Member, begin_member, stackable_groups
from fedmoe_pl.backends.stacked.private_stack import PrivateStack, make_stack
from fedmoe_pl.backends.stacked.stack import Stack, plain_gradients, trained_in_epoch
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.models.layers import has_own_train
from fedmoe_pl.trees import Tree, copy_module, load_tree, loads_by_itself, names_of_same_tensors

_ELEMENTWISE = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop),
}
_MOST_ON_CPU, _MOST_ON_GPU = 32, 256
CPU_CACHE = 8 * 2**20  # bytes; if the stacked parameters are larger, a CPU waits for its memory


class NotStackable(Exception):
    """Why clients cannot be stacked."""


@dataclass
class Trial:
    """What the trial steps of two clients have shown."""

    clients_per_stack: int  # as many as fit into a quarter of the memory
    convolves: bool = False  # whether a step computes a convolution


def try_to_stack(training: LocalTraining, most_operations: float = math.inf) -> Trial:
    """Computes one step of two clients of every architecture with and without stacking.

    A client's step that takes more than ``most_operations``, forward and backward, is refused after the one without.
    """
    if training.sample_privacy is not None:
        check_private(training)
    trial = Trial(_MOST_ON_CPU if training.device.type == "cpu" else _MOST_ON_GPU)
    for clients in training.by_architecture(range(training.datamodule.num_clients)):
        of_clients = training.of(clients[0])
        _check_without_trial(of_clients)
        try:
            server = training.algorithm.server_init(training.module)
            _try_architecture(trial, of_clients, clients[:2], server, most_operations)
        except NotStackable:
            raise
        except Exception as error:  # from the model, the algorithm or PyTorch; training without stacking may still work
            reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
            if "randomness" in reason:
                reason = "random operations, such as dropout, would draw other numbers than in a Trainer per client"
            else:
                reason = f"a trial step of two stacked clients failed with {reason}"
            raise NotStackable(reason) from error
    return trial


def _check_without_trial(training: LocalTraining) -> None:
    """Refuses what needs no trial."""
    if training.datamodule.reader is not None:
        raise NotStackable("samples are read one by one and not from a tensor in memory")
    if overrides(training.algorithm, "client_batches"):
        raise NotStackable(f"{type(training.algorithm).__name__} trains on other batches than those of its samples")
    if reason := needs_every_batch(training):
        raise NotStackable(reason)
    if training.keep_optimizer:
        raise NotStackable("each client keeps the state of its optimizer")
    optimizer, _ = optimizer_and_scheduler(training.module.configure_optimizers())
    if type(optimizer) not in _ELEMENTWISE:
        raise NotStackable(f"{type(optimizer).__name__} may not step every parameter element by element")
    if has_own_train(training.module):
        raise NotStackable("a part of the model has a train method of its own")
    if loads_by_itself(training.module):
        raise NotStackable("a part of the model loads its state by code of its own")
    if names_of_same_tensors(training.module):
        raise NotStackable("parts of the model share parameters or buffers")


@in_full_precision()
def _try_architecture(
    trial: Trial, training: LocalTraining, clients: Sequence[int], server: Tree, most_operations: float
) -> None:
    """Tries, for two clients of one architecture, every set of parameters that are trained together."""
    for round, epoch in training.trainable.values():
        module = copy_module(training.module)
        cache, members = FeatureCache(), list[Member]()
        for client in clients:
            members.append(begin_member(training, module, server, client, {}, round, cache, members))
        for group in stackable_groups(members):
            stack = make_stack(training, module, group, round)
            Freezing(training, module, round).freeze(epoch)
            _try_stack(trial, stack, most_operations)


class _NoTrainer:
    """Replaces the module's Trainer in a trial and refuses access, because its step counts would not be a client's."""

    current_epoch = 0

    def __getattr__(self, name: str) -> Any:
        raise NotStackable(f"the loss reads {name} of its Trainer")


def _try_stack(trial: Trial, stack: Stack, most_operations: float) -> None:
    """Compares a step of each member with and without stacking."""
    stack.module.trainer = _NoTrainer()  # pyright: ignore[reportAttributeAccessIssue]
    names = trained_in_epoch(stack.module, stack.trained)
    saved: list[int] = []

    def note(part: nn.Module, arguments: Any) -> None:
        trial.convolves |= isinstance(part, _ConvNd)

    with register_module_forward_pre_hook(note):
        for client in range(len(stack.members)):
            _try_member(stack, client, names, saved, most_operations)
    device, batch_size = stack.training.device, stack.data.batch_size
    per_client = sum(tensor[0].numel() * tensor.element_size() for tensor in stack.stacked.values())
    # parameters, gradients, two states of the optimizer and a temporary one; forward and backward pass
    batch = 2 * sum(saved) // len(stack.members) * batch_size // min(batch_size, TRIED_SAMPLES)
    limit = _memory(device) // 4 // (5 * per_client + batch + 1)
    if device.type == "cpu":
        limit = min(limit, max(CPU_CACHE // (per_client + 1), 8))
    trial.clients_per_stack = max(1, min(limit, trial.clients_per_stack))


def _try_member(stack: Stack, client: int, names: Sequence[str], saved: list[int], most_operations: float) -> None:
    """Compares a step of one member; appends the bytes of each tensor that its backward pass needs."""
    module, share = stack.module, stack.data.first_share(client)

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    def remember_output(part: nn.Module, arguments: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                remember(leaf)

    load_tree(module, stack.members[client].state)  # as the step will, which then only changes what is the model's own
    contents = Contents(module, stack.training.module, saved_buffers=False)
    counter = FlopCounterMode(display=False)  # only for the first member: all have the same architecture
    hooks = torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor)
    try:
        with nullcontext() if client else counter, hooks:
            _, expected = plain_gradients(stack.training, module, stack.members[client], share, names)
    except RuntimeError:  # torch.func.grad, in the algorithm's loss, refuses these hooks
        saved.clear()
        with register_module_forward_hook(remember_output):
            _, expected = plain_gradients(stack.training, module, stack.members[client], share, names)
    if counter.get_total_flops() * stack.data.batch_size // share.y.shape[1] > most_operations:
        raise NotStackable("a step takes much longer than the calls that stacking saves")
    if change := contents.change():
        raise NotStackable(f"a step changes {change}, and not only the values of tensors")
    buffers = {name: tensor.clone() for name, tensor in module.state_dict().items() if name in stack.buffers}
    with stack.looking_up():
        losses, trained = stack.losses(share, names)
    gradients = dict(zip(trained, torch.autograd.grad(losses.sum(), [*trained.values()]), strict=True))
    largest = largest_value(expected.values())
    for name in names:
        if not is_close(gradients[name][0], expected[name], largest):
            raise NotStackable(f"stacking changes the gradient of '{name}'")
    for name in stack.buffers:
        if not is_close(stack.stacked[name][client], buffers[name]):
            raise NotStackable(f"stacking changes the buffer '{name}'")
    if isinstance(stack, PrivateStack):
        _try_private_member(stack, client, names)


def _try_private_member(stack: PrivateStack, client: int, names: Sequence[str]) -> None:
    """Compares one member's sums of clipped gradients."""
    share, member = stack.data.first_share(client), stack.members[client]
    load_tree(stack.module, member.state)
    constants, lookup = (
        on_device(member.constants, share.y.device),
        {name: rows[0] for name, rows in share.rows.items()},
    )
    with looked_up(stack.module, tuple(share.rows), lookup):
        expected = clipped_gradients(
            stack.training, stack.module, constants, names, (share.x[0], share.y[0]), lookup, stack.max_norm
        )
    stack.names = [*names]
    with stack.looking_up():
        actual = stack.clipped_sums(share, share.y.new_ones(share.y.shape[:2], dtype=torch.bool), stack.max_norm)
    for name in names:
        if not is_close(actual[name][0], expected[name], largest_value(expected.values())):
            raise NotStackable(f"stacking changes the clipped gradient of '{name}'")


def _memory(device: torch.device) -> int:
    """The device's total memory in bytes, not the free memory, so that a resumed run makes the same stacks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
