"""A run killed while clients trained alone goes on with those that had not finished, and ends as without the kill."""

from functools import partial

import pytest
import torch
from helpers import blobs, mixture
from helpers.runs import Kill, Notes, assert_same, federation, resumed_after

from fedmoe_pl import Evaluate, Federation, Phase
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local
from fedmoe_pl.backends import StackedBackend, TrainerBackend, trainer
from fedmoe_pl.checkpoints.checkpoint import CLIENT_STATES, load_checkpoint
from fedmoe_pl.models import ConstantGate
from fedmoe_pl.phases.client_failures import ClientFailures
from fedmoe_pl.rounds import unfinished


def data():
    return blobs((13, 8, 11, 9, 10))


def model():
    torch.manual_seed(0)
    return mixture()


def phases() -> list[Phase]:
    """Clients train for the server, then alone for two rounds, then alone for one round from the beginning."""
    return [
        Phase("FedAvg", FedAvg("global_expert.*"), gate=ConstantGate(1.0)),
        Phase("PFL-FB", FineTuning("local_expert.classifier.*"), rounds=2, gate=ConstantGate(0.0)),
        Phase("Local", Local(), gate=ConstantGate(0.0), start="initial"),
    ]


@pytest.fixture(autouse=True)
def _saved_after_each_group(monkeypatch):
    monkeypatch.setattr(unfinished, "_SECONDS_BETWEEN_SAVES", 0)


def assert_same_runs(resumed, whole):
    states = (load_checkpoint(run.run_dir / "checkpoints/last.ckpt") for run in (resumed, whole))
    assert_same(*states)
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert (resumed.run_dir / name).read_bytes() == (whole.run_dir / name).read_bytes()
    files = [
        {path.relative_to(run.run_dir) for path in (run.run_dir / CLIENT_STATES).rglob("*")} for run in (resumed, whole)
    ]
    assert files[0] == files[1]


@pytest.mark.few("Trainer-7")
@pytest.mark.parametrize("n", [3, 7, 12, 17, 20])
@pytest.mark.parametrize(
    ("backend", "size"), [(TrainerBackend(), 1), (StackedBackend(2), 2)], ids=["Trainer", "stacked"]
)
def test_clients_that_trained_alone_before_a_kill_do_not_train_again(backend, size, n, tmp_path):
    """The n-th client to finish is the last; it is not saved yet, because hooks of it might not have been called."""
    began = Notes(on_client_end=lambda run, phase, round, client: (phase.name, round, client))

    def make(path=tmp_path / "killed", callbacks=()):
        return federation(path, phases(), backend=backend, callbacks=[began, *callbacks])

    whole = make(tmp_path / "whole")
    whole.fit(model(), data())
    order, began.noted = began.noted, []
    resumed = resumed_after(Kill("on_client_end", n), make, model, data)
    assert_same_runs(resumed, whole)
    first, second = began.noted[:n], began.noted[n:]
    assert first == order[:n]
    saved = 0 if n <= 5 else (n - 1) // size * size if size == 1 else 5 * ((n - 1) // 5) + (n - 1) % 5 // 2 * 2
    assert second == order[saved:], "of FedAvg, whose clients train for the server, nothing is saved in a round"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the round is tried again")
def test_a_round_that_must_be_tried_again_counts_the_same(tmp_path):
    def make(path=tmp_path / "killed", callbacks=()):
        failures = ClientFailures(dropout=0.5, min_clients=4)
        return local(path, 1, [tries, *callbacks], failures=failures, seed=2)

    tries = Notes(on_client_end=lambda *arguments: arguments[-1])
    (whole := make(tmp_path / "whole")).fit(model(), data())
    number = len(tries.noted)
    assert number >= 6, "the first try had too few clients"
    for n in (2, number):
        killed = partial(make, tmp_path / str(n))
        assert_same_runs(resumed_after(Kill("on_client_end", n), killed, model, data), whole)


def local(path, epochs=1, callbacks=(), logger=False, every=None, algorithm=None, **settings):
    """A run of Local alone, which is killed or goes on from there."""
    of_clients = {"accelerator": "cpu", "max_epochs": epochs, "logger": logger}
    phase = Phase("Local", algorithm or Local(), gate=ConstantGate(0.0), evaluate=Evaluate(every_n_epochs=every))
    settings = {"trainer": of_clients, "backend": TrainerBackend(), "callbacks": callbacks, **settings}
    return federation(path, [phase], **settings)


def kill(run: Federation, *arguments):
    with pytest.raises(KeyboardInterrupt):
        run.fit(model(), data(), *arguments)


def test_a_changed_configuration_trains_all_clients_of_the_round(tmp_path, caplog):
    kill(local(tmp_path, 1, [Kill("on_client_end", 4)]))
    clients = Notes(on_client_end=lambda *arguments: arguments[-1])
    local(tmp_path, 2, [clients]).fit(model(), data(), "last", "trainer.max_epochs")
    assert clients.noted == [0, 1, 2, 3, 4]
    assert caplog.messages[-1].endswith("after round 0 of phase 'Local'.")


def test_files_that_a_run_with_another_configuration_has_written_anew_are_not_used(tmp_path, monkeypatch):
    (whole := local(tmp_path / "whole")).fit(model(), data())
    kill(local(tmp_path, 1, [Kill("on_client_end", 4)]))
    monkeypatch.setattr(unfinished, "_SECONDS_BETWEEN_SAVES", 1000)
    kill(local(tmp_path, 3, [Kill("on_client_end", 2)]), "last", "trainer.max_epochs")
    clients = Notes(on_client_end=lambda *arguments: arguments[-1])
    (resumed := local(tmp_path, 1, [clients])).fit(model(), data(), "last")
    assert clients.noted == [0, 1, 3, 4]
    assert_same_runs(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"logger": True, "every": 1}, {"logger": True, "every": 1}),
        ({}, {"logger": True}),
        ({"logger": True}, {}),
        ({}, {"every": 1}),
        ({}, {"enable_checkpointing": False}),
    ],
    ids=str,
)
def test_curves_and_what_clients_log_are_whole_also_if_only_the_resumed_run_asks_for_them(before, now, tmp_path):
    results = Notes(on_evaluation_end=lambda *arguments: arguments[-1], on_round_end=lambda run, *_: run.logged)
    local(tmp_path / "whole", 3, [results], **now).fit(model(), data())
    whole, results.noted = results.noted, []
    kill(local(tmp_path, 3, [Kill("on_client_end", 4)], **before))
    local(tmp_path, 3, [results], **now).fit(model(), data(), "last")
    assert_same(results.noted, whole[-len(results.noted) :])
    assert len(results.noted) == 2 if before == now else results.noted[0].epochs == whole[0].epochs
    assert results.noted[-1].keys() == ({0, 1, 2, 3, 4} if "logger" in now else set())


class FailingFor1(Local):
    def client_init(self, client, sent):
        if client.id == 1:
            raise OSError("no disk")
        return super().client_init(client, sent)


@pytest.mark.filterwarnings("ignore:.*left out")
def test_what_clients_log_has_their_order_so_that_means_have_the_same_bits(tmp_path, monkeypatch):
    """The clients 0 and 1 are a group, which is trained again."""
    monkeypatch.setattr(trainer, "_MOST_GROUPS", 3)
    logged = Notes(on_round_end=lambda run, *_: [*run.logged])
    kill(local(tmp_path, 1, [Kill("on_client_end", 4)], True, algorithm=FailingFor1()))
    local(tmp_path, 1, [logged], True, algorithm=FailingFor1()).fit(model(), data(), "last")
    assert logged.noted == [[0, 2, 3, 4]]
