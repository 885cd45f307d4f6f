"""Mixtures of the representations of a shared and a local extractor."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.pfedmoe import model, narrow, network
from torch import nn

from fedmoe_pl.models import CNN, ConstantGate, FeatureGate, RepresentationMoE
from fedmoe_pl.models.gates import SwitchNormGate


def by_hand(module: RepresentationMoE, x, weights, architecture=0):
    """The mixture written down layer by layer."""
    parameters = module.state_dict()

    def extractor(prefix):
        hidden = F.relu(x @ parameters[f"{prefix}.extractor.1.weight"].T + parameters[f"{prefix}.extractor.1.bias"])
        return F.relu(hidden @ parameters[f"{prefix}.extractor.3.weight"].T + parameters[f"{prefix}.extractor.3.bias"])

    shared, local = extractor("shared_extractor"), extractor(f"local_experts.{architecture}")
    mixed = weights[:, :1] * shared + weights[:, 1:] * local
    return mixed @ parameters["header.weight"].T + parameters["header.bias"]


@pytest.mark.parametrize("architecture", [0, 1, 2])
def test_the_header_reads_the_weighted_sum_of_both_representations(architecture):
    module = narrow(architecture)
    x = torch.randn(7, 5, dtype=torch.float64)
    logits, weights = module.mix(x)
    g = torch.sigmoid(x @ module.gate.linear.weight[0] + module.gate.linear.bias)
    torch.testing.assert_close(weights, torch.stack((g, 1 - g), dim=1))
    torch.testing.assert_close(logits, by_hand(module, x, weights, architecture))
    mixed, shared, local = module.representations(x)
    torch.testing.assert_close(mixed, g[:, None] * shared + (1 - g[:, None]) * local)
    torch.testing.assert_close(module.header(mixed), logits)


class Counts(nn.Module):
    """Counts its calls."""

    def __init__(self, part):
        super().__init__()
        self.part, self.calls = part, 0

    def forward(self, x):
        self.calls += 1
        return self.part(x)


@pytest.mark.parametrize(("weight", "calls"), [(1.0, (1, 0)), (0.0, (0, 1)), (0.5, (1, 1)), ([0.0, 1.0], (0, 1))])
def test_a_constant_gate_of_0_or_1_is_one_extractor_and_the_other_is_not_computed(weight, calls):
    module = model(ConstantGate(weight))
    x = torch.randn(4, 5, dtype=torch.float64)
    alone = {1.0: module.shared_extractor(x), 0.0: module.local_experts[0](x)}
    module.shared_extractor, module.local_experts[0] = Counts(module.shared_extractor), Counts(module.local_experts[0])
    logits, weights = module.mix(x)
    assert (module.shared_extractor.calls, module.local_experts[0].calls) == calls
    expected = by_hand(model(), x, weights)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    if calls != (1, 1):
        assert torch.equal(logits, module.header(alone[float(weights[0, 0])]))


def test_a_gate_that_reads_features_reads_the_shared_representation():
    module = model(FeatureGate(2))
    x = torch.randn(4, 5, dtype=torch.float64)
    shared = module.shared_extractor(x)
    assert torch.equal(module.mix(x)[1], module.gate(shared))


def test_clients_have_architectures_in_turn_or_as_given_and_nothing_of_the_others():
    module = model()
    assert [module.client_architecture(client) for client in range(5)] == [0, 1, 2, 0, 1]
    given = model(architectures=[2, 2, 0])
    assert [given.client_architecture(client) for client in range(3)] == [2, 2, 0]
    own = narrow(1)
    assert {name.split(".")[1] for name in own.state_dict() if name.startswith("local")} == {"1"}
    sizes = sum(p.numel() for p in own.parameters())
    assert sizes == (5 * 2 + 2 + 2 * 2 + 2) + (5 * 4 + 4 + 4 * 2 + 2) + (2 * 3 + 3) + (5 + 1)  # G, F, header, gate


def test_pfedmoes_networks_have_its_papers_sizes():
    """By the paper: the networks without a header of 5010 parameters, the header, and a gate of 160,004."""
    module = RepresentationMoE(CNN(5), [CNN(variant) for variant in (1, 2, 3, 4, 5)], gate=SwitchNormGate())
    for architecture, size in enumerate((2621558, 1815142, 1320558, 1060358, 670058)):
        own = copy.deepcopy(module)
        own.keep_architecture(architecture)
        assert sum(p.numel() for p in own.parameters()) == (670058 - 5010) + size + 160004


def test_experts_given_are_not_changed_and_not_shared():
    expert = network(4)
    module = RepresentationMoE(expert, [expert, expert])
    assert isinstance(expert.classifier, nn.Linear)
    parts = (module.shared_extractor, *module.local_experts, module.header)
    assert len({id(p) for part in parts for p in part.parameters()}) == 4 * 3 + 2
