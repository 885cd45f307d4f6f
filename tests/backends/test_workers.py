"""Groups are handed out to workers, with the bits of one process, whatever happens to the workers."""

import pickle
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import blobs, mixture, two_quadratics
from helpers.backends import begin
from helpers.runs import assert_same, data
from helpers.workers import (
    SIZES,
    Fails,
    InThisProcess,
    TwoArgumentsError,
    TwoInThisProcess,
    trained,
    trained_round,
    training,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.backends.workers.handing_out import WorkerDied
from fedmoe_pl.models import LinearGate


def test_what_is_sent_is_what_a_worker_lacks_largest_groups_first():
    phase, backend = training(), TwoInThisProcess()
    kept = {1: {"local_expert.classifier.1.bias": torch.ones(3)}}
    plan = begin(backend, phase)
    first, second = trained_round(plan, kept), trained_round(plan, round=1)
    other = trained(backend, replace(phase, seed=1))
    assert [entry[2] for entry in backend.log[:4]] == [[2], [0], [3], [1]]
    assert [list(group.kept) for group in first] == [[0], [1], [2], [3]], "yielded in order"
    new_phase, new_round, nothing = (True, True), (False, True), (False, False)
    sent = [new_phase, new_phase, nothing, nothing, new_round, new_round, nothing, nothing]
    assert [entry[:2] for entry in backend.log] == [*sent, new_phase, new_phase, nothing, nothing]
    assert [entry[3] for entry in backend.log[:4]] == [[], [], [], [1]]
    one = begin(TrainerBackend(), phase)
    assert_same(first, trained_round(one, kept))
    assert_same(second, trained_round(one, round=1))
    assert_same(other, trained(TrainerBackend(), replace(phase, seed=1)))


@pytest.mark.usefixtures("clients_alone")
def test_no_update_runs_far_ahead_of_the_first_one_that_is_missing():
    backend = TwoInThisProcess()
    trained(backend, training(datamodule=data(sizes=range(5, 45))))
    assert [entry[2] for entry in backend.log[:2]] == [[15], [14]], "the largest of the first sixteen"


def test_stacked_clients_are_handed_out_in_the_stacks_of_one_process():
    phase = training(mixture(LinearGate(5)), blobs(sizes=SIZES))
    backend = TwoInThisProcess(StackedBackend(clients_per_stack=2))
    plan = begin(backend, phase)
    first, second = trained_round(plan), trained_round(plan, round=1)
    assert [entry[2] for entry in backend.log[:2]] == [[2, 0], [3, 1]]
    one = begin(StackedBackend(clients_per_stack=2), phase)
    assert_same(first, trained_round(one))
    assert_same(second, trained_round(one, round=1))
    assert plan.description == "StackedBackend"


class DiesOnce(InThisProcess):
    deaths = 1

    def submit(self, phase, server, groups):
        if pickle.loads(groups)[1] == [[2]] and type(self).deaths:
            type(self).deaths -= 1
            future = Future()
            future.set_exception(WorkerDied("SIGKILL"))
            return future
        return super().submit(phase, server, groups)


@pytest.mark.usefixtures("clients_alone")
def test_a_dead_worker_is_replaced_and_its_group_trained_again():
    phase, backend = training(), TwoInThisProcess()
    backend.worker = DiesOnce
    assert_same(trained(backend, phase), trained(TrainerBackend(), phase))
    assert "end" in backend.log
    assert len(backend.workers) == 2


@pytest.mark.usefixtures("clients_alone")
def test_a_group_that_ends_every_worker_ends_the_run_with_one_sentence(monkeypatch):
    monkeypatch.setattr(DiesOnce, "deaths", 3)
    backend = TwoInThisProcess()
    backend.worker = DiesOnce
    with pytest.raises(
        MisconfigurationException, match=r"client 2 has ended 3 times \(SIGKILL\), probably for lack of"
    ):
        trained(backend, training())


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (partial(MisconfigurationException, "the user's own sentence"), MisconfigurationException),
        (partial(TwoArgumentsError, "one", "two"), RuntimeError),
    ],
)
def test_what_training_raises_reaches_the_user(error, raised):
    backend, phase = TwoInThisProcess(), training(Fails(error), two_quadratics())
    with pytest.raises(raised, match=r"sentence|TwoArgumentsError: one and two"):
        trained(backend, phase)
    assert len([entry for entry in backend.log if entry != "end"]) <= 2, "not tried again"
