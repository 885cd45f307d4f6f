"""What auto takes gives what an ordinary Trainer per client gives; what cannot be stacked is refused with a reason."""

from dataclasses import replace

import pytest
import torch
from helpers import EveryBatch, Expert, OneWeight, blobs, mixture, momentum_sgd
from helpers.backends import FEW, begin, local_training, train, train_clients
from helpers.models import Adapted
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

import fedmoe_pl.backends.auto
import fedmoe_pl.backends.stacked.stacked_backend
from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend
from fedmoe_pl.backends.rounding import is_close, largest_value
from fedmoe_pl.backends.stacked import StackedPlan
from fedmoe_pl.backends.trainer import TrainerPlan
from fedmoe_pl.callbacks import BestEpoch
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import Gate, GlobalOnly, LeNet5, LinearGate, PersonalizedMoE
from fedmoe_pl.phases.phase import Phase


def test_auto_stacks_linear_layers_and_takes_a_trainer_per_client_for_convolutions_on_a_cpu(images):
    auto = AutoBackend()
    assert isinstance(auto.plan(local_training(mixture(), FedAvg(), blobs(FEW))), StackedPlan)
    convolving = PersonalizedMoE(LeNet5(), optimizer=momentum_sgd).double()
    assert isinstance(auto.plan(local_training(convolving, FedAvg(), images([]))), TrainerPlan)
    frozen = FineTuning("local_expert.classifier.*")  # its extractor's features are computed once
    assert isinstance(auto.plan(local_training(convolving, frozen, images([]))), StackedPlan)


def shared_extractor():
    module = mixture()
    module.local_expert.extractor = module.global_expert.extractor
    return module


class CountsSamples(Gate):
    """A running load, assigned rather than changed in place, which the loss depends on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.register_buffer("load", torch.zeros(()))

    def forward(self, x):
        self.load = 0.9 * self.load + 0.1 * x.detach().abs().mean()
        logit = self.linear(x) + self.load
        return torch.cat((logit, -logit), 1).sigmoid()


class Noisy(LinearGate):
    """Draws whether it trains or not."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


class OnlyGate(PersonalizedMoE):
    """An optimizer of only some of the trainable parameters."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.gate.parameters(), lr=0.5)


def only_gate():
    made = mixture(LinearGate(5))
    return OnlyGate(made.global_expert, made.local_expert, made.gate).double()


class BatchMean(PersonalizedMoE):
    """A small term that depends on the whole batch, labels or not."""

    def loss(self, batch):
        loss, metrics = super().loss(batch)
        return loss + 1e-5 * metrics["logits"].mean(0).square().sum(), metrics


def batch_mean():
    made = mixture(LinearGate(5))
    return BatchMean(made.global_expert, made.local_expert, made.gate, optimizer=momentum_sgd).double()


class StepCounting(PersonalizedMoE):
    def loss(self, batch):
        loss, metrics = super().loss(batch)
        return loss * (1 + self.global_step), metrics


def step_counting():
    made = mixture(LinearGate(5))
    return StepCounting(made.global_expert, made.local_expert, made.gate, optimizer=momentum_sgd).double()


def with_first(layer):
    """Both experts with a layer without parameters in front."""
    expert = Expert()
    expert.extractor = nn.Sequential(layer, *expert.extractor[1:])
    return mixture(expert=expert)


def statistics_of_two_names():
    norm = nn.BatchNorm1d(5, affine=False)
    module = with_first(norm)
    module.global_expert.again = norm
    return module


class Late(FedAvg):
    """Constants that differ from the third client on."""

    def client_init(self, client, sent):
        return super().client_init(client, sent) | {"late": client.id > 1}

    def client_loss(self, module, batch, constants):
        return module.loss(batch)[0] * (2 if constants["late"] else 1)


class LessAndLess(Late):
    """Trains in its last epoch a part of what it trains in the first; its clients need two stacks in one module."""

    def is_trainable(self, name, round, epoch):
        return epoch == 0 or "classifier" in name


class ByTurns(FedAvg):
    def is_trainable(self, name, round, epoch):
        return ("classifier" if epoch % 2 else "extractor") in name


TRAPS = {
    "a buffer that is assigned": (lambda: mixture(CountsSamples()), FedAvg(), {}),
    "an optimizer of some parameters, and clipping": (only_gate, FedAvg(), {"gradient_clip_val": 0.05}),
    "clipping by value in capitals": (
        lambda: mixture(LinearGate(5)),
        FedAvg(),
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "VALUE"},
    ),
    "a small term of the whole batch": (batch_mean, FedAvg(), {}),
    "statistics without parameters": (lambda: with_first(nn.BatchNorm1d(5, affine=False)), FedAvg(), {}),
    "frozen statistics of every batch": (
        lambda: with_first(nn.BatchNorm1d(5, track_running_stats=False)),
        FineTuning("local_expert.classifier.*"),
        {},
    ),
    "constants that differ late": (lambda: mixture(LinearGate(5)), Late(), {}),
    "constants that differ late, and parts frozen late": (lambda: mixture(LinearGate(5)), LessAndLess(), {}),
    "parts trained by turns": (lambda: mixture(LinearGate(5)), ByTurns(), {}),
}


SIZES = (30, 25, 11, 20)


def assert_what_an_ordinary_trainer_gives(plans, make, algorithm, data, **arguments):
    ordinary = local_training(make(), algorithm, data, **arguments, callbacks=[EveryBatch()])
    expected, expected_kept = train(TrainerBackend(), ordinary)
    for plan in plans:
        update, kept = train_clients(plan)
        torch.testing.assert_close(update.sent, expected.sent, rtol=1e-10, atol=1e-10)
        assert kept.keys() == expected_kept.keys()
        for client in kept:
            torch.testing.assert_close(kept[client], expected_kept[client], rtol=1e-10, atol=1e-10)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TRAPS)
def test_a_stack_gives_what_an_ordinary_trainer_gives(name):
    make, algorithm, arguments = TRAPS[name]
    data = blobs(SIZES, batch_size=4)
    training = local_training(make(), algorithm, data, **arguments)
    plans = [begin(backend, training) for backend in (TrainerBackend(), StackedBackend())]
    assert_what_an_ordinary_trainer_gives(plans, make, algorithm, data, **arguments)


@pytest.mark.parametrize(("width", "stacks"), [(32, True), (1024, False)])
def test_auto_does_not_stack_where_a_frozen_layer_takes_longer_than_calls(width, stacks):
    """A step of 512 samples has 2 * 512 * width ** 2 operations in it forward, and as many backward."""
    expert = nn.Sequential(nn.Linear(5, width), nn.Linear(width, width).requires_grad_(False), nn.Linear(width, 3))
    data = blobs((600, 600), dtype=torch.float32, batch_size=512)
    training = local_training(PersonalizedMoE(expert, gate=GlobalOnly()), FedAvg("global_expert.*"), data)
    assert isinstance(AutoBackend().plan(training), StackedPlan) is stacks


def test_the_trial_of_stacking_runs_once_for_a_phase(monkeypatch):
    training = local_training(mixture(), FedAvg(), blobs(FEW))
    plan = AutoBackend().plan(training)
    for backend in (fedmoe_pl.backends.auto, fedmoe_pl.backends.stacked.stacked_backend):
        monkeypatch.setattr(backend, "try_to_stack", lambda training: pytest.fail("a second trial"))
    begun = plan.begin(replace(training, rounds=3))
    assert isinstance(begun, StackedPlan)
    assert begun.training.rounds == 3
    assert begun.description == plan.description
    train_clients(begun)
    train_clients(begun, round=1)


def adapted():
    torch.manual_seed(0)
    expert = Expert()
    expert.extractor[1] = Adapted(5, 6)
    return mixture(expert=expert)


# model, algorithm, arguments of the Trainer, and why its clients are not stacked
NOT_STACKED = {
    "an extractor of both experts": (shared_extractor, FedAvg(), {}, "parts of the model share parameters"),
    "statistics of two names": (statistics_of_two_names, FedAvg(), {}, "parts of the model share parameters or"),
    "a gate that draws, behind frozen experts": (lambda: mixture(Noisy(5)), PFLMoE(), {}, "random operations"),
    "dropout": (lambda: mixture(expert=Expert(dropout=0.3)), FedAvg(), {}, "random operations"),
    "a loss that counts steps": (step_counting, FedAvg(), {}, "the loss reads global_step of its Trainer"),
    "callbacks": (mixture, FedAvg(), {"callbacks": [BestEpoch()]}, "callbacks"),
    "accumulation": (mixture, FedAvg(), {"accumulate_grad_batches": 2}, "accumulate_grad_batches is set"),
    "precision": (mixture, FedAvg(), {"precision": "16-mixed"}, "precision is set"),
    "optimizer": (
        lambda: mixture(dtype=torch.float32, optimizer=torch.optim.Adafactor),
        FedAvg(),
        {},
        "Adafactor may not step every parameter element by element",
    ),
    "merged adapters": (adapted, FedAvg(), {}, "a part of the model has a train method of its own"),
    "merged adapters of a frozen part": (adapted, FineTuning("local_expert.classifier.*"), {}, "a train method"),
    "own training_step": (OneWeight, FedAvg(), {}, "OneWeight has its own training_step"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NOT_STACKED)
def test_what_cannot_be_stacked_is_refused_with_a_reason_and_auto_takes_the_other_way(name):
    make, algorithm, trainer, reason = NOT_STACKED[name]
    module = make()
    data = blobs(SIZES, batch_size=4, dtype=next(module.parameters()).dtype)
    training = local_training(module, algorithm, data, **trainer)
    with pytest.raises(MisconfigurationException, match=reason):
        StackedBackend().plan(training)
    plan = AutoBackend().plan(training)
    assert isinstance(plan, TrainerPlan)
    assert reason in plan.description or "code of your own" in plan.description
    if plan.shares_trainer:
        assert_what_an_ordinary_trainer_gives([plan.begin(training)], make, algorithm, data)


def test_a_federation_refuses_an_explicit_choice_before_training_and_names_the_phase(tmp_path):
    phases = [Phase("first", FedAvg(), evaluate=False), Phase("second", FedAvg(), evaluate=False)]
    federation = Federation(phases, backend=StackedBackend(), logger=False, default_root_dir=str(tmp_path))
    with pytest.raises(MisconfigurationException, match=r"'first'.*StackedBackend.*random"):
        federation.fit(mixture(expert=Expert(dropout=0.3)), blobs(FEW))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_rounding_leaves_of_zero_is_close_to_zero_and_a_difference_is_not(dtype):
    """A sum of n values of size v is off by about n eps v; any more is a difference, as it is without larger values."""
    eps = torch.finfo(dtype).eps
    zero, rounding = torch.zeros(3, dtype=dtype), torch.tensor([0, 40 * eps, -90 * eps], dtype=dtype)
    assert is_close(rounding, zero, largest_of_all=1.0)
    assert not is_close(2 * rounding, zero, largest_of_all=1.0)
    assert not is_close(rounding, zero)
    assert not is_close(torch.ones(3, dtype=dtype), 1 + 2000 * rounding, largest_of_all=1.0)
    assert largest_value([None, zero, torch.tensor([-3.0, float("nan")]), torch.empty(0)]) == 3
