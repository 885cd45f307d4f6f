"""Evaluation in worker processes."""

import pickle

import pytest
import torch
from helpers import blobs
from helpers.runs import assert_same, federation, model, phases
from helpers.workers import InThisProcess, TwoInThisProcess

from fedmoe_pl import Evaluate, Phase
from fedmoe_pl.algorithms import FedAvg, PFedMoE
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.backends.workers import workers_backend as workers
from fedmoe_pl.evaluation import stacked_models
from fedmoe_pl.models import GlobalOnly

SIZES = (9, 14, 6, 11, 8)


def data():
    return blobs(SIZES, dtype=torch.float32, validation_fraction=0.2, test_fraction=0.2)


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
    own = [*phases(), both, Phase("own", PFedMoE("global_expert.*"), rounds=2)]
    in_workers, alone = (
        federation(tmp_path / type(each).__name__, own, backend=each) for each in (backend, TrainerBackend())
    )
    results = in_workers.fit(model(), data())
    assert_same(results, alone.fit(model(), data()))
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
    local = phases()[:1]
    run = federation(tmp_path / "pool", local, backend=pool)
    one = federation(tmp_path / "one", local, trainer={"accelerator": "cpu", "devices": 1})  # no processes of its own
    assert_same(run.fit(model(), data()), one.fit(model(), data()))
    assert bool(evaluated(pool.log)) == worth_it
