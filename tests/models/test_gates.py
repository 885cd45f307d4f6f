"""Gates that are trained, against definitions written out again; and fixed ones, in every kind of mixture."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, assert_same_bits, sparse_mixture
from helpers.data import refused_argument
from helpers.models import count, samples
from torch import nn
from torch.func import functional_call

from fedmoe_pl import models
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.evaluation.client_models import evaluated_model
from fedmoe_pl.evaluation.outputs import has_trained_gate
from fedmoe_pl.models.mixtures.mixing import mix_outputs
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.begin import phase_module

# Gates


def test_linear_gate_is_the_sigmoid_of_a_linear_layer_on_the_flattened_input():
    gate, x = models.LinearGate(12), torch.randn(4, 3, 2, 2)
    logit = x.reshape(4, 12) @ gate.linear.weight[0] + gate.linear.bias
    expected = torch.stack([1 / (1 + (-logit).exp()), 1 - 1 / (1 + (-logit).exp())], dim=1)
    torch.testing.assert_close(gate(x), expected)


@pytest.mark.parametrize("in_features", [None, 6])
@pytest.mark.parametrize(
    "gate", [models.FeatureGate, models.LinearGate, partial(models.MLPGate, 2), partial(models.ProxyGate, 2)]
)
def test_a_gate_in_float32_reads_values_in_half_precision(gate, in_features):
    gate, x = gate(in_features=in_features).eval(), torch.randn(4, 6).bfloat16()
    weights = gate(x)
    assert weights.dtype == torch.float32 and torch.equal(weights, gate(x.float()))


@pytest.mark.parametrize(
    ("expert", "gate", "in_features"),
    [
        (models.LeNet5(), models.FeatureGate(), 400),
        (models.LeNet5(3), models.LinearGate(), 3072),
        (models.SmallMLP(64, 20, 10), models.FeatureGate(), 20),
        (models.SmallMLP(64, 20, 10), models.LinearGate(), 64),
    ],
)
def test_a_gate_without_a_width_takes_it_from_the_expert(expert, gate, in_features):
    assert gate.in_features is None
    module = models.PersonalizedMoE(expert, gate=gate)
    assert module.gate.in_features == in_features
    assert module.gate.linear.weight.shape == (1, in_features)


def test_a_gate_without_a_width_takes_it_from_the_first_batch_where_the_expert_does_not_tell():
    module = models.PersonalizedMoE(Expert(), gate=models.FeatureGate())
    module(samples()[0])
    assert module.gate.in_features == 6


@pytest.mark.parametrize(
    ("network", "parameters", "outputs"),
    [
        (models.GateCNN(), 6_995, 7),
        (models.GateCNN(num_experts=2), 6_995 - 6 * 9, 1),  # six outputs of 8 weights and a bias fewer
        (models.GateCNN(conv2_channels=None), 912 + (12 * 14 * 14 * 8 + 8) + 63, 7),
        (models.GateCNN(1, 3, image_size=28), 312 + 3612 + (12 * 16 * 8 + 8) + 27, 3),
    ],
)
def test_the_gates_network_has_the_papers_number_of_parameters_and_an_output_per_expert(network, parameters, outputs):
    assert count(network) == parameters
    assert network(torch.randn(3, *network.input_shape)).shape == (3, outputs)


def fc(p, name, x):
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


@pytest.mark.parametrize("conv2_channels", [5, None])
@pytest.mark.parametrize("relu_logits", [False, True])
def test_the_gates_network_is_its_papers_layers_in_their_order_also_in_training(conv2_channels, relu_logits):
    network = models.GateCNN(2, 3, 4, conv2_channels, 6, dropout=0.4, relu_logits=relu_logits, image_size=16).double()
    x = torch.randn(50, 2, 16, 16, dtype=torch.float64)
    first, *second = (layer for layer in network.modules() if isinstance(layer, nn.Conv2d))
    hidden, last = (layer for layer in network.modules() if isinstance(layer, nn.Linear))
    for train in (False, True):
        h = F.max_pool2d(F.conv2d(x, first.weight, first.bias), 2).relu()
        torch.manual_seed(5)
        for layer in second:
            h = F.max_pool2d(F.dropout2d(F.conv2d(h, layer.weight, layer.bias), 0.4, train), 2).relu()
        h = F.dropout(F.linear(h.flatten(1), hidden.weight, hidden.bias).relu(), 0.4, train)
        logits = F.linear(h, last.weight, last.bias)
        torch.manual_seed(5)
        torch.testing.assert_close(network.train(train)(x), logits.relu() if relu_logits else logits)
        assert logits.min() < 0 < logits.max()


def constant_logits(*logits) -> nn.Linear:
    layer = nn.Linear(2, len(logits)).double()
    nn.init.zeros_(layer.weight)
    layer.bias.data = torch.tensor(logits, dtype=torch.float64)
    return layer


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([math.log(3)], [1 / 4, 3 / 4]), ([0.0, math.log(2), math.log(5)], [1 / 8, 2 / 8, 5 / 8])],
)
def test_a_network_weighs_the_local_expert_by_a_sigmoid_of_one_output_and_several_experts_by_a_softmax(
    logits, expected
):
    weights = models.NetworkGate(constant_logits(*logits))(torch.zeros(4, 2, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.tensor([expected] * 4, dtype=torch.float64))


@pytest.mark.parametrize("gate", [models.NetworkGate(models.BiLSTM(9, 2, 3, 1)), models.SwitchNormGate(6, 4)])
def test_reset_parameters_draws_every_weight_of_a_gate_anew(gate):
    gate = copy.deepcopy(gate)
    weights = [p for p in gate.parameters() if p.dim() > 1]
    before = [weight.clone() for weight in weights]
    gate.reset_parameters()
    assert not any(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


def test_constant_weights_may_be_a_tuple():
    assert models.ConstantGate((0.25, 0.75)).weights == [0.25, 0.75]


def test_pfedmoes_gate_is_its_papers_layers_in_their_order():
    assert count(models.SwitchNormGate(3 * 32 * 32)) == 160_004, "by the paper"
    gate = models.SwitchNormGate(12, 5).double()
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


def test_pfedmoes_gate_keeps_a_share_of_its_first_layers_old_statistics():
    gate, (one, other) = models.SwitchNormGate(4, 3, momentum=0.75).double(), torch.randn(2, 6, 4, dtype=torch.float64)
    gate(one)
    gate(other)
    expected = 0.75 * 0.25 * one.mean(0) + 0.25 * other.mean(0)  # they start at 0
    torch.testing.assert_close(gate.layers[1].running_mean, expected)


# Switchable normalization


def drawn_norm(features=4, momentum=0.9) -> models.SwitchNorm1d:
    norm = models.SwitchNorm1d(features, momentum).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return norm


class ByHand:
    """SwitchNorm1d, number by number; variances divide by one less than their numbers."""

    def __init__(self, norm: models.SwitchNorm1d):
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
    norm = models.SwitchNorm1d(3)
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
    norm, x = models.SwitchNorm1d(3), torch.randn(1, 3)
    for layer in (norm, nn.BatchNorm1d(3)):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            layer(x)
    assert not norm.running_var.any()
    assert norm.eval()(x).isfinite().all()
    with pytest.raises(ValueError, match=r"expected 2D input \(got 3D input\)"):
        norm(x[None])


def test_switch_norm_called_functionally_changes_the_buffers_it_is_given_and_not_its_own():
    norm, x = models.SwitchNorm1d(3), torch.randn(4, 3)
    state = {name: tensor.detach().clone() for name, tensor in norm.state_dict().items()}
    functional_call(norm, state, (x,))
    assert not norm.running_mean.any() and not norm.running_var.any()
    torch.testing.assert_close(state["running_mean"], 0.1 * x.mean(0))
    torch.testing.assert_close(state["running_var"], 0.1 * x.var(0))


# Fixed weights, whose number is that of the mixture


class ThreeExperts(models.MixtureOfExperts):
    """A user's own mixture, of three experts."""

    gate_width = 3

    def __init__(self, gate: models.Gate | None = None) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        self.gate = models.EqualWeights() if gate is None else gate
        self.check_parts()

    def mix(self, x):
        weights = self.gate(x)
        return mix_outputs([expert(x) for expert in self.experts], weights, "logits"), weights


def personalized() -> models.PersonalizedMoE:
    return models.PersonalizedMoE(models.SmallMLP(5, 4, 3), models.SmallMLP(5, 6, 3))


def clustered(num_clusters=3) -> models.ClusteredMoE:
    return models.ClusteredMoE(models.SmallMLP(5, 4, 3), num_clusters, models.SmallMLP(5, 6, 3))


def representation() -> models.RepresentationMoE:
    return models.RepresentationMoE(models.RepresentationMLP(5, 4, 2, 3), [models.RepresentationMLP(5, 6, 2, 3)])


def sparse() -> models.SparseMoE:
    return sparse_mixture(4, dtype=torch.float32)


MIXTURES = {
    "personalized": (personalized, 2),
    "clustered": (clustered, 4),
    "representation": (representation, 2),
    "sparse": (sparse, 4),
    "own": (ThreeExperts, 3),
}
IN_EVERY_MIXTURE = pytest.mark.parametrize(("make", "width"), MIXTURES.values(), ids=MIXTURES)
FIXED = [models.GlobalOnly, models.LocalOnly, models.EqualWeights]


def weights_of(gate: type[models.FixedGate], width: int) -> list[float]:
    first, last, equal = [1.0] + [0.0] * (width - 1), [0.0] * (width - 1) + [1.0], [1 / width] * width
    return {models.GlobalOnly: first, models.LocalOnly: last, models.EqualWeights: equal}[gate]


def replaced(module: models.MixtureOfExperts, gate: models.Gate) -> models.MixtureOfExperts:
    """The module with the gate of a phase."""
    other = phase_module(module, Phase("phase", FedAvg(), gate=gate))
    assert isinstance(other, models.MixtureOfExperts)
    return other


@IN_EVERY_MIXTURE
@pytest.mark.parametrize("gate", FIXED)
def test_a_fixed_gate_takes_the_mixtures_width_and_gives_the_bits_of_its_weights_spelled_out(make, width, gate):
    module, x = make().eval(), torch.randn(4, 5)
    expected = replaced(module, models.ConstantGate(weights_of(gate, width))).mix(x)
    actual = replaced(module, gate()).mix(x)
    assert actual[1].tolist() == torch.tensor([weights_of(gate, width)] * 4).tolist()
    for value, constant in zip(actual, expected, strict=True):
        assert torch.equal(value, constant)


@IN_EVERY_MIXTURE
def test_a_constant_gate_of_another_width_is_refused(make, width):
    assert refused_argument(lambda: replaced(make(), models.ConstantGate([0.0] * width + [1.0]))) == "gate"


@pytest.mark.parametrize("gate", FIXED)
def test_a_gate_moved_to_a_mixture_of_another_width_takes_that_one(gate):
    moved = gate()
    for module, width in ((clustered(5), 6), (personalized(), 2), (sparse(), 4), (clustered(2), 3)):
        in_phase = replaced(module, moved)
        assert in_phase.gate.weights == weights_of(gate, width)
        module.gate = moved
        module.check_parts()
        assert moved.weights == weights_of(gate, width)
    assert in_phase.gate is not moved


@pytest.mark.parametrize("gate", FIXED)
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_a_client_with_fewer_experts_has_a_gate_as_wide(gate, kept):
    module = replaced(sparse_mixture([4, kept]), gate())
    module.keep_architecture(kept)
    assert module.gate.weights == weights_of(gate, kept)
    x = torch.randn(4, 5, dtype=torch.float64)
    outputs = [expert(module.embedding(x)) for expert in module.experts]
    expected = {models.GlobalOnly: outputs[0], models.LocalOnly: outputs[-1], models.EqualWeights: sum(outputs) / kept}[
        gate
    ]
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(
    ("gate", "evaluated"),
    [(models.GlobalOnly, "global expert"), (models.LocalOnly, "local expert"), (models.EqualWeights, "mixture")],
)
def test_a_table_names_what_a_fixed_gate_evaluates(gate, evaluated):
    for module in (personalized(), clustered(), representation()):
        assert evaluated_model(replaced(module, gate()), FedAvg()) == evaluated
    assert evaluated_model(replaced(sparse(), gate()), FedAvg()) == (
        "mixture" if gate is models.EqualWeights else "one expert"
    )


@IN_EVERY_MIXTURE
def test_mixture_weights_start_equal_and_are_what_an_algorithm_has_set_and_no_optimizer_trains_them(make, width):
    module, x = replaced(make(), models.MixtureWeights()).eval(), torch.randn(4, 5)
    equal = replaced(module, models.EqualWeights())
    assert torch.equal(module.mix(x)[0], equal.mix(x)[0])
    assert module.gate.weights.tolist() == torch.full((width,), 1 / width).tolist()
    assert not [*module.gate.parameters()]
    estimated = torch.arange(width) / sum(range(width))
    module.load_state_dict({**module.state_dict(), "gate.weights": estimated})
    module.check_parts()  # as when a phase replaces a part
    assert torch.equal(module.mix(x)[1], estimated.expand(4, width))
    torch.testing.assert_close(module.mix(x)[0], replaced(module, models.ConstantGate(estimated.tolist())).mix(x)[0])
    assert has_trained_gate(module) and not has_trained_gate(equal)


PARTS = {  # what is computed before the experts, the experts, and what follows
    "personalized": lambda m: (nn.Identity(), [m.global_expert, m.local_expert], nn.Identity()),
    "clustered": lambda m: (nn.Identity(), [*m.global_experts, m.local_expert], nn.Identity()),
    "representation": lambda m: (nn.Identity(), [m.shared_extractor, m.local_experts[0]], m.header),
    "sparse": lambda m: (m.embedding, m.experts, nn.Identity()),
}


def never(*_):
    raise AssertionError("computed for nothing")


@pytest.mark.parametrize("name", PARTS)
def test_a_constant_gate_of_one_expert_computes_that_alone_and_others_are_mixed(name):
    (make, width), x = MIXTURES[name], torch.randn(4, 5)
    module = make().eval()
    module.mixing = "logits"
    before, experts, after = PARTS[name](module)
    alone = [after(expert(before(x))) for expert in experts]
    for index in range(width):
        held = replaced(module, models.ConstantGate([float(i == index) for i in range(width)]))
        for other, expert in enumerate(PARTS[name](held)[1]):
            if other != index:
                expert.register_forward_pre_hook(never)
        assert torch.equal(held(x), alone[index])
    mixed = replaced(module, models.ConstantGate([0.25, *[0.0] * (width - 2), 0.75]))(x)
    torch.testing.assert_close(mixed, 0.25 * alone[0] + 0.75 * alone[-1])
