"""A framework of ``peers.py`` in a process of its own, its memory, and the check that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

HERE = str(Path(__file__).parent)  # fedmoe_pl's command finds its classes there
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # nobody phones home in the middle of a round


class Harness:
    """A framework in a process of its own, which runs a round when asked to.

    Args:
        name: how it is called in the table.
        command: the command line.
        start: file of the weights that its first round starts from.

    Attributes:
        weights: file of the weights after its last round.
        seconds: what that round took.
        cpu_seconds: what its processes computed in that round, all together.
        accuracies: of its clients' models in that round; empty if nothing is evaluated.
        versions: of the packages that matter.
    """

    def __init__(self, name: str, command: list[str], start: Path) -> None:
        self.name = name
        self.weights = str(start)
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={
                **os.environ,
                **QUIET,
                "PYTHONPATH": os.pathsep.join(filter(None, (HERE, os.environ.get("PYTHONPATH")))),
            },
            start_new_session=True,
        )

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and its group; ``end_orphans`` ends what else it may have left behind."""
        assert self.process.stdin
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()

    def run(self, round: int, start: str | None = None) -> None:
        """Run a round.

        Args:
            round: its number, counted from 0.
            start: file of the weights to start from, which only the bare loop reads; None for those of its last round.
        """
        assert self.process.stdin and self.process.stdout
        before = cpu_seconds(self.process.pid)
        with contextlib.suppress(BrokenPipeError):  # said below
            print(json.dumps([round, start or self.weights]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.errors.seek(0)
            raise SystemExit(f"{self.name} has stopped; the end of what it said:\n{self.errors.read()[-2000:]}")
        self.cpu_seconds = cpu_seconds(self.process.pid) - before
        self.seconds, self.weights, self.accuracies, self.versions = json.loads(answer)


def adopt_orphans() -> None:
    """Make this process the parent of those that a harness leaves behind, so that they are found (Linux)."""
    set_child_subreaper = 36
    if ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0):
        raise SystemExit("this process cannot adopt what a harness leaves behind; Linux 3.4 or later can")


def end_orphans() -> None:
    """Kill every process that descends from this one, once no harness runs, and wait until none is left.

    A framework's daemons would otherwise take time from whoever's turn comes next.
    """
    deadline = time.monotonic() + 10
    while orphans := descendants(os.getpid())[1:]:
        if time.monotonic() > deadline:
            raise SystemExit(f"processes {orphans} do not end; they would slow down whoever comes next")
        for process in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # none is left to wait for
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.1)


class PeakMemory:
    """The largest memory of a process and its descendants, sampled by a thread.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.mebibytes = 0.0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._sample)

    def __enter__(self) -> PeakMemory:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _sample(self) -> None:
        while not self.stop.wait(0.1):
            self.mebibytes = max(self.mebibytes, sum(map(proportional_set_size, descendants(self.pid))))


def descendants(pid: int) -> list[int]:
    """The process and all that descend from it."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(stat.parent.name))
    found = [pid]
    for process in found:
        found.extend(children[process])
    return found


def cpu_seconds(pid: int) -> float:
    """What a process and all that descend from it have computed, those that have ended included."""
    ticks = 0
    for process in descendants(pid):
        with contextlib.suppress(OSError):  # it has ended
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # its own and its ended children's
    return ticks / os.sysconf("SC_CLK_TCK")


def proportional_set_size(pid: int) -> float:
    """A process's resident memory in MiB; what it shares with others is divided among them."""
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0
