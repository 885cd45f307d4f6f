"""A small base with adapters, and what it computes written out in plain tensors."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from fedmoe_pl.models import LayerwiseAdapterMoE, LoRA

RATE = 0.1
LAYERS = ("0", "2")
sgd = partial(torch.optim.SGD, lr=RATE)


class ScaledEmbedding(nn.Embedding):
    """An embedding that scales its outputs, as Gemma's does."""

    def __init__(self, rows, width):
        super().__init__(rows, width)
        self.register_buffer("embed_scale", torch.tensor(width**0.5), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.embed_scale


def adapters(gate=None, kind=LayerwiseAdapterMoE, optimizer=sgd, seed=0, **lora):
    """Two adapters of rank 2 and scale 2 in both layers of a perceptron for `blobs`, none of whose factors is zero."""
    torch.manual_seed(seed)
    base = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    module = kind(base, LoRA([*LAYERS], **{"r": 2, "lora_alpha": 4, **lora}), gate, optimizer=optimizer).double()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) / 2
    return module


def logits(state, x, weigh, experts=("global_expert", "local_expert"), drop=lambda h: h):
    """The scores of the mixture from its tensors by name; ``weigh`` gives the weights of a layer from its input."""
    h = x
    for layer in LAYERS:
        out = F.linear(h, state[f"base.{layer}.weight"], state[f"base.{layer}.bias"])
        weights, dropped = weigh(layer, h), drop(h)
        for index, expert in enumerate(experts):
            a, b = (state[f"{expert}.{layer}.lora_{factor}.weight"] for factor in "AB")
            out = out + weights[:, index, None] * 2 * (dropped @ a.T @ b.T)
        h = out.tanh() if layer == "0" else out
    return h


def routed(state):
    """How a `TokenGate` weighs a layer's experts."""
    return lambda layer, h: (h @ state[f"gate.routers.{layer}.weight"].T).softmax(-1)


def constant(*weights):
    return lambda layer, h: h.new_tensor(weights).expand(len(h), -1)


def stepped(state, names, loss, rate=RATE):
    """The tensors after a step of plain SGD of those with some prefixes."""
    leaves = {name: state[name].detach().requires_grad_() for name in state if name.startswith(names)}
    gradients = torch.autograd.grad(loss({**state, **leaves}), [*leaves.values()])
    moved = {name: leaf.detach() - rate * g for (name, leaf), g in zip(leaves.items(), gradients, strict=True)}
    return {**state, **moved}


def own_of(state, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
