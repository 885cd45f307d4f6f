"""Small clustered mixtures, the phases of Adaptive Expert Models, and clients' losses by hand."""

import copy

import torch
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import ClusterMixture, EpsilonGreedyIFCA, FineTunedCluster, Local
from fedmoe_pl.models import ClusteredMoE, ConstantGate, NetworkGate
from helpers import Expert, momentum_sgd


class GateNet(nn.Sequential):
    """A gate's network for points."""

    def __init__(self, outputs):
        super().__init__(nn.Linear(5, outputs))


def clustered(num_clusters=3, gate=None, optimizer=momentum_sgd, expert=None, seed=0, **kwargs) -> ClusteredMoE:
    torch.manual_seed(seed)
    return ClusteredMoE(expert or Expert(), num_clusters, gate=gate, optimizer=optimizer, **kwargs).double()


def only(index, experts=4) -> ConstantGate:
    """The gate that is held at one of the experts."""
    return ConstantGate([float(i == index) for i in range(experts)])


def all_phases(rounds=3) -> list[Phase]:
    torch.manual_seed(5)
    return [
        Phase("Local", Local("local_expert.*"), gate=only(3), train=Train(max_epochs=3)),
        Phase("IFCA", EpsilonGreedyIFCA(0.3), rounds=rounds, clients_per_round=2, gate=only(0), start="Local"),
        Phase("Fine-tuned", FineTunedCluster(), gate=only(0)),
        Phase("Ensemble", ClusterMixture(), gate=ConstantGate([0.25] * 4), mixing="logits", train=Train(max_epochs=0)),
        Phase("mixture", ClusterMixture(), gate=NetworkGate(GateNet(4)).double(), train=Train(max_epochs=4)),
    ]


def losses_by_hand(module, data, client) -> list[float]:
    samples = data.train_samples[client]
    x, y = data.x[samples], data.y[samples]
    experts = copy.deepcopy(module.global_experts).eval()
    return [-expert(x).log_softmax(1)[range(len(y)), y].mean().item() for expert in experts]


def tensors_of(server) -> dict:
    return {name: tensor for name, tensor in server.items() if name.startswith("global_experts.")}
