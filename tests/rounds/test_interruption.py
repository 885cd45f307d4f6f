"""Signals end a run within seconds, also with a hanging client, and it is said how it continues."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.runs import assert_same, data, federation, model

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.rounds import interruption


class Hangs(FedAvg):
    """A client hangs in the third round, until a signal arrives."""

    signum = signal.SIGTERM

    def client_loss(self, module, batch, constants):
        if constants and module._trainer is not None:  # not where operations are counted
            threading.Timer(0.2, os.kill, (os.getpid(), self.signum)).start()
            time.sleep(100)
        return super().client_loss(module, batch, constants)

    def client_init(self, client, sent):
        super().client_init(client, sent)
        return {"hangs": True} if self.signum and client.round == 2 else {}


def hanging(path, signum, **kwargs):
    algorithm = Hangs("global_expert.*")
    algorithm.signum = signum
    return federation(path, [Phase("FedAvg", algorithm, rounds=3)], backend=TrainerBackend(), **kwargs)


def test_a_run_ends_while_a_forked_process_goes_on():
    with interruption._handled():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    assert child.is_alive(), "the run did not wait for it"
    child.kill()
    child.join()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.few(1)
def test_a_signal_ends_a_hanging_client_and_the_run_continues(signum, tmp_path, capsys):
    usual = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(signum, usual)  # a shell's background job, or nohup, has it ignored
    stopped = hanging(tmp_path, signum)
    start = time.monotonic()
    with pytest.raises((KeyboardInterrupt, SystemExit)) as end:
        stopped.fit(model(), data())
    assert time.monotonic() - start < 60
    expected = KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)
    assert repr(end.value) == repr(expected)
    checkpoint = stopped.run_dir / "checkpoints/last.ckpt"
    assert capsys.readouterr().err.endswith(
        f"fedmoe: {signum.name} has ended the run; it continues from its last checkpoint with\n"
        f"fit(model, datamodule, ckpt_path='{checkpoint}')\n"
    )
    assert signal.signal(signum, before) is usual
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    resumed, whole = hanging(tmp_path, None), hanging(tmp_path / "whole", None)
    resumed.fit(model(), data(), ckpt_path=str(checkpoint))
    whole.fit(model(), data())
    assert_same(resumed.run.states["FedAvg"].server, whole.run.states["FedAvg"].server)


@pytest.mark.parametrize("arrive", [[signal.SIGTERM, signal.SIGINT], [signal.SIGINT]])
def test_a_second_signal_or_a_main_thread_that_hangs_ends_the_process(arrive, monkeypatch):
    codes, (read, write) = [], os.pipe()

    def end(code):
        codes.append(code)
        raise EOFError

    monkeypatch.setattr(interruption.os, "_exit", end)
    monkeypatch.setattr(interruption, "_SECONDS_TO_END", 0.2)
    for signum in (signal.SIGALRM, *arrive):
        os.write(write, bytes([signum]))
        time.sleep(0.01)
    with pytest.raises(EOFError):
        interruption._watch(read, [signal.SIGINT, signal.SIGTERM])
    assert codes == [128 + arrive[0]]
    os.close(read)
    os.close(write)


def test_slurm_requeues_the_job_which_continues_once(tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $* > {tmp_path}/asked\n")
    (tmp_path / "scontrol").chmod(0o700)
    (tmp_path / "checkpoints").mkdir()
    checkpoint = tmp_path / "checkpoints/last.ckpt"
    checkpoint.touch()
    job = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    for name, value in {**job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    begun = partial(interruption.interruptible, SimpleNamespace(folder=tmp_path), tmp_path / "runs", "fit")
    with pytest.raises(SystemExit) as end, begun():
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(10)
    assert end.value.code == 128 + signal.SIGUSR1
    assert (tmp_path / "asked").read_text() == "requeue 7_3\n"
    assert interruption.requeued(tmp_path / "runs", "fit") is None, "not in the same start of the job"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert interruption.requeued(tmp_path / "runs", "fit --seed_everything 1") is None, "another command of the job"
    for _ in range(2):  # it may be ended before its run has begun
        assert interruption.requeued(tmp_path / "runs", "fit") == str(checkpoint)
    with begun():
        assert interruption.requeued(tmp_path / "runs", "fit") is None, "another run of the same job begins anew"


def test_a_job_whose_container_has_no_scontrol_is_said_not_to_be_requeued(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(UserWarning, match=r"could not be requeued: scontrol gave No such file or directory\."):
        interruption.requeue(tmp_path, "fit", tmp_path / "last.ckpt")


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[4])
from helpers.runs import WithDropout, data, federation
from fedmoe_pl import PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import TrainerBackend

class Hangs(PersonalizedMoE):
    def loss(self, batch):
        if self._trainer is None:
            return super().loss(batch)
        print("hangs", flush=True)
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                if sys.argv[1] == "interruptible":
                    raise

trainer = {"accelerator": "cpu", "devices": int(sys.argv[2])}
run = federation(sys.argv[3], [Phase("FedAvg", FedAvg())], trainer=trainer, backend=TrainerBackend())
run.fit(Hangs(WithDropout()), data())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interruptible", "uninterruptible"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_within_seconds(how, devices, signum, tmp_path):
    command = [sys.executable, "-c", SCRIPT, how, str(devices), str(tmp_path), str(Path(__file__).parents[1])]
    usual = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=usual, **pipes) as process:
        assert process.stdout.readline() == "hangs\n"
        start = time.monotonic()
        process.send_signal(signum)
        # 1: after Ctrl-C, Python forgets why it ends if torchvision has been imported
        assert process.wait(60) in (128 + signum, -signum, *([1] if signum == signal.SIGINT else []))
        assert time.monotonic() - start < 20
        if how == "interruptible":
            assert "checkpoints/last.ckpt" in process.stderr.read()
