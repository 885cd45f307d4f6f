"""What auto takes, and what cannot be stacked; how the trials of both compute and compare."""

import pickle
from dataclasses import replace

import pytest
import torch
from helpers import EveryBatch, Expert, OneWeight, blobs, mixture, momentum_sgd
from helpers.backends import FEW, images, local_training, train, train_clients
from helpers.ingredients import build, double_gradient
from helpers.models import Adapted
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

import fedmoe_pl.backends.auto
import fedmoe_pl.backends.stacked.stacked_backend
from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend
from fedmoe_pl.backends.rounding import in_full_precision, is_close, largest_value, precisions
from fedmoe_pl.backends.stacked import StackedPlan
from fedmoe_pl.backends.trainer import TrainerPlan
from fedmoe_pl.callbacks import BestEpoch
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import GlobalOnly, LeNet5, LinearGate, PersonalizedMoE
from fedmoe_pl.phases.phase import Phase


def test_auto_stacks_linear_layers_and_takes_a_trainer_per_client_for_convolutions_on_a_cpu():
    auto = AutoBackend()
    assert isinstance(auto.plan(local_training(mixture(), FedAvg(), blobs(FEW))), StackedPlan)
    convolving = PersonalizedMoE(LeNet5(), optimizer=momentum_sgd).double()
    assert isinstance(auto.plan(local_training(convolving, FedAvg(), images())), TrainerPlan)
    frozen = FineTuning("local_expert.classifier.*")  # its extractor's features are computed once
    assert isinstance(auto.plan(local_training(convolving, frozen, images())), StackedPlan)


def shared_extractor():
    module = mixture()
    module.local_expert.extractor = module.global_expert.extractor
    return module


class Noisy(LinearGate):
    """Draws whether it trains or not."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


def statistics_of_two_names():
    module = mixture()
    module.global_expert.norm = module.global_expert.again = nn.BatchNorm1d(5, affine=False)
    return module


SIZES = (30, 25, 11, 20)


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


def hooked(register):
    """An optimizer whose factory registers a hook of each parameter."""

    def make(parameters):
        parameters = [*parameters]
        for parameter in parameters:
            register(parameter)
        return momentum_sgd(parameters)

    return make


class Stopping(PersonalizedMoE):
    """Ends the training after the first step."""

    def loss(self, batch):
        self.trainer.should_stop = True
        return super().loss(batch)


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
    "a loss that counts steps": (
        lambda: build(loss="global_step"),
        FedAvg(),
        {},
        "the loss reads or sets global_step of",
    ),
    "a loss that ends the training": (
        lambda: mixture(kind=Stopping),
        FedAvg(),
        {},
        "the loss reads or sets should_stop of its Trainer",
    ),
    "hooks of gradients": (
        lambda: mixture(optimizer=hooked(lambda parameter: parameter.register_hook(lambda gradient: 2 * gradient))),
        FedAvg(),
        {},
        "configure_optimizers registers hooks of parameters",
    ),
    "hooks after gradients": (
        lambda: mixture(optimizer=hooked(lambda each: each.register_post_accumulate_grad_hook(double_gradient))),
        FedAvg(),
        {},
        "configure_optimizers registers hooks of parameters",
    ),
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
        ordinary = local_training(make(), algorithm, data, callbacks=[EveryBatch()])
        (update, kept), (expected, expected_kept) = (
            train_clients(plan.begin(training)),
            train(TrainerBackend(), ordinary),
        )
        torch.testing.assert_close(update.sent, expected.sent, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(kept, expected_kept, rtol=1e-10, atol=1e-10)


def test_clients_that_validate_in_their_training_are_not_stacked():
    data = blobs(SIZES, validation_fraction=0.3)
    with pytest.raises(MisconfigurationException, match="clients validate in their training"):
        StackedBackend().plan(local_training(mixture(), FedAvg(), data, limit_val_batches=1.0))


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
    half = torch.tensor([1.0, 0.9], dtype=torch.bfloat16)  # whose eps, 1/128, times a thousand would allow anything
    assert not is_close(half, torch.ones_like(half), largest_of_all=1.0)
    assert largest_value([None, zero, torch.tensor([-3.0, float("nan")]), torch.empty(0)]) == 3


def settings():
    values = [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]
    if hasattr(torch.backends.cudnn, "conv"):
        values += [torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision]
        values += [torch.backends.mkldnn.conv.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]
    return values


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_settings_of_a_user_are_back_afterwards(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        before = settings()
        with pytest.raises(ValueError, match="in between"), in_full_precision():
            assert settings()[:2] == ["highest", False]
            raise ValueError("in between")
        assert settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="since torch 2.9")
def test_settings_that_older_functions_refuse_to_read_are_no_problem():
    convolutions = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # others stay: the older ones have only one word for all
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with in_full_precision():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert [each.args[-1] for each in pickle.loads(pickle.dumps(precisions()))][:3] == ["tf32", "ieee", "tf32"]
    finally:
        torch.backends.cudnn.conv.fp32_precision = convolutions
        torch.set_float32_matmul_precision("highest")
