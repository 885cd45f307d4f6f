"""A phase's server optimizer: FedOpt, Reddi et al., ICLR 2021, Algorithm 1 (https://arxiv.org/abs/2003.00295)."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from fedmoe_pl.backends import one_thread
from fedmoe_pl.backends.optimizers import load_optimizer_state, optimizer_state, with_strides_of
from fedmoe_pl.trees import Tree


def server_step(
    factory: OptimizerCallable, module: LightningModule, old: Tree, new: Tree, state: Tree
) -> tuple[Tree, Tree]:
    """A step of an optimizer from the old parameters, whose gradient is the old minus the new ones.

    Buffers, such as the statistics of batch normalization, and the algorithm's own tensors are taken from ``new``. So
    are parameters that no client changed: as a parameter without a gradient, they and their state stay as they are.

    """
    parameters = {name: nn.Parameter(old[name].clone()) for name in server_parameters(module, old)}
    optimizer = factory([*parameters.values()])
    if state:
        load_optimizer_state(parameters.items(), optimizer, state)
    changed = [name for name in parameters if not torch.equal(old[name], new[name])]
    for name in changed:
        parameters[name].grad = with_strides_of(old[name], old[name] - new[name])
    with one_thread():
        optimizer.step()
    stepped = {name: parameters[name].detach() for name in changed}
    return {**new, **stepped}, optimizer_state(parameters.items(), optimizer)


def server_parameters(module: LightningModule, server: Tree) -> list[str]:
    """Names of the module's floating-point parameters that the server holds, also of those that two parts share."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if name in server and parameter.is_floating_point()]
