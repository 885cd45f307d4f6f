"""PM-MoE: a pool of all clients' classifiers, sent once, under a gate of each client's own."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, client_generator, methods, mixture, tensors
from helpers.methods import pooled
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, PMMoE
from fedmoe_pl.models import EqualWeights, GlobalOnly, LocalOnly, MLPGate
from fedmoe_pl.trees import subtree

fedper = partial(methods.fedper, clients_per_round=None)
POOL = 3 * 21  # 6 features, 3 classes, a classifier for each of three clients


def pm_moe(**kwargs) -> Phase:
    return Phase("PM-MoE", PMMoE(), **{"start": "FedPer", "train": Train(max_epochs=2), "model": pooled(3), **kwargs})


def fitted(path, *phases, sizes=(13, 8, 11), ckpt_path=None, **kwargs):
    run = federation(path, [*phases] or [fedper(), pm_moe()], **kwargs)
    run.fit(mixture(), blobs(sizes), ckpt_path=ckpt_path)
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("whole"))


def test_each_gate_equals_a_bare_loop_over_the_classifiers_of_all_clients(whole):
    data = blobs()
    experts = [tensors(whole.client_module("FedPer", client), "local_expert.") for client in range(3)]
    heads = [(e["local_expert.classifier.1.weight"], e["local_expert.classifier.1.bias"]) for e in experts]
    weight, bias = experts[0]["local_expert.extractor.1.weight"], experts[0]["local_expert.extractor.1.bias"]

    def logits(gate, x):
        z = F.linear(x, weight, bias).tanh()
        g = gate(z)
        threshold = g.sort(1).values[:, 1:2]  # the second largest of three
        g = torch.where(g >= threshold, g, 0)
        return sum(g[:, j : j + 1] * F.linear(z, *heads[j]) for j in range(3))

    for client in range(3):
        gate = MLPGate(3, 6, dropout=0.0).double()
        generator = client_generator(0, client, 2)  # after the two rounds of FedPer
        gate.reset_parameters()
        for _ in range(2):
            for x, y in data.batches(data.train_samples[client], generator=generator):
                gradients = torch.autograd.grad(F.cross_entropy(logits(gate, x), y), [*gate.parameters()])
                with torch.no_grad():
                    for parameter, gradient in zip(gate.parameters(), gradients, strict=True):
                        parameter -= 0.1 * gradient
        module = whole.client_module("PM-MoE", client)
        torch.testing.assert_close(tensors(module.gate), tensors(gate), rtol=0, atol=1e-10)
        torch.testing.assert_close(module(data.x[:9]), logits(gate, data.x[:9]), rtol=0, atol=1e-10)
        assert_same_bits(tensors(module, "local_expert."), experts[client])


def test_each_client_sends_its_classifier_and_receives_all_of_them_and_nothing_is_aggregated(whole):
    state = whole.run.states["PM-MoE"]
    assert set(state.server) == {f"pool.{i}.1.{name}" for i in range(3) for name in ("weight", "bias")}
    assert (state.traffic["parameters_up"], state.traffic["parameters_down"]) == (POOL, 3 * POOL)
    for client in range(3):
        own = tensors(whole.client_module("FedPer", client).local_expert.classifier)
        assert_same_bits(subtree(state.server, f"pool.{client}."), own)
        assert {name.split(".")[0] for name in state.clients[client]} == {"gate", "local_expert"}


def test_newcomers_receive_the_pool_and_train_a_gate(whole, tmp_path):
    later = federation(tmp_path, [fedper(), pm_moe()])
    later.personalize(mixture(), blobs((9, 6, 7, 5)), str(whole.run_dir / "checkpoints/last.ckpt"), rounds=1)
    assert_same_bits(later.run.states["PM-MoE"].server, whole.run.states["PM-MoE"].server)
    gates = [tensors(later.client_module("PM-MoE", client).gate)["layers.0.weight"] for client in range(4)]
    assert not torch.equal(gates[0], gates[1])
    for client in range(4):
        module = later.client_module("PM-MoE", client)
        assert_same_bits(
            subtree(dict(module.state_dict()), "pool."), subtree(whole.run.states["PM-MoE"].server, "pool.")
        )
        own = tensors(later.client_module("FedPer", client), "local_expert.")
        assert_same_bits(tensors(module, "local_expert."), own)


REFUSED = {
    "PMMoE: model is a PersonalizedMoE, but must be a PooledMoE.": [fedper(), pm_moe(model=None)],
    "PooledMoE: num_experts is 4, but must be num_clients, 3.": [fedper(rounds=1), pm_moe(model=pooled(4))],
    "start is 'FedPer', but must be a phase that trains local_expert.classifier.* and does not share it": [
        Phase("FedPer", FedAvg("local_expert.*"), gate=LocalOnly()),
        pm_moe(),
    ],
    "PMMoE: no client kept local_expert.classifier.*; `start` must be": [
        Phase("FedPer", FedAvg("global_expert.*"), gate=GlobalOnly()),
        pm_moe(),
    ],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_has_no_pool_of_trained_classifiers_is_refused(tmp_path, sentence):
    with pytest.raises(MisconfigurationException) as refusal:
        fitted(tmp_path, *REFUSED[sentence])
    assert sentence in str(refusal.value)


def test_equal_weights_are_an_ensemble_that_needs_no_training(tmp_path):
    run = fitted(tmp_path, fedper(), pm_moe(gate=EqualWeights(), model=pooled(3, top_k=None)))
    x, module = blobs().x, run.client_module("PM-MoE", 1)
    features = module.local_expert.extractor(x)
    torch.testing.assert_close(module(x), sum(head(features) for head in module.pool) / 3)


def test_nothing_is_aggregated_so_that_models_are_those_after_local_training(whole):
    state = whole.run.states["PM-MoE"]
    assert [evaluation.evaluation_point for evaluation in state.evaluations] == ["after local training"]
    assert not any(name.startswith("trained/") for tree in state.clients.values() for name in tree), "kept once"
