"""FedPAC against a bare loop of PyTorch, and its quadratic programs over the simplex against all supports."""

import copy
from functools import partial
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, assert_same_bits, client_generator, mixture, phase, run, tensors
from helpers.prototypes import SIZES, without_a_class
from torch import nn

from fedmoe_pl import Train
from fedmoe_pl.algorithms import FedPAC, Local
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.fedpac import combination_weights, simplex_minimum
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.phases.participation import sample_cohort
from fedmoe_pl.trees import subtree

EXTRACTOR, CLASSIFIER = "global_expert.extractor.", "global_expert.classifier."
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


@pytest.mark.few(1)
@pytest.mark.parametrize("clients_per_round", [None, 2])
def test_rounds_equal_a_loop_by_the_paper(clients_per_round, tmp_path):
    data, weight, rounds = without_a_class(), 0.7, 3
    fed = run([it(weight, rounds=rounds, clients_per_round=clients_per_round)], model(), data, tmp_path, seed=3)
    experts = [copy.deepcopy(model().global_expert) for _ in SIZES]
    prototypes = {}
    for round in range(rounds):
        cohort = sorted(sample_cohort(range(3), clients_per_round or 3, 3, round))
        h, v, sums, numbers = [], [], {}, {}
        for client in cohort:
            own, samples = experts[client], data.train_samples[client]
            x, y = data.x[samples], data.y[samples]
            means, *hv = statistics(own, x, y)
            h.append(hv[0])
            v.append(hv[1])
            batches = data.batches(samples, generator=client_generator(3, client, round))
            train_in_turn(own, batches, prototypes, means, weight)
            for c, mean in statistics(own, x, y)[0].items():
                numbers[c] = numbers.get(c, 0) + (y == c).sum()
                sums[c] = sums.get(c, 0) + mean * (y == c).sum()
        prototypes |= {c: sums[c] / numbers[c] for c in sums}
        extractor = mean_state([experts[c].extractor for c in cohort], [SIZES[c] for c in cohort])
        combined = []
        for row, _ in enumerate(cohort):
            weights = weights_by_hand(h, v, row)
            assert round > 0 or (weights > 0).sum() > 1, "something is combined"
            combined.append(mean_state([experts[c].classifier for c in cohort], weights))
        for row, client in enumerate(cohort):
            experts[client].classifier.load_state_dict(combined[row])
        for own in experts:
            own.extractor.load_state_dict(extractor)
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


class FromGivenPrototypes(FedPAC):
    def server_init(self, module):
        mean = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return {
            **super().server_init(module),
            "prototypes/mean": mean,
            "prototypes/known": torch.tensor([True, False, True]),
        }


def test_where_no_prototype_is_known_the_target_is_the_client_s_own():
    """In the first round, there are no targets at all."""
    data, module, algorithm = without_a_class(), model(), FromGivenPrototypes()
    sent = algorithm.server_init(module)
    samples = data.train_samples[0]
    client = Client(0, 1, 0, module, samples, {}, data)
    constants = algorithm.client_init(client, sent)
    own = module.global_expert.extractor(data.x[samples[data.y[samples] == 1]]).mean(0).detach()
    expected = torch.stack([sent["prototypes/mean"][0], own, sent["prototypes/mean"][2]])
    torch.testing.assert_close(constants["targets"], expected)
    assert constants["known"].tolist() == [True, True, True]
    assert not FedPAC().client_init(client, FedPAC().server_init(module))["known"].any()


def test_one_client_per_round_keeps_its_own_classifier(tmp_path):
    state = run([it(rounds=1, clients_per_round=1)], model(), without_a_class(), tmp_path).run.states["it"]
    ((client, kept),) = state.clients.items()
    assert_same_bits(subtree(state.server, f"classifiers/{client}."), subtree(kept, CLASSIFIER))


@pytest.mark.few(1)
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
