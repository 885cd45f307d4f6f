"""Clients of three small architectures for pFedMoE."""

from functools import partial

import torch

from fedmoe_pl.models import LinearGate, RepresentationMLP, RepresentationMoE

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
WIDTHS = (6, 4, 3)  # hidden widths of the local architectures, in which the representation has two values


def network(hidden: int) -> RepresentationMLP:
    return RepresentationMLP(5, hidden, 2, 3)


def model(gate=None, dtype=torch.float64, **kwargs) -> RepresentationMoE:
    """Three architectures, the same parameters at every call."""
    torch.manual_seed(3)
    shared, *experts = [network(hidden) for hidden in (2, *WIDTHS)]
    gate = LinearGate(5) if gate is None else gate
    gate.reset_parameters()
    return RepresentationMoE(shared, experts, gate=gate, **{"optimizer": SGD, **kwargs}).to(dtype)


def narrow(architecture: int, **kwargs) -> RepresentationMoE:
    """What clients of one architecture have of it."""
    module = model(**kwargs)
    module.keep_architecture(architecture)
    return module
