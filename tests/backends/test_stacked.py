"""Stacked clients get the result of a Trainer per client."""

import math
from functools import partial

import pytest
import torch
from helpers import (
    Expert,
    PureOneWeight,
    TensorData,
    blobs,
    mixture,
    momentum_sgd,
    small_expert,
    sparse_mixture,
    two_quadratics,
)
from helpers.backends import FEW, UNEQUAL, assert_agree, begin, images, local_training, train
from helpers.clusters import clustered
from helpers.quadratics import LOSSES, RATE
from torch import nn

from fedmoe_pl.algorithms import EpsilonGreedyIFCA, FedAvg, FedMoEDA, FedRep, FineTuning, PFLMoE, SpecialistMixture
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.backends.stacked.members import Member, StackedData
from fedmoe_pl.backends.stacked.stack import with_noise
from fedmoe_pl.data import RandomCrop, RandomHorizontalFlip
from fedmoe_pl.models import (
    ConstantGate,
    FeatureGate,
    LeNet5,
    LinearGate,
    NetworkGate,
    PersonalizedMoE,
    ProxyGate,
    SmallMLP,
    SparseMoE,
)

PLAIN = partial(torch.optim.SGD, lr=0.1)


def test_backends_agree_for_an_expert_that_no_sample_is_sent_to():
    """Its weight decay is that of the closed form: (1 - 0.1 * 0.5) in each of 2 epochs of 2 steps."""
    module = sparse_mixture(3, partial(torch.optim.SGD, lr=0.1, weight_decay=0.5))
    for index, proxy in enumerate(module.gate.proxies):  # of an embedding whose values are above 0
        torch.nn.init.constant_(proxy.weight, -9.0 if index == 1 else 1.0)
    training = local_training(module, FedMoEDA(), blobs((7, 8), batch_size=4))
    assert_agree(training, 1e-10)
    expected = module.experts[1][0].weight.detach() * 0.95**4
    for kept in train(StackedBackend(2), training)[1].values():
        torch.testing.assert_close(kept["experts.1.0.weight"], expected, rtol=1e-12, atol=0)


def test_backends_agree_for_clusters_of_which_each_client_trains_another():
    algorithm, module = EpsilonGreedyIFCA(0.5, patience=1), clustered(2, ConstantGate([1.0, 0.0, 0.0]), seed=2)
    data = blobs(UNEQUAL, batch_size=10, validation_fraction=0.2)
    assert_agree(local_training(module, algorithm, data, max_epochs=3), 1e-10, round=9)
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


def mixed(gate, mixing):
    module = mixture(gate)
    module.mixing = mixing
    return module


def of_several_depths():
    return sparse_mixture([2, 3, 1], partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1), load_balancing=0.1)


OTHERS = {
    "a frozen embedding, sparse experts": (of_several_depths, FedMoEDA(trainable=["gate.*", "experts.*"]), unequal),
    **{
        mixing: (partial(mixed, NetworkGate(nn.Linear(5, 1)), mixing), SpecialistMixture(), unequal)
        for mixing in ("probabilities", "log_probabilities", "probabilities_without_log")
    },
    "a head that only training uses": (lambda: mixture(LinearGate(5), TrainsMore()), FedAvg(), unequal),
    "a loss of batches that only training has": (lambda: mixture(LinearGate(5), kind=Balanced), FedAvg(), unequal),
    "ids of words": (lambda: mixture(ConstantGate(0.5), WordExpert()), FedAvg(), words),
    "looked-up words": (lambda: mixture(FeatureGate(6), WordExpert()), PFLMoE(), words),
    "a head on looked-up words": (
        lambda: mixture(ConstantGate(0.5), WordExpert()),
        FineTuning("local_expert.classifier.*"),
        words,
    ),
}


@pytest.mark.few("a frozen embedding, sparse experts", "log_probabilities")
@pytest.mark.parametrize("name", OTHERS)
def test_backends_agree(name):
    make, algorithm, data = OTHERS[name]
    assert_agree(local_training(make(), algorithm, data(), max_epochs=3), 1e-10)


def layers(*first):
    """Experts of PyTorch's layers, so that short batches may be padded."""
    return lambda: mixture(LinearGate(5), nn.Sequential(*first, nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))


class Own(nn.Linear):
    """A layer of a user's own, of which one cannot know what it does with other samples."""


def balanced():
    embedding = nn.Sequential(nn.Linear(5, 6), nn.Sigmoid())
    return SparseMoE(embedding, small_expert(), 2, gate=ProxyGate(2, 6), optimizer=PLAIN, load_balancing=0.3).double()


def ignoring():
    loss = nn.CrossEntropyLoss(ignore_index=1)
    return PersonalizedMoE(SmallMLP(5, num_classes=3), optimizer=PLAIN, loss=loss).double()


PADDED = {
    "layers that treat samples apart": (layers(nn.LayerNorm(5), nn.GroupNorm(1, 5), nn.Identity()), True),
    "the package's layers": (lambda: mixture(LinearGate(5), SmallMLP(5, num_classes=3)), True),
    "a layer of the user's": (layers(Own(5, 5)), False),
    "batch normalization": (layers(nn.BatchNorm1d(5)), False),
    "a softmax over samples": (layers(nn.Softmax(dim=0)), False),
    "a balance of experts over the batch": (balanced, False),
    "a loss of another class to ignore": (ignoring, True),  # its label takes the place of -100
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PADDED)
def test_short_batches_are_padded_only_where_samples_are_apart(name, monkeypatch):
    (make, pads), seen, epoch = PADDED[name], [], StackedData.epoch
    monkeypatch.setattr(StackedData, "epoch", lambda self, pads: seen.append(pads) or epoch(self, pads))
    torch.manual_seed(0)
    assert_agree(local_training(make(), FedAvg(), blobs((13, 8, 11))), 1e-9)
    assert {*seen} == {pads}


@pytest.mark.parametrize("expert", [LeNet5(in_channels=1), SmallMLP(1024)], ids=["LeNet5", "SmallMLP"])
def test_backends_agree_for_models_of_images_with_augmentation(expert):
    module = PersonalizedMoE(expert, optimizer=momentum_sgd).double()
    assert_agree(local_training(module, FedAvg(), images([RandomCrop(), RandomHorizontalFlip()])), 1e-10)


class Late(FedRep):
    """Its constants differ from the third client on, so that it trains in two stacks, one after the other."""

    began = ()

    def client_init(self, client, sent):
        self.began = (*self.began, client.id)
        return {**super().client_init(client, sent), "late": client.id > 1}

    def client_loss(self, module, batch, constants):
        return super().client_loss(module, batch, constants) * (2 if constants["late"] else 1)


@pytest.mark.slow
def test_a_stack_trains_what_the_one_before_has_frozen_last():
    algorithm = Late(head_epochs=1)
    training = local_training(mixture(), algorithm, blobs(FEW), max_epochs=2)
    assert_agree(training, 1e-10)
    plan, algorithm.began = begin(StackedBackend(), training), ()
    assert len([*plan.train(algorithm.server_init(training.module), plan.groups(range(len(FEW))), {}, 0)]) == 1
    assert sorted(algorithm.began) == [*range(len(FEW))], "a stack that fails is trained again, client by client"


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


def test_noise_of_a_trial_leaves_infinite_values_of_a_mask():
    mask = torch.full((3, 3), -math.inf).triu(1)
    noisy = with_noise({"mask": mask})["mask"]
    assert torch.equal(noisy.isfinite(), mask.isfinite()) and bool((noisy.tril() > 0).any())
    assert bool((noisy[~mask.isfinite()] == -math.inf).all())
