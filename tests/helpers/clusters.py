"""Small clustered mixtures, the phases of Adaptive Expert Models, and what clients choose by hand."""

import copy

import torch
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import ClusterMixture, EpsilonGreedyIFCA, FineTunedCluster, Local
from fedmoe_pl.backends.local_client import begin_client
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.models import ClusteredMoE, ConstantGate, NetworkGate
from fedmoe_pl.trees import copy_module
from helpers import Expert, TensorData, momentum_sgd

FIRST = {2: [1.0, 0.0, 0.0], 3: [1.0, 0.0, 0.0, 0.0]}


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


def chosen(training, client=0, round=0, server=None, module=None) -> int:
    """The cluster that a client picks; a given module is changed, but all that was sent is loaded into it again."""
    server = training.algorithm.server_init(training.module) if server is None else server
    module = copy_module(training.module) if module is None else module
    _, constants, _ = begin_client(training, module, server, client, {}, round)
    return int(constants["cluster"])


def losses_by_hand(module, data, client) -> list[float]:
    samples = data.train_samples[client]
    x, y = data.x[samples], data.y[samples]
    experts = copy.deepcopy(module.global_experts).eval()
    return [-expert(x).log_softmax(1)[range(len(y)), y].mean().item() for expert in experts]


def cluster(tree, index) -> dict:
    return {name: tensor for name, tensor in tree.items() if name.startswith(f"global_experts.{index}.")}


def tensors_of(server) -> dict:
    return {name: tensor for name, tensor in server.items() if name.startswith("global_experts.")}


def conflicting(**kwargs) -> TensorData:
    """Six clients with the same kind of points; the labels of clients 3 to 5 are swapped."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    y[120:] = 1 - y[120:]
    parts = torch.arange(240).split(40)
    data = TensorData(x, y, parts, dtype=torch.float64, batch_size=10, **kwargs)
    data.setup()
    return data


class Watch(FederationCallback):
    """Records the server's state after every round."""

    def __init__(self):
        self.servers = []

    def on_round_end(self, run, phase, round):
        self.servers.append(dict(run.states[phase.name].server))
