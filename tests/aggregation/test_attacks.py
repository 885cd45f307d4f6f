"""What attackers send, and that robust aggregations survive what FedAvg does not."""

import pytest
import torch
from helpers import blobs, mixture, phase, run
from torch import Generator

from fedmoe_pl import Phase, aggregation
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import StackedBackend
from fedmoe_pl.models import GlobalOnly

HONEST = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 8.0]], dtype=torch.float64)
SIZES = (40, 44, 36, 41, 40, 43, 42, 40, 38, 45)
ATTACKERS = [2, 7]


def test_the_attacks_are_those_of_their_papers():
    generator = Generator().manual_seed(0)
    assert aggregation.InnerProductManipulation(2.0)(HONEST, generator).tolist() == [-6, -8]
    assert aggregation.InnerProductManipulation(1.0)(HONEST, generator).tolist() == [-3, -4], "sign flipping"
    deviations = HONEST.numpy().std(axis=0, ddof=1)
    assert aggregation.ALittleIsEnough(1.5)(HONEST, generator).tolist() == pytest.approx(
        [3 + 1.5 * deviations[0], 4 + 1.5 * deviations[1]]
    )
    assert aggregation.ALittleIsEnough()(HONEST[:1], generator).tolist() == [1, 2]
    draws = aggregation.GaussianNoise(3.0)(torch.ones(2, 10_000), generator)
    assert abs(draws.std().item() - 3) < 0.1 and draws.dtype == torch.float32
    assert abs(draws.mean().item()) < 0.2, "in place of the change, not on top of it"


def test_only_the_attackers_vectors_are_replaced_and_without_an_aggregation_the_mean_is_weighted():
    attack = aggregation.UnderAttack(aggregation.InnerProductManipulation(1.0), [4, 9])
    vectors = torch.cat([HONEST[:1], torch.full((1, 2), 100.0), HONEST[1:]])
    before = vectors.clone()
    mean = attack.of_clients([0, 4, 5, 6], vectors, [1, 2, 3, 4], Generator())
    expected = (HONEST[0] + 2 * torch.tensor([-3.0, -4.0]) + 3 * HONEST[1] + 4 * HONEST[2]) / 10
    torch.testing.assert_close(mean, expected)
    assert torch.equal(vectors, before), "not changed in place"
    alone = attack.of_clients([4, 9], HONEST[:2], [1, 1], Generator())
    torch.testing.assert_close(alone, HONEST[:2].mean(0)), "nobody to learn from: they send their own"


DEFENSES = {
    "median": aggregation.CoordinateMedian(),
    "trimmed mean": aggregation.TrimmedMean(2),
    "geometric median": aggregation.GeometricMedian(),
    "Multi-Krum": aggregation.MultiKrum(2),
    "centered clipping": aggregation.CenteredClipping(1.0),
    "NNM": aggregation.NearestNeighborMixing(aggregation.TrimmedMean(2), 2),
    "buckets": aggregation.Bucketing(aggregation.CoordinateMedian()),
}
IPM, NOISE = aggregation.InnerProductManipulation(20.0), aggregation.GaussianNoise(20.0)
AGGREGATIONS = {
    "FedAvg": None,
    "FedAvg under attack": aggregation.UnderAttack(IPM, ATTACKERS),
    "FedAvg under noise": aggregation.UnderAttack(NOISE, ATTACKERS),
    "median under noise": aggregation.UnderAttack(NOISE, ATTACKERS, aggregation.CoordinateMedian()),
    **{name: aggregation.UnderAttack(IPM, ATTACKERS, defense) for name, defense in DEFENSES.items()},
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
    attacked = phase(
        "it", FedAvg("global_expert.*"), aggregation=aggregation.UnderAttack(aggregation.GaussianNoise(), [1])
    )
    usual = phase("usual", FedAvg("global_expert.*"), start="initial")
    states = run([attacked, usual], mixture(), blobs(), tmp_path).run.states
    assert states["it"].clients[1].keys() == states["usual"].clients[1].keys()
    assert all(
        torch.equal(tensor, states["usual"].clients[1][name]) for name, tensor in states["it"].clients[1].items()
    )
