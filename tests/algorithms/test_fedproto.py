"""FedProto against a bare loop of PyTorch, and its limits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, client_generator, mixture, momentum_sgd, phase, run, tensors
from helpers.prototypes import OWN_CLASSES, SIZES, without_a_class

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedProto
from fedmoe_pl.models import GlobalOnly, LocalOnly, PersonalizedMoE

MEAN, COUNT, KNOWN = "prototypes/mean", "prototypes/count", "prototypes/known"


def of_two_architectures():
    """Clients 0 and 2 have a local expert of one kind, client 1 of another; all have six features."""
    torch.manual_seed(2)
    deep = Expert()
    deep.extractor.insert(1, torch.nn.Linear(5, 5))
    return PersonalizedMoE(Expert(), [Expert(), deep], LocalOnly(), optimizer=momentum_sgd).double()


def train_with_prototypes(model, batches, prototypes, weight):
    """The official code's loss: the target of a sample whose class has no prototype is its own feature vector."""
    optimizer = momentum_sgd(model.parameters())
    for _ in range(2):
        for x, y in batches:
            features = model.extractor(x)
            target = features.detach().clone()
            for row, label in enumerate(y.tolist()):
                target[row] = prototypes.get(label, target[row])
            loss = F.cross_entropy(model.classifier(features), y) + weight * F.mse_loss(features, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def mean_features(model, x, y):
    with torch.no_grad():
        return {label: model.extractor(x[y == label]).mean(0) for label in y.unique().tolist()}


def mean_over_clients(of_clients):
    labels = {label for of_client in of_clients for label in of_client}
    having = {label: [means[label] for means in of_clients if label in means] for label in labels}
    return {label: sum(means) / len(means) for label, means in having.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("expert", ["global_expert", "local_expert"])
def test_three_rounds_equal_a_loop_with_the_official_loss(expert, tmp_path):
    data, weight = without_a_class(), 0.7
    model = mixture() if expert == "global_expert" else of_two_architectures()
    it = phase("it", FedProto(expert, weight), rounds=3)
    fed = run([it], copy.deepcopy(model), data, tmp_path, seed=3)
    if expert == "global_expert":
        models = [copy.deepcopy(model.global_expert) for _ in SIZES]
    else:
        models = [copy.deepcopy(model.local_expert[client % 2]) for client in range(3)]
    prototypes = {}
    for round in range(3):
        of_clients = []
        for client, own in enumerate(models):
            samples = data.train_samples[client]
            batches = data.batches(samples, generator=client_generator(3, client, round))
            train_with_prototypes(own, batches, prototypes, weight)
            of_clients.append(mean_features(own, data.x[samples], data.y[samples]))
        prototypes = mean_over_clients(of_clients)
    server = fed.run.states["it"].server
    for label, prototype in prototypes.items():
        torch.testing.assert_close(server[MEAN][label], prototype, rtol=1e-10, atol=1e-10)
    assert server[KNOWN].all() and {*server} == {MEAN, KNOWN}  # not how many clients have a class
    for client, own in enumerate(models):
        trained = fed.client_module("it", client).get_submodule(expert)
        trained = trained if expert == "global_expert" else trained.expert
        torch.testing.assert_close(tensors(trained), tensors(own), rtol=1e-10, atol=1e-10)


def test_a_class_that_no_client_of_a_round_has_keeps_its_prototype(tmp_path):
    """With one client per round, each round has two of the three classes."""
    before = {}
    for rounds in range(1, 5):
        it = phase("it", FedProto(), rounds=rounds, clients_per_round=1)
        server = run([it], mixture(), without_a_class(), tmp_path / str(rounds), seed=1).run.states["it"].server
        if rounds == 1:
            (absent,) = [c for c in range(3) if not server[KNOWN][c]]
            assert not server[MEAN][absent].any()
        else:
            kept = [c for c in range(3) if torch.equal(server[MEAN][c], before[MEAN][c])]
            assert len(kept) == 1
        before = server
    assert server[KNOWN].all()


def test_prototypes_predict_the_nearest_among_the_client_s_own_classes(tmp_path):
    data = without_a_class()
    it = Phase("it", FedProto(prediction="prototype"), rounds=2, gate=GlobalOnly())
    fed = run([it], mixture(), data, tmp_path)
    prototypes = fed.run.states["it"].server[MEAN]
    x, y = data.x[data.global_test], data.y[data.global_test]
    for client, classes in enumerate(OWN_CLASSES):
        features = fed.client_module("it", client).global_expert.extractor(x)
        distances = ((features[:, None] - prototypes[classes]) ** 2).sum(2)
        nearest = torch.tensor(classes)[distances.argmin(1)]
        right = (nearest == y).double().mean().item()
        assert fed.results["it"].clients[client].global_test == pytest.approx(right, abs=1e-6)
        assert not torch.equal(nearest, prototypes.sub(features[:, None]).square().sum(2).argmin(1))


def test_the_loss_of_a_class_that_a_client_cannot_predict_is_finite(tmp_path):
    """Client 0 has no training sample of class 0."""
    it = phase("it", FedProto(prediction="prototype"), rounds=2, gate=GlobalOnly())
    fed = run([it], mixture(), without_a_class(), tmp_path)
    x, y = fed.run.datamodule.x, fed.run.datamodule.y
    with torch.inference_mode():
        scores = fed.run.client_predictor("it", 0)(x)
    losses = F.cross_entropy(scores, y, reduction="none")
    assert (losses[y == 0] >= 100).all() and (losses[y == 0] < 102).all()
    features = fed.client_module("it", 0).global_expert.extractor(x)
    distances = torch.cdist(features, fed.run.states["it"].server[MEAN][1:])
    torch.testing.assert_close(losses[y > 0], F.cross_entropy(-distances, (y - 1).clamp(0), reduction="none")[y > 0])


def test_a_client_without_a_prototype_of_its_classes_predicts_with_its_module(tmp_path):
    it = Phase("it", FedProto(prediction="prototype"), rounds=2, train=Train(max_epochs=0), gate=GlobalOnly())
    fed = run([it], mixture(), without_a_class(), tmp_path)
    state = fed.run.states["it"]
    state.server[KNOWN].zero_()
    x = fed.run.datamodule.x
    for client in range(3):
        expected = fed.client_module("it", client)(x)
        torch.testing.assert_close(fed.run.client_predictor("it", client)(x), expected, rtol=0, atol=0)
