"""Evaluations of a few clients, made up."""

import math

import torch

from fedmoe_pl.evaluation.results import ClientEvaluation, Evaluation

nan = math.nan


def evaluation(method="FedAvg", reweighted=(0.5, 0.7, 0.9), local=nan, gates=None, **changes):
    """An evaluation of len(reweighted) clients with a global test accuracy of 0.6 each."""
    gates = gates or [(None, None)] * len(reweighted)
    clients = [
        ClientEvaluation(i, 10 + i, local, accuracy, 0.6, nan, *gate)
        for i, (accuracy, gate) in enumerate(zip(reweighted, gates, strict=True))
    ]
    facts = {"round": 4, "model": "global expert", "evaluation_point": "after aggregation", "selection": "last round"}
    return Evaluation(method, clients=clients, **(facts | changes))


def gate(weights, labels):
    first = torch.tensor(weights)
    return torch.stack([first, 1 - first], dim=1), torch.tensor(labels)


GATES = [gate([0.0, 0.5, 1.0, 0.25], [0, 0, 1, 1]), gate([0.75], [2]), gate([0.1, 0.2], [1, 1])]


def mixture(method="PFL-MFE", **changes):
    return evaluation(method, gates=GATES, model="mixture", evaluation_point="after local training", **changes)
