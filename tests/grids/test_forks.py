"""Processes of cells that are forked: they begin, end and are ended as new ones are."""

import json
import os
import subprocess
import sys

import pytest

# The first process has a command of each kind run, and prints how it ended.
_SCRIPT = """
import atexit, json, os, signal, sys, time
from pathlib import Path
from fedmoe_pl.grids.forks import fork, serve_forks

print("not yet written", end=" ")
imported = len(sys.modules)
serve_forks()
if sys.argv[1:]:
    _, _, kind = sys.argv
    stdin = sys.stdin.read()
    import torch
    said = [os.environ.get("GREETING"), sorted(os.sched_getaffinity(0)), torch.get_num_threads(), os.getsid(0), stdin]
    print(json.dumps({"pid": os.getpid(), "said": said, "modules": len(sys.modules) - imported}), flush=True)
    print("to stderr", file=sys.stderr)
    atexit.register(lambda: Path(kind, "handlers").write_text("ran"))
    if kind == "hangs":
        time.sleep(60)
    sys.exit({"ends": None, "fails": 3}[kind])
ended = {}
for kind, signum in {"ends": None, "fails": None, "hangs": signal.SIGKILL}.items():
    process = fork(["run", kind], Path(kind), {"GREETING": kind}, [min(os.sched_getaffinity(0))])
    if signum is not None:
        assert process.poll() is None
        log = Path(kind, "stdout.log")
        while not (log.exists() and log.read_text()):
            time.sleep(0.01)
        os.killpg(process.pid, signum)
    process.wait()
    process.terminate()  # does nothing to one that has ended
    ended[kind] = [process.pid, process.poll()]
print(json.dumps(ended))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_a_forked_process_begins_and_ends_as_a_new_one(tmp_path):
    (tmp_path / "script.py").write_text(_SCRIPT)
    kinds = {"ends": 0, "fails": 3, "hangs": -9}
    for kind in kinds:
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "stderr.log").write_text("of an earlier run")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    ended = json.loads(done.stdout.removeprefix("not yet written "))
    assert {kind: code for kind, (_, code) in ended.items()} == kinds and not done.stderr
    core = min(os.sched_getaffinity(0))
    for kind, (pid, _) in ended.items():
        said = json.loads((tmp_path / kind / "stdout.log").read_text())
        assert said["pid"] == pid and said["said"] == [kind, [core], 1, pid, ""]
        assert said["modules"] < 10, "nothing large is imported again"
        assert (tmp_path / kind / "stderr.log").read_text() == "to stderr\n"
        assert (tmp_path / kind / "handlers").exists() == (kind != "hangs")
