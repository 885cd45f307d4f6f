"""Clipping, noise and the adapted norm against their formulas, and what DifferentialPrivacy refuses."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Expert, blobs, mixture
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Generator, nn

from fedmoe_pl import Phase, Update
from fedmoe_pl.aggregation import DifferentialPrivacy, accountant
from fedmoe_pl.aggregation.aggregation import Cohort
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.models import GlobalOnly

START = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.tensor(3.0, dtype=torch.float64)}
SENT = [
    {"a": torch.tensor([4.0, 2.0], dtype=torch.float64), "b": torch.tensor(7.0, dtype=torch.float64)},  # 5 away
    {"a": torch.tensor([1.0, 2.5], dtype=torch.float64), "b": torch.tensor(3.0, dtype=torch.float64)},  # 0.5 away
    {"a": torch.tensor([1.0, 1.0], dtype=torch.float64), "b": torch.tensor(3.0, dtype=torch.float64)},  # 1 away
]
COHORT = Cohort(4, range(10))


def clipped(aggregation, sent, state=None):
    client = SimpleNamespace(id=0, module=nn.Module(), loaded={**START, **(state or {})})
    return aggregation.of_client(client, Update(sent, 17))


def aggregate(aggregation, updates, state=None, seed=0, cohort=COHORT):
    combined = None
    for sent in updates:
        update = clipped(aggregation, sent, state)
        combined = update if combined is None else aggregation.combine(combined, update)
    return aggregation.aggregate(START, combined, state or {}, cohort, Generator().manual_seed(seed))


def test_a_change_is_one_vector_that_is_clipped_to_the_norm():
    private = DifferentialPrivacy(0.0, 1.0, 1e-5)
    far, near, exact = (clipped(private, sent) for sent in SENT)
    assert far.sent["a"].tolist() == pytest.approx([0.6, 0]) and far.sent["b"].item() == pytest.approx(0.8)
    assert near.sent["a"].tolist() == [0, 0.5] and near.sent["b"].item() == 0
    assert exact.sent["a"].tolist() == [0, -1]
    assert far.weight == 1, "not the number of samples"


def test_a_server_cannot_lift_a_norm_that_is_not_adapted():
    far = clipped(DifferentialPrivacy(0.0, 1.0, 1e-5), SENT[0], {"aggregation/max_norm": torch.tensor(1e9)})
    assert far.sent["a"].tolist() == pytest.approx([0.6, 0]) and far.sent["b"].item() == pytest.approx(0.8)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_change_that_is_not_finite_counts_as_none(value):
    adaptive = DifferentialPrivacy(0.0, 1.0, 1e-5, quantile=0.5)
    sent = {"a": torch.tensor([value, 1.0], dtype=torch.float64), "b": torch.tensor(3.0, dtype=torch.float64)}
    update = clipped(adaptive, sent)
    assert [tensor.abs().sum().item() for tensor in update.sent.values()] == [0, 0, 0]


def test_the_server_adds_the_sum_over_the_expected_number_of_clients():
    update, state = aggregate(DifferentialPrivacy(0.0, 1.0, 1e-5), SENT)
    assert update.sent["a"].tolist() == pytest.approx([1 + 0.6 / 4, 2 + (0.5 - 1) / 4])
    assert update.sent["b"].item() == pytest.approx(3 + 0.8 / 4)
    assert not state
    nobody, _ = aggregate(DifferentialPrivacy(0.0, 1.0, 1e-5), [])
    assert all(torch.equal(nobody.sent[name], START[name]) for name in START)


@pytest.mark.parametrize("updates", [SENT, []], ids=["three clients", "nobody"])
def test_the_noise_is_gaussian_with_the_multiplier_times_the_norm_on_the_sum(updates):
    exact, _ = aggregate(DifferentialPrivacy(0.0, 2.0, 1e-5), updates)
    private = DifferentialPrivacy(1.5, 2.0, 1e-5)
    draws = [aggregate(private, updates, seed=seed)[0].sent for seed in range(600)]
    noise = torch.stack([torch.cat([(sent[name] - exact.sent[name]).flatten() for name in START]) for sent in draws])
    expected = 1.5 * 2.0 / 4
    assert noise.std(0).tolist() == pytest.approx([expected] * 3, rel=0.1)
    assert noise.mean(0).abs().max() < 0.15 * expected
    assert np.abs(np.corrcoef(noise.T.numpy()) - np.eye(3)).max() < 0.15
    again = aggregate(private, updates, seed=5)[0].sent
    assert all(torch.equal(again[name], draws[5][name]) for name in START)


def test_the_norm_follows_the_quantile():
    """Without noise, half of the clients are within it at the end (Andrew et al., Eq. 3)."""
    private = DifferentialPrivacy(0.0, 0.1, 1e-5, quantile=0.5)
    state = private.begin()
    update, state = aggregate(private, SENT, state, cohort=Cohort(3, range(3)))
    assert state["aggregation/max_norm"].item() == pytest.approx(0.1 * math.exp(-0.2 * (0 - 0.5)))
    assert update.sent["b"].item() == pytest.approx(3 + 0.08 / 3)
    for _ in range(200):
        _, state = aggregate(private, SENT, state, cohort=Cohort(3, range(3)))
    assert 0.9 < state["aggregation/max_norm"].item() < 1.1, "the median of 5, 0.5 and 1"
    assert clipped(private, SENT[1], state).sent["aggregation/within_max_norm"].item() == 1
    assert clipped(private, SENT[0], state).sent["aggregation/within_max_norm"].item() == 0


class Tied(Expert):
    """An expert that computes a layer twice or, for comparison, once."""

    def __init__(self, names):
        super().__init__()
        layer = nn.Linear(5, 5)
        for name in names:
            self.add_module(name, layer)

    def forward(self, x):
        return super().forward(self.one(self.one(x)))


def test_a_tensor_of_several_names_counts_once_in_the_norm_and_gets_noise_once(tmp_path):
    servers = []
    for names in (["one"], ["one", "two"]):
        private = DifferentialPrivacy(0.5, 0.3, 1e-5)
        phase = Phase("it", FedAvg("global_expert.*"), rounds=2, aggregation=private, gate=GlobalOnly(), evaluate=False)
        run = federation(tmp_path, [phase], trainer={"accelerator": "cpu"}, enable_checkpointing=False)
        run.fit(mixture(GlobalOnly(), Tied(names)), blobs())
        servers.append(run.run.states["it"].server)
    once, tied = servers
    for name, tensor in tied.items():
        torch.testing.assert_close(tensor, once[name.replace(".two.", ".one.")], rtol=1e-12, atol=1e-12)


def test_bits_and_changes_together_cost_the_noise_multiplier():
    """Andrew et al., Theorem 1; the bits' sum changes by 1/2 with one client."""
    private = DifferentialPrivacy(1.0, 0.1, 1e-5, quantile=0.5, bit_noise=0.7)
    changes = private.noise_of_changes(COHORT)
    assert changes > 1
    assert changes**-2 + (0.7 / 0.5) ** -2 == pytest.approx(1.0**-2)
    by_default = DifferentialPrivacy(1.0, 0.1, 1e-5, quantile=0.5)
    assert by_default.noise_of_bits(Cohort(100, range(1000))) == 5
    assert DifferentialPrivacy(1.0, 0.1, 1e-5).noise_of_changes(COHORT) == 1
    results = [aggregate(private, [], {"aggregation/max_norm": torch.tensor(1.0)}, seed) for seed in range(600)]
    noise = torch.stack([update.sent["a"] for update, _ in results]).std(0)
    assert noise.tolist() == pytest.approx([changes / 4] * 2, rel=0.05), "more than the multiplier alone"
    assert changes > 1.1
    norms = [state["aggregation/max_norm"].log() for _, state in results]
    assert torch.stack(norms).std().item() == pytest.approx(0.2 * 0.7 / 4, rel=0.1)


def test_shared_complex_numbers_are_refused():
    """Their imaginary parts would be in no norm, and their noise too little."""
    shared = {"weight": torch.zeros(2), "spectrum": torch.zeros(2, dtype=torch.complex64)}
    with pytest.raises(MisconfigurationException, match=r"'spectrum' is shared, .* for real numbers"):
        DifferentialPrivacy(0.0, 1.0, 1e-5).check(shared, {*shared}, COHORT)


def test_without_opacus_noise_is_refused(monkeypatch):
    accountant._opacus.cache_clear()
    monkeypatch.setattr(accountant, "find_spec", lambda name: None)
    with pytest.raises(MisconfigurationException, match=r'pip install "\.\[privacy\]"'):
        DifferentialPrivacy(1.234, 1.0, 1e-5).check(START, {*START}, COHORT)
    DifferentialPrivacy(0.0, 1.0, 1e-5).check(START, {*START}, COHORT)
