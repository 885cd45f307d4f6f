"""Experts, gates and the personalized mixture: sizes, weights, a plain Trainer, checkpoints, vmap."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, assert_same_bits, mixture
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.models import (
    VGG16,
    ClusteredMoE,
    ConstantGate,
    FeatureGate,
    LeNet5,
    LinearGate,
    PersonalizedMoE,
    RepresentationMoE,
    SmallMLP,
)
from fedmoe_pl.rounds.begin import phase_module
from fedmoe_pl.rounds.phase import Phase

plain_trainer = pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",  # lightning 2.6 with torch 2.14 and newer
    "ignore:The .* does not have many workers",
    "ignore:You defined a .validation_step. but have no .val_dataloader",
    "ignore:.weights_only. was not set",
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning",  # lightning 2.6 with jsonargparse 4.53
)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def samples(n=12, features=5, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, features, generator=generator), torch.arange(n) % classes


def trainer(tmp_path, **kwargs) -> Trainer:
    off = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(default_root_dir=tmp_path, accelerator="cpu", **(off | kwargs))


@pytest.mark.parametrize(("in_channels", "parameters"), [(1, 61_706), (3, 62_006)])
def test_lenet5_has_the_papers_number_of_parameters_and_400_features(in_channels, parameters):
    expert = LeNet5(in_channels)
    x = torch.randn(2, in_channels, 32, 32)
    assert count(expert) == parameters
    assert expert.extractor(x).shape == (2, 400)
    assert torch.equal(expert(x), expert.classifier(expert.extractor(x)))


def test_vgg16_has_the_papers_number_of_parameters_and_initial_convolutions():
    expert = VGG16()
    assert count(expert) == 15_245_130
    assert count(expert.extractor) == 14_714_688
    convolutions = [layer for layer in expert.extractor if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 13
    for convolution in convolutions:
        expected = math.sqrt(2 / (9 * convolution.out_channels))
        standard_error = expected / math.sqrt(2 * convolution.weight.numel())
        assert abs(convolution.weight.std().item() - expected) < 5 * standard_error
        assert not convolution.bias.any()
    assert [layer.p for layer in expert.classifier if isinstance(layer, nn.Dropout)] == [0.5, 0.5]
    assert expert.extractor(torch.zeros(1, 3, 32, 32)).shape == (1, 512)


def test_small_mlp_flattens_images_and_gives_features_of_its_hidden_width():
    expert = SmallMLP(64, 20, 7)
    x = torch.randn(3, 1, 8, 8)
    assert expert.extractor(x).shape == (3, 20)
    assert torch.equal(expert(x), expert.classifier(expert.extractor(x.flatten(1))))
    assert expert(x).shape == (3, 7)


@given(st.integers(1, 5), st.integers(1, 40), st.floats(1e-3, 1e4), st.integers(0, 2**20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_gate_weights_are_in_0_to_1_and_add_up_to_1_for_any_input(n, features, scale, seed, reads_features):
    generator = torch.Generator().manual_seed(seed)
    gate = FeatureGate(features) if reads_features else LinearGate(features)
    weights = gate(scale * torch.randn(n, features, generator=generator))
    assert weights.shape == (n, 2)
    assert ((weights >= 0) & (weights <= 1)).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(n))


@given(st.floats(0, 1), st.integers(1, 5))
def test_constant_gate_gives_every_sample_its_weight_first(weight, n):
    weights = ConstantGate(weight)(torch.zeros(n, 3, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.tensor([[weight, 1 - weight]] * n, dtype=torch.float64), rtol=0, atol=0)


def test_linear_gate_is_the_sigmoid_of_a_linear_layer_on_the_flattened_input():
    gate, x = LinearGate(12), torch.randn(4, 3, 2, 2)
    logit = x.reshape(4, 12) @ gate.linear.weight[0] + gate.linear.bias
    expected = torch.stack([1 / (1 + (-logit).exp()), 1 - 1 / (1 + (-logit).exp())], dim=1)
    torch.testing.assert_close(gate(x), expected)


def test_mixture_weighs_the_global_experts_logits_by_the_first_weight():
    x, _ = samples()
    module = mixture(LinearGate(5), dtype=torch.float64)
    g = torch.sigmoid(x.double() @ module.gate.linear.weight[0] + module.gate.linear.bias)[:, None]
    expected = g * module.global_expert(x.double()) + (1 - g) * module.local_expert(x.double())
    logits, weights = module.mix(x.double())
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(weights, torch.cat((g, 1 - g), dim=1))
    assert torch.equal(module(x.double()), logits)


@pytest.mark.parametrize(
    ("weight", "expert", "other"), [(1, "global_expert", "local_expert"), (0, "local_expert", "global_expert")]
)
def test_constant_gate_of_1_or_0_is_bitwise_the_one_expert_whatever_the_other_gives(weight, expert, other):
    x, _ = samples()
    module = mixture(ConstantGate(weight), dtype=torch.float32)
    for parameter in getattr(module, other).parameters():
        nn.init.constant_(parameter, math.nan)
    assert torch.equal(module(x), getattr(module, expert)(x))


@pytest.mark.parametrize("gate", [None, ConstantGate(0.5)])
def test_constant_gate_of_a_half_is_the_default_and_the_mean_of_the_experts(gate):
    x, _ = samples()
    module = mixture(gate, dtype=torch.float32)
    assert torch.equal(module(x), (module.global_expert(x) + module.local_expert(x)) / 2)


def test_feature_gate_reads_the_global_experts_features():
    x, _ = samples()
    module = mixture(FeatureGate(6), dtype=torch.float32)
    logits, weights = module.mix(x)
    features = module.global_expert.extractor(x)
    g = torch.sigmoid(F.linear(features, module.gate.linear.weight, module.gate.linear.bias))
    torch.testing.assert_close(weights[:, :1], g)
    torch.testing.assert_close(logits, g * module.global_expert(x) + (1 - g) * module.local_expert(x))
    nn.init.zeros_(module.local_expert.extractor[1].weight)
    assert torch.equal(module.mix(x)[1], weights)


@pytest.mark.parametrize(
    ("expert", "gate", "in_features"),
    [
        (LeNet5(), FeatureGate(), 400),
        (LeNet5(3), LinearGate(), 3072),
        (SmallMLP(64, 20, 10), FeatureGate(), 20),
        (SmallMLP(64, 20, 10), LinearGate(), 64),
    ],
)
def test_a_gate_without_a_width_takes_it_from_the_expert(expert, gate, in_features):
    assert gate.in_features is None
    module = PersonalizedMoE(expert, gate=gate)
    assert module.gate.in_features == in_features
    assert module.gate.linear.weight.shape == (1, in_features)


def test_a_gate_without_a_width_takes_it_from_the_first_batch_where_the_expert_does_not_tell():
    module = PersonalizedMoE(Expert(), gate=FeatureGate())
    module(samples()[0])
    assert module.gate.in_features == 6


def test_reset_parameters_draws_the_gate_anew():
    gate = LinearGate(5)
    before = copy.deepcopy(gate.state_dict())
    gate.reset_parameters()
    assert not torch.equal(gate.linear.weight, before["linear.weight"])
    torch.manual_seed(3)
    gate.reset_parameters()
    torch.manual_seed(3)
    assert_same_bits(gate.linear.state_dict(), nn.Linear(5, 1).state_dict())


@pytest.mark.parametrize("weight", [-0.1, 1.1, math.nan])
def test_a_constant_weight_outside_0_to_1_is_refused(weight):
    with pytest.raises(MisconfigurationException, match=rf"ConstantGate: weight is {weight}, but must be from 0 to 1"):
        ConstantGate(weight)


def test_experts_with_different_numbers_of_outputs_are_refused_when_they_tell_their_input():
    with pytest.raises(
        MisconfigurationException, match=r"local_expert gives 7 outputs, but must give 10, as many as global_expert"
    ):
        PersonalizedMoE(SmallMLP(), SmallMLP(num_classes=7))


def test_experts_with_different_numbers_of_outputs_are_refused_at_the_first_batch():
    with pytest.raises(MisconfigurationException, match="local_expert gives 1 outputs"):  # would broadcast
        PersonalizedMoE(Expert(), Expert(classes=1))(samples()[0])


def test_a_feature_gate_is_refused_for_a_global_expert_without_extractor():
    message = "FeatureGate, which reads features, but the global expert Linear has no `extractor`"
    with pytest.raises(MisconfigurationException, match=message):
        PersonalizedMoE(nn.Linear(5, 3), gate=FeatureGate())
    assert PersonalizedMoE(nn.Linear(5, 3), gate=LinearGate())(samples()[0]).shape == (12, 3)


def test_without_a_local_expert_it_is_a_copy_of_the_global_one():
    module = PersonalizedMoE(Expert())
    assert_same_bits(module.local_expert.state_dict(), module.global_expert.state_dict())
    nn.init.zeros_(module.local_expert.extractor[1].weight)
    assert module.global_expert.extractor[1].weight.any()


class WithBatchNorm(nn.Module):
    """An expert that tells its input and cannot be run on a batch of one in train mode."""

    def __init__(self):
        super().__init__()
        self.input_shape = (5,)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, x):
        return self.net(x)


def test_construction_leaves_batch_norm_statistics_and_train_mode_as_they_are():
    module = PersonalizedMoE(WithBatchNorm(), gate=LinearGate())
    assert module.global_expert.net[1].num_batches_tracked == 0
    assert all(submodule.training for submodule in module.modules())


def test_a_phase_replaces_gate_and_optimizer_in_a_copy_of_the_model_and_keeps_its_class():
    class Mine(PersonalizedMoE):
        pass

    module = Mine(Expert(), gate=FeatureGate(6))
    adam = partial(torch.optim.Adam, lr=0.5)
    other = phase_module(module, Phase("phase", FedAvg(), gate=LinearGate(5), optimizer=adam))
    assert type(other) is Mine
    assert isinstance(other.gate, LinearGate) and isinstance(module.gate, FeatureGate)
    assert isinstance(other.configure_optimizers(), torch.optim.Adam)
    assert isinstance(module.configure_optimizers(), torch.optim.SGD)
    for part in ("global_expert", "local_expert"):
        assert_same_bits(getattr(other, part).state_dict(), getattr(module, part).state_dict())
    own = {parameter.data_ptr() for parameter in module.parameters()}
    assert not own & {parameter.data_ptr() for parameter in other.parameters()}


@plain_trainer
def test_a_plain_trainer_fits_validates_tests_and_predicts_with_an_ordinary_dataloader(tmp_path):
    x, y = samples()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    module = mixture(FeatureGate(6), dtype=torch.float32)
    by_hand = copy.deepcopy(module)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for batch_x, batch_y in loader:
            optimizer.zero_grad()
            F.cross_entropy(by_hand(batch_x), batch_y).backward()
            optimizer.step()

    plain = trainer(tmp_path, max_epochs=3)
    plain.fit(module, loader, loader)
    torch.testing.assert_close(module.state_dict(), by_hand.state_dict())

    logits, weights = by_hand.eval().mix(x)
    expected = {
        "loss": F.cross_entropy(logits, y).item(),
        "accuracy": (logits.argmax(1) == y).double().mean().item(),
        "gate/global_expert": weights[:, 0].mean().item(),
    }
    assert 0 < expected["accuracy"] < 1
    whole = DataLoader(TensorDataset(x, y), batch_size=5)  # the last batch is shorter
    assert plain.validate(module, whole, verbose=False)[0] == pytest.approx(
        {f"validation_{name}": value for name, value in expected.items()}, rel=1e-5
    )
    assert plain.test(module, whole, verbose=False)[0] == pytest.approx(
        {f"test_{name}": value for name, value in expected.items()}, rel=1e-5
    )
    for predicted in (plain.predict(module, whole), plain.predict(module, DataLoader(x, batch_size=5))):
        torch.testing.assert_close(torch.cat([batch["logits"] for batch in predicted]), logits)
        torch.testing.assert_close(torch.cat([batch["gate_weights"] for batch in predicted]), weights)


@plain_trainer
def test_a_learning_rate_schedule_steps_once_an_epoch(tmp_path):
    x, y = samples()
    rates = []

    class Recorded(PersonalizedMoE):
        def on_train_batch_start(self, batch, batch_idx):
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    module = Recorded(
        Expert(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    trainer(tmp_path, max_epochs=2).fit(module, DataLoader(TensorDataset(x, y), batch_size=6))
    assert rates == [0.1, 0.1, 0.05, 0.05]


@plain_trainer
@pytest.mark.parametrize("gate", [LinearGate(), FeatureGate(), ConstantGate(0.3), None])
def test_a_checkpoint_is_loaded_in_one_line_to_the_same_bits(tmp_path, gate):
    x, y = samples(features=8)
    module = PersonalizedMoE(SmallMLP(8, 6, 3), SmallMLP(8, 9, 3), gate, lambda p: torch.optim.SGD(p, lr=0.1))
    plain = trainer(tmp_path, max_epochs=1)
    plain.fit(module, DataLoader(TensorDataset(x, y), batch_size=4))
    plain.save_checkpoint(tmp_path / "mixture.ckpt")

    loaded = PersonalizedMoE.load_from_checkpoint(tmp_path / "mixture.ckpt")
    assert_same_bits(loaded.state_dict(), module.state_dict())
    assert type(loaded.gate) is type(module.gate)
    for loaded_output, output in zip(loaded.eval().mix(x), module.eval().mix(x), strict=True):
        assert torch.equal(loaded_output, output)


class Undescribed(Expert):
    """A user's own expert that does not keep its constructor's arguments as attributes."""

    def __init__(self, features):
        super().__init__(features)


@plain_trainer
def test_a_checkpoint_of_a_users_own_expert_is_loaded_by_giving_the_expert(tmp_path):
    x, y = samples()
    module = PersonalizedMoE(Undescribed(5), gate=FeatureGate())
    plain = trainer(tmp_path, max_epochs=1)
    plain.fit(module, DataLoader(TensorDataset(x, y), batch_size=4))
    plain.save_checkpoint(tmp_path / "mixture.ckpt")

    loaded = PersonalizedMoE.load_from_checkpoint(tmp_path / "mixture.ckpt", global_expert=Undescribed(5))
    assert_same_bits(loaded.state_dict(), module.state_dict())
    assert torch.equal(loaded.eval()(x), module.eval()(x))


@plain_trainer
def test_a_checkpoint_of_an_expert_defined_inside_a_function_is_loaded_by_giving_the_expert(tmp_path):
    class Inner(Expert):
        def __init__(self):  # no arguments, so that nothing is missing to describe it but an importable name
            super().__init__()

    x, y = samples()
    module = PersonalizedMoE(Inner(), gate=ConstantGate(0.3))
    plain = trainer(tmp_path, max_epochs=1)
    plain.fit(module, DataLoader(TensorDataset(x, y), batch_size=4))
    plain.save_checkpoint(tmp_path / "mixture.ckpt")

    loaded = PersonalizedMoE.load_from_checkpoint(tmp_path / "mixture.ckpt", global_expert=Inner())
    assert torch.equal(loaded.eval()(x), module.eval()(x))


@pytest.mark.parametrize(
    "gate", [partial(LinearGate, 5), partial(FeatureGate, 6), partial(ConstantGate, 0.5), partial(ConstantGate, 1)]
)
def test_the_loss_and_its_gradients_under_vmap_are_those_of_one_client_at_a_time(gate):
    torch.manual_seed(2)
    clients = [PersonalizedMoE(Expert(), Expert(), gate()).double() for _ in range(4)]
    batches = [samples(seed=seed) for seed in range(4)]
    x, y = torch.stack([x.double() for x, _ in batches]), torch.stack([y for _, y in batches])
    template = clients[0]
    stacked, _ = torch.func.stack_module_state(clients)

    def loss(parameters, x, y):
        call = {f"module.{name}": parameter for name, parameter in parameters.items()}
        return torch.func.functional_call(_Loss(template), call, ((x, y),))

    gradients, (losses, metrics) = torch.vmap(torch.func.grad_and_value(loss, has_aux=True))(stacked, x, y)
    for i, client in enumerate(clients):
        expected, expected_metrics = client.loss((x[i], y[i]))
        expected.backward()
        assert expected.item() == pytest.approx(F.cross_entropy(client(x[i]), y[i]).item(), rel=1e-12)
        torch.testing.assert_close(losses[i], expected)
        torch.testing.assert_close({name: value[i] for name, value in metrics.items()}, expected_metrics)
        for name, parameter in client.named_parameters():
            expected_gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradients[name][i], expected_gradient)


class _Loss(LightningModule):
    """Calls the loss as a module's forward, because ``functional_call`` calls a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, batch):
        return self.module.loss(batch)


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0, 1.0]])
def test_a_constant_gate_of_another_number_of_experts_is_refused(weights):
    gate = ConstantGate(weights)
    with pytest.raises(MisconfigurationException, match=f"PersonalizedMoE: gate .* weighs {len(weights)} experts, but"):
        PersonalizedMoE(SmallMLP(), gate=gate)
    with pytest.raises(
        MisconfigurationException, match=f"RepresentationMoE: gate .* weighs {len(weights)} experts, but"
    ):
        RepresentationMoE(SmallMLP(), [SmallMLP()], gate=gate)


def test_clusters_of_vgg16_are_drawn_as_it_is():
    """N(0, sqrt(2 / (9 * 512))) for the last convolution, of 2.4 million weights, and biases of 0."""
    for expert in ClusteredMoE(VGG16(), 2).global_experts:
        last = [part for part in expert.modules() if isinstance(part, nn.Conv2d)][-1]
        assert last.weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)
        assert not last.bias.any()


def test_the_logged_weight_of_the_global_experts_is_that_of_all_of_them(tmp_path):
    gate = ConstantGate([0.2, 0.3, 0.5])
    module = ClusteredMoE(SmallMLP(5, 4, 3), 2, gate=gate)
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    data = DataLoader(TensorDataset(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)))
    (found,) = trainer.test(module, data, verbose=False)
    assert found["test_gate/global_expert"] == pytest.approx(0.5)
