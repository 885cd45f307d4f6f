"""Decides whether the clients of a phase can be stacked, by a trial step of two clients with and without stacking."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from fedmoe_pl.backends.features import FeatureCache
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.hooks import needs_every_batch
from fedmoe_pl.backends.optimizers import optimizer_and_scheduler
from fedmoe_pl.backends.rounding import is_close, largest_value
from fedmoe_pl.backends.stacked.batches import TRIED_SAMPLES, Member, begin_member, stackable_groups
from fedmoe_pl.backends.stacked.module import skip_idle_dropout
from fedmoe_pl.backends.stacked.stack import Stack, plain_gradients
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.trees import copy_module, names_of_same_tensors

_ELEMENTWISE = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop),
}
_MOST_ON_CPU, _MOST_ON_GPU = 32, 256
CPU_CACHE = 8 * 2**20  # bytes; if the stacked parameters are larger, a CPU waits for its memory


@dataclass(frozen=True)
class Trial:
    """The result of a stacked step of two clients.

    Attributes:
        clients_per_stack: how many clients fit into a quarter of the memory.
        convolves: whether a step computes a convolution.
    """

    clients_per_stack: int
    convolves: bool


def try_to_stack(training: LocalTraining) -> Trial | str:
    """Computes one step of two clients of every architecture with and without stacking."""
    trials = []
    for clients in training.by_architecture(range(training.datamodule.num_clients)):
        of_clients = training.of(clients[0])
        reason = _why_not(of_clients)
        trial = reason or _try_architecture(of_clients, clients[:2])
        if isinstance(trial, str):
            return trial
        trials.append(trial)
    return _of_all(trials)


def _why_not(training: LocalTraining) -> str | None:
    """A reason why clients cannot be stacked that is known without a trial; None if only a trial can tell."""
    if training.datamodule.reader is not None:
        return "samples are read one by one and not from a tensor in memory"
    reason = needs_every_batch(training)
    if reason:
        return reason
    if training.keep_optimizer:
        return "each client keeps the state of its optimizer"
    optimizer, _ = optimizer_and_scheduler(training.module.configure_optimizers())
    if type(optimizer) not in _ELEMENTWISE:
        return f"{type(optimizer).__name__} may not step every parameter element by element"
    module = training.module
    if names_of_same_tensors(module):
        return "parts of the model share parameters or buffers"
    return None


def _try_architecture(training: LocalTraining, clients: Sequence[int]) -> Trial | str:
    """Tries, for two clients of one architecture, every set of parameters that are trained together."""
    trials = [Trial(_most_clients(training.device), convolves=False)]
    try:
        for round, epoch in training.trainable.values():
            module = copy_module(training.module)
            server = training.algorithm.server_init(module)
            cache, members = FeatureCache(), list[Member]()
            for client in clients:
                members.append(begin_member(training, module, server, client, {}, round, cache, members))
            for group in stackable_groups(members):
                stack = Stack(training, module, group, round)
                Freezing(training, module, round).freeze(epoch)
                trials.append(_try_stack(stack))
    except Exception as error:  # from the model, the algorithm or PyTorch; training without stacking may still work
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        if "randomness" in reason:
            return "random operations, such as dropout, would draw other numbers than in a Trainer per client"
        return (
            str(error) if isinstance(error, _Different) else f"a trial step of two stacked clients failed with {reason}"
        )
    return _of_all(trials)


def _of_all(trials: Sequence[Trial]) -> Trial:
    return Trial(min(trial.clients_per_stack for trial in trials), any(trial.convolves for trial in trials))


class _Different(Exception):
    """Stacking changes what clients compute."""


class _NoTrainer:
    """Replaces the module's Trainer in a trial and refuses access, because its step counts would not be a client's."""

    current_epoch = 0

    def __getattr__(self, name: str) -> Any:
        raise _Different(f"the loss reads {name} of its Trainer")


def _try_stack(stack: Stack) -> Trial:
    """Compares a step of each member with and without stacking."""
    skip_idle_dropout(stack.module)
    stack.module.trainer = _NoTrainer()  # pyright: ignore[reportAttributeAccessIssue]
    names = [name for name, parameter in stack.module.named_parameters() if parameter.requires_grad]
    names = [name for name in names if name in stack.trained]
    saved: list[int] = []
    with _convolutions(stack.module) as convolutions:
        for client in range(len(stack.members)):
            _try_member(stack, client, names, saved)
    device, batch_size = stack.training.device, stack.data.batch_size
    per_client = sum(tensor[0].numel() * tensor.element_size() for tensor in stack.stacked.values())
    # parameters, gradients, two states of the optimizer and a temporary one; forward and backward pass
    batch = 2 * sum(saved) // len(stack.members) * batch_size // min(batch_size, TRIED_SAMPLES)
    limit = _memory(device) // 4 // (5 * per_client + batch + 1)
    if device.type == "cpu":
        limit = min(limit, max(CPU_CACHE // (per_client + 1), 8))
    return Trial(max(1, min(limit, _most_clients(device))), bool(convolutions))


def _try_member(stack: Stack, client: int, names: Sequence[str], saved: list[int]) -> None:
    """Compares a step of one member; appends the bytes of each tensor that its backward pass needs."""
    module, share = stack.module, stack.data.first_share(client)

    def remember_size(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(remember_size, lambda tensor: tensor):
            _, expected = plain_gradients(stack.training, module, stack.members[client], share, names)
    except RuntimeError:  # torch.func.grad, in the algorithm's loss, refuses these hooks
        saved.clear()
        with register_module_forward_hook(lambda part, arguments, output: _remember_outputs(output, saved)):
            _, expected = plain_gradients(stack.training, module, stack.members[client], share, names)
    buffers = {name: tensor.clone() for name, tensor in module.state_dict().items() if name in stack.buffers}
    with stack.looking_up():
        losses, trained = stack.losses(share, names)
    gradients = dict(zip(trained, torch.autograd.grad(losses.sum(), [*trained.values()]), strict=True))
    largest = largest_value(expected.values())
    for name in names:
        if not is_close(gradients[name][0], expected[name], largest):
            raise _Different(f"stacking changes the gradient of '{name}'")
    for name in stack.buffers:
        if not is_close(stack.stacked[name][client], buffers[name]):
            raise _Different(f"stacking changes the buffer '{name}'")


def _remember_outputs(output: Any, saved: list[int]) -> None:
    """Appends the bytes of a module's output: about what its backward pass needs."""
    saved.extend(leaf.numel() * leaf.element_size() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


@contextmanager
def _convolutions(module: LightningModule) -> Iterator[list[nn.Module]]:
    """Yields a list to which each convolution of the module is added when it is called."""
    called: list[nn.Module] = []
    hooks = [
        part.register_forward_pre_hook(lambda part, arguments: called.append(part))
        for part in module.modules()
        if isinstance(part, _ConvNd)
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def _most_clients(device: torch.device) -> int:
    return _MOST_ON_CPU if device.type == "cpu" else _MOST_ON_GPU


def _memory(device: torch.device) -> int:
    """The device's total memory in bytes, not the free memory, so that a resumed run makes the same stacks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
