"""The mixture of all clients' classifiers, and the gate of PM-MoE."""

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert
from helpers.models import count, samples
from torch import nn

from fedmoe_pl.models import EqualWeights, GlobalOnly, LocalOnly, MLPGate, PooledMoE, SmallMLP


def pooled(num_experts=3, gate=None, **kwargs) -> PooledMoE:
    torch.manual_seed(0)
    module = PooledMoE(Expert(), num_experts, gate, **kwargs).double().eval()
    for classifier in module.pool:
        classifier[1].reset_parameters()
    return module


class Given(EqualWeights):
    """A gate that gives every sample the same weights, whatever they add up to."""

    def __init__(self, *weights):
        super().__init__()
        self.weights = [*weights]

    def fit_to(self, num_experts):
        pass


def test_the_largest_weights_are_used_as_they_are_and_the_others_are_0():
    x = samples()[0].double()
    module = pooled(gate=Given(0.2, 0.5, 0.3), top_k=2)
    logits, weights = module.mix(x)
    features = module.local_expert.extractor(x)
    torch.testing.assert_close(logits, 0.5 * module.pool[1](features) + 0.3 * module.pool[2](features))
    torch.testing.assert_close(weights[0], torch.tensor([0.0, 0.5, 0.3]).double(), check_dtype=False)
    module.top_k = None
    everything = logits + 0.2 * module.pool[0](features)
    torch.testing.assert_close(module(x), everything)


@pytest.mark.parametrize("top_k", [None, 3])
def test_equal_classifiers_or_a_pool_of_one_are_the_expert_itself(top_k):
    x = samples()[0]
    for number, k in ((3, top_k), (1, None)):
        module = PooledMoE(Expert(), number, MLPGate(number, 6, dropout=0.0), k)
        torch.testing.assert_close(module(x), module.local_expert(x))


def test_a_gate_of_one_classifier_is_that_classifier_on_the_own_features():
    x = samples()[0].double()
    for gate, index in ((GlobalOnly(), 0), (LocalOnly(), 2)):
        module = pooled(gate=gate)
        torch.testing.assert_close(module(x), module.pool[index](module.local_expert.extractor(x)))


def test_the_gate_is_a_perceptron_of_orthogonal_layers_which_it_draws_anew():
    gate = MLPGate(4, 6, dropout=0.0).double()
    assert count(gate) == 7 * 128 + 129 * 256 + 257 * 128 + 129 * 4
    first = [layer.weight.clone() for layer in gate.layers if isinstance(layer, nn.Linear)]
    z = torch.randn(5, 6, dtype=torch.float64)
    p = dict(gate.layers.named_parameters())
    h = F.relu(F.linear(z, p["0.weight"], p["0.bias"]))
    h = F.leaky_relu(F.linear(h, p["3.weight"], p["3.bias"]))
    h = F.leaky_relu(F.linear(h, p["6.weight"], p["6.bias"]))
    torch.testing.assert_close(gate(z), F.linear(h, p["9.weight"], p["9.bias"]).softmax(1))
    gate.reset_parameters()
    for layer, before in zip((layer for layer in gate.layers if isinstance(layer, nn.Linear)), first, strict=True):
        assert not torch.equal(layer.weight, before)
        rows = layer.weight if len(layer.weight) <= layer.weight.shape[1] else layer.weight.T
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)).double(), rtol=0, atol=1e-6)


def test_a_gate_that_is_sized_by_its_input_reads_the_features_or_the_input():
    for reads_features, width in ((True, 64), (False, 256)):
        module = PooledMoE(SmallMLP(256), 3, MLPGate(3, reads_features=reads_features))
        assert module.gate.in_features == width
        module.gate.reset_parameters()
        weight = module.gate.layers[0].weight
        rows = weight if len(weight) <= weight.shape[1] else weight.T
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), rtol=0, atol=1e-5)
