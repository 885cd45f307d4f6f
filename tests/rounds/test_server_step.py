"""The server's step: a phase's aggregation and its privacy, and the server's optimizer; and what is refused."""

import math
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from helpers import blobs, mixture, phase, run, runs, sparse_mixture
from helpers.backends import WithBatchNorm
from helpers.clusters import clustered, only
from helpers.pfedmoe import model as of_three_architectures
from helpers.runs import Kill, assert_same, resumed_after
from helpers.workers import TwoInThisProcess
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Evaluate, Messages, Phase, Select
from fedmoe_pl.aggregation import (
    Bucketing,
    CoordinateMedian,
    DifferentialPrivacy,
    GaussianNoise,
    TrimmedMean,
    UnderAttack,
)
from fedmoe_pl.algorithms import (
    APFL,
    Ditto,
    EpsilonGreedyIFCA,
    FedAdam,
    FedAvg,
    FedBN,
    FedKD,
    FedMoEDA,
    FedRoD,
    FineTuning,
    Local,
    OptInFedAvg,
    PFedMoE,
    Scaffold,
)
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.checkpoints.checkpoint import load_checkpoint
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import EqualWeights, GlobalOnly, LocalOnly
from fedmoe_pl.phases.participation import phase_cohort, sample_poisson
from fedmoe_pl.rounds.fit import server_step

needs_opacus = pytest.mark.skipif(find_spec("opacus") is None, reason="needs Opacus")
MEAN = DifferentialPrivacy(0.0, math.inf, 1e-5)  # changes nothing but the weights
ADAPTIVE = {"noise_multiplier": 1.0, "max_norm": 0.5, "delta": 1e-3, "quantile": 0.5, "bit_noise": 1.0}
SGD, HALF = (partial(torch.optim.SGD, lr=rate) for rate in (0.1, 0.5))
SIZES = (12, 12, 12)  # so that weights by samples are uniform

AGGREGATED = {
    "FedAvg": (lambda: FedAvg("global_expert.*"), mixture),
    "OptInFedAvg": (lambda: OptInFedAvg("global_expert.*", opt_out_clients=0.3), mixture),
    "Ditto": (Ditto, lambda: mixture(EqualWeights())),
    "APFL": (APFL, lambda: mixture(EqualWeights())),
    "FedRoD": (FedRoD, lambda: mixture(EqualWeights())),
    "PFedMoE": (PFedMoE, of_three_architectures),
}


@pytest.mark.few("FedAvg", "OptInFedAvg")
@pytest.mark.parametrize("name", AGGREGATED)
def test_without_noise_or_attackers_it_is_the_mean_of_every_algorithm_that_averages(name, tmp_path):
    algorithm, model = AGGREGATED[name]
    aggregations = {"usual": None, "private": MEAN, "trimmed": TrimmedMean(0)}
    each = [
        phase(key, algorithm(), rounds=2, start="initial", aggregation=aggregation)
        for key, aggregation in aggregations.items()
    ]
    states = run(each, model(), blobs(SIZES), tmp_path, max_epochs=1, backend=TrainerBackend()).run.states
    for key in ("private", "trimmed"):
        torch.testing.assert_close(states[key].server, states["usual"].server, rtol=1e-12, atol=1e-13)


def test_a_server_optimizer_steps_to_the_aggregated_model(tmp_path):
    half = {"server_optimizer": HALF}
    one = [phase("it", FedAvg("global_expert.*"), aggregation=CoordinateMedian(), **extra) for extra in ({}, half)]
    medians = [run([it], mixture(), blobs(), tmp_path).run.states["it"].server for it in one]
    for name, initial in FedAvg("global_expert.*").server_init(mixture()).items():
        torch.testing.assert_close(medians[1][name], (initial + medians[0][name]) / 2, rtol=1e-12, atol=1e-14)


def test_statistics_of_batch_normalization_are_aggregated_and_counters_take_their_median(tmp_path):
    it = phase("it", FedAvg("global_expert.*"), aggregation=CoordinateMedian())
    federation = run([it], mixture(expert=WithBatchNorm()), blobs((8, 20, 13)), tmp_path)
    server = federation.run.states["it"].server
    counter = next(tensor for name, tensor in server.items() if name.endswith("num_batches_tracked"))
    assert counter.item() == 2 * 3 and counter.dtype == torch.int64, (
        "two epochs of the client with 13 samples, of which the last is dropped"
    )
    variance = next(tensor for name, tensor in server.items() if name.endswith("running_var"))
    assert (variance > 0).all() and not torch.equal(variance, torch.ones_like(variance))


def private(aggregation, **arguments):
    fedavg = FedAvg("global_expert.*")
    return Phase("private", fedavg, 4, clients_per_round=2, gate=GlobalOnly(), aggregation=aggregation, **arguments)


def tuned():
    return Phase("PFL-FT", FineTuning(gate_fraction=0.25), gate=LocalOnly())


def random_phases():
    """Noise and an adapted norm, and attackers and buckets."""
    attacked = UnderAttack(GaussianNoise(), [1], Bucketing(CoordinateMedian()))
    fedavg = Phase("attacked", FedAvg("global_expert.*"), 2, gate=GlobalOnly(), start="initial", aggregation=attacked)
    return [private(DifferentialPrivacy(**ADAPTIVE)), fedavg]


def federation(path, phases, **kwargs):
    return runs.federation(path, phases, **{"backend": TrainerBackend(), "evaluate_every_n_rounds": 2, **kwargs})


def content(federation):
    return load_checkpoint(federation.run_dir / "checkpoints/last.ckpt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    if find_spec("opacus") is None:
        pytest.skip("needs Opacus")
    it = federation(tmp_path_factory.mktemp("whole"), random_phases())
    it.fit(mixture(), blobs())
    return it


@pytest.mark.slow
def test_a_killed_run_draws_the_same_numbers_again(whole, tmp_path):
    resumed = resumed_after(
        Kill("on_round_end", 2), lambda **kwargs: federation(tmp_path, random_phases(), **kwargs), mixture, blobs
    )
    assert_same(content(resumed), content(whole))


@pytest.mark.slow
def test_workers_and_stores_have_the_same_bits_and_backends_agree(whole, tmp_path):
    workers = federation(tmp_path / "workers", random_phases(), backend=TwoInThisProcess())
    workers.fit(mixture(), blobs())
    stacked = federation(tmp_path / "stacked", random_phases(), backend=StackedBackend())
    stacked.fit(mixture(), blobs())
    for name, expected in whole.run.states.items():
        assert_same(workers.run.states[name].server, expected.server)
        assert_same(workers.run.states[name].aggregation, expected.aggregation)
        actual = stacked.run.states[name].server
        torch.testing.assert_close(actual, expected.server, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@needs_opacus
def test_newcomers_leave_model_and_epsilon_as_they_are(tmp_path):
    whole = federation(tmp_path, [private(DifferentialPrivacy(**ADAPTIVE)), tuned()])
    whole.fit(mixture(), blobs())
    expected = whole.run.states["private"]
    whole.personalize(mixture(), blobs(sizes=(9, 6)), rounds=2)
    assert_same(whole.run.states["private"].server, expected.server)
    assert whole.run.states["private"].epsilon == expected.epsilon


def test_clients_join_rounds_by_draws_of_their_own():
    cohorts = [sample_poisson(range(10), 3, seed=0, round=round) for round in range(2000)]
    assert abs(sum(map(len, cohorts)) / 2000 - 3) < 0.1
    assert min(map(len, cohorts)) == 0 and max(map(len, cohorts)) > 6
    together = sum({0, 1} <= {*cohort} for cohort in cohorts) / 2000
    assert abs(together - 0.09) < 0.02, "independent"
    assert cohorts[0] == sample_poisson(range(10), 3, seed=0, round=0)


def test_private_phases_draw_cohorts_of_their_own():
    """A phase may start from parts of both: their epsilons add up if the draws are independent."""
    private = {"clients_per_round": 3, "aggregation": DifferentialPrivacy(0.0, 1.0, 1e-5)}
    one, other = (phase(name, FedAvg("global_expert.*"), **private) for name in "AB")
    for secret in (None, 5):
        cohorts = [[phase_cohort(each, 10, 0, i, 0, secret) for each in (one, other)] for i in range(2000)]
        assert abs(sum(0 in a and 0 in b for a, b in cohorts) / 2000 - 0.09) < 0.02
        assert abs(sum(len(a) for a, _ in cohorts) / 2000 - 3) < 0.1


def test_cohorts_of_a_secret_follow_from_all_of_it_and_not_from_the_seed():
    private = phase("A", FedAvg("*"), clients_per_round=3, aggregation=DifferentialPrivacy(0.0, 1.0, 1e-5))

    def cohorts(seed, secret, attempt=0):
        return [phase_cohort(private, 10, seed, round, attempt, secret) for round in range(50)]

    assert cohorts(0, 5) == cohorts(1, 5)
    assert len({str(each) for each in (cohorts(0, None), cohorts(0, 5), cohorts(0, 5 + 2**200), cohorts(0, 5, 1))}) == 4


@pytest.mark.parametrize("backend", [StackedBackend(), TrainerBackend()])
def test_a_round_without_clients_adds_only_noise(backend, tmp_path):
    it = phase("it", FedAvg("global_expert.*"), clients_per_round=1, aggregation=DifferentialPrivacy(0.0, 1.0, 1e-5))
    empty = next(seed for seed in range(100) if not phase_cohort(it, 3, seed, 0))
    federation = run([it], mixture(), blobs(), tmp_path, seed=empty, backend=backend)
    state = federation.run.states["it"]
    assert_same(state.server, FedAvg("global_expert.*").server_init(mixture()))
    assert state.round == 1 and state.traffic["bytes_up"] == 0 and not state.clients


def test_the_clipping_norm_and_the_bit_are_counted_as_traffic(tmp_path):
    adaptive, fedavg = DifferentialPrivacy(0.0, 1.0, 1e-5, quantile=0.5), FedAvg("global_expert.*")
    usual, it = phase("usual", fedavg), phase("it", fedavg, start="initial", aggregation=adaptive)
    states = run([usual, it], mixture(), blobs(), tmp_path).run.states
    for way in ("up", "down"):
        assert states["it"].traffic[f"bytes_{way}"] == states["usual"].traffic[f"bytes_{way}"] + 3 * 8


class AsksClients(FedAvg):
    def server_begin(self, server, clients):
        return server | {"samples/": torch.tensor(sum(len(client.samples) for client in clients))}


class Exchanging(FedAvg):
    messages = Messages(exchanged=("local_expert.",))


class SendsChanges(FedAvg):
    messages = Messages(changes=True)


MEDIAN = CoordinateMedian()
REFUSED = {
    "Local aggregates nothing": (Local(), MEDIAN, mixture),
    "a combine of its own": (EpsilonGreedyIFCA(), MEDIAN, lambda: clustered(gate=only(0))),
    "its own step of the server": (FedKD(), MEDIAN, mixture),
    "control variates": (Scaffold(), MEDIAN, lambda: mixture(optimizer=SGD)),
    "no parameter": (FedAvg(shared=[]), MEDIAN, mixture),
    "too few clients": (FedAvg(), TrimmedMean(2), mixture),
    "answers before the first round": (AsksClients(), MEAN, mixture),
    "an exchange": (Exchanging(), MEAN, mixture),
    "changes": (SendsChanges(), MEDIAN, mixture),
}


@pytest.mark.parametrize("why", REFUSED)
def test_an_aggregation_that_does_not_fit_is_refused(why, tmp_path):
    algorithm, aggregation, model = REFUSED[why]
    with pytest.raises(InvalidArgumentError) as error:
        run([phase("it", algorithm, aggregation=aggregation)], model(), blobs(), tmp_path)
    assert error.value.owner == "Phase 'it'"
    assert error.value.argument == ("clients_per_round" if why == "too few clients" else "aggregation")


def test_differential_privacy_that_would_not_hold_is_refused(tmp_path):
    monitored = Phase(
        "it", FedAvg("global_expert.*"), aggregation=MEAN, select=Select("global_test"), gate=GlobalOnly()
    )
    with pytest.raises(MisconfigurationException, match="select by clients' data is not in epsilon"):
        run([monitored], mixture(), blobs(), tmp_path)
    after = [phase("open", FedAvg()), phase("it", FedAvg("global_expert.*"), start="open", aggregation=MEAN)]
    with pytest.raises(MisconfigurationException, match="given in 'open', from which the phase starts, too"):
        run(after, mixture(), blobs(), tmp_path)
    with pytest.raises(
        MisconfigurationException, match=r"the buffer 'global_expert.extractor.1.running_mean' is shared"
    ):
        run([phase("it", FedAvg(), aggregation=MEAN)], mixture(expert=WithBatchNorm()), blobs(), tmp_path)
    run([phase("it", FedBN(), aggregation=MEAN)], mixture(expert=WithBatchNorm()), blobs(), tmp_path)


ADAM = partial(FedAdam, lr=3.0)

AVERAGING = {
    "FedAvg": (lambda: FedAvg("global_expert.*"), mixture),
    "Scaffold": (lambda: Scaffold(server_lr=0.8), lambda: mixture(optimizer=SGD)),
    "FedMoEDA": (FedMoEDA, sparse_mixture),
    "PFedMoE": (PFedMoE, of_three_architectures),
    "IFCA": (lambda: EpsilonGreedyIFCA(0.3), lambda: clustered(gate=only(0))),
}


def server_of(name, path, **arguments):
    """The server's tree after one round, and its parameters before it."""
    algorithm, model = AVERAGING[name]
    module = model()
    federation = run([phase("it", algorithm(), **arguments)], module, blobs(), path)
    names = dict(module.named_parameters())
    initial = {name: tensor for name, tensor in algorithm().server_init(module).items() if name in names}
    return federation.run.states["it"].server, initial


@pytest.mark.few("FedAvg")
@pytest.mark.parametrize("name", AVERAGING)
def test_half_a_step_goes_half_the_way_of_every_algorithm_that_averages(name, tmp_path):
    mean, initial = server_of(name, tmp_path / "mean")
    half, _ = server_of(name, tmp_path / "half", server_optimizer=HALF)
    assert half.keys() == mean.keys()
    moved = 0
    for key, tensor in mean.items():
        if key in initial:
            moved += not torch.equal(tensor, initial[key])
            tensor = (initial[key] + tensor) / 2
        torch.testing.assert_close(half[key], tensor, rtol=1e-13, atol=1e-15)
    assert moved > 1


def test_statistics_of_batch_normalization_take_the_mean(tmp_path):
    def server(**arguments):
        it = phase("it", FedAvg(), **arguments)
        return run([it], mixture(expert=WithBatchNorm()), blobs(), tmp_path).run.states["it"].server

    mean, half = server(), server(server_optimizer=HALF)
    buffers = [name for name in mean if "running" in name or "num_batches" in name]
    assert len(buffers) == 6
    weights = [name for name in mean if name.endswith("weight")]
    for name in (*buffers, *weights):
        assert torch.equal(half[name], mean[name]) == (name in buffers), name


def test_what_no_client_changed_stays_and_so_does_its_momentum():
    """As for a cluster that nobody picked, and for parts that are not trained, also with weight decay."""
    module = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
    optimizer = partial(torch.optim.SGD, lr=1.0, momentum=0.5, weight_decay=0.1)
    old = {"a": torch.ones(2), "b": torch.ones(2), "c/own": torch.ones(2)}
    moved = {name: tensor + 1 for name, tensor in old.items()}
    first, state = server_step(optimizer, module, old, moved, {})
    assert first["c/own"].tolist() == [2, 2] and first["b"].tolist() == pytest.approx([1.9, 1.9])
    second, later = server_step(optimizer, module, first, {**first, "a": first["a"] + 1}, state)
    assert torch.equal(second["b"], first["b"]) and not torch.equal(second["a"], first["a"])
    assert torch.equal(later["optimizer/b/momentum_buffer"], state["optimizer/b/momentum_buffer"])
    assert not torch.equal(later["optimizer/a/momentum_buffer"], state["optimizer/a/momentum_buffer"])
    assert old["a"].tolist() == [1, 1], "trees are not changed in place"


def phases(**arguments):
    fedavg = Phase("FedAvg", FedAvg(), 4, clients_per_round=2, server_optimizer=ADAM, gate=GlobalOnly(), **arguments)
    return [fedavg, Phase("again", FedAvg(), start="FedAvg", gate=GlobalOnly(), server_optimizer=ADAM)]


def optimized(path, **kwargs):
    selected = phases(select=Select("global_test"), evaluate=Evaluate(every_n_rounds=1))
    return runs.federation(path, selected, trainer={"max_epochs": 2, "accelerator": "cpu"}, **kwargs)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_optimizer_s_state(tmp_path):
    whole = optimized(tmp_path / "whole")
    whole.fit(mixture(), blobs())
    with pytest.raises(KeyboardInterrupt):
        optimized(tmp_path / "killed", callbacks=[Kill("on_round_end", 2)]).fit(mixture(), blobs())
    saved = load_checkpoint(next((tmp_path / "killed").rglob("last.ckpt")))["phases"]["FedAvg"]
    names = [name for name, _ in mixture().named_parameters() if name.startswith("global_expert")]
    assert {*saved.server_optimizer} == {f"optimizer/{name}/{key}" for name in names for key in "mv"}
    assert not any(name.startswith("optimizer/") for name in saved.server), "it is not sent"
    resumed = optimized(tmp_path / "killed")
    resumed.fit(mixture(), blobs(), ckpt_path="last")
    assert_same(content(resumed), content(whole))


@pytest.mark.slow
def test_a_phase_ends_at_its_best_round_and_the_next_one_begins_without_momentum(tmp_path):
    it = optimized(tmp_path)
    it.fit(mixture(), blobs())
    first, again = it.run.states["FedAvg"], it.run.states["again"]
    rounds = [row["round"] for row in it.run.rows if row["method"] == "FedAvg"]
    assert first.best_round < max(rounds), "or this says nothing"
    short = optimized(tmp_path / "short")
    short.phases[0].rounds = first.best_round
    short.fit(mixture(), blobs())
    assert_same(first.server, short.run.states["FedAvg"].server)
    assert not first.server_optimizer
    for name, m in again.server_optimizer.items():
        if name.endswith("/m"):
            parameter = name.split("/")[1]
            v = again.server_optimizer[f"optimizer/{parameter}/v"]
            step = 3 * m / (v.sqrt() + 1e-3)
            torch.testing.assert_close(again.server[parameter], first.server[parameter] + step, rtol=1e-12, atol=0)
