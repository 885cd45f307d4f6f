"""One process trains a run at a time."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from helpers.runs import data, federation, model
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.checkpoints.checkpoint import locked
from fedmoe_pl.checkpoints.files import exclusive

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
