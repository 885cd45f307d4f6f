"""Mixtures of clusters, of all clients' classifiers, and of representations: what they compute."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert
from helpers.clusters import GateNet, clustered
from helpers.models import count, samples
from helpers.pfedmoe import model, narrow, network
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl import models
from fedmoe_pl.models.gates import SwitchNormGate

# Clusters


def test_the_mixture_is_the_weighted_sum_of_probabilities_with_the_local_expert_last():
    module = clustered(2, gate=models.NetworkGate(GateNet(3)))
    x = torch.randn(7, 5, dtype=torch.float64)
    scores, weights = module.mix(x)
    expected_weights = F.softmax(module.gate.network(x), dim=1)
    experts = [*module.global_experts, module.local_expert]
    expected = sum(expected_weights[:, [i]] * F.softmax(expert(x), dim=1) for i, expert in enumerate(experts))
    torch.testing.assert_close(weights, expected_weights)
    torch.testing.assert_close(scores.exp(), expected)


def test_all_experts_are_drawn_independently():
    given = Expert().double()
    module = clustered(3, expert=given)
    experts = [given, *module.global_experts, module.local_expert]
    for name in ("extractor.1.weight", "extractor.1.bias", "classifier.1.weight", "classifier.1.bias"):
        values = torch.cat([expert.get_parameter(name).flatten() for expert in experts])
        assert len(values.unique()) == len(values), name


def test_clusters_that_share_fc_are_equal_except_for_the_weights_of_convolutions():
    torch.manual_seed(0)
    module = models.ClusteredMoE(models.LEAFCNN(), 3, clusters_share_fc=True)
    for name, first in module.global_experts[0].named_parameters():
        others = [expert.get_parameter(name) for expert in module.global_experts[1:]]
        drawn = name in ("extractor.0.weight", "extractor.3.weight")
        assert [torch.equal(first, other) for other in others] == [not drawn] * 2, name
        assert not drawn or not torch.equal(*others)
    first, local = module.global_experts[0].classifier, module.local_expert.classifier
    assert not torch.equal(first[3].weight, local[3].weight), "the local expert is drawn by itself"
    shared = [tensor.data_ptr() for expert in module.global_experts for tensor in expert.parameters()]
    assert len(set(shared)) == len(shared), "they are copies, which training may tell apart"


def test_the_logged_weight_of_the_global_experts_is_that_of_all_of_them(tmp_path):
    gate = models.ConstantGate([0.2, 0.3, 0.5])
    module = models.ClusteredMoE(models.SmallMLP(5, 4, 3), 2, gate=gate)
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    data = DataLoader(TensorDataset(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)))
    (found,) = trainer.test(module, data, verbose=False)
    assert found["test_gate/global_expert"] == pytest.approx(0.5)


# Pools of classifiers, and the gate of PM-MoE


def pooled(num_experts=3, gate=None, **kwargs) -> models.PooledMoE:
    torch.manual_seed(0)
    module = models.PooledMoE(Expert(), num_experts, gate, **kwargs).double().eval()
    for classifier in module.pool:
        classifier[1].reset_parameters()
    return module


class Given(models.EqualWeights):
    """A gate that gives every sample the same weights, whatever they add up to."""

    def fit_to(self, num_experts):
        self.weights = [0.2, 0.5, 0.3]


def test_the_largest_weights_are_used_as_they_are_and_the_others_are_0():
    x = samples()[0].double()
    module = pooled(gate=Given(), top_k=2)
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
        module = models.PooledMoE(Expert(), number, models.MLPGate(number, 6, dropout=0.0), k)
        torch.testing.assert_close(module(x), module.local_expert(x))


def test_a_gate_of_one_classifier_is_that_classifier_on_the_own_features():
    x = samples()[0].double()
    for gate, index in ((models.GlobalOnly(), 0), (models.LocalOnly(), 2)):
        module = pooled(gate=gate)
        torch.testing.assert_close(module(x), module.pool[index](module.local_expert.extractor(x)))


def assert_orthogonal(layer):
    rows = layer.weight if len(layer.weight) <= layer.weight.shape[1] else layer.weight.T
    torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)).to(rows), rtol=0, atol=1e-5)


def test_the_gate_is_a_perceptron_of_orthogonal_layers_which_it_draws_anew():
    gate = models.MLPGate(4, 6, dropout=0.0).double()
    assert count(gate) == 7 * 128 + 129 * 256 + 257 * 128 + 129 * 4
    layers = [layer for layer in gate.layers if isinstance(layer, nn.Linear)]
    first, z = [layer.weight.clone() for layer in layers], torch.randn(5, 6, dtype=torch.float64)
    h = layers[0](z).relu()
    for layer in layers[1:3]:
        h = F.leaky_relu(layer(h))
    torch.testing.assert_close(gate(z), layers[3](h).softmax(1))
    gate.reset_parameters()
    for layer, before in zip(layers, first, strict=True):
        assert not torch.equal(layer.weight, before)
        assert_orthogonal(layer)


def test_a_gate_that_is_sized_by_its_input_reads_the_features_or_the_input():
    for reads_features, width in ((True, 64), (False, 256)):
        module = models.PooledMoE(models.SmallMLP(256), 3, models.MLPGate(3, reads_features=reads_features))
        assert module.gate.in_features == width
        module.gate.reset_parameters()
        assert_orthogonal(module.gate.layers[0])


# Representations


def by_hand(module: models.RepresentationMoE, x, weights, architecture=0):
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


def test_a_gate_that_reads_features_reads_the_shared_representation():
    module = model(models.FeatureGate(2))
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
    module = models.RepresentationMoE(
        models.CNN(5), [models.CNN(variant) for variant in (1, 2, 3, 4, 5)], gate=SwitchNormGate()
    )
    for architecture, size in enumerate((2621558, 1815142, 1320558, 1060358, 670058)):
        own = copy.deepcopy(module)
        own.keep_architecture(architecture)
        assert sum(p.numel() for p in own.parameters()) == (670058 - 5010) + size + 160004


def test_experts_given_are_not_changed_and_not_shared():
    expert = network(4)
    module = models.RepresentationMoE(expert, [expert, expert])
    assert isinstance(expert.classifier, nn.Linear)
    parts = (module.shared_extractor, *module.local_experts, module.header)
    assert len({id(p) for part in parts for p in part.parameters()}) == 4 * 3 + 2
