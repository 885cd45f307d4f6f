"""Decides whether the clients of a phase can be stacked, by a trial step of two clients with and without stacking."""

from __future__ import annotations

import io
import math
import os
import pickle
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedmoe_pl.algorithms.algorithm import overrides
from fedmoe_pl.backends.features import FeatureCache, NoTrainer, looked_up, states_of_generators
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.local_client import on_device
from fedmoe_pl.backends.loop import needs_every_batch
from fedmoe_pl.backends.optimizers import optimizer_and_scheduler
from fedmoe_pl.backends.private_client import check_private, clipped_gradients
from fedmoe_pl.backends.rounding import in_full_precision, is_close, largest_value
from fedmoe_pl.backends.stacked.members import TRIED_SAMPLES, Member, Share, begin_member, stackable_groups
from fedmoe_pl.backends.stacked.private_stack import PrivateStack, make_stack
from fedmoe_pl.backends.stacked.rule import changes_steps
from fedmoe_pl.backends.stacked.stack import Stack, plain_gradients, with_noise
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.models.layers import has_own_train
from fedmoe_pl.trees import Tree, copy_module, load_tree, loads_by_itself, names_of_same_tensors, same_bits

_ELEMENTWISE = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop),
}
_MOST_ON_CPU, _MOST_ON_GPU = 32, 256
_DRAWS = "random operations, such as dropout, would draw other numbers than in a Trainer per client"
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial, weakref.ReferenceType)
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
            _try_architecture(trial, of_clients, clients, most_operations)
        except NotStackable:
            raise
        except Exception as error:  # from the model, the algorithm or PyTorch; training without stacking may still work
            reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
            if "randomness" in reason:
                reason = _DRAWS
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
    optimizer, scheduler = optimizer_and_scheduler(training.module.configure_optimizers())
    if type(optimizer) not in _ELEMENTWISE:
        raise NotStackable(f"{type(optimizer).__name__} may not step every parameter element by element")
    for stepping in filter(None, (optimizer, scheduler)):
        if changes_steps(stepping):
            raise NotStackable(f"the steps of {type(stepping).__name__} call hooks or methods of your own")
    if has_own_train(training.module):
        raise NotStackable("a part of the model has a train method of its own")
    if loads_by_itself(training.module):
        raise NotStackable("a part of the model loads its state by code of its own")
    if names_of_same_tensors(training.module):
        raise NotStackable("parts of the model share parameters or buffers")


@in_full_precision()
def _try_architecture(trial: Trial, training: LocalTraining, clients: Sequence[int], most_operations: float) -> None:
    """Tries, for two clients of one architecture, every set of parameters that are trained together."""
    server, sizes = training.algorithm.server_init(training.module), training.datamodule.train_samples.sizes
    clients = sorted(clients, key=lambda client: -int(sizes[client]))[:2]
    for round, epoch in training.trainable.values():
        cache, members = FeatureCache(), list[Member]()
        for client in clients:
            members.append(begin_member(training, server, client, {}, round, cache, members))
        for group in stackable_groups(members):
            pair = [replace(member, state={**member.state}) for member in (group * 2)[:2]]
            _try_stack(trial, training, pair, round, epoch, most_operations)


def _try_stack(
    trial: Trial, training: LocalTraining, pair: list[Member], round: int, epoch: int, most_operations: float
) -> None:
    """Compares a step of each member with and without stacking, both at once, from parameters with noise."""
    module, device = copy_module(training.module), training.device
    trainer = NoTrainer(module, *(member.client.module for member in pair))
    saved: list[int] = []

    def note(part: nn.Module, arguments: Any) -> None:
        trial.convolves |= isinstance(part, _ConvNd)

    try:
        stack = make_stack(training, module, pair, round)
        stack.stacked = with_noise(stack.stacked)
        for position, member in enumerate(stack.members):
            member.state |= {name: tensor[position] for name, tensor in stack.stacked.items()}
            training.copies.move(member.client.module, device)
        for of_member in (module, *(member.client.module for member in pair)):
            Freezing(training, of_member, round).freeze(epoch)
        before = states_of_generators(device)
        with register_module_forward_pre_hook(note):
            _compare(stack, saved, most_operations)
        if states_of_generators(device) != before:
            raise NotStackable(_DRAWS)
    finally:
        if trainer.asked:  # also if the module caught the error
            raise NotStackable(f"the loss reads {trainer.asked[0]} of its Trainer")
    batch_size = stack.data.batch_size
    per_client = sum(tensor[0].numel() * tensor.element_size() for tensor in stack.stacked.values())
    # parameters, gradients, two states of the optimizer and a temporary one; forward and backward pass
    batch = 2 * sum(saved) // len(stack.members) * batch_size // min(batch_size, TRIED_SAMPLES)
    limit = _memory(device) // 4 // (5 * per_client + batch + 1)
    if device.type == "cpu":
        limit = min(limit, max(CPU_CACHE // (per_client + 1), 8))
    trial.clients_per_stack = max(1, min(limit, trial.clients_per_stack))


def _compare(stack: Stack, saved: list[int], most_operations: float) -> None:
    """Compares a step of each member; appends the bytes of each tensor that its backward pass needs."""
    share, alone = stack.data.first_share(slice(0, 2)), list[dict[str, Any]]()
    for position, member in enumerate(stack.members):
        alone.append(_step_alone(stack, member, share.of(position), saved, most_operations))
    with stack.looking_up(), stack.stepping():
        losses, trained = stack.losses(share, stack.names)
        gradients = dict(zip(stack.names, torch.autograd.grad(losses.sum(), [*trained.values()]), strict=True))
        stacked = {"gradient": gradients, "buffer": {name: stack.stacked[name].clone() for name in stack.buffers}}
        if isinstance(stack, PrivateStack):
            counts = share.y.new_ones(share.y.shape[:2], dtype=torch.bool)
            stacked["clipped gradient"] = stack.clipped_sums(share, counts, stack.max_norm)
    for position, of_client in enumerate(alone):
        if isinstance(stack, PrivateStack):
            of_client["clipped gradient"] = _clipped_alone(stack, stack.members[position], share.of(position))
        for what, expected in of_client.items():
            largest = 0.0 if what == "buffer" else largest_value(expected.values())
            for name, tensor in expected.items():
                actual = stacked[what][name][position] if name in stacked[what] else None
                if not is_close(actual, tensor, largest):
                    raise NotStackable(f"stacking changes the {what} of '{name}'")


def _step_alone(stack: Stack, member: Member, share: Share, saved: list[int], most_operations: float) -> dict[str, Any]:
    """The gradients, and the buffers after a client's step, in a module of its own; it may change nothing else."""
    module = member.client.module
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad and name in stack.stepped]

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    def remember_output(part: nn.Module, arguments: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                remember(leaf)

    load_tree(module, member.state)
    before = _contents(module)
    tables, counter = _Tables(), FlopCounterMode(display=False)
    hooks = torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor)
    try:
        with tables, nullcontext() if saved else counter, hooks:  # counted once: both have the same architecture
            _, gradients = plain_gradients(stack.training, module, member, share, names)
    except RuntimeError:  # torch.func.grad, in the algorithm's loss, refuses these hooks
        saved.clear()
        with tables, register_module_forward_hook(remember_output):
            _, gradients = plain_gradients(stack.training, module, member, share, names)
    if counter.get_total_flops() * stack.data.batch_size // share.y.shape[1] > most_operations:
        raise NotStackable("a step takes much longer than the calls that stacking saves")
    if tables.are_special:
        raise NotStackable("a step looks up embeddings with padding_idx or max_norm")
    tensors, after = module.state_dict(), _contents(module)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    changed += [name for name in tensors.keys() - stack.buffers if not same_bits(member.state[name], tensors[name])]
    if changed:
        raise NotStackable(f"a step changes '{changed[0]}', and not only the values of buffers")
    return {"gradient": gradients, "buffer": {name: tensors[name] for name in stack.buffers}}


class _Tables(TorchDispatchMode):
    """Notes steps that treat some rows of a table of embeddings in other ways: vmap makes one table of all clients'."""

    def __init__(self) -> None:
        super().__init__()
        self.are_special = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        is_padded = function is torch.ops.aten.embedding_dense_backward.default and arguments[3] >= 0
        self.are_special |= is_padded or function is torch.ops.aten.embedding_renorm_.default
        return function(*arguments, **(options or {}))


class _Pickler(pickle.Pickler):
    """Knows the tensors of a state dict, whose values are compared elsewhere, and code by their identity."""

    def __init__(self, file: io.BytesIO, known: set[int]) -> None:
        super().__init__(file)
        self.known = known

    def persistent_id(self, value: Any) -> int | None:
        return id(value) if id(value) in self.known or isinstance(value, _CODE) else None


def _contents(module: nn.Module) -> dict[str, bytes]:
    """What a module holds besides the values of its state dict: attributes of its parts and what is in them."""
    tensors = module.state_dict(keep_vars=True).values()
    contents, known = dict[str, bytes](), {id(tensor) for tensor in tensors}
    for path, part in module.named_modules():
        other_buffers = {name: part._buffers[name] for name in part._non_persistent_buffers_set}
        of_parameters = {name: vars(parameter) for name, parameter in part._parameters.items() if parameter is not None}
        values = {**vars(part), "_buffers": [*part._buffers], "_modules": [*part._modules], "_trainer": None}
        for name, value in {**values, **other_buffers, "attributes of parameters": of_parameters}.items():
            file, label = io.BytesIO(), f"{path}.{name}".lstrip(".")
            try:
                _Pickler(file, known).dump(value)
            except Exception as error:
                raise NotStackable(f"a step may change '{label}', which cannot be compared ({error})") from error
            contents[label] = file.getvalue()
    return contents


def _clipped_alone(stack: PrivateStack, member: Member, share: Share) -> Tree:
    """The sums of a client's clipped gradients."""
    load_tree(member.client.module, member.state)
    constants = on_device(member.constants, share.y.device)
    lookup, batch = {name: rows[0] for name, rows in share.rows.items()}, (share.x[0], share.y[0])
    with looked_up(member.client.module, tuple(share.rows), lookup):
        return clipped_gradients(
            stack.training, member.client.module, constants, stack.names, batch, lookup, stack.max_norm
        )


def _memory(device: torch.device) -> int:
    """The device's total memory in bytes, not the free memory, so that a resumed run makes the same stacks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
