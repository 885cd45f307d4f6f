"""FD and FedProto, which exchange means of each class, against bare loops of PyTorch."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, TensorData, assert_same_bits, mixture, momentum_sgd, phase, run, tensors
from helpers.bare import round_batches
from helpers.prototypes import OWN_CLASSES, without_a_class
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FD, FedProto, Local
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.shared.class_means import class_means, combine_class_means, mean_of_known
from fedmoe_pl.models import GlobalOnly, LocalOnly, PersonalizedMoE
from fedmoe_pl.phases.participation import sample_cohort

MEAN, KNOWN, WEIGHT = "prototypes/mean", "prototypes/known", 0.7


def mean_of_clients(of_clients, but=None):
    """The mean by class of the clients' means, but for those of one client."""
    others = [means for client, means in of_clients.items() if client != but]
    having = {label: [means[label] for means in others if label in means] for label in range(3)}
    return {label: sum(means) / len(means) for label, means in having.items() if means}


def minimize(model, batches, loss):
    optimizer = momentum_sgd(model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()


def of_fd(model, batches, targets, outputs):
    """Trains a client's model, sample by sample in the distance."""

    def loss(x, y):
        logits = model(x)
        distance = 0.0
        for row, label in zip(logits, y.tolist(), strict=True):
            if label not in targets:
                continue
            if outputs == "probabilities":
                distance = distance - (targets[label] * (row.exp() / row.exp().sum()).log()).sum() / len(y)
            else:
                distance = distance + F.mse_loss(row, targets[label]) / len(y)
        return F.cross_entropy(logits, y) + WEIGHT * distance

    minimize(model, batches, loss)
    return lambda x: model(x).softmax(1) if outputs == "probabilities" else model(x)


def of_fedproto(model, batches, targets):
    """The official code's loss: the target of a sample whose class has no prototype is its own feature vector."""

    def loss(x, y):
        features = model.extractor(x)
        own = features.detach()
        target = torch.stack([targets.get(label, row) for label, row in zip(y.tolist(), own, strict=True)])
        return F.cross_entropy(model.classifier(features), y) + WEIGHT * F.mse_loss(features, target)

    minimize(model, batches, loss)
    return model.extractor


def fd(outputs) -> tuple:
    return FD("global_expert", WEIGHT, outputs), partial(of_fd, outputs=outputs)


def of_two_architectures():
    """Clients 0 and 2 have a local expert of one kind, client 1 of another; all have six features."""
    torch.manual_seed(2)
    deep = Expert()
    deep.extractor.insert(1, torch.nn.Linear(5, 5))
    return PersonalizedMoE(Expert(), [Expert(), deep], LocalOnly(), optimizer=momentum_sgd).double()


ROUNDS = {  # the algorithm, a client's training, which gives what is averaged by class, and the clients of a round
    "FD": (*fd("probabilities"), None),
    "FedProto": (FedProto("global_expert", WEIGHT), of_fedproto, None),
    "FD, logits": (*fd("logits"), None),
    "FD, some clients": (*fd("probabilities"), 2),
    "FD, logits, some clients": (*fd("logits"), 2),
    "FedProto, two architectures": (FedProto("local_expert", WEIGHT), of_fedproto, None),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_equal_a_loop_in_which_the_server_knows_every_client_s_means(name, tmp_path):
    """With FD, a client learns from those of the others."""
    (algorithm, train, clients_per_round), data, rounds = ROUNDS[name], without_a_class(), 5
    is_fd, of_local = isinstance(algorithm, FD), name == "FedProto, two architectures"
    model = of_two_architectures() if of_local else mixture()
    it = phase("it", algorithm, rounds=rounds, clients_per_round=clients_per_round)
    fed = run([it], copy.deepcopy(model), data, tmp_path, seed=4)
    models = [copy.deepcopy(model.local_expert[i % 2] if of_local else model.global_expert) for i in range(3)]
    sent, cohorts = {}, [sample_cohort(range(3), clients_per_round or 3, 4, round) for round in range(rounds)]
    for round, cohort in enumerate(cohorts):
        of_round = {}
        for client in cohort:
            targets = mean_of_clients(sent, client if is_fd else None)
            averaged = train(models[client], round_batches(data, client, round, 2, 4), targets)
            x, y = (values[data.train_samples[client]] for values in (data.x, data.y))
            with torch.no_grad():
                of_round[client] = {label: averaged(x[y == label]).mean(0) for label in y.unique().tolist()}
        sent = of_round
    returning = [c for r in range(2, rounds) for c in cohorts[r] if c not in cohorts[r - 1] and c in cohorts[r - 2]]
    assert clients_per_round is None or returning, "a client comes back after a round without it"
    server, prefix = fed.run.states["it"].server, "outputs" if is_fd else "prototypes"
    for label, mean in mean_of_clients(sent).items():
        torch.testing.assert_close(server[f"{prefix}/mean"][label], mean, rtol=1e-10, atol=1e-10)
    assert is_fd or (server[KNOWN].all() and {*server} == {MEAN, KNOWN}), "not how many clients have a class"
    for client, expected in enumerate(models):
        trained = fed.client_module("it", client)
        trained = trained.local_expert.expert if of_local else trained.global_expert
        torch.testing.assert_close(tensors(trained), tensors(expected), rtol=1e-10, atol=1e-10)


def test_a_class_that_no_other_client_has_is_skipped_and_a_client_never_learns_from_itself(tmp_path):
    """Two clients: only class 2 is both's. Without it, each of them trains alone."""
    both = without_a_class((13, 8))
    parts = [part[both.y[part] != 2] for part in both.train_samples]
    kept = {}
    for name, algorithm in (("FD", FD(weight=0.9)), ("Local", Local("global_expert.*"))):
        data = TensorData(both.x[:21], both.y[:21], parts, dtype=torch.float64, batch_size=4)
        it = phase("it", algorithm, rounds=3)
        kept[name] = run([it], mixture(gate=GlobalOnly()), data, tmp_path / name).run.states["it"].clients
    for client in (0, 1):
        expected = kept["Local"][client]
        assert_same_bits({name: kept["FD"][client][name] for name in expected}, expected)


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


def predicting(path, **kwargs):
    it = Phase("it", FedProto(prediction="prototype"), rounds=2, gate=GlobalOnly(), **kwargs)
    return run([it], mixture(), without_a_class(), path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return predicting(tmp_path_factory.mktemp("trained"))


def test_prototypes_predict_the_nearest_among_the_client_s_own_classes(trained):
    data, prototypes = trained.run.datamodule, trained.run.states["it"].server[MEAN]
    x, y = data.x[data.global_test], data.y[data.global_test]
    for client, classes in enumerate(OWN_CLASSES):
        features = trained.client_module("it", client).global_expert.extractor(x)
        distances = ((features[:, None] - prototypes[classes]) ** 2).sum(2)
        nearest = torch.tensor(classes)[distances.argmin(1)]
        right = (nearest == y).double().mean().item()
        assert trained.results["it"].clients[client].global_test == pytest.approx(right, abs=1e-6)
        assert not torch.equal(nearest, prototypes.sub(features[:, None]).square().sum(2).argmin(1))


def test_the_loss_of_a_class_that_a_client_cannot_predict_is_finite(trained):
    """Client 0 has no training sample of class 0."""
    x, y = trained.run.datamodule.x, trained.run.datamodule.y
    with torch.inference_mode():
        scores = trained.run.client_predictor("it", 0)(x)
    losses = F.cross_entropy(scores, y, reduction="none")
    assert (losses[y == 0] >= 100).all() and (losses[y == 0] < 102).all()
    features = trained.client_module("it", 0).global_expert.extractor(x)
    distances = torch.cdist(features, trained.run.states["it"].server[MEAN][1:])
    torch.testing.assert_close(losses[y > 0], F.cross_entropy(-distances, (y - 1).clamp(0), reduction="none")[y > 0])


def test_a_client_without_a_prototype_of_its_classes_predicts_with_its_module(tmp_path):
    fed = predicting(tmp_path, train=Train(max_epochs=0))
    fed.run.states["it"].server[KNOWN].zero_()
    x = fed.run.datamodule.x
    for client in range(3):
        assert torch.equal(fed.run.client_predictor("it", client)(x), fed.client_module("it", client)(x))


# The means


def client(samples, data, module=None):
    return Client(0, 0, 0, module or mixture(), samples, {}, data)


def features(module, x):
    return module.global_expert.extractor(x)


def test_a_client_without_samples_has_no_means():
    tree = class_means(client(torch.arange(0), without_a_class()), features, "p/")
    assert tree["p/mean"].shape == (3, 6) and not tree["p/mean"].any() and tree["p/count"].tolist() == [0, 0, 0]


def test_dropout_is_not_active_and_the_client_s_module_stays_in_train_mode():
    data, module = without_a_class(), mixture(expert=Expert(dropout=0.5))
    here = client(data.train_samples[0], data, module)
    assert_same_bits(class_means(here, features, "p/"), class_means(here, features, "p/"))
    assert module.training and module.global_expert.extractor[0].training


def tree(mean, count):
    return {"p/mean": torch.tensor(mean)[:, None], "p/count": torch.tensor(count)}


def test_the_means_of_two_groups_are_weighed_class_by_class_and_exact_if_one_has_none():
    third = 1 / 3
    both = combine_class_means(tree([1.0, third, 0.0], [1, 3, 0]), tree([4.0, 0.0, third], [2, 0, 7]), "p/")
    assert both["p/count"].tolist() == [3, 3, 7]
    assert both["p/mean"][0].item() == pytest.approx(3.0)
    assert both["p/mean"][1:].flatten().tolist() == torch.tensor([third, third]).tolist()


def test_unknown_classes_count_as_0_and_samples_without_a_label_not_at_all():
    values, y = torch.tensor([1.0, 10.0, 3.0, 100.0]), torch.tensor([0, 1, 0, -100])
    assert mean_of_known(values, y, torch.tensor([True, False])).item() == pytest.approx(4 / 3)


def test_means_of_different_widths_are_refused_also_those_that_would_be_broadcast():
    narrow, wide = ({"mean": torch.zeros(3, width), "count": torch.ones(3)} for width in (1, 6))
    with pytest.raises(MisconfigurationException, match="features of widths 1 and 6"):
        combine_class_means(narrow, wide, "")
