"""The sparse mixture: what it computes."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import Embedding, assert_same_bits, blobs, momentum_sgd, phase, run, small_expert, sparse_mixture, tensors
from torch import nn
from torch.nn.parameter import UninitializedParameter

from fedmoe_pl.algorithms import FedMoEDA
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import ConstantGate, ConvBlock, ConvExpert, FedAvgCNN, MixtureWeights, ProxyGate, SparseMoE
from fedmoe_pl.models.mixtures.sparse import dense_experts


def test_a_sample_gets_the_scaled_logits_of_the_expert_with_the_largest_weight_by_which_the_gate_learns():
    module = sparse_mixture(3)
    x = torch.randn(20, 5, dtype=torch.float64)
    z = module.embedding(x)
    exponentials = torch.cat([z @ proxy.weight.T for proxy in module.gate.proxies], 1).exp()
    shares = exponentials / exponentials.sum(1, keepdim=True)
    outputs = torch.stack([expert(z) for expert in module.experts], 1)
    rows, chosen = torch.arange(20), shares.argmax(1)
    assert len(chosen.unique()) > 1, "else the test could not tell experts apart"
    expected = shares[rows, chosen, None] * outputs[rows, chosen]
    scores, weights = module.mix(x)
    torch.testing.assert_close((scores, weights), (expected, shares))
    gradients = (torch.autograd.grad(each.square().sum(), [*module.parameters()]) for each in (scores, expected))
    torch.testing.assert_close(*gradients)


def test_each_expert_computes_its_own_samples_only():
    module = sparse_mixture(3)
    x = torch.randn(20, 5, dtype=torch.float64)
    computed = []
    for expert in module.experts:
        expert.register_forward_pre_hook(lambda _, arguments: computed.append(len(arguments[0])))
    weights = module.mix(x)[1]
    assert computed == [n for n in weights.argmax(1).bincount(minlength=3).tolist() if n]
    computed.clear()
    with dense_experts():
        module.mix(x)
    assert computed == [20, 20, 20]


@pytest.mark.parametrize("gate", [ConstantGate([0.0, 0.5, 0.5]), MixtureWeights()])
def test_a_fixed_gate_has_nothing_to_balance(gate):
    module = SparseMoE(nn.Linear(5, 4), nn.Linear(4, 3), num_experts=3, load_balancing=0.5, gate=gate)
    x, y = torch.randn(6, 5), torch.arange(6) % 3
    loss, metrics = module.loss((x, y))
    assert torch.equal(loss, F.cross_entropy(metrics["logits"], y))


STEPPED = {
    "momentum and decay": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


@pytest.mark.few("0.5-adam", "0.0-momentum and decay")
@pytest.mark.parametrize("optimizer", STEPPED.values(), ids=STEPPED)
@pytest.mark.parametrize("load_balancing", [0.0, 0.5])
def test_sparse_and_dense_experts_make_the_same_steps_with_experts_that_some_batches_leave_out(
    optimizer, load_balancing
):
    sparse = sparse_mixture(4, optimizer, load_balancing=load_balancing)
    dense = copy.deepcopy(sparse)
    steps = sparse.configure_optimizers(), dense.configure_optimizers()
    left_out = set()
    for _ in range(12):
        batch = torch.randn(3, 5, dtype=torch.float64), torch.randint(3, (3,))
        left_out |= {0, 1, 2, 3} - set(sparse.mix(batch[0])[1].argmax(1).tolist())
        loss, metrics = sparse.loss(batch)
        with dense_experts():
            expected, expected_metrics = dense.loss(batch)
        torch.testing.assert_close(metrics, expected_metrics, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for step, value in zip(steps, (loss, expected), strict=True):
            step.zero_grad()
            value.backward()
        for one, other in zip(sparse.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
        for step in steps:
            step.step()
        torch.testing.assert_close(tensors(sparse), tensors(dense), rtol=1e-12, atol=1e-12)
    assert len(left_out) > 1


def test_a_frozen_expert_without_samples_stays_without_a_gradient():
    module = sparse_mixture(4)
    for parameter in module.experts.parameters():
        parameter.requires_grad_(False)
    module.loss((torch.randn(1, 5, dtype=torch.float64), torch.tensor([0])))[0].backward()
    assert all(parameter.grad is None for parameter in module.experts.parameters())


def test_the_balancing_loss_is_the_number_of_experts_times_shares_times_mean_weights():
    batch = torch.randn(9, 5, dtype=torch.float64), torch.randint(3, (9,))
    plain, balanced = sparse_mixture(3), sparse_mixture(3, load_balancing=0.5)
    weights = plain.mix(batch[0])[1]
    shares = [float((weights.argmax(1) == k).sum()) / 9 for k in range(3)]
    balance = 3 * sum(share * weights[:, k].mean().item() for k, share in enumerate(shares))
    assert (balanced.loss(batch)[0] - plain.loss(batch)[0]).item() == pytest.approx(0.5 * balance, rel=1e-12)
    total = plain.loss(batch)[0] + 0.5 * 3 * (torch.tensor(shares) * plain.mix(batch[0])[1].mean(0)).sum()
    expected = torch.autograd.grad(total, [*plain.parameters()])
    torch.testing.assert_close(torch.autograd.grad(balanced.loss(batch)[0], [*balanced.parameters()]), expected)


def test_experts_are_drawn_independently_and_proxies_as_a_linear_layer():
    module = SparseMoE(ConvBlock(), ConvExpert(hidden=8), num_experts=3)
    first, second, third = (torch.cat([p.flatten() for p in expert.parameters()]) for expert in module.experts)
    for a, b in ((first, second), (first, third), (second, third)):
        assert not (a == b).any()
        assert abs(F.cosine_similarity(a, b, dim=0)) < 0.05
        assert 0.95 < a.std() / b.std() < 1.05
    for proxy in module.gate.proxies:
        assert 0.95 < proxy.weight.abs().max() * math.sqrt(6272) <= 1  # uniform up to 1 / sqrt(fan in)


def test_one_expert_and_its_embedding_are_the_paper_s_network():
    for channels, size in ((3, 32), (1, 28)):
        block = ConvBlock(channels, image_size=size)
        module = SparseMoE(block, ConvExpert(image_size=block.output_shape[1]), num_experts=1)
        network = FedAvgCNN(channels, image_size=size)
        for own, part in ((block, network.extractor[0]), (module.expert.extractor, network.extractor[3])):
            next(layer for layer in own.modules() if isinstance(layer, nn.Conv2d)).load_state_dict(part.state_dict())
        module.expert.classifier.load_state_dict(network.classifier.state_dict())
        x = torch.randn(2, channels, size, size)
        torch.testing.assert_close(module(x), network(x))  # one expert has a weight of 1
        gate = math.prod(block.output_shape)
        total = sum(parameter.numel() for parameter in module.parameters())
        assert total - gate == sum(parameter.numel() for parameter in network.parameters())


def test_a_client_with_fewer_experts_mixes_those_by_their_constant_weights():
    module = sparse_mixture(3)
    x = torch.randn(4, 5, dtype=torch.float64)
    outputs = [expert(module.embedding(x)) for expert in module.experts]
    module.gate = ConstantGate([0.125, 0.375, 0.5])
    module.keep_architecture(2)
    torch.testing.assert_close(module(x), 0.25 * outputs[0] + 0.75 * outputs[1])
    module.keep_architecture(1)
    torch.testing.assert_close(module(x), outputs[0])


def test_a_client_with_fewer_experts_keeps_the_first_ones_under_their_names():
    module = sparse_mixture([1, 3])
    whole = tensors(module)
    assert [module.client_architecture(client) for client in range(5)] == [1, 3, 1, 3, 1]
    module.keep_architecture(1)
    state = tensors(module)
    assert_same_bits(state, {name: whole[name] for name in state})
    assert {name for name in whole if name not in state} == {
        name for name in whole if name.startswith(("experts.1.", "experts.2.", "gate.proxies.1.", "gate.proxies.2."))
    }
    assert module.client_architecture(1) == 1


def test_experts_that_get_whole_batches_may_have_batch_normalization():
    expert = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    module = SparseMoE(Embedding(), expert, gate=MixtureWeights())
    assert module.mix(torch.randn(4, 5))[0].shape == (4, 3)
    module.gate = ProxyGate(4)
    with pytest.raises(InvalidArgumentError) as error:
        module.check_parts()
    assert error.value.argument == "expert"


def test_the_gate_of_an_embedding_that_tells_no_shape_is_sized_by_the_data(tmp_path):
    module = SparseMoE(nn.Sequential(nn.Linear(5, 6)), small_expert(), optimizer=momentum_sgd)
    assert isinstance(module.gate.proxies[0].weight, UninitializedParameter)
    federation = run([phase("DA", FedMoEDA(top_p=1))], module, blobs(dtype=torch.float32), tmp_path)
    assert federation.client_module("DA", 0).gate.in_features == 6
