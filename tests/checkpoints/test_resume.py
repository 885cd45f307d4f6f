"""A run that was stopped anywhere ends with the bits of one that was not; one process trains it at a time."""

import errno
import os
import signal
import subprocess
import sys

import pytest
import torch
from helpers.runs import Kill, assert_same, data, federation, model, phases
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Evaluate, Federation, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.checkpoints.checkpoint import load_checkpoint, locked
from fedmoe_pl.checkpoints.files import exclusive
from fedmoe_pl.commands.predict import evaluate_all
from fedmoe_pl.models import ConstantGate, LinearGate, NetworkGate

OTHER = pytest.mark.filterwarnings("ignore:ckpt_path is .*, a run with another configuration")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Federation:
    """A run that nothing stopped."""
    run = federation(tmp_path_factory.mktemp("whole"))
    run.fit(model(), data())
    return run


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("hook", "n"),
    [
        *(("on_client_end", 6), ("on_evaluation_end", 3), ("on_round_end", 3)),
        *(("on_client_end", 15), ("on_phase_end", 3), ("on_fit_end", 1)),
    ],
)
def test_a_run_stopped_anywhere_and_resumed_ends_with_the_bits_of_one_that_was_not(whole, tmp_path, hook, n, caplog):
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path / "stopped", callbacks=[Kill(hook, n)]).fit(model(), data())
    resumed = federation(tmp_path / "stopped")
    resumed.fit(model(seed=9), data(), ckpt_path="last")
    if (hook, n) == ("on_round_end", 3):
        path = tmp_path / "stopped/federation/version_0/checkpoints/last.ckpt"
        assert f"Resumed from {path} after round 2 of phase 'FedAvg'." in caplog.messages

    content, expected = (load_checkpoint(run.run_dir / "checkpoints/last.ckpt") for run in (resumed, whole))
    assert_same(content, expected)
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert (resumed.run_dir / name).read_bytes() == (whole.run_dir / name).read_bytes()


def test_a_checkpoint_of_another_run_is_refused(whole, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"another seed \(0, now 1\)"):
        federation(whole.runs.parent, seed=1).fit(model(), data(), ckpt_path="last")
    with pytest.raises(MisconfigurationException, match="holds the phases"):
        federation(whole.runs.parent, phases()[:1]).fit(model(), data(), ckpt_path="last")
    of_client = tmp_path / "lightning.ckpt"
    torch.save({"state_dict": model().state_dict()}, of_client)
    with pytest.raises(MisconfigurationException, match=r"but must be checkpoints/last\.ckpt"):
        federation(whole.runs.parent).fit(model(), data(), ckpt_path=str(of_client))
    with pytest.raises(MisconfigurationException, match=r"no run in .* has a checkpoint"):
        federation(tmp_path / "empty").fit(model(), data(), ckpt_path="last")


def test_a_checkpoint_goes_on_only_with_its_own_data_and_rounds(whole, tmp_path):
    for other in (data(sizes=(13, 8, 11, 9)), data(validation_fraction=0.3), data(sizes=(11, 8, 13))):
        with pytest.raises(MisconfigurationException, match=r"a run with another partition .*; start a new run"):
            federation(whole.runs.parent).test(model(), other)
    (whole.run_dir / "config.yaml").touch()  # of a run from the command line
    with pytest.raises(MisconfigurationException, match=r"; take the configuration of that run, '.*/config\.yaml', or"):
        federation(whole.runs.parent).test(model(), data(validation_fraction=0.3))
    changed = phases()
    changed[1].rounds = 7
    with pytest.raises(MisconfigurationException, match=r"'FedAvg' has had 4 rounds, but rounds is 7; .* start from"):
        federation(whole.runs.parent, changed).fit(model(), data(), ckpt_path="last")
    moved = tmp_path / "moved.ckpt"
    moved.write_bytes((whole.run_dir / "checkpoints/last.ckpt").read_bytes())
    with pytest.raises(MisconfigurationException, match=r"needs .*; a checkpoint must stay in its run's folder"):
        federation(tmp_path).fit(model(), data(), ckpt_path=str(moved))


def noisy():
    """The same training data with other test samples."""
    other = data()
    other.x = other.x.clone()
    other.x[other.global_test] += torch.randn(30, 5, generator=torch.Generator().manual_seed(5))
    return other


def accuracies(run, method, samples, gate=None):
    for client in range(3):
        module = run.client_module(method, client)
        module.gate = gate or module.gate
        predictions = module(samples.x[samples.global_test]).argmax(1)
        yield (predictions == samples.y[samples.global_test]).double().mean().item()


@OTHER
def test_a_finished_run_is_tested_on_another_test_set_which_the_table_names(whole, capsys):
    tested = federation(whole.runs.parent)
    tested.test(model(), data())
    assert "test set is not" not in capsys.readouterr().out
    tested.test(model(), noisy())
    named = "The test set is not the one of the run, but that of TensorData (30 samples for all, checksum"
    assert named in capsys.readouterr().out.splitlines()[-1]
    changed = 0
    for evaluation in evaluate_all(tested.run):
        of_clients = [client.global_test for client in evaluation.clients]
        assert of_clients == pytest.approx([*accuracies(whole, evaluation.method, noisy())])
        changed += of_clients != [*accuracies(whole, evaluation.method, data())]
    assert changed
    with pytest.raises(MisconfigurationException, match=r"a run with another test set \(30 .* start a new run"):
        federation(whole.runs.parent).fit(model(), noisy(), ckpt_path="last")


@OTHER
def test_a_finished_run_is_tested_with_another_gate_that_nothing_must_train(whole):
    changed = phases()
    changed[3].gate = ConstantGate(0.25)
    tested = federation(whole.runs.parent, changed)
    tested.test(model(), data())
    of_clients = [client.global_test for client in evaluate_all(tested.run)[3].clients]
    assert of_clients == pytest.approx([*accuracies(whole, "PFL-MF", data(), ConstantGate(0.25))])
    for gate in (NetworkGate(torch.nn.Linear(5, 1)), LinearGate(5)):
        changed = phases()
        changed[1].gate = gate
        with pytest.raises(MisconfigurationException, match=r"'FedAvg': gate is .*, or one that has no tensors"):
            federation(whole.runs.parent, changed).test(model(), data())


@pytest.mark.few(1)
@OTHER
@pytest.mark.parametrize("trained", ["both", "local_training"])
def test_a_finished_run_is_tested_at_another_evaluation_point_that_its_checkpoint_has(trained, tmp_path):
    def of(after):
        phase = phases()[1]
        phase.evaluate, phase.select = Evaluate(after=after), None
        return federation(tmp_path, [phase])

    run = of(trained)
    run.fit(model(), data())
    for after in ("aggregation", "local_training"):
        tested = of(after)
        tested.test(model(), data())
        (now,) = evaluate_all(tested.run)
        if trained == "both" or after == trained:
            (expected,) = (each for each in run.results.values() if each.evaluation_point == now.evaluation_point)
            assert now.values("global_test") == expected.values("global_test")


@pytest.mark.slow
def test_two_runs_that_are_set_up_at_the_same_time_have_folders_of_their_own(tmp_path):
    """The number of a run is chosen when its folder is made, not while its data are read."""

    class Later(type(data())):
        def prepare_data(self):
            federation(tmp_path).fit(model(), data())

    slow = data()
    slow.__class__ = Later
    run = federation(tmp_path)
    run.fit(model(), slow)
    assert run.run_dir.name == "version_1" and (tmp_path / "federation/version_0/summary.csv").is_file()


TRAINS = """
import subprocess, sys
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    def run_of():
        return federation(tmp_path, [Phase("FedAvg", FedAvg())])

    run = run_of()
    run.fit(model(), data())
    command = [sys.executable, "-c", TRAINS, str(run.run_dir / "checkpoints/lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        with pytest.raises(MisconfigurationException, match="another process trains this run now"):
            run_of().fit(model(), data(), ckpt_path="last")
        run_of().test(model(), data())  # reads only
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        run_of().fit(model(), data(), ckpt_path="last")
        os.killpg(process.pid, signal.SIGKILL)  # its own process, which did not hold the lock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_is_the_lock_where_the_file_system_has_none(number, tmp_path, monkeypatch):
    def flock(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    for _ in range(2):
        with (
            pytest.warns(UserWarning, match=f"has no locks .{os.strerror(number)}.*lock_file.*keeps other") as said,
            exclusive(tmp_path / "lock", "taken", lambda error: error),
        ):
            held = [*tmp_path.iterdir()]
            with (
                pytest.warns(UserWarning, match="has no locks"),
                pytest.raises(MisconfigurationException, match="taken"),
                exclusive(tmp_path / "lock", "taken", lambda error: error),
            ):
                pass
        assert len(said) == 1 and {path.name for path in held} >= {"lock_file"}


def test_the_lock_ends_with_the_run(tmp_path):
    run = federation(tmp_path, [Phase("FedAvg", FedAvg())])
    run.fit(model(), data())
    for _ in range(2):
        with locked(run.run_dir / "checkpoints/last.ckpt"):
            pass
    with locked(tmp_path / "anywhere/last.ckpt"):
        assert not (tmp_path / "anywhere").exists(), "no checkpoint of a run"


def test_a_run_without_checkpoints_leaves_those_that_it_goes_on_from_as_they_are(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, callbacks=[Kill("on_round_end", 3)]).fit(model(), data())
    folder = tmp_path / "federation/version_0/checkpoints"
    before = {path.name: path.read_bytes() for path in folder.glob("*.ckpt")}
    assert before["last.ckpt"] != before["previous.ckpt"]
    federation(tmp_path, enable_checkpointing=False).fit(model(), data(), ckpt_path=str(folder / "previous.ckpt"))
    assert {path.name: path.read_bytes() for path in folder.glob("*.ckpt")} == before
