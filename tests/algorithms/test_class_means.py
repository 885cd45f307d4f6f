"""FD, FedProto and FedPAC, which exchange means of each class, against bare loops of PyTorch."""

import copy
from functools import partial
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, assert_same_bits, blobs, client_generator, mixture, momentum_sgd, phase, run, tensors
from helpers.bare import round_batches
from helpers.prototypes import OWN_CLASSES, without_a_class
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FD, FedPAC, FedProto, Local
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.fedpac import combination_weights, simplex_minimum
from fedmoe_pl.algorithms.shared.class_means import class_means, combine_class_means, mean_of_known
from fedmoe_pl.backends import TrainerBackend
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
    "FedProto, one client": (FedProto("global_expert", WEIGHT), of_fedproto, 1),
}


@pytest.mark.few("FD, some clients", "FedProto, one client")
@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_equal_a_loop_in_which_the_server_knows_every_client_s_means(name, tmp_path):
    """With FD, a client learns from the others' means of the last round; prototypes stay until there are newer ones.

    With some clients per round, there are classes that no other client of it has, or nobody.
    """
    (algorithm, train, clients_per_round), data, rounds = ROUNDS[name], without_a_class(), 5
    is_fd, of_local = isinstance(algorithm, FD), name == "FedProto, two architectures"
    model = of_two_architectures() if of_local else mixture()
    it = phase("it", algorithm, rounds=rounds, clients_per_round=clients_per_round)
    fed = run([it], copy.deepcopy(model), data, tmp_path, seed=4)
    models = [copy.deepcopy(model.local_expert[i % 2] if of_local else model.global_expert) for i in range(3)]
    cohorts, sent, known = [sample_cohort(range(3), clients_per_round or 3, 4, r) for r in range(rounds)], {}, {}
    for round, cohort in enumerate(cohorts):
        of_round = {}
        for client in cohort:
            targets = mean_of_clients(sent, client) if is_fd else dict(known)
            averaged = train(models[client], round_batches(data, client, round, 2, 4), targets)
            x, y = (values[data.train_samples[client]] for values in (data.x, data.y))
            with torch.no_grad():
                of_round[client] = {label: averaged(x[y == label]).mean(0) for label in y.unique().tolist()}
        sent = of_round
        known |= mean_of_clients(sent)
    returning = [c for r in range(2, rounds) for c in cohorts[r] if c not in cohorts[r - 1] and c in cohorts[r - 2]]
    assert clients_per_round != 2 or returning, "a client comes back after a round without it"
    server, prefix = fed.run.states["it"].server, "outputs" if is_fd else "prototypes"
    for label, mean in (mean_of_clients(sent) if is_fd else known).items():
        torch.testing.assert_close(server[f"{prefix}/mean"][label], mean, rtol=1e-10, atol=1e-10)
    assert is_fd or (server[KNOWN].all() and {*server} == {MEAN, KNOWN}), "not how many clients have a class"
    for client, expected in enumerate(models):
        trained = fed.client_module("it", client)
        trained = trained.local_expert.expert if of_local else trained.global_expert
        torch.testing.assert_close(tensors(trained), tensors(expected), rtol=1e-10, atol=1e-10)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_a_model_in_half_precision_count_each_of_3000_samples(dtype):
    """In bfloat16, a count would stop at 256."""
    arrays, samples = blobs((3000,)), torch.arange(3000)
    means = class_means(client(samples, arrays), lambda module, x: torch.full((len(x), 1), 100.0, dtype=dtype), "p/")
    assert means["p/count"].tolist() == arrays.y[samples].bincount().tolist()
    assert means["p/mean"].flatten().tolist() == [100.0] * 3


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


# FedPAC, whose quadratic programs over the simplex are compared with all supports


CLASSES, FEATURES = 3, 6
sgd = partial(torch.optim.SGD, momentum=0.5, weight_decay=5e-4)
slower = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1], gamma=0.1)


def model():
    return mixture(optimizer=partial(sgd, lr=0.1))


def it(weight=0.7, **kwargs):
    return phase("it", FedPAC(weight=weight), **{"train": Train(max_epochs=3, lr_scheduler=slower), **kwargs})


def statistics(own, x, y):
    """The mean features of each class, and h and v by the formulas of the official code, class by class."""
    with torch.no_grad():
        z = own.extractor(x)
    means, h, v = {}, torch.zeros(CLASSES, FEATURES, dtype=torch.float64), 0.0
    for c in y.unique().tolist():
        of_class, share = z[y == c], (y == c).double().mean()
        means[c] = of_class.mean(0)
        h[c] = share * means[c]
        v += share * torch.trace(of_class.T @ of_class / len(of_class)) - share**2 * (means[c] ** 2).sum()
    return means, h, v / len(y)


def of_all_supports(matrix):
    """The minimum over all supports in which the minimum on the plane has weights of at least 0."""
    best, size = None, len(matrix)
    for support in (list(s) for n in range(1, size + 1) for s in combinations(range(size), n)):
        within = torch.linalg.inv(matrix[support][:, support]).sum(1)
        weights = torch.zeros(size, dtype=torch.float64)
        weights[support] = within / within.sum()
        if (weights >= 0).all() and (best is None or weights @ matrix @ weights < best @ matrix @ best):
            best = weights
    return best


def weights_by_hand(h, v, i):
    rows = torch.stack([h[i] - each for each in h]).flatten(1)
    weights = of_all_supports(rows @ rows.T + torch.diag(torch.stack(v)))
    weights[weights < 1e-3] = 0
    return weights / weights.sum()


def train_in_turn(own, batches, prototypes, own_prototypes, weight):
    """One epoch of the classifier at 0.1, two of the extractor at 0.01, with an optimizer each."""
    for part, epochs, lr in ((own.classifier, 1, 0.1), (own.extractor, 2, 0.01)):
        optimizer = sgd(part.parameters(), lr=lr)
        for _ in range(epochs):
            for x, y in batches:
                z = own.extractor(x)
                loss = F.cross_entropy(own.classifier(z), y)
                if prototypes:
                    targets = [prototypes.get(label, own_prototypes[label]) for label in y.tolist()]
                    loss = loss + weight * F.mse_loss(z, torch.stack(targets))
                own.zero_grad()
                loss.backward()
                optimizer.step()


def mean_state(modules, weights):
    states = [module.state_dict() for module in modules]
    return {name: sum(w * s[name] for w, s in zip(weights, states, strict=True)) / sum(weights) for name in states[0]}


@pytest.mark.few("None", "1")
@pytest.mark.parametrize("clients_per_round", [None, 2, 1])
def test_rounds_equal_a_loop_by_the_paper(clients_per_round, tmp_path):
    """With one client per round, another one then trains with a class of which nobody has sent a prototype."""
    sizes = (2, 13, 8)  # client 0, which then trains after client 1, has a single sample of that class
    data, weight, rounds = without_a_class(sizes), 0.7, 3
    fed = run([it(weight, rounds=rounds, clients_per_round=clients_per_round)], model(), data, tmp_path, seed=3)
    experts = [copy.deepcopy(model().global_expert) for _ in sizes]
    prototypes, is_alone = {}, False
    for round in range(rounds):
        cohort = sorted(sample_cohort(range(3), clients_per_round or 3, 3, round))
        h, v, sums, numbers = [], [], {}, {}
        for client in cohort:
            own, samples = experts[client], data.train_samples[client]
            x, y = data.x[samples], data.y[samples]
            is_alone |= any(prototypes and c not in prototypes and (y == c).sum() == 1 for c in range(CLASSES))
            means, *hv = statistics(own, x, y)
            h.append(hv[0])
            v.append(hv[1])
            batches = data.batches(samples, generator=client_generator(3, client, round))
            train_in_turn(own, batches, prototypes, means, weight)
            for c, mean in statistics(own, x, y)[0].items():
                numbers[c] = numbers.get(c, 0) + (y == c).sum()
                sums[c] = sums.get(c, 0) + mean * (y == c).sum()
        prototypes |= {c: sums[c] / numbers[c] for c in sums}
        extractor = mean_state([experts[c].extractor for c in cohort], [sizes[c] for c in cohort])
        combined = []
        for row, _ in enumerate(cohort):
            weights = weights_by_hand(h, v, row)
            assert round > 0 or clients_per_round == 1 or (weights > 0).sum() > 1, "something is combined"
            combined.append(mean_state([experts[c].classifier for c in cohort], weights))
        for row, client in enumerate(cohort):
            experts[client].classifier.load_state_dict(combined[row])
        for own in experts:
            own.extractor.load_state_dict(extractor)
    assert is_alone == (clients_per_round == 1), "a class without a prototype, of which the client has one sample"
    server = fed.run.states["it"].server
    for c, prototype in prototypes.items():
        torch.testing.assert_close(server["prototypes/mean"][c], prototype, rtol=1e-10, atol=1e-10)
    for client, own in enumerate(experts):
        actual = tensors(fed.client_module("it", client).global_expert)
        torch.testing.assert_close(actual, tensors(own), rtol=1e-10, atol=1e-10)


def test_two_clients_have_weights_in_closed_form():
    """With the distance d^2 between them, client 0 minimizes a^2 v_0 + (1 - a)^2 (v_1 + d^2)."""
    features = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    variances, distance = torch.tensor([0.5, 0.25], dtype=torch.float64), 5.0
    for client, (own, other) in enumerate([(0.5, 0.25), (0.25, 0.5)]):
        share = (other + distance) / (own + other + distance)
        expected = [share, 1 - share] if client == 0 else [1 - share, share]
        assert combination_weights(features, variances, client).tolist() == pytest.approx(expected, abs=1e-12)


def test_weights_below_a_thousandth_are_dropped():
    features = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    variances = torch.tensor([9e-4, 1e-4], dtype=torch.float64)
    assert combination_weights(features, variances, 0).tolist() == [1.0, 0.0]
    assert combination_weights(features, 2 * variances, 0)[1] > 1e-3


def test_clients_alike_get_the_mean_classifier_by_samples():
    """Equal features: the weights are proportional to 1 / v, and v to 1 / n."""
    features = torch.ones(3, 4, dtype=torch.float64)
    weights = combination_weights(features, 1 / torch.tensor([13.0, 8.0, 11.0], dtype=torch.float64), 1)
    assert weights.tolist() == pytest.approx([13 / 32, 8 / 32, 11 / 32], rel=1e-10)


def test_what_leaves_and_reaches_a_client_is_what_the_paper_says(tmp_path):
    state = run([it(rounds=2)], model(), without_a_class(), tmp_path).run.states["it"]
    size = sum(tensor.numel() for tensor in model().global_expert.parameters())
    prototypes, statistics_ = CLASSES * (FEATURES + 1), CLASSES * FEATURES + 1
    assert state.traffic["parameters_up"] == 2 * 3 * size
    assert state.traffic["bytes_up"] == 8 * 2 * 3 * (size + prototypes + statistics_)
    assert state.traffic["parameters_down"] == 2 * 3 * size  # the extractor before, the classifier after the training
    assert state.traffic["bytes_down"] == 3 * (8 * (2 * size + CLASSES * FEATURES) + CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("in_files", [False, True])
def test_a_later_phase_starts_from_the_combined_classifiers(in_files, tmp_path):
    phases = [it(rounds=3, clients_per_round=2), phase("later", Local(), train=Train(max_epochs=0), start="it")]
    fed = run(phases, model(), without_a_class(), tmp_path, enable_checkpointing=in_files)
    for client in range(3):
        before, after = (tensors(fed.client_module(name, client).global_expert) for name in ("it", "later"))
        assert_same_bits(after, before)


def test_a_classifier_s_counter_is_the_client_s_own(tmp_path):
    """That of batch normalization."""
    counting = Expert()
    counting.classifier = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))
    module = mixture(expert=counting, optimizer=partial(sgd, lr=0.1))
    fed = run([it(rounds=2)], module, without_a_class(), tmp_path, backend=TrainerBackend())
    counts = [fed.client_module("it", client).global_expert.classifier[0].num_batches_tracked for client in range(3)]
    assert len({int(count) for count in counts}) > 1


# Quadratic programs over the simplex


def gram(size, rank, seed):
    rows = torch.randn(size, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows @ rows.T


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", range(6))
def test_the_minimum_is_that_of_the_best_support(size, seed):
    matrix = gram(size, size + 1, seed)
    torch.testing.assert_close(simplex_minimum(matrix), of_all_supports(matrix), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("matrix", [torch.zeros(4, 4), torch.ones(4, 4), gram(30, 5, 0), gram(40, 60, 1)])
def test_singular_and_large_matrices_have_a_minimum_where_no_weight_would_lower_the_value(matrix):
    weights = simplex_minimum(matrix)
    assert (weights >= 0).all() and weights.sum().item() == pytest.approx(1)
    gradient = matrix.double() @ weights
    assert gradient.min().item() >= (weights @ gradient).item() - 1e-9
