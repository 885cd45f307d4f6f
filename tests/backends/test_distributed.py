"""Two processes that train each client together, by DDP over gloo, give what one process gives, to rounding."""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import blobs, mixture
from helpers.backends import WithBatchNorm, local_training, train_clients
from helpers.ranks import Hangs, Misbehaves, Own, adam, sgd
from helpers.runs import Kill, assert_same, federation
from helpers.workers import CPU, trained_round, wait_until, workers
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, FedRep, FineTuning, PerFedAvg
from fedmoe_pl.backends import DistributedBackend, PoolBackend, StackedBackend, TrainerBackend
from fedmoe_pl.backends.workers import distributed
from fedmoe_pl.data import Share
from fedmoe_pl.models import GlobalOnly, LocalOnly
from fedmoe_pl.setup import start

# in batches of 4: a last batch of one sample, which only one process has; whole ones; an odd last batch; one sample
SIZES = (17, 10, 15, 1)
DDP = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


@pytest.fixture(scope="module")
def datamodule():
    return blobs(sizes=SIZES, validation_fraction=0.25)


@pytest.fixture(scope="module")
def team():
    """Two processes that all tests of this module use, because they take seconds to start."""
    backend = DistributedBackend([CPU, CPU], loss_is_mean=True)  # of layers of the tests' own
    yield backend
    backend.close()


@pytest.fixture
def runs_use_the_team(team, monkeypatch):
    monkeypatch.setattr(start, "DistributedBackend", lambda *arguments: team)
    monkeypatch.setattr(team, "close", lambda: None)


def both(team, training, round=0):
    """A round in two processes and in one."""
    shared = replace(training, trainer={**training.trainer, "strategy": "ddp"})
    plans = team.plan(shared).begin(shared), TrainerBackend().plan(training).begin(training)
    return [train_clients(plan, round) for plan in plans]


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize(("processes", "at_least"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
def test_the_shares_of_a_batch_have_every_sample_once(size, processes, at_least):
    shares = [Share(rank, processes, at_least) for rank in range(processes)]
    counted = [sample for share in shares if share.weight(size) for sample in range(size)[share.part(size)]]
    assert counted == [*range(size)]
    values = torch.arange(size).double() ** 2
    means = [share.weight(size) * values[share.part(size)].mean() for share in shares]
    close(torch.stack(means).mean(), values.mean())
    assert all(len(range(size)[share.part(size)]) >= min(at_least, size) for share in shares)


SETTINGS = {
    "momentum": (sgd, FedAvg(), {}),
    "Adam": (adam, FedAvg(), {}),
    "accumulated and clipped": (sgd, FedAvg(), {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "parts in turn": (sgd, FedRep("global_expert.extractor.*", head_epochs=1), {}),
}


@pytest.mark.few("parts in turn")
@pytest.mark.parametrize("setting", SETTINGS)
def test_two_processes_train_as_one_with_the_same_batches(team, datamodule, setting):
    optimizer, algorithm, trainer = SETTINGS[setting]
    module = mixture(GlobalOnly(), optimizer=optimizer)
    phase = replace(local_training(module, algorithm, datamodule, **trainer), keep_optimizer=algorithm.is_shared("x"))
    (update, kept), (expected, expected_kept) = both(team, phase)
    close(update.sent, expected.sent)
    assert (
        update.weight == expected.weight == len(datamodule.train_samples.indices)
        and kept.keys() == expected_kept.keys()
    )
    for client in kept:
        close(kept[client], expected_kept[client])
    moved = [name for name in update.sent if not torch.equal(update.sent[name], phase.initial[name])]
    assert any(name.startswith("global_expert.extractor") for name in moved)


@pytest.mark.usefixtures("runs_use_the_team")
def test_a_run_is_that_of_one_process_and_goes_on_with_the_same_bits(datamodule, tmp_path):
    def run(folder, callbacks=(), ckpt_path=None, **trainer):
        phases = [
            Phase("FedAvg", FedAvg("global_expert.*"), rounds=2, clients_per_round=3, gate=GlobalOnly()),
            Phase("FineTuning", FineTuning(), gate=LocalOnly(), train=Train(optimizer=adam)),
        ]
        trainer = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, **trainer}
        run = federation(tmp_path / folder, phases, trainer=trainer, backend=TrainerBackend(), callbacks=[*callbacks])
        with suppress(KeyboardInterrupt):
            run.fit(mixture(GlobalOnly()), datamodule, ckpt_path)
        return run

    alone, together = run("alone"), run("together", **DDP)
    for name, state in together.run.states.items():
        close(state.server, alone.run.states[name].server)
        for client in state.clients:
            close(dict(state.clients[client]), dict(alone.run.states[name].clients[client]))
    for evaluations in zip(*(each.results["FineTuning"].clients for each in (together, alone)), strict=True):
        assert_same(*(replace(each, validation_loss=0.0, gate_weights=None) for each in evaluations))
    stopped = run("stopped", [Kill("on_round_end", 1)], **DDP)
    assert "FineTuning" not in stopped.run.states
    assert_same(run("stopped", ckpt_path="last", **DDP).run.states, together.run.states)


def test_the_loss_is_logged_once_and_is_that_of_whole_batches(team, datamodule, tmp_path):
    loggers = {name: CSVLogger(tmp_path / name, version="") for name in ("two", "one")}
    rows = []
    for backend, name in ((team, "two"), (TrainerBackend(), "one")):
        trainer = {"logger": loggers[name], "log_every_n_steps": 1, **({"strategy": "ddp"} if name == "two" else {})}
        phase = local_training(mixture(GlobalOnly()), FedAvg(), datamodule, **trainer)
        phase = replace(phase, phase_name="p", run_name="run")
        train_clients(backend.plan(phase).begin(phase))
        (file,) = (tmp_path / name).rglob("client_000/**/metrics.csv")
        header, *lines = file.read_text().split()
        rows.append((header, [[float(value or 0) for value in line.split(",")] for line in lines]))
    (header, two), (expected_header, one) = rows
    assert header == expected_header and len(one) == 4  # the rates and the means of two epochs
    close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=1e-5)  # the file's digits


def test_a_module_of_ones_own_validates_once(team, datamodule, tmp_path):
    trainer = {"limit_val_batches": 1.0, "strategy": "ddp"}
    phase = local_training(Own(tmp_path).double(), FedAvg(), datamodule, max_epochs=1, **trainer)
    train_clients(team.plan(phase).begin(phase))
    number = sorted(datamodule.validation_samples.sizes.tolist())
    for rank in ("0", "1"):
        assert sorted(map(int, (tmp_path / rank).read_text().split())) == number


def test_batch_norm_of_shares_and_a_short_batch(team, datamodule):
    """A batch of 5 samples is 2 and 3; one of 3 samples stays whole, because a share needs two."""
    phase = local_training(mixture(GlobalOnly(), WithBatchNorm()), FedAvg(), datamodule, strategy="ddp")
    plan = team.plan(phase).begin(phase)
    results = [*plan.train(phase.algorithm.server_init(phase.module), [0, 1, 2], {}, 0)]
    assert [result.failed for result in results] == [{}] * 3
    assert all(tensor.isfinite().all() for result in results for tensor in result.update.sent.values())


@pytest.mark.slow
def test_a_process_that_dies_is_replaced_and_a_failure_in_one_is_the_clients(team, datamodule, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "_GRACE", 1.0)
    file = tmp_path / "kill"
    file.touch()
    phase = local_training(mixture(GlobalOnly()), Misbehaves(file), datamodule, strategy="ddp")
    one = replace(phase, trainer={**phase.trainer, "strategy": "auto"})
    results = trained_round(team.plan(phase).begin(phase))
    assert not file.exists()
    assert [[*result.failed] for result in results] == [[], [1], [], []]
    assert results[1].failed[1].reason == "ZeroDivisionError: in the second process"
    for result, expected in zip(results, trained_round(TrainerBackend().plan(one).begin(one)), strict=True):
        if result.update is not None:
            close(result.update.sent, expected.update.sent)


def test_ctrl_c_ends_processes_that_hang(team, datamodule, tmp_path):
    phase = local_training(mixture(GlobalOnly()), Hangs(tmp_path / "hangs"), datamodule, strategy="ddp")

    def interrupt():
        while not (tmp_path / "hangs").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        trained_round(team.plan(phase).begin(phase))
    signal.signal(signal.SIGINT, before)
    assert team.workers == []
    wait_until(lambda: not workers())


REFUSED = {
    "stacking": ({}, {"backend": StackedBackend()}, "backend is a StackedBackend.*one client after another"),
    "own workers": (
        {"devices": 1},
        {"backend": PoolBackend(TrainerBackend(), [CPU])},
        "PoolBackend trains each client on one",
    ),
    "two machines": ({"num_nodes": 2}, {}, "num_nodes is 2, but must be left out"),
    "spawned": ({"strategy": "ddp_spawn"}, {}, "strategy is 'ddp_spawn', but must be ddp, or left out"),
    "parameters in parts": ({"strategy": FSDPStrategy(), "accelerator": "auto"}, {}, "ddp, or left out|GPU"),
    "an algorithm": ({}, {"phases": [Phase("p", PerFedAvg(), gate=GlobalOnly())]}, "PerFedAvg needs whole batches"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_divided_is_refused_before_any_training(why, datamodule, tmp_path):
    trainer, arguments, sentence = REFUSED[why]
    arguments = {"phases": [Phase("p", FedAvg())], "trainer": {**DDP, **trainer}, **arguments}
    with pytest.raises(MisconfigurationException, match=sentence):
        federation(tmp_path, **arguments).check(mixture(GlobalOnly()), datamodule)
