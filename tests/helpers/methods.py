"""Every method of the package as phases on five small clients, with what must never leave a client."""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl import Phase, algorithms
from fedmoe_pl.aggregation import DifferentialPrivacy, TrimmedMean
from fedmoe_pl.deployment.audit import without_numbers
from fedmoe_pl.models import (
    ClusteredAdapterMoE,
    GlobalOnly,
    LayerwiseAdapterMoE,
    LinearGate,
    LocalOnly,
    LoRA,
    MixtureWeights,
    MLPGate,
    NetworkGate,
    PooledMoE,
    SimilarityGate,
    TokenGate,
)
from helpers import Expert, blobs, mixture, sparse_mixture
from helpers.adapted import adapted
from helpers.architectures import pair
from helpers.backends import WithBatchNorm
from helpers.clusters import GateNet, clustered, only
from helpers.mixtures_of_learners import backbone, learners
from helpers.pfedmoe import model as of_three_architectures
from helpers.reports import csv_rows

SIZES = (13, 8, 11, 9, 12)  # five clients; two in a round, so that one is in neither of two rounds
sgd = partial(torch.optim.SGD, lr=0.1)


@dataclass
class Method:
    """A method.

    Attributes:
        phases: makes its phases.
        model: makes its model.
        private: glob patterns of tensors that must never leave a client.
        handed: glob patterns of the tensors that clients keep and that reach others without being in ``Update.sent``:
            in an exchange, or before the first round of a later phase.
        split: arguments of ``data`` without which it is refused.
        stacks: whether its clients can be stacked.
    """

    phases: Callable[[], list[Phase]]
    model: Callable[[], LightningModule] = mixture
    private: list[str] = field(default_factory=lambda: ["local_expert.*", "gate.*"])
    handed: list[str] = field(default_factory=list)
    split: dict[str, float] = field(default_factory=dict)
    stacks: bool = True


def in_layers(kind=LayerwiseAdapterMoE, gate=None) -> LightningModule:
    """Adapters in the first layer of a perceptron, with its last layer as the head."""
    pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return kind(base, LoRA(["0"], r=2, modules_to_save=["2"]), gate, optimizer=sgd).double()


def phase(name, algorithm, **kwargs) -> Phase:
    return Phase(name, algorithm, **{"rounds": 2, "clients_per_round": 2, "evaluate": False, **kwargs})


def alone(name, algorithm, **kwargs) -> Phase:
    return Phase(name, algorithm, evaluate=False, **kwargs)


def one(algorithm, gate=GlobalOnly, **kwargs) -> Callable[[], list[Phase]]:
    """The method's only phase."""
    return lambda: [phase("it", algorithm(), gate=gate() if gate else None, **kwargs)]


def fedavg(**kwargs) -> Phase:
    return phase("FedAvg", algorithms.FedAvg("global_expert.*"), gate=GlobalOnly(), **kwargs)


def linear_gate() -> LinearGate:
    torch.manual_seed(5)
    return LinearGate(5).double()


def pooled(num_experts=5, top_k=2) -> PooledMoE:
    torch.manual_seed(5)
    gate = MLPGate(num_experts, 6, dropout=0.0)
    return PooledMoE(Expert(), num_experts, gate, top_k, optimizer=sgd).double()


def fedper(**kwargs) -> Phase:
    algorithm = algorithms.FedAvg("local_expert.extractor.*", "local_expert.*")
    return phase("FedPer", algorithm, gate=LocalOnly(), **kwargs)


def ifca() -> list[Phase]:
    torch.manual_seed(5)
    return [
        alone("Local", algorithms.Local("local_expert.*"), gate=only(3)),
        phase("IFCA", algorithms.EpsilonGreedyIFCA(0.3), gate=only(0), start="Local"),
    ]


def opted_out() -> list[Phase]:
    algorithm = algorithms.OptInFedAvg("global_expert.*", opt_out_clients=0.3, opt_out_data=0.3)
    return [
        phase("opt-out", algorithm, gate=GlobalOnly()),
        alone("tuned", algorithms.FineTuning(), gate=LocalOnly()),
        alone("mixture", algorithms.SpecialistMixture(), gate=linear_gate()),
    ]


def everything(**kwargs):
    return {"clients_per_round": 1.0, **kwargs}


ADAPTERS = ["base.*", "local_expert.*"]
GATE = ["gate.*"]
IFCA = ["local_expert.*", "gate.*"]
METHODS = {
    "Local": Method(lambda: [alone("it", algorithms.Local(), gate=linear_gate())], private=["*"]),
    "FedAvg": Method(one(lambda: algorithms.FedAvg("global_expert.*"))),
    "FedAvg of everything": Method(one(algorithms.FedAvg), private=["gate.*"]),
    "TrimmedMean": Method(lambda: [fedavg(aggregation=TrimmedMean(1), clients_per_round=4)]),
    "DifferentialPrivacy": Method(lambda: [fedavg(aggregation=DifferentialPrivacy(0.0, 1.0, 0.1, quantile=0.5))]),
    "SecureAggregation": Method(lambda: [fedavg(secure_aggregation=True, clients_per_round=4)]),
    "FedProx": Method(one(lambda: algorithms.FedProx(0.1, "global_expert.*"))),
    "Scaffold": Method(one(lambda: algorithms.Scaffold("global_expert.*")), lambda: mixture(optimizer=sgd)),
    "FedPer": Method(lambda: [fedper()], private=["global_expert.*", "local_expert.classifier.*", "gate.*"]),
    "FedRep": Method(
        one(lambda: algorithms.FedRep(head_epochs=1)),
        private=["local_expert.*", "global_expert.classifier.*", "gate.*"],
    ),
    "FedBN": Method(
        one(lambda: algorithms.FedBN("global_expert.*")),
        lambda: mixture(expert=WithBatchNorm()),
        ["local_expert.*", "gate.*", "global_expert.extractor.1.*"],
    ),
    "FedALA": Method(one(lambda: algorithms.FedALA(max_passes=2)), private=["local_expert.*", "gate.*", "ala/*"]),
    "FedRoD": Method(one(algorithms.FedRoD, None)),
    "FedALT": Method(
        one(algorithms.FedALT, None), lambda: in_layers(gate=TokenGate()), ["base.*", "global_expert.*", "gate.*"]
    ),
    "CoMiGS": Method(
        one(lambda: algorithms.CoMiGS(2, 1), None),
        lambda: in_layers(gate=TokenGate()),
        split={"validation_fraction": 0.2},
        stacks=False,
    ),
    "FedLEASE": Method(
        one(lambda: algorithms.FedLEASE(1), None, **everything(rounds=3)),
        lambda: in_layers(ClusteredAdapterMoE),
        ["base.*", "head.*"],
    ),
    "FedDPA": Method(
        one(algorithms.FedDPA, lambda: SimilarityGate(6)), in_layers, ["base.*", "local_expert.*", "gate.*", "head.*"]
    ),
    "FedExLoRA": Method(one(algorithms.FedExLoRA, None), adapted, ADAPTERS),
    "HetLoRA": Method(one(lambda: algorithms.HetLoRA([1, 3, 2]), None), lambda: adapted(3), ADAPTERS),
    "FlexLoRA": Method(one(lambda: algorithms.FlexLoRA([1, 2]), None), lambda: adapted(2), ADAPTERS),
    "FML": Method(one(algorithms.FML, LocalOnly), pair),
    "FedAPEN": Method(one(algorithms.FedAPEN, MixtureWeights), pair),
    "FedKD": Method(one(algorithms.FedKD, LocalOnly, **everything()), lambda: pair(hidden=(6,))),
    "FedProto": Method(one(algorithms.FedProto), private=["global_expert.*", "local_expert.*", "gate.*"]),
    "FD": Method(one(algorithms.FD), private=["global_expert.*", "local_expert.*", "gate.*"]),
    "FedPAC": Method(one(algorithms.FedPAC)),
    "Ditto": Method(one(algorithms.Ditto, LocalOnly)),
    "APFL": Method(
        one(lambda: algorithms.APFL(alpha_lr=0.1), LocalOnly), private=["local_expert.*", "gate.*", "mixture/*"]
    ),
    "PFedMe": Method(one(algorithms.PFedMe, LocalOnly), lambda: mixture(optimizer=sgd)),
    "PerFedAvg": Method(one(algorithms.PerFedAvg)),
    "FedEM": Method(one(algorithms.FedEM, None), learners, GATE),
    "PFedMM": Method(one(algorithms.PFedMM, None), lambda: learners(embedding=backbone()), GATE),
    "FedMix": Method(one(algorithms.FedMix, None), lambda: sparse_mixture(4), []),
    "FedJETs": Method(
        lambda: [
            phase(
                "common",
                algorithms.FedAvg(["embedding.*", "experts.0.*"], ["embedding.*", "experts.0.*"]),
                gate=GlobalOnly(),
            ),
            phase("it", algorithms.FedJETs(anchors=False), start="common"),
        ],
        lambda: sparse_mixture(4),
        ["experts.1.*"],
    ),
    "FedMoEDA": Method(
        one(lambda: algorithms.FedMoEDA(top_p=2, interval=1), None, **everything(rounds=3)),
        sparse_mixture,
        GATE,
        ["experts.*"],
    ),
    "PFedMoE": Method(one(algorithms.PFedMoE, None), of_three_architectures, ["local_experts.*", "header.*", "gate.*"]),
    "PMMoE": Method(
        lambda: [fedper(), alone("PM-MoE", algorithms.PMMoE(), start="FedPer", model=pooled())],
        private=["global_expert.*", "gate.*"],
        handed=["local_expert.classifier.*"],
    ),
    "FineTunedFedPer": Method(
        lambda: [
            phase("FedPer", algorithms.FedAvg("global_expert.extractor.*"), gate=GlobalOnly()),
            alone("tuned", algorithms.FineTuning("local_expert.extractor.*"), gate=LocalOnly(), start="FedPer"),
        ],
        private=["global_expert.classifier.*", "local_expert.*", "gate.*"],
    ),
    "KNNPer": Method(
        lambda: [fedavg(), alone("kNN-Per", algorithms.KNNPer(), gate=GlobalOnly())], private=["knn/*", "gate.*"]
    ),
    "LabelPrior": Method(
        lambda: [
            fedavg(),
            alone("prior", algorithms.LabelPrior(), gate=GlobalOnly()),
            alone("tuned", algorithms.FineTuning(gate_fraction=0.25), gate=LocalOnly()),
            alone(
                "MF", algorithms.PFLMoE(), gate=linear_gate(), start={"global_expert": "prior", "local_expert": "tuned"}
            ),
        ],
        private=["prior/*", "local_expert.*", "gate.*"],
    ),
    "PFLMoE": Method(
        lambda: [
            fedavg(),
            alone("tuned", algorithms.FineTuning(gate_fraction=0.25), gate=LocalOnly()),
            alone("MF", algorithms.PFLMoE(), gate=linear_gate()),
            alone("interleaved", algorithms.PFLMoE(interleaved=True), rounds=2, gate=linear_gate()),
        ]
    ),
    "SpecialistMixture": Method(opted_out),
    "IFCA": Method(
        lambda: [
            *ifca(),
            alone("fine-tuned", algorithms.FineTunedCluster(), gate=only(0), start="IFCA"),
            alone("mixture", algorithms.ClusterMixture(), gate=NetworkGate(GateNet(4)).double(), start="IFCA"),
        ],
        lambda: clustered(3),
        IFCA,
    ),
}


CHOOSING = {"FedKD", "FedLEASE", "FedMix", "FedJETs", "FedMoEDA", "IFCA"}  # what is sent depends on the clients' data


FEW_METHODS = (
    *("FedAvg", "DifferentialPrivacy", "SecureAggregation", "Scaffold", "FedPer", "FedExLoRA", "FedProto"),
    *("PFLMoE", "PFedMoE", "IFCA", "SpecialistMixture", "FedMoEDA"),
)
"""One of each kind: for tests that take long."""


def kind(tensor):
    """The name without numbers, and without the factors of which algorithms.FedKD may send a tensor."""
    return re.sub("/[usv]$", "", without_numbers(f".{tensor}"))


def data(**kwargs):
    return blobs(SIZES, **kwargs)


def ledger(federation) -> list[dict]:
    """The rows of ``traffic.csv``."""
    return csv_rows(federation.run_dir / "traffic.csv")


class Messages:
    """What clients send in a run, and a way to send the same in another run, whatever the client has trained.

    Attributes:
        sent: requests and updates of each phase and client, in order.
        replayed: clients that send what they sent in the run before; their next messages are removed from ``sent``.
    """

    def __init__(self, replayed=(), sent=None):
        self.sent = defaultdict(list) if sent is None else sent
        self.replayed = replayed

    def through(self, phases: list[Phase], handed=()) -> list[Phase]:
        """The phases, whose algorithms' messages go through this object."""
        for phase in phases:
            phase.algorithm.__class__ = _through(self, phase.name, type(phase.algorithm), handed)
        return phases

    def pass_on(self, key, client, message):
        if client in self.replayed:
            return self.sent[key, client].pop(0)
        self.sent[key, client].append(message)
        return message


def _through(messages, phase, kind, handed):
    def server_send(self, server, client_id, request):
        return kind.server_send(self, server, client_id, messages.pass_on((phase, "request"), client_id, request))

    class Through(kind):
        def client_final(self, client, constants):
            update = super().client_final(client, constants)
            given = {
                name: tensor for name, tensor in update.state.items() if any(fnmatchcase(name, each) for each in handed)
            }
            message = messages.pass_on((phase, "update"), client.id, (update.sent, update.weight, given))
            update.sent, update.weight = message[:2]
            update.state.update(message[2])
            return update

    if kind.messages.request:  # otherwise clients request nothing
        Through.server_send = server_send
    return Through
