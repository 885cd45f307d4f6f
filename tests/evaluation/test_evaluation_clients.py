"""Only some clients are evaluated; and evaluation in worker processes."""

import pickle
from collections import Counter

import pytest
import torch
from helpers import blobs, mixture, phase, run
from helpers.reports import csv_rows
from helpers.runs import Notes, assert_same, federation, model
from helpers.runs import phases as of_runs
from helpers.workers import InThisProcess, TwoInThisProcess
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Evaluate, Phase, Select
from fedmoe_pl.algorithms import FedAvg, Local, OptInFedAvg, PFedMoE
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.backends.workers import workers_backend as workers
from fedmoe_pl.evaluation import stacked_models
from fedmoe_pl.evaluation.results import ACCURACIES
from fedmoe_pl.models import ConstantGate, GlobalOnly, LinearGate
from fedmoe_pl.phases.participation import evaluated_clients, sample_cohort

SIZES = (13, 8, 11, 9, 12, 10)


def phases(**kwargs):
    gate = ConstantGate(1)
    return [
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=5, gate=gate, select=Select("validation_loss"), **kwargs),
        Phase("Local", Local(), rounds=2),
    ]


@pytest.mark.slow
def test_the_drawn_clients_have_their_numbers_among_all_and_select_the_round(tmp_path, capsys):
    module, data = mixture(LinearGate(5)), blobs(SIZES, validation_fraction=0.3)
    everybody, some = (Notes(on_evaluation_end=lambda run, phase, evaluation: evaluation) for _ in range(2))
    run(phases(), module, data, tmp_path / "all", max_epochs=20, seed=4, callbacks=[everybody])
    found = run(phases(), module, data, tmp_path, max_epochs=20, seed=4, callbacks=[some], evaluation_cohort_size=3)
    drawn = found.run.evaluated
    assert len(drawn) == 3
    assert len(some.noted) == len(everybody.noted) == 7
    losses = []
    for one, of_all in zip(some.noted, everybody.noted, strict=True):
        assert [client.client for client in one.clients] == drawn
        for client in one.clients:
            same = of_all.clients[client.client]
            for name in (*ACCURACIES, "n_train", "validation_loss", "mean_gate_weight"):
                assert getattr(client, name) == pytest.approx(getattr(same, name), rel=1e-12, nan_ok=True)
        losses.append(sum(of_all.clients[client].validation_loss for client in drawn) / 3)
    assert found.results["FedAvg"].round == 1 + losses[:5].index(min(losses[:5]))
    assert {row["clients"] for row in found.run.rows} == {"3 of 6"}
    assert [int(row["client"]) for row in csv_rows(found.run_dir / "clients.csv")] == drawn * 2
    assert "Accuracy in percent over 3 of 6 clients" in capsys.readouterr().out


def test_every_client_is_drawn_as_often_and_the_draw_depends_on_the_seed_alone():
    draws = [evaluated_clients(10, 3, seed) for seed in range(1000)]
    assert draws == [evaluated_clients(10, 3, seed) for seed in range(1000)]
    assert all(len(set(draw)) == 3 and draw == sorted(draw) for draw in draws)
    counts = Counter(client for draw in draws for client in draw)  # 300 each; standard deviation 14.5
    assert set(counts) == set(range(10)) and max(abs(count - 300) for count in counts.values()) < 60
    trained = [sample_cohort(range(10), 3, seed, round=0) for seed in range(1000)]
    assert sum(map(list.__eq__, draws, trained)) < 30, "one in 120 is equal if they are drawn independently"


def test_numbers_out_of_range_and_a_monitor_without_clients_are_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match="evaluation_cohort_size is 7"):
        run([phase("Local", Local())], mixture(), blobs(SIZES), tmp_path, evaluation_cohort_size=7)
    out = OptInFedAvg("global_expert.*", opt_out_clients=0.9)  # one client takes part
    participants = out.opt_out.participants
    seed = next(seed for seed in range(99) if [*participants(range(6), seed)] != evaluated_clients(6, 1, seed))
    with pytest.raises(MisconfigurationException, match="none of these clients takes part in 'FedAvg', which selects"):
        federated = Phase("FedAvg", out, gate=ConstantGate(1), select=Select("global_test"))
        run([federated], mixture(), blobs(SIZES), tmp_path, evaluation_cohort_size=1, seed=seed)


def test_newcomers_are_all_evaluated(tmp_path):
    settings = {"enable_checkpointing": True, "evaluation_cohort_size": 2}
    federated = [Phase("FedAvg", FedAvg("global_expert.*"), gate=ConstantGate(1))]
    federation = run(federated, mixture(), blobs(SIZES), tmp_path, **settings)
    assert len(federation.results["FedAvg"].clients) == 2
    federation.personalize(mixture(), blobs((9,)))
    assert [client.client for client in federation.results["FedAvg"].clients] == [0]


def samples():
    return blobs(SIZES[:5], dtype=torch.float32, validation_fraction=0.2, test_fraction=0.2)


class Listing(InThisProcess):
    """A worker that lists which job it did for which clients."""

    def submit(self, phase, server, groups):
        job, chunk, _ = pickle.loads(groups)
        self.log.append((job.func.__name__, [client for group in chunk for client in group]))
        return super().submit(phase, server, groups)


class TwoListing(TwoInThisProcess):
    worker = Listing


def evaluated(log) -> list[list[int]]:
    return [entry[1] for entry in log if entry[0] == "_evaluate_groups"]


@pytest.mark.slow
def test_personal_models_are_evaluated_in_workers_with_the_bits_of_one_process(tmp_path):
    backend = TwoListing()
    both = Phase("both", FedAvg("global_expert.*"), gate=GlobalOnly(), evaluate=Evaluate(after="both"))
    own = [*of_runs(), both, Phase("own", PFedMoE("global_expert.*"), rounds=2)]
    in_workers, alone = (
        federation(tmp_path / type(each).__name__, own, backend=each) for each in (backend, TrainerBackend())
    )
    results = in_workers.fit(model(), samples())
    assert_same(results, alone.fit(model(), samples()))
    handed_out = [client for clients in evaluated(backend.log) for client in clients]
    # Local, PFL-FB, PFL-MF, FedAvg after local training, and two rounds of the last one
    assert sorted(handed_out) == sorted(6 * list(range(5))), "a model that all clients share is evaluated here"
    for file in ("rounds.csv", "clients.csv", "summary.csv"):
        assert (in_workers.run_dir / file).read_bytes() == (alone.run_dir / file).read_bytes()


@pytest.mark.parametrize("worth_it", [True, False])
def test_a_lazy_pool_starts_for_a_long_evaluation(tmp_path, monkeypatch, worth_it):
    pool = TwoListing(lazy=True)
    monkeypatch.setattr(workers, "_WORTH_STARTING", 0.0 if worth_it else 1e9)
    monkeypatch.setattr(stacked_models, "_MOST", 1)  # several groups, of which two are measured
    local = of_runs()[:1]
    run = federation(tmp_path / "pool", local, backend=pool)
    one = federation(tmp_path / "one", local, trainer={"accelerator": "cpu", "devices": 1})  # no processes of its own
    assert_same(run.fit(model(), samples()), one.fit(model(), samples()))
    assert bool(evaluated(pool.log)) == worth_it
