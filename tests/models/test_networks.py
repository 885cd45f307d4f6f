"""The networks of four papers, their gates and switchable normalization, against definitions written out again."""

import copy
import inspect
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import TensorData, assert_same_bits, blobs, mixture, momentum_sgd
from helpers.backends import FEW, UNEQUAL, assert_agree, local_training, train
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import nn
from torch.func import functional_call

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import StackedBackend, TrainerBackend, has_batch_norm
from fedmoe_pl.models import (
    CNN,
    IFCACNN,
    LEAFCNN,
    BiLSTM,
    ConstantGate,
    FedAvgCNN,
    GateCNN,
    NetworkGate,
    PersonalizedMoE,
    SwitchNorm1d,
    SwitchNormGate,
    TwoConvCNN,
)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def small_images(n=4, channels=1, size=16, seed=0):
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(seed))


# --- sizes: METHODS sections 3 and 4 ---

SIZES = [
    (CNN(1), 2_621_558, 500),
    (CNN(2), 1_815_142, 500),
    (CNN(3), 1_320_558, 500),
    (CNN(4), 1_060_358, 500),
    (CNN(5), 670_058, 500),
    (LEAFCNN(), 942_634, 800),
    (LEAFCNN(3, 10, 32, 256, 256, 0.76), 1_848_714, 6400),
    # 1 * 25 * 32 + 32, 32 * 25 * 64 + 64, (64 * 16) * 2048 + 2048, 2048 * 62 + 62
    (LEAFCNN(1, 62, 32, 64, 2048, image_size=28), 832 + 51_264 + 2_099_200 + 127_038, 1024),
    (IFCACNN(), 798_752, 1600),
    (TwoConvCNN(), 62_006, 400),
    (TwoConvCNN(1, 10, 28), 44_426, 256),
    (TwoConvCNN(1, 10, 28, 0.5, 6, 12, 84, 42), 22_180, 192),
    (FedAvgCNN(), 878_538, 1600),
    (FedAvgCNN(1, 10, 28), 582_026, 1024),
]


@pytest.mark.parametrize(("expert", "parameters", "features"), SIZES, ids=lambda value: type(value).__name__)
def test_an_expert_has_the_papers_number_of_parameters_and_is_its_classifier_on_its_extractor(
    expert, parameters, features
):
    expert = copy.deepcopy(expert).eval()
    x = torch.randn(2, *expert.input_shape)
    assert count(expert) == parameters
    assert expert.extractor(x).shape == (2, features)
    assert expert(x).shape == (2, expert.num_classes)
    assert torch.equal(expert(x), expert.classifier(expert.extractor(x)))


@pytest.mark.parametrize("variant", [1, 2, 3, 4, 5])
def test_pfedmoes_extractor_is_its_network_without_the_header_of_5010_parameters(variant):
    expert = CNN(variant)
    assert count(expert) - count(expert.extractor) == count(expert.classifier) == 5010
    assert count(CNN(variant, num_classes=100).classifier) == 50_100


def test_bilstm_has_the_papers_number_of_parameters_and_reads_texts_of_any_length():
    expert = BiLSTM()
    assert count(expert) == 1_085_708
    assert expert.input_dtype == torch.int64
    for shape in ((3, 7), (2, *expert.input_shape)):
        x = torch.randint(10_002, shape, dtype=expert.input_dtype)
        assert expert.extractor(x).shape == (len(x), 128)
        assert torch.equal(expert(x), expert.classifier(expert.extractor(x)))
        assert expert(x).shape == (len(x), 4)


@pytest.mark.parametrize(
    ("network", "parameters", "outputs"),
    [
        (GateCNN(), 6_995, 7),
        (GateCNN(num_experts=2), 6_995 - 6 * 9, 1),  # six outputs of 8 weights and a bias fewer
        (GateCNN(conv2_channels=0), 912 + (12 * 14 * 14 * 8 + 8) + 63, 7),
        (GateCNN(1, 3, image_size=28), 312 + 3612 + (12 * 16 * 8 + 8) + 27, 3),
    ],
)
def test_the_gates_network_has_the_papers_number_of_parameters_and_an_output_per_expert(network, parameters, outputs):
    assert count(network) == parameters
    assert network(torch.randn(3, *network.input_shape)).shape == (3, outputs)


def test_pfedmoes_gate_has_the_number_of_parameters_of_a_hidden_width_of_50():
    gate = SwitchNormGate()
    assert count(gate) == 160_004
    assert gate(torch.randn(3, 3, 32, 32)).shape == (3, 2)


# --- layers, written out again; dropout draws the same numbers in the same order ---


def conv(p, name, x):
    return F.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"])


def fc(p, name, x):
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def pool_relu(x):
    return F.max_pool2d(F.relu(x), 2)


def pfedmoe(p, x, training):
    x = pool_relu(conv(p, "extractor.3", pool_relu(conv(p, "extractor.0", x)))).flatten(1)
    return fc(p, "classifier", F.relu(fc(p, "extractor.9", F.relu(fc(p, "extractor.7", x)))))


def leaf(p, x, training):
    x = pool_relu(conv(p, "extractor.3", pool_relu(conv(p, "extractor.0", x)))).flatten(1)
    return fc(p, "classifier.3", F.dropout(F.relu(fc(p, "classifier.0", x)), 0.8, training))


def ifca(p, x, training):
    x = lrn(pool_relu(conv(p, "extractor.0", x)))
    x = F.max_pool2d(lrn(F.relu(conv(p, "extractor.4", x))), 2).flatten(1)
    x = F.dropout(F.relu(fc(p, "classifier.0", x)), 0.5, training)
    return fc(p, "classifier.5", F.relu(fc(p, "classifier.3", x)))


def lrn(x):
    """A channel's window is itself, the two before it and the one after it."""
    squares = F.pad(x**2, (0, 0, 0, 0, 2, 1))
    window = sum(squares[:, i : i + x.shape[1]] for i in range(4))
    return x / (1 + 0.001 / 9 / 4 * window) ** 0.75


def two_conv(p, x, training):
    x = pool_relu(conv(p, "extractor.3", pool_relu(conv(p, "extractor.0", x)))).flatten(1)
    x = F.dropout(F.relu(fc(p, "classifier.0", x)), 0.5, training)
    return fc(p, "classifier.5", F.relu(fc(p, "classifier.3", x)))


def fedavg(p, x, training):
    x = pool_relu(conv(p, "extractor.3", pool_relu(conv(p, "extractor.0", x)))).flatten(1)
    return fc(p, "classifier.2", F.relu(fc(p, "classifier.0", x)))


def gate_cnn(p, x, training):
    x = conv(p, "layers.3", pool_relu(conv(p, "layers.0", x)))
    x = pool_relu(F.dropout2d(x, 0.78, training)).flatten(1)
    return fc(p, "layers.11", F.dropout(F.relu(fc(p, "layers.8", x)), 0.78, training))


def gate_cnn_of_one_convolution(p, x, training):
    x = F.relu(fc(p, "layers.4", pool_relu(conv(p, "layers.0", x)).flatten(1)))
    return fc(p, "layers.7", F.dropout(x, 0.78, training))


LAYERS = {
    "CNN": (CNN(5), pfedmoe),
    "LEAFCNN": (LEAFCNN(conv1_channels=4, hidden=16), leaf),
    "IFCACNN": (IFCACNN(), ifca),
    "TwoConvCNN": (TwoConvCNN(), two_conv),
    "FedAvgCNN": (FedAvgCNN(), fedavg),
    "GateCNN": (GateCNN(), gate_cnn),
    "GateCNN with one convolution": (GateCNN(conv2_channels=0), gate_cnn_of_one_convolution),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_network_is_its_papers_layers_in_their_order(name, training):
    network, by_hand = LAYERS[name]
    network = copy.deepcopy(network).double().train(training)
    x = 3 * torch.randn(8, *network.input_shape, dtype=torch.float64)
    torch.manual_seed(5)
    actual = network(x)
    torch.manual_seed(5)
    expected = by_hand(dict(network.named_parameters()), x, training)
    torch.testing.assert_close(actual, expected)


def test_bilstm_joins_the_states_behind_the_last_token_and_backwards_behind_the_first():
    expert = BiLSTM(20, 3, 4, 2).double()
    x = torch.randint(20, (5, 6))
    embedded = expert.extractor.embedding.weight[x]

    def last_state(suffix, steps):
        p = {name: getattr(expert.extractor.lstm, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh")}
        b = sum(getattr(expert.extractor.lstm, f"{name}_l0{suffix}") for name in ("bias_ih", "bias_hh"))
        h = c = torch.zeros(5, 4, dtype=torch.float64)
        for t in steps:
            i, f, g, o = (embedded[:, t] @ p["weight_ih"].T + h @ p["weight_hh"].T + b).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h

    expected = torch.cat((last_state("", range(6)), last_state("_reverse", reversed(range(6)))), dim=1)
    torch.testing.assert_close(expert.extractor(x), expected)
    torch.testing.assert_close(expert(x), expected @ expert.classifier.weight.T + expert.classifier.bias)


@pytest.mark.parametrize("make", [LEAFCNN, IFCACNN, GateCNN])
def test_relu_logits_are_the_logits_without_those_below_0(make):
    torch.manual_seed(0)
    network, plain = make(relu_logits=True).eval(), make().eval()
    plain.load_state_dict(network.state_dict())
    x = 5 * torch.randn(8, 3, 32, 32)
    logits = plain(x)
    assert (logits < 0).any() and (logits > 0).any()
    assert torch.equal(network(x), logits.clamp(min=0))


@pytest.mark.parametrize("make", [LEAFCNN, IFCACNN, GateCNN])
def test_initial_parameters_of_adaptive_expert_models_survive_drawing_all_layers_anew(make):
    network = make()
    before = copy.deepcopy(network.state_dict())
    for redrawn in (False, True):
        if redrawn:
            for layer in network.modules():
                if callable(reset := getattr(layer, "reset_parameters", None)):
                    reset()
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear):
                assert (layer.bias == 0.01).all()
            if isinstance(layer, nn.Conv2d):
                bound = math.sqrt(6 / (25 * (layer.in_channels + layer.out_channels)))
                assert 0.95 * bound < layer.weight.abs().max() <= bound * (1 + 1e-6)
                assert layer.weight.var().item() == pytest.approx(bound**2 / 3, rel=0.15)
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                assert torch.equal(layer.weight, before[f"{name}.weight"]) is not redrawn


# --- gates ---


def constant_logits(*logits) -> nn.Linear:
    layer = nn.Linear(2, len(logits)).double()
    nn.init.zeros_(layer.weight)
    layer.bias.data = torch.tensor(logits, dtype=torch.float64)
    return layer


def test_a_network_with_one_output_weighs_the_local_expert_by_its_sigmoid():
    weights = NetworkGate(constant_logits(math.log(3)))(torch.zeros(4, 2, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.75]] * 4, dtype=torch.float64))


def test_a_network_with_an_output_per_expert_weighs_them_in_order_by_a_softmax():
    gate = NetworkGate(constant_logits(0.0, math.log(2), math.log(5)))
    weights = gate(torch.zeros(4, 2, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.tensor([[1 / 8, 2 / 8, 5 / 8]] * 4, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize(
    "gate",
    [
        NetworkGate(TwoConvCNN(1, 1, 16)),
        NetworkGate(GateCNN(1, 2, image_size=16)),
        NetworkGate(GateCNN(1, 5, image_size=16)),
        SwitchNormGate(256, 4),
    ],
)
def test_weights_are_at_least_0_and_add_up_to_1(gate, scale):
    weights = copy.deepcopy(gate)(scale * small_images())
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(4))


def test_a_mixture_takes_the_sigmoid_of_a_networks_one_output_as_the_local_experts_weight():
    network = nn.Linear(5, 1)
    module = mixture(NetworkGate(network))
    x = torch.randn(4, 5, dtype=torch.float64)
    h = torch.sigmoid(x @ network.weight.T + network.bias)
    torch.testing.assert_close(module(x), h * module.local_expert(x) + (1 - h) * module.global_expert(x))


@pytest.mark.parametrize("gate", [NetworkGate(BiLSTM(9, 2, 3, 1)), SwitchNormGate(6, 4)])
def test_reset_parameters_draws_every_weight_of_a_gate_anew(gate):
    gate = copy.deepcopy(gate)
    weights = [p for p in gate.parameters() if p.dim() > 1]
    before = [weight.clone() for weight in weights]
    gate.reset_parameters()
    assert not any(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


def test_pfedmoes_gate_is_its_papers_layers_in_their_order():
    gate = SwitchNormGate(12, 5).double()
    x = torch.randn(7, 3, 2, 2, dtype=torch.float64) + 1
    p = dict(gate.named_parameters())
    flat = x.reshape(7, 12)
    mean = (flat.mean(1, keepdim=True) + flat.mean(0)) / 2
    var = (flat.var(1, keepdim=True) + flat.var(0)) / 2

    def batch_norm(h):
        return (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()

    hidden = batch_norm(fc(p, "layers.2", (flat - mean) / (var + 1e-5).sqrt())).sigmoid()
    expected = batch_norm(fc(p, "layers.5", hidden)).softmax(1)
    torch.testing.assert_close(gate(x), expected)


def test_the_momentum_of_pfedmoes_gate_is_that_of_its_switch_norm():
    (norm,) = (layer for layer in SwitchNormGate(6, momentum=0.997).modules() if isinstance(layer, SwitchNorm1d))
    assert norm.momentum == 0.997


# --- switchable normalization ---


def drawn_norm(features=4, momentum=0.9) -> SwitchNorm1d:
    norm = SwitchNorm1d(features, momentum).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return norm


class ByHand:
    """SwitchNorm1d, number by number; variances divide by one less than their numbers."""

    def __init__(self, norm: SwitchNorm1d):
        self.p = {name: parameter.detach().numpy() for name, parameter in norm.named_parameters()}
        self.momentum = norm.momentum
        self.running = [(0.0, 0.0)] * norm.num_features

    def __call__(self, x, training):
        result = np.empty_like(x)
        shares = {name: np.exp(self.p[name]) / np.exp(self.p[name]).sum() for name in ("mean_weight", "var_weight")}
        for d in range(x.shape[1]):
            feature = (x[:, d].mean(), x[:, d].var(ddof=1)) if training else self.running[d]
            for b in range(x.shape[0]):
                mean = shares["mean_weight"] @ (x[b].mean(), feature[0])
                var = shares["var_weight"] @ (x[b].var(ddof=1), feature[1])
                result[b, d] = (x[b, d] - mean) / math.sqrt(var + 1e-5) * self.p["weight"][d] + self.p["bias"][d]
            if training:
                m = self.momentum
                self.running[d] = tuple(m * o + (1 - m) * n for o, n in zip(self.running[d], feature, strict=True))
        return result


@pytest.mark.parametrize("momentum", [0.9, 0.997])
def test_switch_norm_is_its_definition_in_every_step_and_in_eval_mode(momentum):
    norm = drawn_norm(momentum=momentum)
    by_hand = ByHand(norm)
    generator = torch.Generator().manual_seed(1)
    for training in (False, True, True, True, False, True, False):
        x = 2 * torch.randn(5, 4, generator=generator, dtype=torch.float64) + 3
        actual = norm.train(training)(x)
        torch.testing.assert_close(actual, torch.from_numpy(by_hand(x.numpy(), training)))
        running = torch.tensor(by_hand.running, dtype=torch.float64)
        torch.testing.assert_close(norm.running_mean, running[:, 0])
        torch.testing.assert_close(norm.running_var, running[:, 1])


def test_switch_norm_starts_as_the_mean_of_both_statistics_with_running_ones_at_0():
    norm = SwitchNorm1d(3)
    assert {name: tensor.tolist() for name, tensor in norm.state_dict().items()} == {
        "weight": [1, 1, 1],
        "bias": [0, 0, 0],
        "mean_weight": [1, 1],
        "var_weight": [1, 1],
        "running_mean": [0, 0, 0],
        "running_var": [0, 0, 0],
    }
    assert norm.momentum == 0.9
    other = drawn_norm(3).float()
    other(torch.randn(4, 3))
    other.reset_parameters()
    assert_same_bits(other.state_dict(), norm.state_dict())


@pytest.mark.parametrize("training", [False, True])
def test_switch_norm_has_the_gradients_of_finite_differences(training):
    norm = drawn_norm()
    norm(torch.randn(5, 4, dtype=torch.float64))
    norm.train(training)
    names = [name for name, _ in norm.named_parameters()]

    def call(x, *values):
        return functional_call(copy.deepcopy(norm), dict(zip(names, values, strict=True)), (x,))

    inputs = [torch.randn(5, 4, dtype=torch.float64), *(parameter.detach() for parameter in norm.parameters())]
    assert torch.autograd.gradcheck(call, [value.requires_grad_() for value in inputs])


def test_switch_norm_refuses_a_batch_of_one_in_train_mode_as_batch_norm_does():
    norm, x = SwitchNorm1d(3), torch.randn(1, 3)
    for layer in (norm, nn.BatchNorm1d(3)):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            layer(x)
    assert not norm.running_var.any()
    assert norm.eval()(x).isfinite().all()
    with pytest.raises(ValueError, match=r"expected 2D input \(got 3D input\)"):
        norm(x[None])


def test_switch_norm_called_functionally_changes_the_buffers_it_is_given_and_not_its_own():
    norm, x = SwitchNorm1d(3), torch.randn(4, 3)
    state = {name: tensor.detach().clone() for name, tensor in norm.state_dict().items()}
    functional_call(norm, state, (x,))
    assert not norm.running_mean.any() and not norm.running_var.any()
    torch.testing.assert_close(state["running_mean"], 0.1 * x.mean(0))
    torch.testing.assert_close(state["running_var"], 0.1 * x.var(0))


class WithSwitchNorm(nn.Module):
    """A perceptron whose hidden layer is normalized."""

    def __init__(self):
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(5, 6), SwitchNorm1d(6), nn.Tanh())
        self.classifier = nn.Linear(6, 3)

    def forward(self, x):
        return self.classifier(self.extractor(x))


def test_backends_agree_with_switch_norm_on_unequal_clients_and_last_batches_of_one():
    module = mixture(expert=WithSwitchNorm())
    assert has_batch_norm(module)
    training = local_training(module, FedAvg(), blobs(FEW, batch_size=6))  # 25 samples: four batches and one sample
    assert_agree(training, 1e-10)
    update, _ = train(StackedBackend(4), training)
    for name in ("running_mean", "running_var", "mean_weight", "var_weight"):
        start = training.initial[f"global_expert.extractor.1.{name}"]
        assert (update.sent[f"global_expert.extractor.1.{name}"] - start).abs().max() > 1e-4


def test_backends_agree_with_pfedmoes_gate():
    """The trial stacks it, though the gradients of biases before a normalization are what rounding leaves of 0."""
    training = local_training(mixture(SwitchNormGate(5, 4)), FedAvg(), blobs(UNEQUAL, batch_size=10))
    assert_agree(training, 1e-10)
    sent = train(TrainerBackend(), training)[0].sent
    for name in ("gate.layers.2.weight", "gate.layers.1.running_var"):
        assert (sent[name] - training.initial[name]).abs().max() > 1e-3


@pytest.mark.parametrize("expert", [LEAFCNN(1, 3, 2, 2, 4, 0.0, image_size=16), TwoConvCNN(1, 3, 16, 0.0, 2, 2, 4, 4)])
def test_backends_agree_for_convolutional_experts_without_dropout(expert):
    x, y = small_images(12), torch.arange(12) % 3
    data = TensorData(x, y, torch.arange(12).split([7, 5]), dtype=torch.float64, batch_size=3)
    data.setup()
    gate = NetworkGate(GateCNN(1, 2, 2, 2, 4, 0.0, image_size=16))
    module = PersonalizedMoE(copy.deepcopy(expert), gate=gate, optimizer=momentum_sgd).double()
    assert_agree(local_training(module, FedAvg(), data), 1e-10)


# --- arguments ---

ARGUMENTS = [
    (CNN, {"variant": 2, "in_channels": 1, "num_classes": 7}),
    (LEAFCNN, dict(zip(inspect.signature(LEAFCNN).parameters, (1, 7, 2, 3, 4, 0.1, True, 20), strict=True))),
    (IFCACNN, {"in_channels": 1, "num_classes": 7, "dropout": 0.1, "relu_logits": True}),
    (TwoConvCNN, dict(zip(inspect.signature(TwoConvCNN).parameters, (1, 7, 20, 0.1, 2, 3, 4, 5), strict=True))),
    (FedAvgCNN, {"in_channels": 1, "num_classes": 7, "image_size": 20}),
    (BiLSTM, {"vocabulary_size": 9, "embedding_dim": 2, "hidden": 3, "num_classes": 7}),
    (GateCNN, dict(zip(inspect.signature(GateCNN).parameters, (1, 3, 2, 0, 4, 0.1, True, 20), strict=True))),
    (SwitchNormGate, {"in_features": 6, "hidden": 4, "momentum": 0.5}),
    (SwitchNorm1d, {"num_features": 6, "momentum": 0.5, "eps": 0.1}),
]


@pytest.mark.parametrize(("make", "arguments"), ARGUMENTS, ids=lambda value: getattr(value, "__name__", ""))
def test_all_arguments_are_kept_as_plain_attributes_of_their_name(make, arguments):
    module = make(**arguments)
    assert list(arguments) == list(inspect.signature(make).parameters)
    assert {name: getattr(module, name) for name in arguments} == arguments


checkpoint_warnings = pytest.mark.filterwarnings("ignore:.weights_only. was not set")


@checkpoint_warnings
@pytest.mark.parametrize(
    ("expert", "gate"),
    [
        (LEAFCNN(1, 3, 2, 2, 4, relu_logits=True, image_size=16), SwitchNormGate(256, 4, 0.5)),
        (TwoConvCNN(1, 3, 16, 0.1, 2, 2, 4, 4), ConstantGate(0.3)),
        (FedAvgCNN(1, 3, 16), None),
        (CNN(5, 1, 3), None),
        (IFCACNN(1, 3), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_checkpoint_rebuilds_experts_and_gate(tmp_path, expert, gate):
    module = PersonalizedMoE(copy.deepcopy(expert), gate=copy.deepcopy(gate))
    loaded = PersonalizedMoE.load_from_checkpoint(save(module, tmp_path))
    assert_same_bits(loaded.state_dict(), module.state_dict())
    x = torch.randn(2, *expert.input_shape)
    assert torch.equal(loaded.eval()(x), module.eval()(x))


@checkpoint_warnings
def test_a_checkpoint_with_a_network_as_gate_is_loaded_by_giving_the_gate(tmp_path):
    def gate():
        return NetworkGate(GateCNN(1, 2, 2, 2, 4, image_size=16))

    module = PersonalizedMoE(FedAvgCNN(1, 3, 16), gate=gate())
    loaded = PersonalizedMoE.load_from_checkpoint(save(module, tmp_path), gate=gate())
    assert_same_bits(loaded.state_dict(), module.state_dict())


def save(module, folder):
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=folder)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(folder / "mixture.ckpt")
    return folder / "mixture.ckpt"


REFUSED = {
    "variant": (lambda: CNN(6), "CNN: variant is 6, but must be 1, 2, 3, 4 or 5"),
    "dropout of 1": (lambda: LEAFCNN(dropout=1.0), r"LEAFCNN: dropout is 1.0, but must be at least 0 and"),
    "dropout below 0": (lambda: IFCACNN(dropout=-0.1), "IFCACNN: dropout is -0.1, but"),
    "dropout that is no number": (lambda: TwoConvCNN(dropout=math.nan), "TwoConvCNN: dropout is nan, but"),
    "a gate's dropout": (lambda: GateCNN(dropout=1.5), "GateCNN: dropout is 1.5, but"),
    "small image of LEAF": (lambda: LEAFCNN(image_size=15), "LEAFCNN: image_size is 15, but .* least 16 "),
    "small image": (lambda: TwoConvCNN(image_size=15), "TwoConvCNN: image_size is 15, but .* least 16 "),
    "no image": (lambda: FedAvgCNN(image_size=0), "FedAvgCNN: image_size is 0, but .* at least 16 pixels"),
    "a gate's small image": (lambda: GateCNN(image_size=15), "GateCNN: image_size is 15, .* least 16 "),
    "one convolution": (lambda: GateCNN(conv2_channels=0, image_size=5), "image_size is 5, but must be at least 6 "),
    "one expert": (lambda: GateCNN(num_experts=1), "GateCNN: num_experts is 1, but must be at least 2"),
    "one feature": (lambda: SwitchNormGate(1), "num_features is 1, but must be at least 2"),
    "momentum": (lambda: SwitchNormGate(momentum=1.1), "momentum is 1.1, but must be from 0 to 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_in_one_sentence(name):
    make, message = REFUSED[name]
    with pytest.raises(MisconfigurationException, match=message) as caught:
        make()
    assert str(caught.value).endswith(".") and ". " not in str(caught.value)


def test_the_smallest_images_leave_one_pixel():
    assert TwoConvCNN(1, 3, 16).extractor(small_images(2, size=16)).shape == (2, 16)
    assert GateCNN(1, 3, 5, 0, image_size=6)(small_images(2, size=6)).shape == (2, 3)
