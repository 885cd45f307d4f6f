"""Robust aggregations against rewrites, closed forms and values of the library byzfl; what attackers send."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import blobs, mixture, phase, run
from scipy.optimize import minimize_scalar
from torch import Generator

from fedmoe_pl import Phase, Update
from fedmoe_pl.aggregation import (
    ALittleIsEnough,
    Bucketing,
    CenteredClipping,
    CoordinateMedian,
    GaussianNoise,
    GeometricMedian,
    InnerProductManipulation,
    MultiKrum,
    NearestNeighborMixing,
    TrimmedMean,
    UnderAttack,
)
from fedmoe_pl.aggregation.aggregation import Cohort
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import StackedBackend
from fedmoe_pl.models import GlobalOnly

# nine vectors, the last two far away, and what byzfl 0.0.11 makes of them (numpy, 2026-11-22)
VECTORS = [
    [0.13, -0.13, 0.64, 0.1],
    [-0.54, 0.36, 1.3, 0.95],
    [-0.7, -1.27, -0.62, 0.04],
    [-2.33, -0.22, -1.25, -0.73],
    [-0.54, -0.32, 0.41, 1.04],
    [-0.13, 1.37, -0.67, 0.35],
    [0.9, 0.09, -0.74, -0.92],
    [40.0, -3.0, 0.0, 9.0],
    [41.0, -3.0, 0.0, 9.0],
]
BYZFL = {
    "Median": (CoordinateMedian(), [-0.13, -0.22, 0.0, 0.35]),
    "TrMean(2)": (TrimmedMean(2), [-0.036, -0.37, -0.176, 0.496]),
    "GeometricMedian(1e-9, 500)": (
        GeometricMedian(),
        [0.10157778317533243, -0.07677910564461927, 0.1409977192308962, 0.29905736582092535],
    ),
    "Krum(2)": (MultiKrum(2, num_selected=1), [0.13, -0.13, 0.64, 0.1]),
    "MultiKrum(2)": (
        MultiKrum(2),
        [-0.4585714285714286, -0.017142857142857126, -0.13285714285714284, 0.11857142857142865],
    ),
    "CenteredClipping(L=3, tau=1.5)": (
        CenteredClipping(1.5),
        [0.14329858579969892, -0.03960983111545205, -0.06356233641625932, 0.2648899157910271],
    ),
    "TrMean(2)(NNM(2))": (
        NearestNeighborMixing(TrimmedMean(2), 2),
        [-0.4585714285714285, -0.017142857142857144, -0.13285714285714284, 0.11857142857142858],
    ),
}


def aggregate(aggregation, vectors, seed=0):
    return aggregation.of_vectors(torch.as_tensor(vectors, dtype=torch.float64), Generator().manual_seed(seed))


@pytest.mark.parametrize("name", BYZFL)
def test_the_values_are_those_of_byzfl(name):
    aggregation, expected = BYZFL[name]
    tolerance = 1e-5 if name.startswith("Geo") else 1e-13
    torch.testing.assert_close(
        aggregate(aggregation, VECTORS), torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("n", [4, 7, 10])
def test_medians_and_trimmed_means_are_numpy_s(n):
    x = np.random.default_rng(n).normal(size=(n, 6))
    np.testing.assert_allclose(aggregate(CoordinateMedian(), x), np.median(x, axis=0), rtol=1e-15)
    trimmed = np.sort(x, axis=0)[1:-1].mean(axis=0)
    np.testing.assert_allclose(aggregate(TrimmedMean(1), x), trimmed, rtol=1e-13)
    np.testing.assert_allclose(aggregate(TrimmedMean(0), x), x.mean(axis=0), rtol=1e-13)


def test_the_geometric_median_has_no_force_on_it():
    """The unit vectors to all points add up to 0; of a square's corners it is the center; on a line, the median."""
    x = np.random.default_rng(1).normal(size=(9, 5))
    median = aggregate(GeometricMedian(), x).numpy()
    unit = (x - median) / np.linalg.norm(x - median, axis=1, keepdims=True)
    assert np.abs(unit.sum(axis=0)).max() < 1e-4
    square = [[0, 0], [0, 2], [2, 0], [2, 2]]
    assert aggregate(GeometricMedian(), square).tolist() == pytest.approx([1, 1])
    on_a_line = [[0.0], [1.0], [1000.0]]
    assert aggregate(GeometricMedian(), on_a_line).item() == pytest.approx(1, abs=1e-3)
    assert aggregate(GeometricMedian(), [[3.0, 1.0]] * 4).tolist() == [3, 1]
    assert aggregate(GeometricMedian(), [[0.0], [10.0]]).item() == 5, "whoever is first: all points between are medians"
    assert aggregate(GeometricMedian(), [[9.0], [0.0], [5.0], [1.0]]).item() == 3


def sum_of_distances(y, x):
    return np.linalg.norm(x - y, axis=1).sum()


def test_a_vector_at_the_start_does_not_hold_the_geometric_median():
    """Each coordinate's median is the fourth vector; in many dimensions, it is that of two clients."""
    x = np.array([[-1.09, 0.80], [-0.59, -1.63], [1.93, -1.41], [-0.52, -0.37], [0.08, -0.37]])
    median = aggregate(GeometricMedian(), x).numpy()
    assert median.tolist() == pytest.approx([-0.1945, -0.4543], abs=1e-4)
    assert sum_of_distances(median, x) == pytest.approx(5.7346, abs=1e-4)
    many = np.ones((5, 30))
    many[:2], many[2, :10], many[3, 10:20], many[4, 20:] = 0, -0.1, -0.1, -0.1
    along = minimize_scalar(lambda t: sum_of_distances(t * np.ones(30), many))  # by symmetry
    np.testing.assert_allclose(aggregate(GeometricMedian(), many), along.x, atol=1e-6)


def test_the_geometric_median_is_a_client_s_vector_where_the_others_pull_less_than_it_resists():
    """In a triangle with an angle above 120 degrees it is that corner; unit vectors add up to at most their number."""
    assert aggregate(GeometricMedian(), [[0.0, 0.0], [2.0, 0.5], [-1.0, 0.3]]).tolist() == [0, 0]
    x = np.random.default_rng(4).normal(size=(7, 20))
    x[2:6] = x[0]
    for vectors in (x, np.concatenate((x[:6], x[6:] * 1e30))):
        assert aggregate(GeometricMedian(), vectors).tolist() == x[0].tolist()


def test_a_client_far_away_moves_the_geometric_median_by_its_direction_only():
    x = np.random.default_rng(5).normal(size=(8, 3))
    far = [aggregate(GeometricMedian(), np.concatenate((x, [[scale, 0, 0]]))).numpy() for scale in (1e9, 1e30)]
    np.testing.assert_allclose(far[0], far[1], atol=1e-6)


@pytest.mark.parametrize("selected", [1, 3, None])
def test_krum_averages_the_vectors_with_the_lowest_scores(selected):
    x = np.random.default_rng(4).normal(size=(8, 6)) ** 3  # distances that are not squared choose other vectors
    f = 2
    scores = [np.sort([((x[i] - x[j]) ** 2).sum() for j in range(8) if j != i])[: 8 - f - 2].sum() for i in range(8)]
    best = np.argsort(scores)[: selected or 8 - f]
    np.testing.assert_allclose(aggregate(MultiKrum(f, selected), x), x[best].mean(axis=0), rtol=1e-13)


def test_centered_clipping_is_the_mean_of_short_vectors_and_moves_a_step_at_most():
    x = torch.tensor([[3.0, 4.0], [0.6, 0.8]], dtype=torch.float64)
    assert aggregate(CenteredClipping(10.0, iterations=1), x).tolist() == pytest.approx([1.8, 2.4])
    assert aggregate(CenteredClipping(1.0, iterations=1), x).tolist() == pytest.approx([0.6, 0.8])
    far = aggregate(CenteredClipping(1.0, iterations=4), [[1e9, 0.0]])
    assert far.tolist() == pytest.approx([4, 0])


def test_buckets_are_drawn_and_averaged():
    """The mean of whole buckets is the mean; the median of buckets of all is the mean; draws follow the generator."""
    x = np.random.default_rng(3).normal(size=(6, 4))
    np.testing.assert_allclose(aggregate(Bucketing(TrimmedMean(0)), x), x.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(aggregate(Bucketing(CoordinateMedian(), 6), x), x.mean(axis=0), rtol=1e-12)
    medians = [aggregate(Bucketing(CoordinateMedian()), x, seed).tolist() for seed in (0, 0, 1)]
    assert medians[0] == medians[1] != medians[2]


@pytest.mark.parametrize("name", BYZFL)
def test_the_order_of_clients_and_float32_change_little(name):
    aggregation, _ = BYZFL[name]
    expected = aggregate(aggregation, VECTORS)
    turned = aggregate(aggregation, VECTORS[::-1])
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)
    in_32_bits = aggregation.of_vectors(torch.tensor(VECTORS), Generator())
    assert in_32_bits.dtype == torch.float32
    torch.testing.assert_close(in_32_bits.double(), expected, rtol=1e-4, atol=1e-4)


NEEDED = [
    (CoordinateMedian(), 1),
    (TrimmedMean(2), 5),
    (MultiKrum(2), 7),
    (MultiKrum(0, 5), 5),
    (NearestNeighborMixing(CoordinateMedian(), 1), 3),
    (NearestNeighborMixing(TrimmedMean(3), 1), 7),
    (Bucketing(CoordinateMedian(), 4), 1),
    (Bucketing(TrimmedMean(1), 2), 5),
    (UnderAttack(GaussianNoise(), [0]), 1),
    (UnderAttack(GaussianNoise(), [0], TrimmedMean(2)), 5),
]


@pytest.mark.parametrize(("aggregation", "clients"), NEEDED)
def test_an_aggregation_says_how_many_clients_it_needs(aggregation, clients):
    assert aggregation.min_clients == clients


RULES = [
    CoordinateMedian(),
    TrimmedMean(1),
    GeometricMedian(),
    MultiKrum(1),
    CenteredClipping(1.0),
    NearestNeighborMixing(GeometricMedian(), 1),
    NearestNeighborMixing(CenteredClipping(1.0), 1),
    Bucketing(CenteredClipping(1.0), 2),
    Bucketing(GeometricMedian(), 2),
]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e20, -1e30])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_one_client_of_ten_moves_the_result_only_so_far_whatever_it_sends(rule, value):
    honest = torch.randn(10, 4, generator=Generator().manual_seed(0)) * 0.1
    for row in (0, 9):
        start = {"w": torch.zeros(4)}
        sent = [{"w": torch.full((4,), value) if client == row else honest[client]} for client in range(10)]
        combined = rule.of_client(SimpleNamespace(id=0), Update(sent[0], 17))
        for client in range(1, 10):
            combined = rule.combine(combined, rule.of_client(SimpleNamespace(id=client), Update(sent[client], 1)))
        update, _ = rule.aggregate(start, combined, {}, Cohort(10, range(10)), Generator().manual_seed(0))
        assert update.weight == 10, "whatever a client says, it weighs 1"
        assert update.sent["w"].norm() < 1


def test_a_change_with_one_number_that_is_not_finite_counts_as_none():
    rule, combined = TrimmedMean(0), None
    for client, sent in enumerate(([math.nan, 9.0], [5.0, 3.0])):
        update = rule.of_client(SimpleNamespace(id=client), Update({"w": torch.tensor(sent)}, 1))
        combined = rule.combine(combined, update) if combined else update
    new, _ = rule.aggregate({"w": torch.ones(2)}, combined, {}, Cohort(2, range(2)), Generator())
    assert new.sent["w"].tolist() == [3, 2], "half of the change of the other client"


# Attacks


HONEST = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 8.0]], dtype=torch.float64)
SIZES = (40, 44, 36, 41, 40, 43, 42, 40, 38, 45)
ATTACKERS = [2, 7]


def test_the_attacks_are_those_of_their_papers():
    generator = Generator().manual_seed(0)
    assert InnerProductManipulation(2.0)(HONEST, generator).tolist() == [-6, -8]
    assert InnerProductManipulation(1.0)(HONEST, generator).tolist() == [-3, -4], "sign flipping"
    deviations = HONEST.numpy().std(axis=0, ddof=1)
    assert ALittleIsEnough(1.5)(HONEST, generator).tolist() == pytest.approx(
        [3 + 1.5 * deviations[0], 4 + 1.5 * deviations[1]]
    )
    assert ALittleIsEnough()(HONEST[:1], generator).tolist() == [1, 2]
    draws = GaussianNoise(3.0)(torch.ones(2, 10_000), generator)
    assert abs(draws.std().item() - 3) < 0.1 and draws.dtype == torch.float32
    assert abs(draws.mean().item()) < 0.2, "in place of the change, not on top of it"


def test_only_the_attackers_vectors_are_replaced_and_without_an_aggregation_the_mean_is_weighted():
    attack = UnderAttack(InnerProductManipulation(1.0), [4, 9])
    vectors = torch.cat([HONEST[:1], torch.full((1, 2), 100.0), HONEST[1:]])
    before = vectors.clone()
    mean = attack.of_clients([0, 4, 5, 6], vectors, [1, 2, 3, 4], Generator())
    expected = (HONEST[0] + 2 * torch.tensor([-3.0, -4.0]) + 3 * HONEST[1] + 4 * HONEST[2]) / 10
    torch.testing.assert_close(mean, expected)
    assert torch.equal(vectors, before), "not changed in place"
    alone = attack.of_clients([4, 9], HONEST[:2], [1, 1], Generator())
    torch.testing.assert_close(alone, HONEST[:2].mean(0)), "nobody to learn from: they send their own"


DEFENSES = {
    "median": CoordinateMedian(),
    "trimmed mean": TrimmedMean(2),
    "geometric median": GeometricMedian(),
    "Multi-Krum": MultiKrum(2),
    "centered clipping": CenteredClipping(1.0),
    "NNM": NearestNeighborMixing(TrimmedMean(2), 2),
    "buckets": Bucketing(CoordinateMedian()),
}
IPM, NOISE = InnerProductManipulation(20.0), GaussianNoise(20.0)
AGGREGATIONS = {
    "FedAvg": None,
    "FedAvg under attack": UnderAttack(IPM, ATTACKERS),
    "FedAvg under noise": UnderAttack(NOISE, ATTACKERS),
    "median under noise": UnderAttack(NOISE, ATTACKERS, CoordinateMedian()),
    **{name: UnderAttack(IPM, ATTACKERS, defense) for name, defense in DEFENSES.items()},
}


def federated(name, aggregation):
    algorithm = FedAvg("global_expert.*", weighting="uniform")
    return Phase(name, algorithm, 5, start="initial", gate=GlobalOnly(), aggregation=aggregation)


@pytest.fixture(scope="module")
def accuracies(tmp_path_factory):
    phases = [federated(name, aggregation) for name, aggregation in AGGREGATIONS.items()]
    arguments = {"backend": StackedBackend(), "evaluate_every_n_rounds": 0}
    it = run(phases, mixture(), blobs(SIZES, batch_size=8), tmp_path_factory.mktemp("run"), **arguments)
    return {name: evaluation.spread("global_test").mean for name, evaluation in it.run.results.items()}


@pytest.mark.slow
def test_fedavg_fails_under_attack_and_robust_aggregations_survive(accuracies):
    usual = accuracies["FedAvg"]
    assert usual > 0.9
    for name, accuracy in accuracies.items():
        if name.startswith("FedAvg under"):
            assert accuracy < usual - 0.2, name
        else:
            assert accuracy > usual - 0.1, name


def test_the_attackers_train_and_keep_their_own_parameters(tmp_path):
    attacked = phase("it", FedAvg("global_expert.*"), aggregation=UnderAttack(GaussianNoise(), [1]))
    usual = phase("usual", FedAvg("global_expert.*"), start="initial")
    states = run([attacked, usual], mixture(), blobs(), tmp_path).run.states
    assert states["it"].clients[1].keys() == states["usual"].clients[1].keys()
    assert all(
        torch.equal(tensor, states["usual"].clients[1][name]) for name, tensor in states["it"].clients[1].items()
    )


def test_masks_stay_as_they_are_and_hide_no_change_of_other_tensors():
    mask = {"mask": torch.full((2, 2), -math.inf).triu(1), "allowed": torch.tensor([True, False])}
    mask |= {"rotations": torch.ones(2, dtype=torch.complex64)}
    start = {"weight": torch.zeros(2), **mask}
    updates = [
        Update({"weight": torch.tensor([1.0, n]), **{name: mask[name].clone() for name in mask}}, 1) for n in range(3)
    ]
    collected = [TrimmedMean(0).of_remote_client(client, update) for client, update in enumerate(updates)]
    combined = TrimmedMean(0).combine(TrimmedMean(0).combine(*collected[:2]), collected[2])
    sent = TrimmedMean(0).aggregate(start, combined, {}, Cohort(3, range(3)), Generator())[0].sent
    assert sent["weight"].tolist() == [1.0, 1.0]
    assert all(torch.equal(sent[name], mask[name]) for name in mask)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_complex_numbers_are_pairs_of_real_ones(rule):
    pairs = torch.randn(10, 5, 2, generator=Generator().manual_seed(0))
    bias = torch.randn(10, 3, generator=Generator().manual_seed(1))

    def aggregated(start, sent):
        combined = None
        for client, tensors in enumerate(sent):
            update = rule.of_client(SimpleNamespace(id=client), Update(tensors, 1))
            combined = rule.combine(combined, update) if combined else update
        return rule.aggregate(start, combined, {}, Cohort(10, range(10)), Generator().manual_seed(0))[0].sent

    start = {"bias": torch.ones(3), "w": torch.ones(5, 2)}
    real = aggregated(start, [{"bias": bias[client], "w": pairs[client]} for client in range(10)])
    of_complex = [{"bias": bias[client], "w": torch.view_as_complex(pairs[client])} for client in range(10)]
    found = aggregated({**start, "w": torch.view_as_complex(start["w"])}, of_complex)
    assert found["w"].dtype == torch.complex64 and torch.equal(found["bias"], real["bias"])
    assert torch.equal(torch.view_as_real(found["w"]), real["w"]) and not torch.equal(real["w"], start["w"])
