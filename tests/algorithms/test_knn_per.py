"""kNN-Per against a rewrite with sorted distances, and its limits."""

import pytest
import torch
from helpers import assert_same_bits, blobs, mixture
from helpers.runs import federation
from torch import Generator

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg, KNNPer
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.seeds import derive_seed

SIZES = (23, 8, 1)


def phases(algorithm=None, **kwargs) -> list[Phase]:
    federated = Phase("FedAvg", FedAvg("global_expert.*"), rounds=2, gate=GlobalOnly())
    return [federated, Phase("kNN-Per", algorithm or KNNPer(k=3), **kwargs)]


def fitted(path, algorithm=None, sizes=SIZES, ckpt_path=None, **kwargs):
    run = federation(path, phases(algorithm), **kwargs)
    run.fit(mixture(), blobs(sizes), ckpt_path=ckpt_path)
    return run


def shuffled(data, client):
    """The client's samples in the order of which the first fifth are queries."""
    samples = data.train_samples[client]
    return samples[torch.randperm(len(samples), generator=Generator().manual_seed(derive_seed(0, 2, client, 3)))]


def by_hand(expert, data, stored, x, k, kernel):
    """The probabilities of the expert and of the neighbors, sample by sample."""
    z, labels = expert.extractor(data.x[stored]), data.y[stored].tolist()
    both = []
    for features, logits in zip(expert.extractor(x), expert(x), strict=True):
        distances = [(features - other).square().sum().item() for other in z]
        weights = torch.zeros(3, dtype=torch.float64)
        for index in sorted(range(len(z)), key=lambda index: distances[index])[:k]:
            weights[labels[index]] += torch.exp(torch.tensor(-kernel(distances[index]), dtype=torch.float64))
        both.append((logits.softmax(0), weights / weights.sum()))
    return both


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("kernel", ["squared", "euclidean"])
def test_weights_and_predictions_equal_those_by_hand(tmp_path, kernel):
    def exponent(squared_distance):
        return squared_distance / (6 * 0.5) if kernel == "squared" else squared_distance**0.5 / 0.5

    sizes = (40, 25)
    data = blobs(sizes)
    run = fitted(tmp_path, KNNPer(k=3, kernel=kernel, scale=0.5, capacity=0.7), sizes, trainer={"max_epochs": 0})
    chosen = []
    with torch.no_grad():
        for client in range(2):
            expert = run.client_module("FedAvg", client).global_expert
            samples = shuffled(data, client)
            queries, rest = samples[: len(samples) // 5], samples[len(samples) // 5 :]
            both = by_hand(expert, data, rest[: int(0.7 * len(rest))], data.x[queries], 3, exponent)
            right = [
                sum(
                    int(((1 - i / 10) * p + i / 10 * q).argmax() == y)
                    for (p, q), y in zip(both, data.y[queries], strict=True)
                )
                for i in range(11)
            ]
            weight = right.index(max(right)) / 10
            chosen.append(weight)
            assert run.run.states["kNN-Per"].clients[client]["knn/weight"].item() == pytest.approx(weight)
            stored = samples[: int(0.7 * len(samples))]
            mixed = [(1 - weight) * p + weight * q for p, q in by_hand(expert, data, stored, data.x[:20], 3, exponent)]
            expected = torch.stack(mixed).log() if weight else expert(data.x[:20])
            torch.testing.assert_close(
                run.run.client_predictor("kNN-Per", client)(data.x[:20]), expected, rtol=0, atol=1e-10
            )
    assert any(chosen), "the test shows nothing if no client uses its neighbors"


def test_a_client_with_one_sample_uses_the_federated_model(whole):
    assert whole.run.states["kNN-Per"].clients[2]["knn/weight"].item() == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", [KNNPer(weight=0.0), KNNPer(capacity=0.0), KNNPer(capacity=0.0, weight=1.0)])
def test_without_weight_or_neighbors_it_is_the_federated_model_to_the_bit(tmp_path, algorithm):
    run, x = fitted(tmp_path, algorithm), blobs(SIZES).x
    for client in range(3):
        expected = run.client_module("FedAvg", client)(x)
        assert_same_bits({"": run.run.client_predictor("kNN-Per", client)(x)}, {"": expected})
    clients = [[vars(one) for one in run.results[name].clients] for name in ("FedAvg", "kNN-Per")]
    for one, other in zip(*clients, strict=True):
        assert (one["reweighted_test"], one["global_test"]) == (other["reweighted_test"], other["global_test"])


def test_a_narrow_kernel_does_not_lose_the_nearest_neighbor(tmp_path):
    run = fitted(tmp_path, KNNPer(k=3, weight=1.0, scale=1e-9))
    assert torch.isfinite(run.run.client_predictor("kNN-Per", 0)(blobs(SIZES).x)).all()
