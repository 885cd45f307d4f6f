"""Mixtures of shared learners for FedEM and pFedMM, and their rounds in bare PyTorch."""

import copy
from functools import partial

import torch
from torch import Tensor, nn

from fedmoe_pl.models import MixtureWeights, SparseMoE
from helpers import client_generator, small_expert

RATE = 0.1
sgd = partial(torch.optim.SGD, lr=RATE)


def learners(num_experts=3, embedding=None, expert=None, optimizer=sgd, seed=3) -> SparseMoE:
    """Learners of 5 values after no embedding, or heads after a backbone with 6 outputs."""
    torch.manual_seed(seed)
    default = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)) if embedding is None else small_expert()
    return SparseMoE(
        embedding or nn.Identity(),
        expert or default,
        num_experts,
        optimizer=optimizer,
        gate=MixtureWeights(),
        mixing="probabilities",
    ).double()


def backbone() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 6), nn.Sigmoid())


def rounds_by_hand(model, data, cohorts, epochs, optimizers) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Rounds of federated expectation-maximization; ``optimizers`` makes those of a client from its module.

    Returns:
        The parameters of embedding and experts, and the weights of the clients that were trained.
    """
    names = [name for name, _ in model.named_parameters()]
    server = {name: model.state_dict()[name].clone() for name in names}
    weights = {}
    for round, cohort in enumerate(cohorts):
        total = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
        for client in cohort:
            module = copy.deepcopy(model)
            module.load_state_dict({**module.state_dict(), **server})
            samples = data.train_samples[client]
            x, y = data.x[samples], data.y[samples]
            pi = weights.get(client, torch.full((len(module.experts),), 1 / len(module.experts), dtype=x.dtype))
            with torch.no_grad():
                z = module.embedding(x)
                likelihood = torch.stack([expert(z).softmax(1)[range(len(y)), y] for expert in module.experts], 1)
            q = pi * likelihood / (pi * likelihood).sum(1, keepdim=True)
            weights[client] = q.mean(0)
            steps = optimizers(module)
            batches = data.batches(samples, generator=client_generator(0, client, round))
            for _ in range(epochs):
                for batch_x, batch_y in batches:
                    rows = [int((x == sample).all(1).nonzero()) for sample in batch_x]
                    for step in steps:
                        step.zero_grad()
                    z = module.embedding(batch_x)
                    for m, expert in enumerate(module.experts):
                        losses = -expert(z).log_softmax(1)[range(len(rows)), batch_y]
                        (q[rows, m] @ losses / len(rows)).backward(retain_graph=True)
                    for step in steps:
                        step.step()
            share = len(samples) / sum(len(data.train_samples[other]) for other in cohort)
            for name, parameter in module.named_parameters():
                total[name] += share * parameter.detach()
        server = total
    return server, weights
