"""Stacked clients get the result of a Trainer per client."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, PureOneWeight, TensorData, blobs, mixture, momentum_sgd, sparse_mixture, two_quadratics
from helpers.backends import FEW, UNEQUAL, TwoGroups, WithBatchNorm, assert_agree, begin, local_training, train
from helpers.quadratics import LOSSES, RATE
from torch import nn

from fedmoe_pl.algorithms import (
    ClusterMixture,
    EpsilonGreedyIFCA,
    FedAvg,
    FedMoEDA,
    FedRep,
    FineTunedCluster,
    FineTuning,
    PFLMoE,
    Scaffold,
    SpecialistMixture,
)
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.backends.stacked.members import Member, StackedData
from fedmoe_pl.data import RandomCrop, RandomHorizontalFlip
from fedmoe_pl.models import (
    ClusteredMoE,
    ConstantGate,
    FeatureGate,
    LeNet5,
    LinearGate,
    NetworkGate,
    PersonalizedMoE,
    SmallMLP,
)


class NoClassIgnored(PersonalizedMoE):
    """A loss that does not know of labels to ignore, so that batches cannot be padded."""

    def loss(self, batch):
        x, y = batch
        logits, weights = self.mix(x)
        return ((logits - F.one_hot(y, 3)) ** 2).mean(), {"logits": logits, "gate_weights": weights}


OPTIMIZERS = {
    "momentum": momentum_sgd,
    "adam": partial(torch.optim.Adam, lr=0.01),
    "fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "nesterov with decay": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "dampening": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, lr_decay=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
}


ALGORITHMS = {
    "PFL-FT": (FineTuning(), lambda _: ConstantGate(0)),
    "specialist and gate": (SpecialistMixture(), lambda features: NetworkGate(nn.Linear(features, 1))),
}


@pytest.mark.few("fused", "nesterov with decay")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_backends_agree_for_every_optimizer_on_unequal_clients(optimizer):
    module = mixture(LinearGate(5), optimizer=optimizer)
    assert_agree(local_training(module, FedAvg(), blobs(UNEQUAL, batch_size=10)), 1e-10)


@pytest.mark.few("specialist and gate-log_probabilities")
@pytest.mark.parametrize("mixing", ["probabilities", "log_probabilities", "probabilities_without_log"])
@pytest.mark.parametrize("name", ["PFL-FT", "specialist and gate"])
def test_backends_agree_whatever_is_mixed(name, mixing):
    algorithm, gate = ALGORITHMS[name]
    module = mixture(gate(5))
    module.mixing = mixing
    assert_agree(local_training(module, algorithm, blobs(UNEQUAL, batch_size=10), max_epochs=3), 1e-10)


@pytest.mark.few("adamw-frozen-[2, 3, 1]")
@pytest.mark.parametrize("num_experts", [3, [2, 3, 1]], ids=str)
@pytest.mark.parametrize("algorithm", [FedMoEDA(), FedMoEDA(trainable=["gate.*", "experts.*"])], ids=["all", "frozen"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "nesterov with decay"])
def test_backends_agree_for_sparse_experts(optimizer, algorithm, num_experts):
    module = sparse_mixture(num_experts, OPTIMIZERS[optimizer], load_balancing=0.1)
    assert_agree(local_training(module, algorithm, blobs(UNEQUAL, batch_size=10), max_epochs=3), 1e-10)


def test_backends_agree_for_an_expert_that_no_sample_is_sent_to():
    """Its weight decay is that of the closed form: (1 - 0.1 * 0.5) in each of 2 epochs of 2 steps."""
    module = sparse_mixture(3, partial(torch.optim.SGD, lr=0.1, weight_decay=0.5))
    for index, proxy in enumerate(module.gate.proxies):  # of an embedding whose values are above 0
        torch.nn.init.constant_(proxy.weight, -9.0 if index == 1 else 1.0)
    training = local_training(module, FedMoEDA(), blobs((7, 8), batch_size=4))
    assert_agree(training, 1e-10)
    for backend in (TrainerBackend(), StackedBackend(2)):
        _, kept = train(backend, training)
        expected = module.experts[1][0].weight.detach() * 0.95**4
        for client in (0, 1):
            torch.testing.assert_close(kept[client]["experts.1.0.weight"], expected, rtol=1e-12, atol=0)


CLUSTERED = {
    "IFCA": (EpsilonGreedyIFCA(epsilon=0.0), lambda: ConstantGate([1.0, 0.0, 0.0])),
    "IFCA, epsilon-greedy": (EpsilonGreedyIFCA(0.5, patience=1), lambda: ConstantGate([1.0, 0.0, 0.0])),
    "fine-tuned cluster": (FineTunedCluster(), lambda: ConstantGate([1.0, 0.0, 0.0])),
    "mixture of clusters": (ClusterMixture(["gate.*", "local_expert.*"]), lambda: NetworkGate(nn.Linear(5, 3))),
    "mixture of clusters, whole": (ClusterMixture("*"), lambda: NetworkGate(nn.Linear(5, 3))),
}


@pytest.mark.few("IFCA, epsilon-greedy")
@pytest.mark.parametrize("name", CLUSTERED)
def test_backends_agree_for_clusters_of_which_each_client_trains_another(name):
    algorithm, gate = CLUSTERED[name]
    torch.manual_seed(2)
    module = ClusteredMoE(Expert(), 2, gate=gate(), optimizer=momentum_sgd).double()
    data = blobs(UNEQUAL, batch_size=10, validation_fraction=0.2)
    assert_agree(local_training(module, algorithm, data, max_epochs=3), 1e-10, round=9)
    if isinstance(algorithm, EpsilonGreedyIFCA):
        tallies = {name for name in train(TrainerBackend(), local_training(module, algorithm, data))[0].sent}
        assert {"clusters/tally/0", "clusters/tally/1"} <= tallies, "one cluster alone would prove little"


class WordExpert(Expert):
    """Reads three ids of words."""

    def __init__(self):
        super().__init__(features=4)
        self.extractor = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(12, 6), nn.Tanh())


def words():
    x = torch.randint(20, (46, 3), generator=torch.Generator().manual_seed(0))
    parts = torch.arange(46).split([25, 7, 11, 3])  # padded, and with a last batch of one sample
    data = TensorData(x, x[:, 0] % 3, parts, dtype=torch.int64, batch_size=6)
    data.setup()
    return data


def of_class(kind):
    made = mixture(LinearGate(5))
    return kind(made.global_expert, made.local_expert, made.gate, optimizer=momentum_sgd).double()


def unequal():
    return blobs(UNEQUAL, batch_size=10)


class TrainsMore(Expert):
    """Has a head that only training uses."""

    def __init__(self):
        super().__init__()
        self.auxiliary = nn.Linear(6, 3)

    def forward(self, x):
        features = self.extractor(x)
        return self.classifier(features) + (0.3 * self.auxiliary(features) if self.training else 0)


class Balanced(PersonalizedMoE):
    """In training, its loss depends on the mean over a batch, so that batches cannot be padded."""

    def loss(self, batch):
        loss, values = super().loss(batch)
        if self.training:
            loss = loss + 0.5 * values["logits"].mean(0).square().sum()
        return loss, values


PLAIN = partial(torch.optim.SGD, lr=0.1)
OTHERS = {
    "SCAFFOLD and its steps": (lambda: mixture(LinearGate(5), optimizer=PLAIN), Scaffold(), unequal, {}),
    "two parameter groups and a schedule": (lambda: of_class(TwoGroups), FedAvg(), unequal, {}),
    "clipping": (lambda: mixture(LinearGate(5)), FedAvg(), unequal, {"gradient_clip_val": 0.1}),
    "clipping by value": (
        lambda: mixture(LinearGate(5)),
        FedAvg(),
        unequal,
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "batches that cannot be padded": (lambda: of_class(NoClassIgnored), FedAvg(), unequal, {}),
    "a head that only training uses": (lambda: mixture(LinearGate(5), TrainsMore()), FedAvg(), unequal, {}),
    "a loss of batches that only training has": (lambda: of_class(Balanced), FedAvg(), unequal, {}),
    "rounds that alternate": (lambda: mixture(LinearGate(5)), PFLMoE(interleaved=True), unequal, {"rounds": 2}),
    "ids of words": (lambda: mixture(ConstantGate(0.5), WordExpert()), FedAvg(), words, {}),
    "looked-up words": (lambda: mixture(FeatureGate(6), WordExpert()), PFLMoE(), words, {}),
    "a head on looked-up words": (
        lambda: mixture(ConstantGate(0.5), WordExpert()),
        FineTuning("local_expert.classifier.*"),
        words,
        {},
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OTHERS)
def test_backends_agree(name):
    make, algorithm, data, arguments = OTHERS[name]
    assert_agree(local_training(make(), algorithm, data(), max_epochs=3, **arguments), 1e-10)


def test_backends_agree_with_batch_normalization():
    module = mixture(expert=WithBatchNorm())
    training = local_training(module, FedAvg(), blobs(FEW, batch_size=6))
    assert_agree(training, 1e-10)
    update, _ = train(StackedBackend(4), training)
    assert update.sent["global_expert.extractor.1.running_mean"].abs().max() > 0.01


@pytest.mark.parametrize("expert", [LeNet5(in_channels=1), SmallMLP(1024)], ids=["LeNet5", "SmallMLP"])
def test_backends_agree_for_models_of_images_with_augmentation(expert, images):
    module = PersonalizedMoE(expert, optimizer=momentum_sgd).double()
    assert_agree(local_training(module, FedAvg(), images([RandomCrop(), RandomHorizontalFlip()])), 1e-10)


def test_backends_agree_for_frozen_experts_of_which_each_client_has_another():
    """The gate's round of two that alternate, with the experts of the round before."""
    training = local_training(mixture(LinearGate(5)), PFLMoE(interleaved=True), blobs(FEW), rounds=2)
    server, clients = training.algorithm.server_init(training.module), range(len(FEW))
    _, kept = train(TrainerBackend(), training)
    ends = []
    for backend in (TrainerBackend(), StackedBackend()):
        groups = begin(backend, training).train(server, clients, kept, 1)
        ends.append({client: dict(tree) for group in groups for client, tree in group.clients.items()})
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-10, atol=1e-10)
    name = "gate.linear.weight"
    assert all((ends[0][client][name] - kept[client][name]).abs().max() > 1e-3 for client in clients)


class Parities(FedRep):
    """Its clients have constants of two kinds, and so train in two stacks, one after the other."""

    began = ()

    def client_init(self, client, sent):
        self.began = (*self.began, client.id)
        return {**super().client_init(client, sent), "parity": client.id % 2}


def test_a_stack_trains_what_the_one_before_has_frozen_last():
    algorithm = Parities(head_epochs=1)
    training = local_training(mixture(), algorithm, blobs(FEW), max_epochs=2)
    assert_agree(training, 1e-10)
    plan, algorithm.began = begin(StackedBackend(), training), ()
    assert len([*plan.train(algorithm.server_init(training.module), range(len(FEW)), {}, 0)]) == 1
    assert sorted(algorithm.began) == [*range(len(FEW))], "a stack that fails is trained again, client by client"


def test_any_number_of_clients_per_stack_gives_the_same():
    training = local_training(mixture(LinearGate(5)), FedAvg(), blobs(FEW, batch_size=10))
    expected, _ = train(StackedBackend(4), training)
    for clients_per_stack in (1, 3):
        update, _ = train(StackedBackend(clients_per_stack), training)
        torch.testing.assert_close(update.sent, expected.sent, rtol=1e-12, atol=1e-12)


class ByLoss(FedAvg):
    """Makes the clients train by the module's pure loss."""

    def client_loss(self, module, batch, constants):
        return module.loss(batch)[0]


def test_a_stack_clips_the_gradients_that_are_too_long_and_no_others():
    data = two_quadratics()
    data.setup()
    training = local_training(PureOneWeight(), ByLoss(), data, max_epochs=10, gradient_clip_val=15.0)
    update, _ = train(StackedBackend(2), training)
    ends, gradients = [], []
    for a, b in LOSSES:
        w = 0.0
        for _ in range(10):
            gradients.append(a * (w - b))
            w -= RATE * gradients[-1] * min(15 / (abs(gradients[-1]) + 1e-6), 1)  # torch.nn.utils.clip_grad_norm_
        ends.append(w)
    assert any(abs(gradient) > 15 for gradient in gradients) and any(0 < abs(gradient) < 15 for gradient in gradients)
    assert update.sent["weight"].item() == pytest.approx(sum(ends) / 2, rel=1e-12)


def test_a_stack_s_batches_are_no_larger_than_its_largest_client():
    data = blobs((5, 7), batch_size=10**9)
    members = [Member(None, {}, {}, data.batches(samples), None) for samples in data.train_samples]
    stacked = StackedData(local_training(mixture(), FedAvg(), data), members)
    assert (stacked.batch_size, stacked.steps, stacked.sizes.tolist()) == (7, [1, 1], [[5], [7]])


def test_a_client_with_a_sample_that_is_no_number_spoils_no_other():
    data = blobs((13, 9, 11))
    data.x[data.train_samples[1][0]] = torch.nan
    module = mixture(ConstantGate(0))
    training = local_training(module, FineTuning("local_expert.classifier.*"), data, 3)
    expected = train(TrainerBackend(), training)[1]
    kept = train(StackedBackend(3), training)[1]
    assert kept.keys() == expected.keys() == {0, 2}, "the client is left out"
    for client in (0, 2):
        torch.testing.assert_close(kept[client], expected[client], rtol=1e-10, atol=1e-10)
