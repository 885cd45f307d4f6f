"""Outputs of frozen parts are computed once, and give what computing them in every step gives."""

import pytest
import torch
from helpers import EveryBatch, Expert, blobs, mixture, momentum_sgd, phase
from helpers.backends import FEW, begin, images, local_training, train, train_clients
from helpers.runs import federation
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from fedmoe_pl import Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE, SpecialistMixture
from fedmoe_pl.backends import StackedBackend, TrainerBackend, features
from fedmoe_pl.data import RandomCrop
from fedmoe_pl.models import ConstantGate, FeatureGate, LeNet5, LinearGate, NetworkGate, PersonalizedMoE

FROZEN = FineTuning("local_expert.classifier.*")


@pytest.fixture
def seen(monkeypatch):
    """How many samples each extractor has seen, in a list to which its layer adds; it stays PyTorch's own."""
    numbers, forward = [], nn.Linear.forward

    def count(layer, x):
        if layer.out_features == 6:
            numbers.append(len(x))
        return forward(layer, x)

    monkeypatch.setattr(nn.Linear, "forward", count)
    return numbers


def test_outputs_that_are_too_large_are_not_looked_for_in_the_next_client(monkeypatch, seen):
    monkeypatch.setattr(features, "_MOST_TIMES_SAMPLES", 0)
    train(TrainerBackend(), local_training(mixture(ConstantGate(0)), FROZEN, blobs((4,) * 8), 2))
    assert sum(seen) == 8 * 4 * 2 + 3, "three samples of the first client were traced"


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend(8)])
@pytest.mark.few(1)
def test_a_frozen_extractor_sees_every_sample_once(backend, seen):
    def seen_in(max_epochs):
        seen.clear()
        train(backend, local_training(mixture(ConstantGate(0)), FROZEN, blobs(FEW), max_epochs))
        return sum(seen)

    assert seen_in(8) == seen_in(4) < 4 * sum(FEW)


class Careful(nn.Linear):
    """Refuses inputs of another width with an exception of its own."""

    def __init__(self):
        super().__init__(5, 1)

    def forward(self, x):
        assert x.shape[1] == self.in_features
        return super().forward(x)


class Hooked(Expert):
    """Adds what is trained elsewhere to the outputs of a frozen layer, as the base of adapters does."""

    def __init__(self):
        super().__init__()
        self.added = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.extractor[1].register_forward_hook(lambda part, inputs, output: output + self.added)


class Deciding(Expert):
    """Decides by the batch what the frozen part reads, but always in the same way in a trial of three samples."""

    def forward(self, x):
        return super().forward(-x if len(x) > 3 and x.mean() > 0 else x)


class CountingBatches(Expert):
    """Decides by the number of batches before what the frozen part reads."""

    def __init__(self):
        super().__init__()
        self.batches = 0

    def forward(self, x):
        self.batches += 1
        return super().forward(-x if self.batches > 9 else x)


class Averaging(nn.Linear):
    """Keeps a mean of its inputs in every mode, which no output depends on."""

    def __init__(self):
        super().__init__(5, 6)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


class KeepsMean(Expert):
    def __init__(self):
        super().__init__()
        self.extractor = nn.Sequential(Averaging(), nn.Tanh())


class KeepsMeanInParameter(KeepsMean):
    def __init__(self):
        super().__init__()
        del self.extractor[0].mean
        self.extractor[0].mean = nn.Parameter(torch.zeros(5), requires_grad=False)


class Clamping(Expert):
    """Changes samples in place before the frozen part reads them, but none of the three that are traced."""

    def forward(self, x):
        return super().forward(x.clamp_(-8, 8))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("cudnn RNN backward can only be called in training mode")


class LikeCudnn(Expert):
    """Has no gradients in eval mode, as an LSTM on a GPU."""

    def forward(self, x):
        logits = super().forward(x)
        return logits if self.training else _NoGradient.apply(logits)


def convolutions():
    return PersonalizedMoE(LeNet5(), gate=ConstantGate(0), optimizer=momentum_sgd).double()


def points():
    return blobs(FEW)


def outliers():
    data = points()
    for client in range(len(FEW)):
        data.x[data.train_samples[client][3:]] *= 10
    return data


FEATURES = {
    "a gate of features": (lambda: mixture(FeatureGate(6)), PFLMoE(), points),
    "a gate of inputs": (lambda: mixture(LinearGate(5)), PFLMoE(), points),
    "a gate of one width": (lambda: mixture(NetworkGate(Careful())), PFLMoE(), points),
    "a part that computes more than its own": (
        lambda: mixture(ConstantGate(0), Hooked()),
        FineTuning("local_expert.added"),
        points,
    ),
    "a decision by values": (lambda: mixture(ConstantGate(0), Deciding()), FROZEN, points),
    "a decision by attributes": (lambda: mixture(ConstantGate(0), CountingBatches()), FROZEN, points),
    "a mean in every mode": (lambda: mixture(ConstantGate(0), KeepsMean()), FROZEN, points),
    "a mean in a parameter": (lambda: mixture(ConstantGate(0), KeepsMeanInParameter()), FROZEN, points),
    "samples changed in place": (lambda: mixture(ConstantGate(0), Clamping()), FROZEN, outliers),
    "augmentation": (convolutions, FROZEN, lambda: images([RandomCrop()])),
    "no gradients in eval mode": (lambda: mixture(LinearGate(5), LikeCudnn()), SpecialistMixture(), points),
}


@pytest.mark.few(
    *("a gate of features", "a part that computes more than its own", "a decision by values"),
    *("a decision by attributes", "a mean in every mode", "a mean in a parameter", "samples changed in place"),
)
@pytest.mark.parametrize("name", FEATURES)
def test_features_give_what_computing_them_in_every_step_gives(name):
    make, algorithm, data = FEATURES[name]
    module = make()
    looked_up = train(TrainerBackend(), local_training(module, algorithm, data(), 5))[1]
    computed = train(TrainerBackend(), local_training(module, algorithm, data(), 5, callbacks=[EveryBatch()]))[1]
    torch.testing.assert_close(looked_up, computed, rtol=1e-12, atol=1e-12)


def test_features_are_kept_for_all_rounds_of_a_phase(seen):
    class Frozen(FedAvg):
        def is_trainable(self, name, round, epoch):
            return "classifier" in name

    algorithm = Frozen(shared="*.classifier.*")
    training = local_training(mixture(ConstantGate(0.5)), algorithm, blobs((200, 300)), max_epochs=1, rounds=50)
    plan = begin(TrainerBackend(), training)
    train_clients(plan)
    seen.clear()
    train_clients(plan, round=1)
    assert sum(seen) < 500  # the few samples that are traced, in place of two experts on 500


class Teacher(FedAvg):
    """The global expert is never trained or shared, but drawn nearer to the local one after every round, and kept."""

    def is_trainable(self, name, round, epoch):
        return name.startswith("local_expert.")

    def is_shared(self, name):
        return False

    def client_final(self, client, constants):
        state = client.module.state_dict()
        with torch.no_grad():
            for name in [name for name in state if name.startswith("global_expert.")]:
                state[name].lerp_(state[name.replace("global", "local")], 0.5)
        return super().client_final(client, constants)


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend(4)])
def test_features_are_computed_anew_when_what_computes_them_has_changed(backend):
    def rounds(backend, **arguments):
        training = local_training(mixture(LinearGate(5)), Teacher(), blobs((13, 9)), 1, rounds=3, **arguments)
        plan, kept = begin(backend, training), {}
        for round in range(3):
            for group in plan.train({}, plan.groups([0, 1]), dict(kept), round):
                kept |= group.clients
        return kept

    expected = rounds(TrainerBackend(), callbacks=[EveryBatch()])
    for client, tree in rounds(backend).items():
        torch.testing.assert_close(tree, expected[client], rtol=1e-10, atol=1e-10)


class WithMetric(Expert):
    """Its modules are moved to the CPU again, too: a metric takes the default data type when it is."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.accuracy = MulticlassAccuracy(3)


def test_frozen_parts_have_the_tensors_that_each_client_received_and_not_the_initial_ones(tmp_path):
    def tuned(expert, backend):
        phases = [phase("FedAvg", FedAvg("global_expert.*")), phase("FB", FROZEN, train=Train(max_epochs=3))]
        torch.manual_seed(0)
        path = tmp_path / f"{type(expert).__name__}{type(backend).__name__}"
        run = federation(path, phases, backend=backend, trainer={"accelerator": "cpu", "devices": 1})
        run.fit(mixture(expert=expert), blobs())
        states = [run.client_module("FB", client).state_dict() for client in range(3)]
        return [{name: tensor for name, tensor in state.items() if "accuracy" not in name} for state in states]

    expected = tuned(Expert(), StackedBackend())
    for state, own in zip(tuned(WithMetric(), TrainerBackend()), expected, strict=True):
        torch.testing.assert_close(state, own, rtol=1e-9, atol=1e-9)
