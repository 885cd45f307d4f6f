"""Rounds of FedMix and FedJETs in bare PyTorch."""

import copy
from collections import defaultdict

import torch
from torch import Tensor

from helpers import blobs, client_generator, momentum_sgd, sparse_mixture

FOUR = (13, 8, 11, 9)


@torch.no_grad()
def choosy():
    """Four experts, of which the clients of ``blobs(FOUR)`` prefer 0 and 3, 2 and 3, 0 and 3, 0 and 2."""
    module, data = sparse_mixture(4), blobs(FOUR)
    mean = module.embedding(data.x[: sum(FOUR)]).mean(0)
    proxies = 3 * torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    proxies -= (proxies @ mean)[:, None] * mean / mean.square().sum()  # no expert is best for the mean
    for proxy, row in zip(module.gate.proxies, proxies, strict=True):
        proxy.weight.copy_(row[None])
    return module


def logits_of_gate(module, z) -> Tensor:
    return z @ torch.cat([proxy.weight for proxy in module.gate.proxies]).T


@torch.no_grad()
def loss_of_likelihood(module, x, y, experts=range(4)) -> float:
    """The mean of ``-log sum_k p(k|x) p(y|x, k)`` over some experts k."""
    z, experts = module.embedding(x), [*experts]
    p = logits_of_gate(module, z)[:, experts].softmax(1)
    right = torch.stack([module.experts[expert](z).softmax(1)[range(len(y)), y] for expert in experts], 1)
    return -(p * right).sum(1).log().mean().item()


def rounds_by_hand(
    model, data, cohorts, epochs, expert_weights, entropy_weight=0.0, anchors=None, frozen=(), rounds_before=0
):
    """Rounds with two experts per client.

    Args:
        model: the model before the first round.
        data: the clients' data.
        cohorts: the clients of each round.
        epochs: local epochs.
        expert_weights: from the numbers of two trained experts, the module and a client's samples, their weights.
        entropy_weight: weight of the entropy of a batch's mean gate weights.
        anchors: the expert of each client that is an anchor.
        frozen: prefixes of the parameters that are not trained.
        rounds_before: number of rounds of the phase that these start from.

    Returns:
        The parameters, the experts that each client trained in each round, and those that it asks for next.
    """
    anchors = anchors or {}
    server = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trained, asked = [], {}
    for round, cohort in enumerate(cohorts):
        sums, totals = defaultdict(float), defaultdict(float)
        trained.append({})
        for client in cohort:
            module = copy.deepcopy(model)
            module.load_state_dict(server)
            samples = data.train_samples[client]
            x, y = data.x[samples], data.y[samples]
            with torch.no_grad():
                scores = logits_of_gate(module, module.embedding(x)).softmax(1).mean(0).tolist()
            if client in anchors:
                scores[anchors[client]] = 2.0
            best = sorted(sorted(range(len(scores)), key=lambda expert: -scores[expert])[:2])
            pair = trained[-1][client] = asked.get(client, best)
            asked[client] = best
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen))
            optimizer = momentum_sgd([parameter for parameter in module.parameters() if parameter.requires_grad])
            batches = data.batches(samples, generator=client_generator(0, client, rounds_before + round))
            for _ in range(epochs):
                for batch_x, batch_y in batches:
                    optimizer.zero_grad()
                    z = module.embedding(batch_x)
                    logits = logits_of_gate(module, z)
                    p = logits[:, pair].softmax(1)
                    right = [module.experts[expert](z).softmax(1)[range(len(batch_y)), batch_y] for expert in pair]
                    loss = -(p[:, 0] * right[0] + p[:, 1] * right[1]).log().mean()
                    mean = p.mean(0)
                    loss = loss - entropy_weight * -(mean * mean.log()).sum()
                    if client in anchors:
                        loss = loss - logits.log_softmax(1)[:, anchors[client]].mean()
                    loss.backward()
                    optimizer.step()
            weights = dict(zip(pair, expert_weights(module, pair, x, y), strict=True))
            for name, parameter in module.named_parameters():
                part, number = name.split(".")[:2]
                weight = weights.get(int(number), 0) if part == "experts" else len(samples)
                sums[name] = sums[name] + weight * parameter.detach()
                totals[name] += weight
        server = {name: sums[name] / totals[name] if totals[name] else tensor for name, tensor in server.items()}
    return server, trained, asked
