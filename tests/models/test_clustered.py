"""Mixtures of the models of several clusters and a local expert."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert
from helpers.clusters import GateNet, clustered, only
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl.models import LEAFCNN, ClusteredMoE, ConstantGate, NetworkGate, SmallMLP


def test_the_mixture_is_the_weighted_sum_of_probabilities_with_the_local_expert_last():
    module = clustered(2, gate=NetworkGate(GateNet(3)))
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
    module = ClusteredMoE(LEAFCNN(), 3, clusters_share_fc=True)
    for name, first in module.global_experts[0].named_parameters():
        others = [expert.get_parameter(name) for expert in module.global_experts[1:]]
        drawn = name in ("extractor.0.weight", "extractor.3.weight")
        assert [torch.equal(first, other) for other in others] == [not drawn] * 2, name
        assert not drawn or not torch.equal(*others)
    first, local = module.global_experts[0].classifier, module.local_expert.classifier
    assert not torch.equal(first[3].weight, local[3].weight), "the local expert is drawn by itself"
    shared = [tensor.data_ptr() for expert in module.global_experts for tensor in expert.parameters()]
    assert len(set(shared)) == len(shared), "they are copies, which training may tell apart"


def test_a_gate_held_at_one_expert_gives_exactly_it_and_computes_no_other():
    module = clustered(3, mixing="logits")
    x = torch.randn(4, 5, dtype=torch.float64)
    alone = [expert(x) for expert in (*module.global_experts, module.local_expert)]
    calls = Counter()
    for index, expert in enumerate((*module.global_experts, module.local_expert)):
        expert.register_forward_hook(lambda *_, index=index: calls.update([index]))
    for index in range(4):
        module.gate = only(index)
        assert torch.equal(module(x), alone[index])
    assert calls == {0: 1, 1: 1, 2: 1, 3: 1}
    module.gate = ConstantGate([0.25, 0.0, 0.75, 0.0])
    torch.testing.assert_close(module(x), 0.25 * alone[0] + 0.75 * alone[2])
    assert calls == {0: 2, 1: 1, 2: 2, 3: 1}


def test_the_logged_weight_of_the_global_experts_is_that_of_all_of_them(tmp_path):
    gate = ConstantGate([0.2, 0.3, 0.5])
    module = ClusteredMoE(SmallMLP(5, 4, 3), 2, gate=gate)
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    data = DataLoader(TensorDataset(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)))
    (found,) = trainer.test(module, data, verbose=False)
    assert found["test_gate/global_expert"] == pytest.approx(0.5)
