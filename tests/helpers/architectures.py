"""Clients of two architectures with a global and a local expert, and their training in plain PyTorch."""

import torch
from torch import nn

from fedmoe_pl.models import PersonalizedMoE
from helpers import Expert, client_generator

SIZES = (13, 8, 11)
HIDDEN = (4, 7)  # hidden widths of the architectures, which clients have in turn
RATE = 0.1


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def pair(dtype=torch.float64, hidden=HIDDEN, **kwargs) -> PersonalizedMoE:
    """A global expert with a hidden width of 6 and local ones of several, the same parameters at every call."""
    torch.manual_seed(3)
    experts = [Expert(hidden=width) for width in hidden]
    return PersonalizedMoE(Expert(), experts, **{"optimizer": sgd, **kwargs}).to(dtype)


def bare_experts(client: int, tensors: dict, hidden=HIDDEN) -> dict[str, nn.Module]:
    """A client's global and local expert, by the prefix of their names, with the given tensors."""
    architecture = client % len(hidden)
    experts = {"global_expert.": Expert(), f"local_expert.{architecture}.": Expert(hidden=hidden[architecture])}
    for prefix, expert in experts.items():
        expert.double().load_state_dict({name: tensors[prefix + name] for name in expert.state_dict()})
    return experts


def train_bare(client: int, round: int, tensors: dict, data, loss, samples=None, epochs=1, hidden=HIDDEN) -> dict:
    """A client's tensors after local epochs of plain SGD, without the package's mixture and algorithms.

    `loss` gets the global expert, the local one, samples and labels.
    """
    generator = client_generator(0, client, round)
    experts = bare_experts(client, tensors, hidden)
    optimizer = torch.optim.SGD([p for expert in experts.values() for p in expert.parameters()], lr=RATE)
    samples = data.train_samples[client] if samples is None else samples
    for _ in range(epochs):
        for batch in samples[torch.randperm(len(samples), generator=generator)].split(4):
            optimizer.zero_grad()
            loss(*experts.values(), data.x[batch], data.y[batch]).backward()
            optimizer.step()
    return {
        prefix + name: tensor.detach().clone()
        for prefix, expert in experts.items()
        for name, tensor in expert.state_dict().items()
    }
