"""A network with low-rank adapters of two experts in a frozen base, and the same in plain tensors."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.models.mixtures.mixture import MixtureOfExperts
from helpers.bare import RATE, round_batches

sgd = partial(torch.optim.SGD, lr=RATE)
LAYERS = ("first", "second")
A, B = (f"global_expert.{{}}.lora_{factor}.weight".format for factor in "AB")


class Factors(nn.Module):
    def __init__(self, inputs, outputs, rank):
        super().__init__()
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.lora_B(self.lora_A(x))


class Base(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second


class AdaptedNetwork(MixtureOfExperts):
    """Two linear layers with tanh between them, whose global expert's adapters are added; the local ones are idle.

    Its state dict has the names of an ``AdapterMoE``'s.
    """

    gate_width = 2

    def __init__(self, rank=2, scaling=2.0, optimizer=sgd, sizes=((5, 6), (6, 3))):
        super().__init__(optimizer)
        self.base = Base(*(nn.Linear(*size) for size in sizes)).requires_grad_(False)
        self.scaling, self.gate = scaling, GlobalOnly()
        self.global_expert, self.local_expert = (
            nn.ModuleDict({name: Factors(*size, rank) for name, size in zip(LAYERS, sizes, strict=True)})
            for _ in range(2)
        )

    def layer(self, name, x):
        return getattr(self.base, name)(x) + self.scaling * self.global_expert[name](x)

    def mix(self, x):
        return self.layer("second", torch.tanh(self.layer("first", x))), self.gate(x)


def adapted(rank=2, **kwargs) -> AdaptedNetwork:
    """The network, the same at every call."""
    torch.manual_seed(2)
    return AdaptedNetwork(rank, **kwargs).double()


def factors(tree, rank=None) -> list:
    """The A and B of each layer from a tree of tensors by name, cut to a rank."""
    return [(tree[A(layer)][:rank].double(), tree[B(layer)][:, :rank].double()) for layer in LAYERS]


def products(tree) -> list:
    return [b @ a for a, b in factors(tree)]


def of_client(a, b, weight=1.0, layer="first", prefix="") -> Update:
    """What a client sends whose factors are these lists, of one layer."""
    names = zip((A(layer), B(layer)), (a, b), strict=True)
    return Update({prefix + name: torch.tensor(values, dtype=torch.float64) for name, values in names}, weight)


def trained(weights, pairs, data, client, round, scaling=2.0, epochs=2, frozen_a=False) -> list:
    """A client's factors after SGD on W + s B A, by hand; ``weights`` has W and the bias of both layers."""
    leaves = [factor.clone().requires_grad_() for pair in pairs for factor in pair]
    (w, c), (v, d) = weights
    for x, y in round_batches(data, client, round, epochs):
        a, b, e, f = leaves
        hidden = torch.tanh(x @ (w + scaling * b @ a).T + c)
        loss = F.cross_entropy(hidden @ (v + scaling * f @ e).T + d, y)
        slopes = torch.autograd.grad(loss, leaves)
        rates = [0 if frozen_a else RATE, RATE] * 2
        moved = [leaf - rate * slope for leaf, rate, slope in zip(leaves, rates, slopes, strict=True)]
        leaves = [leaf.detach().requires_grad_() for leaf in moved]
    a, b, e, f = (leaf.detach() for leaf in leaves)
    return [(a, b), (e, f)]


def weights_of(module) -> list:
    return [(layer.weight.data, layer.bias.data) for layer in (module.base.first, module.base.second)]
