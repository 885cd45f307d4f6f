"""Decides by a trial step of two clients, with and without stacking, whether a phase's clients can be stacked."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fedmoe_pl.backends.attributes import CannotCompare, attributes, changed_attributes
from fedmoe_pl.backends.code_of_user import changes_steps
from fedmoe_pl.backends.features import FeatureCache, NoTrainer, states_of_generators
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.loop import needs_every_batch
from fedmoe_pl.backends.optimizers import optimizer_and_scheduler
from fedmoe_pl.backends.private_client import check_private
from fedmoe_pl.backends.rounding import in_full_precision, is_close, largest_value
from fedmoe_pl.backends.stacked.members import Member, StackedShare, begin_member, stackable_groups
from fedmoe_pl.backends.stacked.stack import Stack, make_stack, with_noise
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data.arrays import NO_LABEL
from fedmoe_pl.models.copies import has_hooks
from fedmoe_pl.models.layers import has_own_train
from fedmoe_pl.trees import copy_module, loads_by_itself, names_of_same_tensors, same_bits

_ELEMENTWISE = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop),
}
_MOST_ON_CPU, _MOST_ON_GPU = 32, 256
_DRAWS = "random operations, such as dropout, would draw other numbers than in a Trainer per client"
CPU_CACHE = 8 * 2**20  # bytes; if the stacked parameters are larger, a CPU has to wait for memory


class NotStackable(Exception):
    """Why clients cannot be stacked."""


@dataclass
class Trial:
    """What the trial steps of two clients showed."""

    clients_per_stack: int  # the most that fit into a quarter of the memory (on a CPU, also its cache), up to a limit
    computes_convolutions: bool = False  # in a step


def try_to_stack(training: LocalTraining, most_operations: float = math.inf) -> Trial:
    """Tries a step of two clients of every architecture, with and without stacking.

    Raises ``NotStackable`` if they differ or if a client's step, forward and backward, takes over ``most_operations``.
    """
    if training.sample_privacy is not None:
        check_private(training)
    trial = Trial(_MOST_ON_CPU if training.device.type == "cpu" else _MOST_ON_GPU)
    for clients in training.by_architecture(range(training.datamodule.num_clients)):
        of_clients = training.of(clients[0])
        check_without_trial(of_clients)
        try:
            _try_architecture(trial, of_clients, clients, most_operations)
        except NotStackable:
            raise
        except Exception as error:  # from the model, the algorithm or PyTorch; training without stacking may still work
            reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
            failed = f"a trial step of two stacked clients failed with {reason}"
            raise NotStackable(_DRAWS if "randomness" in reason else failed) from error
    return trial


def check_without_trial(training: LocalTraining) -> None:
    """Refuses what is known to be unstackable without a trial."""
    if training.datamodule.reader is not None:
        raise NotStackable("samples are read one by one and not from a tensor in memory")
    if training.algorithm.client_batches:
        raise NotStackable(f"{type(training.algorithm).__name__} trains on other batches than those of its samples")
    if reason := needs_every_batch(training):
        raise NotStackable(reason)
    if training.validates:
        raise NotStackable("clients validate in their training")
    if training.keep_optimizer:
        raise NotStackable("each client keeps the state of its optimizer")
    optimizer, scheduler = optimizer_and_scheduler(training.module.configure_optimizers())
    if type(optimizer) not in _ELEMENTWISE:
        raise NotStackable(f"{type(optimizer).__name__} may not step every parameter element by element")
    for stepping in filter(None, (optimizer, scheduler)):
        if changes_steps(stepping):
            raise NotStackable(f"the steps of {type(stepping).__name__} call hooks or methods of your own")
    if any(map(has_hooks, training.module.parameters())):
        raise NotStackable("configure_optimizers registers hooks of parameters")
    if has_own_train(training.module):
        raise NotStackable("a part of the model has a train method of its own")
    if loads_by_itself(training.module):
        raise NotStackable("a part of the model loads its state by code of its own")
    if names_of_same_tensors(training.module):
        raise NotStackable("parts of the model share parameters or buffers")


@in_full_precision()
def _try_architecture(trial: Trial, training: LocalTraining, clients: Sequence[int], most_operations: float) -> None:
    """Tries every set of parameters that are trained together, with two clients of one architecture."""
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
    """Compares a step of two stacked members, from noisy parameters, with a step of each alone."""
    module, device, operations = copy_module(training.module), training.device, _Operations()
    modules = module, *(member.client.module for member in pair)
    trainer = NoTrainer(*modules)
    try:
        stack = make_stack(training, module, pair, round)
        stack.stacked = with_noise(stack.stacked)
        stack.unstack()
        for each in modules:
            Freezing(training, training.copies.move(each, device), round).freeze(epoch)
        before = states_of_generators(device)
        share = stack.data.first_share(slice(0, 2))
        if bool((share.y == NO_LABEL).flatten(1).all(1).any()):
            raise NotStackable("a trial step would compare nothing, because a client trains on no sample with a label")
        batches = share.y.shape[:2].numel() / stack.data.batch_size
        with stack.looking_up(), stack.stepping():
            alone = [
                _step_alone(stack, member, share.of(position), operations)
                for position, member in enumerate(stack.members)
            ]
            if operations.flops / batches > most_operations:
                raise NotStackable("a step takes much longer than the calls that stacking saves")
            if operations.read_special_rows:
                raise NotStackable("a step looks up embeddings with padding_idx or max_norm")
            _compare(stack, share, alone)
        if states_of_generators(device) != before:
            raise NotStackable(_DRAWS)
    except Exception as error:
        if not trainer.asked:
            raise
        raise _reads_trainer(trainer) from error
    if trainer.asked:  # the module may have caught the error
        raise _reads_trainer(trainer)
    trial.computes_convolutions |= operations.convolve
    per_client = sum(tensor[0].nbytes for tensor in stack.stacked.values())
    # parameters, gradients, two optimizer states and a temporary one, plus results of the forward and backward pass
    limit = _memory(device) // 4 // (5 * per_client + int(operations.bytes / batches) + 1)
    if device.type == "cpu":
        limit = min(limit, max(CPU_CACHE // (per_client + 1), 8))
    trial.clients_per_stack = max(1, min(limit, trial.clients_per_stack))


def _reads_trainer(trainer: NoTrainer) -> NotStackable:
    return NotStackable(f"the loss reads or sets {trainer.asked[0]} of its Trainer")


def _compare(stack: Stack, share: StackedShare, alone: list[dict[str, Any]]) -> None:
    """Compares a step of the stack with the steps that its members made alone."""
    stacked = {"gradient": stack.gradients(share), "buffer": stack.stacked}
    for position, of_client in enumerate(alone):
        for what, expected in of_client.items():
            largest = 0.0 if what == "buffer" else largest_value(expected.values())
            for name, tensor in expected.items():
                actual = stacked[what][name][position] if name in stacked[what] else None
                if not is_close(actual, tensor, largest):
                    raise NotStackable(f"stacking changes the {what} of '{name}'")


def _step_alone(stack: Stack, member: Member, share: StackedShare, operations: _Operations) -> dict[str, Any]:
    """The gradients of a client's step in its own module, and the buffers after it; refuses any other change."""
    module = member.client.module
    try:
        before = attributes(module)
        with operations:
            gradients = stack.gradients_alone(member, share)
        changed = changed_attributes(module, before)
    except CannotCompare as error:
        raise NotStackable(f"a step may change {error}") from error
    tensors = module.state_dict()
    changed += [name for name in tensors.keys() - stack.buffers if not same_bits(member.state[name], tensors[name])]
    if changed:
        raise NotStackable(f"a step changes '{changed[0]}', and not only the values of saved buffers")
    # copies, because an architecture with one client has its module twice
    return {"gradient": gradients, "buffer": {name: tensors[name].clone() for name in stack.buffers}}


class _Operations(TorchDispatchMode):
    """Records the operations of the steps in its context.

    Attributes:
        bytes: total size of all results.
        flops: number of multiplications and additions.
        convolve: whether an operation is a convolution.
        read_special_rows: whether some rows of an embedding table get special treatment, which is lost where vmap
            merges all clients' tables into one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.flops = 0
        self.convolve = self.read_special_rows = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result, kind = function(*arguments, **(options or {})), function._overloadpacket
        self.bytes += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if kind in flop_registry:
            self.flops += flop_registry[kind](*arguments, **(options or {}), out_val=result)
        self.convolve |= kind is torch.ops.aten.convolution
        is_padded = kind is torch.ops.aten.embedding_dense_backward and arguments[3] >= 0
        self.read_special_rows |= is_padded or kind is torch.ops.aten.embedding_renorm_
        return result


def _memory(device: torch.device) -> int:
    """The device's total memory in bytes; free memory could give a resumed run other stacks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
