"""Secure aggregation in a simulation: exact sums, means as without it, and what it refuses."""

import functools
import itertools
import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from helpers import blobs, mixture, run
from helpers.backends import WithBatchNorm
from helpers.clusters import clustered, only
from helpers.methods import METHODS
from helpers.reports import csv_rows
from helpers.runs import assert_same
from helpers.workers import TwoInThisProcess

from fedmoe_pl import DPSGD, ClientFailures, Federation, Messages, Phase, Update
from fedmoe_pl.aggregation import CoordinateMedian, DifferentialPrivacy, SecureAggregation
from fedmoe_pl.aggregation.secure import OutOfRangeError
from fedmoe_pl.algorithms import EpsilonGreedyIFCA, FedAvg, FedPAC, Local, Scaffold
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.callbacks import TrafficLedger
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.phases.client_failures import ClientError

SIZES = (13, 8, 11, 9, 12)
START = {"w": torch.linspace(-1, 1, 7), "b": torch.tensor([0.1, -0.0])}


def update(client):
    generator = torch.Generator().manual_seed(client)
    sent = {name: tensor + 1e-3 * torch.randn(tensor.shape, generator=generator) for name, tensor in START.items()}
    return Update({**sent, "own/x": torch.tensor([client / 3])}, SIZES[client])


def exact_sum(name, bits):
    """The sum by Python's fractions, each summand rounded to the nearest even integer."""
    start = START[name].tolist() if name in START else [0.0]
    total = [0] * len(start)
    for client, weight in enumerate(SIZES):
        for i, value in enumerate(update(client).sent[name].tolist()):
            total[i] += round((Fraction(value) - Fraction(start[i])) * weight * 2**bits)
    return total


@pytest.mark.parametrize("bits", [8, 32])
def test_the_sum_is_that_of_fractions_in_whatever_order(bits):
    secure = SecureAggregation(fraction_bits=bits)
    encoded = [secure.encoded(update(client), START, 5) for client in range(5)]
    totals = []
    for order in itertools.islice(itertools.permutations(encoded), 0, 120, 17):
        a, b, c, d, e = order
        totals.append(secure.combine(secure.combine(a, secure.combine(b, c)), secure.combine(d, e)))
    for total in totals:
        assert {name: tensor.tolist() for name, tensor in total.sent.items()} == {
            name: exact_sum(name, bits) for name in total.sent
        }
        assert total.weight == sum(SIZES)
    mean = secure.decoded(totals[0], START, START)
    for name in START:
        exact = sum(update(client).sent[name].double() * weight for client, weight in enumerate(SIZES)) / sum(SIZES)
        assert (mean.sent[name] - exact).abs().max() < 2.0**-bits + 1e-7 and mean.sent[name].dtype == torch.float32


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 2), (torch.float64, 0)])
def test_the_mean_differs_from_that_of_fedavg_as_the_guide_says(dtype, units):
    """By 2.4e-10, and by some units in the last place of the largest parameter."""
    secure, weights = SecureAggregation(), (600, 37, 251, 1000, 5, 80, 333, 91, 2, 450)
    for scale in (1, 10):
        start = {"w": scale * torch.randn(10_000, dtype=dtype)}
        updates = [Update({"w": start["w"] + 0.1 * scale * torch.randn(10_000, dtype=dtype)}, w) for w in weights]
        total = functools.reduce(secure.combine, [secure.encoded(each, start, len(weights)) for each in updates])
        plain = functools.reduce(FedAvg().combine, updates).sent["w"]
        largest = plain.abs().max()
        last_place = torch.nextafter(largest, torch.tensor(math.inf, dtype=dtype)) - largest
        difference = (secure.decoded(total, start, start).sent["w"] - plain).abs().max()
        assert 0 < difference <= 2.4e-10 + units * last_place


def test_what_nobody_changes_stays_the_same_in_every_bit():
    secure = SecureAggregation(fraction_bits=1)
    odd = {"w": torch.tensor([1e-30, -0.0, 3e30, -math.inf])}
    encoded = [secure.encoded(Update({"w": each}, 7), odd, 2) for each in (odd["w"], odd["w"].clone())]
    assert secure.decoded(secure.combine(*encoded), odd, odd).sent["w"] is odd["w"]


LARGEST = 2.0**62 / 5 / 2.0**32


def test_the_largest_values_of_all_clients_do_not_overflow():
    secure = SecureAggregation()
    tensor = torch.tensor([1.0, -1.0], dtype=torch.float64) * math.nextafter(LARGEST / 9, 0)
    encoded = [secure.encoded(Update({"w": tensor}, 9), {}, 5) for _ in range(5)]
    expected = [5 * int(each) for each in encoded[0].sent["w"].tolist()]
    total = functools.reduce(secure.combine, encoded)
    assert total.sent["w"].tolist() == expected
    torch.testing.assert_close(secure.decoded(total, {}, {}).sent["w"], tensor)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, LARGEST / 9, -LARGEST / 9, 1e300])
def test_a_value_that_the_integers_cannot_express_is_refused(value):
    wrong = Update({"w": torch.tensor([0.0, value], dtype=torch.float64)}, 9)
    with pytest.raises(OutOfRangeError, match=r"^its w times its weight, 9, has values of 2\.15e\+08 or more"):
        SecureAggregation().encoded(wrong, {}, 5)


def phase(algorithm=None, **kwargs):
    algorithm = FedAvg("global_expert.*") if algorithm is None else algorithm
    return Phase("it", algorithm, **{"rounds": 2, "gate": GlobalOnly(), "evaluate": False, **kwargs})


def state_of(folder, each, model=mixture, data=None, **kwargs):
    it = run([each], model(), data or blobs(SIZES), folder, **{"backend": TrainerBackend(), **kwargs})
    return it.run.states["it"]


PRIVATE = DifferentialPrivacy(1.0, 1.0, 0.1, quantile=0.5, bit_noise=2.0)
SAME_MEANS = {
    "FedAvg": {},
    "some of five": {"clients_per_round": 4},
    "Scaffold": {"algorithm": Scaffold("global_expert.*")},
    "FedAdam": {"server_optimizer": partial(torch.optim.Adam, lr=0.1)},
    "privacy": {"aggregation": PRIVATE},
    "privacy of samples": {"sample_privacy": DPSGD(0.5, 1e-3, 1.0)},
    "weights of 1": {"algorithm": FedAvg("global_expert.*", weighting="uniform")},
    "other settings": {"secure_aggregation": SecureAggregation(threshold=5, fraction_bits=40)},
}


@pytest.mark.few("some of five")
@pytest.mark.parametrize("name", SAME_MEANS)
def test_means_are_those_without_it_up_to_rounding(name, tmp_path):
    plain = partial(torch.optim.SGD, lr=0.1)
    arguments = {"secure_aggregation": True, **SAME_MEANS[name]}
    if name in ("privacy", "privacy of samples"):
        pytest.importorskip("opacus")
    with_it = state_of(tmp_path, phase(**arguments), lambda: mixture(optimizer=plain))
    without = state_of(tmp_path, phase(**{**arguments, "secure_aggregation": False}), lambda: mixture(optimizer=plain))
    torch.testing.assert_close(with_it.server, without.server, rtol=0, atol=1e-8)
    assert any(not torch.equal(with_it.server[name], without.server[name]) for name in without.server), "it rounds"
    assert all(torch.equal(with_it.server[name], each) for name, each in without.server.items() if "gate" in name)


BACKENDS = {
    "stacked": lambda: {"backend": StackedBackend()},
    "in two groups": lambda: {"backend": StackedBackend(clients_per_stack=3)},
    "two workers": lambda: {"backend": TwoInThisProcess()},
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.few(1)
def test_all_backends_end_with_the_same_bits(name, tmp_path):
    """Also a stack, whose sums of floating-point numbers have other bits: here, integers are added."""
    each = phase(secure_aggregation=True)
    expected = state_of(tmp_path, each)
    assert_same(state_of(tmp_path, each, **BACKENDS[name]()).server, expected.server)


def test_a_round_that_too_few_clients_stay_in_is_tried_again_and_then_refused(tmp_path):
    settings = {"failures": ClientFailures(dropout=0.5)}
    with pytest.warns(UserWarning) as warned, pytest.raises(ClientError) as error:
        state_of(tmp_path, phase(secure_aggregation=SecureAggregation(threshold=5)), **settings)
    assert "of 5 clients answered, but secure aggregation needs 5, also after 3 more tries" in str(error.value)
    assert sum("the round is tried again" in str(each.message) for each in warned) == 3
    state_of(tmp_path, phase(secure_aggregation=True, rounds=1), failures=ClientFailures(dropout=0.1))


def test_a_client_whose_values_are_too_large_is_left_out(tmp_path):
    class Diverging(FedAvg):
        def client_final(self, client, constants):
            update = super().client_final(client, constants)
            factor = 1e9 if client.id == 2 else 1.0
            return replace(update, sent={name: factor * tensor for name, tensor in update.sent.items()})

    with pytest.warns(UserWarning, match=r"client 2 is left out: its global_expert.* times its weight, 11, has values"):
        state = state_of(tmp_path, phase(Diverging("global_expert.*"), secure_aggregation=True, rounds=1))
    assert state.failed == 1


class Halved(FedAvg):
    """Sends clients other tensors than those that the server shares."""

    def server_send(self, server, client_id, request):
        return {name: tensor / 2 for name, tensor in server.items()}


def declaring(**messages):
    """Says that clients send more than their updates."""
    algorithm = FedAvg("global_expert.*")
    algorithm.messages = Messages(**messages)
    return {"algorithm": algorithm}


OF_IFCA = {"algorithm": EpsilonGreedyIFCA(0.3), "gate": only(0)}
THREE_OF_FOUR = {"clients_per_round": 3, "secure_aggregation": SecureAggregation(4)}
REFUSED = [
    ("secure_aggregation", "IFCA needs each client's update", OF_IFCA, partial(clustered, 3)),
    ("secure_aggregation", "FedPAC needs each", {"algorithm": FedPAC()}, mixture),
    ("secure_aggregation", "Local sends nothing", {"algorithm": Local(), "rounds": 1}, mixture),
    ("secure_aggregation", "send more than their updates (request)", declaring(request=("own/",)), mixture),
    ("secure_aggregation", "send more than their updates (exchanged)", declaring(exchanged=("own/",)), mixture),
    ("secure_aggregation", "receive tensors other than", {"algorithm": Halved("global_expert.*")}, mixture),
    ("aggregation", "it needs each client's update", {"aggregation": CoordinateMedian()}, mixture),
    ("clients_per_round", "secure aggregation needs 2", {"clients_per_round": 1}, mixture),
    ("clients_per_round", "secure aggregation needs 4", THREE_OF_FOUR, mixture),
    ("clients_per_round", "too small", {"clients_per_round": 4, "aggregation": PRIVATE}, mixture),
    ("secure_aggregation.threshold", "", {"secure_aggregation": SecureAggregation(2)}, mixture),
    ("secure_aggregation", "num_batches_tracked' is no mean", {}, lambda: mixture(expert=WithBatchNorm())),
]


@pytest.mark.parametrize(("argument", "because", "arguments", "model"), REFUSED)
def test_it_is_refused_where_the_server_needs_more_than_a_sum(argument, because, arguments, model, tmp_path):
    if arguments.get("aggregation") is PRIVATE:
        pytest.importorskip("opacus")
    with pytest.raises(InvalidArgumentError) as error:
        state_of(tmp_path, phase(**{"secure_aggregation": True, **arguments}), model)
    assert error.value.argument == argument and because in error.value.because


def test_more_clients_than_the_threshold_are_not_asked_for(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"^ClientFailures: min_clients is 5, but must be at most 4"):
        state_of(tmp_path, phase(secure_aggregation=True), failures=ClientFailures(min_clients=5))


@pytest.mark.slow
def test_the_algorithms_that_it_takes_are_those_whose_updates_are_averaged(tmp_path):
    """Every method of the package can be audited with it, or is refused because of what its server needs."""
    refused = set()
    for name, method in METHODS.items():
        (first, *_) = [each for each in method.phases() if each.algorithm.federated] or [None]
        if first is None or first.aggregation is not None:
            continue
        of_phase = {"start": None, "clients_per_round": 1.0, "rounds": 1, "secure_aggregation": True}
        it = Federation([replace(first, **of_phase)], default_root_dir=str(tmp_path), trainer={"max_epochs": 2})
        try:
            it.audit(method.model(), blobs(SIZES, **method.split))
        except InvalidArgumentError as error:
            assert error.argument == "secure_aggregation", name
            refused.add(name)
    assert refused == {
        *("FD", "FedALT", "FedExLoRA", "FedKD", "FedLEASE", "FedMix", "FedMoEDA", "FedPAC", "FedProto", "FlexLoRA"),
        *("HetLoRA", "IFCA"),
    }


def test_ledger_and_audit_say_what_is_masked(tmp_path, capsys):
    each = phase(secure_aggregation=True)
    it = run([each], mixture(), blobs(SIZES), tmp_path, callbacks=[TrafficLedger()], enable_checkpointing=True)
    rows = [row for row in csv_rows(it.run_dir / "traffic.csv") if row["tensor"] != "(weight)"]
    assert {(row["direction"], row["dtype"]) for row in rows} == {("down", "float64"), ("up", "masked int64")}
    it.audit(mixture(), blobs(SIZES))
    text = " ".join(capsys.readouterr().out.split())
    assert "of the updates, the server sees only the sum of at least 4, because each is masked; it sees the" in text
