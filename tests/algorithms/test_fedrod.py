"""FedRoD against a bare loop of PyTorch, and its limits."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, assert_same_bits, client_generator, mixture, momentum_sgd, phase, run, tensors
from helpers.prototypes import SIZES, without_a_class

from fedmoe_pl import Evaluate, Select, Train
from fedmoe_pl.algorithms import FedRoD, Local
from fedmoe_pl.backends import TrainerBackend


def train_by_turns(model, head, x, y, counts, batches, exponent):
    """A client's round with two optimizers: a step of extractor and generic head, then one of the personal head."""
    optimizers = momentum_sgd(model.parameters()), momentum_sgd(head.parameters())
    for _ in range(2):
        for x, y in batches:
            features = model.extractor(x)
            generic = model.classifier(features)
            exp = counts**exponent * (generic - generic.max()).exp()  # the balanced softmax as a fraction
            losses = [-(exp[range(len(y)), y] / exp.sum(1)).log().mean()]
            losses.append(F.cross_entropy(generic.detach() + head(features.detach()), y))
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


@pytest.mark.few("0.5")
@pytest.mark.parametrize("exponent", [1.0, 0.5])
def test_two_rounds_equal_a_loop_with_two_optimizers(exponent, tmp_path):
    """Another phase goes on with the heads."""
    data, again = without_a_class(), phase("again", FedRoD(), start="it", train=Train(max_epochs=0))
    fed = run([phase("it", FedRoD(exponent), rounds=2), again], mixture(), data, tmp_path, seed=3)
    server = mixture().global_expert
    heads = [copy.deepcopy(server.classifier) for _ in SIZES]
    for round in range(2):
        models = [copy.deepcopy(server) for _ in SIZES]
        for client, (model, head) in enumerate(zip(models, heads, strict=True)):
            samples = data.train_samples[client]
            counts = torch.stack([(data.y[samples] == c).sum() for c in range(3)]).double()
            assert counts[client] == 0 and counts.sum() == SIZES[client]
            batches = data.batches(samples, generator=client_generator(3, client, round))
            train_by_turns(model, head, data.x, data.y, counts, batches, exponent)
        for name, parameter in server.state_dict().items():
            parameter.copy_(sum(n * m.state_dict()[name] for n, m in zip(SIZES, models, strict=True)) / sum(SIZES))
    for client, head in enumerate(heads):
        module = fed.client_module("it", client)
        torch.testing.assert_close(tensors(module.global_expert), tensors(server), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(tensors(module.local_expert.classifier), tensors(head), rtol=1e-10, atol=1e-10)
        kept = fed.client_module("again", client).local_expert.classifier
        assert_same_bits(tensors(kept), tensors(module.local_expert.classifier))
        z = server.extractor(data.x)
        torch.testing.assert_close(2 * module(data.x), server.classifier(z) + head(z), rtol=1e-9, atol=1e-9)


def test_a_loss_of_the_model_takes_the_place_of_both_cross_entropies():
    weight, data = torch.tensor([1.0, 5.0, 25.0], dtype=torch.float64), without_a_class()
    module, counts = mixture(), torch.tensor([4.0, 2.0, 3.0]).double()
    module.criterion = torch.nn.CrossEntropyLoss(weight)
    features = module.global_expert.extractor(data.x)
    generic, head = module.global_expert.classifier(features), module.local_expert.classifier(features)
    expected = 0.0
    for scores in (generic + counts.log(), generic + head):
        likelihoods = scores.softmax(1)[range(len(data.y)), data.y]
        expected -= (weight[data.y] * likelihoods.log()).sum() / weight[data.y].sum()
    actual = FedRoD().client_loss(module, (data.x, data.y), {"counts": counts})
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


SELECTED = {"select": Select("global_test"), "evaluate": True}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "arguments", [{}, SELECTED, {**SELECTED, "server_optimizer": partial(torch.optim.Adam, lr=0.1)}]
)
def test_a_client_without_a_head_of_its_own_predicts_as_the_generic_model_also_in_a_later_phase(arguments, tmp_path):
    """Also if the models are those of a selected round."""
    phases = [
        phase("it", FedRoD(), rounds=4, clients_per_round=1, **arguments),
        phase("later", Local(), train=Train(max_epochs=0), start="it"),
    ]
    fed = run(phases, mixture(optimizer=partial(torch.optim.SGD, lr=3.0)), without_a_class(), tmp_path)
    state = fed.run.states["it"]
    assert 1 <= len(state.clients) < 3 and (not arguments or state.best_round < state.round)
    for client in range(3):
        module, later = (fed.client_module(name, client) for name in ("it", "later"))
        assert_same_bits(tensors(later), tensors(module))
        assert_same_bits(tensors(module.local_expert.extractor), tensors(module.global_expert.extractor))
        heads = [tensors(expert.classifier) for expert in (module.local_expert, module.global_expert)]
        assert torch.equal(heads[0]["1.weight"], heads[1]["1.weight"]) == (client not in state.clients)


def test_after_local_training_a_client_uses_the_extractor_that_it_trained(tmp_path):
    it = phase("it", FedRoD(), rounds=2, evaluate=Evaluate(after="both"))
    fed = run([it], mixture(), without_a_class(), tmp_path, backend=TrainerBackend())
    for client in range(3):
        after = fed.client_module("it after local training", client)
        assert_same_bits(tensors(after.local_expert.extractor), tensors(after.global_expert.extractor))
        before = fed.client_module("it", client)
        assert_same_bits(tensors(after.local_expert.classifier), tensors(before.local_expert.classifier))
        assert not torch.equal(after.local_expert.extractor[1].weight, before.local_expert.extractor[1].weight)


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_a_model_may_know_more_classes_than_the_data_have(exponent, tmp_path):
    """With exponent 0, they have the prior of all others; otherwise none, and their outputs are not trained."""
    more = mixture(expert=Expert(classes=5))
    before = more.global_expert.classifier[1].bias.detach().clone()
    fed = run([phase("it", FedRoD(exponent), rounds=2)], more, without_a_class(), tmp_path)
    moved = fed.client_module("it", 0).global_expert.classifier[1].bias != before
    assert moved.tolist() == [True] * 3 + [exponent == 0] * 2
