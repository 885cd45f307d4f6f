"""Work is handed out to workers, with the bits of one process, whatever happens to them; what is sent is small."""

import pickle
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import blobs, mixture, two_quadratics
from helpers.backends import begin, local_training, train_clients
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
from torch import nn

from fedmoe_pl.algorithms import FineTuning
from fedmoe_pl.backends import StackedBackend, TrainerBackend, trainer
from fedmoe_pl.backends.workers import workers_backend
from fedmoe_pl.backends.workers.pickling import dumps, loads
from fedmoe_pl.backends.workers.workers_backend import WorkerDied
from fedmoe_pl.checkpoints.files import _DTYPES
from fedmoe_pl.cli import FederationCLI
from fedmoe_pl.models import ConstantGate, LinearGate
from fedmoe_pl.trees import same_bits


def test_what_is_sent_is_what_a_worker_lacks_largest_groups_first():
    phase, backend = training(), TwoInThisProcess()
    kept = {1: {"local_expert.classifier.1.bias": torch.ones(3)}}
    plan = begin(backend, phase)
    first, second = trained_round(plan, kept), trained_round(plan, round=1)
    other = trained(backend, replace(phase, seed=1))
    assert [entry[2] for entry in backend.log[:4]] == [[2], [0], [3], [1]]
    assert [list(group.clients) for group in first] == [[0], [1], [2], [3]], "yielded in order"
    new_phase, new_round, nothing = (True, True), (False, True), (False, False)
    sent = [new_phase, new_phase, nothing, nothing, new_round, new_round, nothing, nothing]
    assert [entry[:2] for entry in backend.log] == [*sent, new_phase, new_phase, nothing, nothing]
    assert [entry[3] for entry in backend.log[:4]] == [[], [], [], [1]]
    one = begin(TrainerBackend(), phase)
    assert_same(first, trained_round(one, kept))
    assert_same(second, trained_round(one, round=1))
    assert_same(other, trained(TrainerBackend(), replace(phase, seed=1)))


@pytest.mark.slow
@pytest.mark.usefixtures("clients_alone")
def test_no_update_runs_far_ahead_of_the_first_one_that_is_missing():
    backend = TwoInThisProcess()
    trained(backend, training(datamodule=data(sizes=range(5, 45))))
    assert [entry[2] for entry in backend.log[:2]] == [[15], [14]], "the largest of the first sixteen"


@pytest.mark.slow
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


class Dies(InThisProcess):
    """A worker that ends, so many times, when it has to train client 2."""

    deaths = 1

    def submit(self, phase, server, groups):
        if [2] in pickle.loads(groups)[1] and Dies.deaths:
            Dies.deaths -= 1
            self.log.append("death")
            future = Future()
            future.set_exception(WorkerDied("SIGKILL"))
            return future
        return super().submit(phase, server, groups)


@pytest.fixture
def dying(monkeypatch):
    """Makes a backend whose workers die so many times."""

    def make(deaths=99):
        monkeypatch.setattr(Dies, "deaths", deaths)
        backend = TwoInThisProcess()
        backend.worker = Dies
        return backend

    return make


@pytest.mark.usefixtures("clients_alone")
def test_a_dead_worker_is_replaced_and_its_group_trained_again(dying):
    phase, backend = training(), dying(1)
    assert_same(trained(backend, phase), trained(TrainerBackend(), phase))
    assert "end" in backend.log
    assert len(backend.workers) == 2


@pytest.mark.parametrize("alone", [True, False])
def test_a_group_that_ends_every_worker_is_left_out_and_a_chunk_is_parted_before(dying, alone, monkeypatch):
    if alone:
        monkeypatch.setattr(trainer, "_SAMPLES_PER_TRAINER", 0)
    else:
        monkeypatch.setattr(workers_backend, "_CHUNKS", 0.1)  # few chunks, of several clients
    backend = dying()
    groups, expected = trained(backend, training()), trained(TrainerBackend(), training())
    assert [[*group.failed] for group in groups] == [[], [], [2], []]
    assert groups[2].update is None and not groups[2].clients
    assert groups[2].failed[2].reason == "its worker process has ended 3 times (SIGKILL)"
    assert backend.log.count("death") == 3
    assert_same([*groups[:2], groups[3]], [*expected[:2], expected[3]])


@pytest.mark.usefixtures("clients_alone")
def test_a_worker_that_does_not_answer_in_time_is_ended(monkeypatch):
    class Silent(InThisProcess):
        def submit(self, phase, server, groups):
            return Future() if pickle.loads(groups)[1] == [[2]] else super().submit(phase, server, groups)

    monkeypatch.setattr(workers_backend, "_GRACE", 0.1)
    backend = TwoInThisProcess()
    backend.worker = Silent
    # long enough for the others, whose alarm may ring where Python can only print it
    groups = trained(backend, training(client_timeout=0.8))
    assert groups[2].failed[2].reason == (
        "its worker process did not answer within failures.timeout, 0.8 s for each client"
    )
    assert "end" in backend.log


def test_a_job_that_ends_every_worker_ends_the_run_with_one_sentence(dying):
    plan = begin(dying(), training())
    with pytest.raises(
        MisconfigurationException, match=r"client 2 has ended 3 times \(SIGKILL\), probably for lack of"
    ):
        list(plan.map(lambda plan, server, groups, kept: [None for _ in groups], {}, [[0], [1], [2], [3]], {}))


def test_what_training_raises_is_the_reason_unless_the_configuration_is_wrong():
    phase = training(Fails(partial(TwoArgumentsError, "one", "two")), two_quadratics())
    groups = trained(TwoInThisProcess(), phase)
    assert [group.failed[client].reason for client, group in enumerate(groups)] == 2 * [
        "TwoArgumentsError: one and two"
    ]
    assert "in training_step" in groups[0].failed[0].trace
    backend = TwoInThisProcess()
    phase = training(Fails(partial(MisconfigurationException, "the user's own sentence")), two_quadratics())
    with pytest.raises(MisconfigurationException, match="the user's own sentence"):
        trained(backend, phase)
    assert len([entry for entry in backend.log if entry != "end"]) <= 2, "not tried again"


def test_tensors_travel_without_what_they_are_views_of():
    whole = torch.arange(100_000.0)
    tree = {"part": whole[10:20], "half": whole[:4].bfloat16(), "empty": whole[:0], "number": torch.tensor(3)}
    pickled = dumps(tree)
    assert len(pickled) < 3000
    assert_same(loads(pickled), tree)
    loads(pickled)["part"].add_(1)  # it is writable


@pytest.mark.parametrize("dtype", _DTYPES)
def test_tensors_of_every_type_travel(dtype):
    tensor = torch.tensor([[1, 0, 2], [0, 1, 1]]).to(dtype)
    for sent in (tensor, tensor.t(), nn.Parameter(tensor, requires_grad=False)):
        received = loads(dumps(sent))
        assert same_bits(received, sent) and received.stride() == sent.stride() and type(received) is type(sent)


@pytest.mark.slow
def test_a_model_of_the_command_line_travels_without_its_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])
    config = str(Path(__file__).parents[2] / "configs/quickstart.yaml")
    cli = FederationCLI(["partition", "--config", config, "--federation.default_root_dir", str(tmp_path)])
    pickled = dumps(cli.model, cli.datamodule)
    assert len(pickled) < 100_000
    optimizer = loads(pickled).optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert optimizer.defaults["momentum"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend(2)])
def test_a_plan_travels_without_the_features_that_it_has_computed(backend):
    algorithm = FineTuning("local_expert.classifier.*")
    training = local_training(mixture(ConstantGate(0)), algorithm, blobs((500, 400)), max_epochs=1, rounds=2)
    plan = begin(backend, training)
    before = len(dumps(plan, training.datamodule))
    expected, _ = train_clients(plan)
    after = dumps(plan, training.datamodule)
    assert len(after) == before
    update, _ = train_clients(loads(after, training.datamodule))
    assert_same(update, expected)
