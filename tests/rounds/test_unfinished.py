"""A run killed while clients trained alone goes on with those that had not finished, and ends as without the kill."""

from functools import partial

import pytest
import torch
from helpers import blobs, mixture
from helpers.runs import Kill, Notes, assert_same, federation, resumed_after

from fedmoe_pl import Evaluate, Phase
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.checkpoints.checkpoint import CLIENT_STATES, load_checkpoint
from fedmoe_pl.models import ConstantGate
from fedmoe_pl.phases.client_failures import ClientFailures
from fedmoe_pl.rounds import unfinished


def data():
    return blobs((13, 8, 11, 9, 10))


def model():
    torch.manual_seed(0)
    return mixture()


def phases(**of_local) -> list[Phase]:
    """Clients train for the server, then alone for two rounds, then alone for one round from the beginning."""
    return [
        Phase("FedAvg", FedAvg("global_expert.*"), gate=ConstantGate(1.0)),
        Phase("PFL-FB", FineTuning("local_expert.classifier.*"), rounds=2, gate=ConstantGate(0.0)),
        Phase("Local", Local(), gate=ConstantGate(0.0), start="initial", **of_local),
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


@pytest.mark.few(3)
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


@pytest.mark.filterwarnings("ignore:.*the round is tried again")
def test_a_round_that_must_be_tried_again_counts_the_same(tmp_path):
    def make(path=tmp_path / "killed", callbacks=()):
        failures = ClientFailures(dropout=0.5, min_clients=4)
        its_callbacks = [tries, *callbacks]
        return federation(
            path, phases()[2:], failures=failures, seed=2, backend=TrainerBackend(), callbacks=its_callbacks
        )

    tries = Notes(on_client_end=lambda *arguments: arguments[-1])
    (whole := make(tmp_path / "whole")).fit(model(), data())
    number = len(tries.noted)
    assert number >= 6, "the first try had too few clients"
    for n in (2, number):
        killed = partial(make, tmp_path / str(n))
        assert_same_runs(resumed_after(Kill("on_client_end", n), killed, model, data), whole)


def test_a_changed_configuration_trains_all_clients_of_the_round(tmp_path, caplog):
    def make(epochs, callbacks=()):
        trainer = {"accelerator": "cpu", "max_epochs": epochs}
        return federation(tmp_path, phases()[2:], trainer=trainer, backend=TrainerBackend(), callbacks=callbacks)

    with pytest.raises(KeyboardInterrupt):
        make(1, [Kill("on_client_end", 4)]).fit(model(), data())
    clients = Notes(on_client_end=lambda *arguments: arguments[-1])
    make(2, [clients]).fit(model(), data(), ckpt_path="last", allow_changes="trainer.max_epochs")
    assert clients.noted == [0, 1, 2, 3, 4]
    assert caplog.messages[-1].endswith("after round 0 of phase 'Local'.")


def test_a_curve_over_epochs_and_what_clients_log_are_whole(tmp_path):
    def make(path=tmp_path / "killed", callbacks=()):
        trainer = {"accelerator": "cpu", "max_epochs": 3, "logger": True}
        of_local = {"evaluate": Evaluate(every_n_epochs=1)}
        its_callbacks = [logged, *callbacks]
        return federation(
            path,
            phases(**of_local)[2:],
            trainer=trainer,
            logger=True,
            backend=TrainerBackend(),
            callbacks=its_callbacks,
        )

    logged = Notes(on_round_end=lambda run, *_: run.logged)
    (whole := make(tmp_path / "whole")).fit(model(), data())
    resumed = resumed_after(Kill("on_client_end", 4), make, model, data)
    assert_same_runs(resumed, whole)
    assert logged.noted[0].keys() == {0, 1, 2, 3, 4} and logged.noted[1] == logged.noted[0]
