"""Seconds and memory of one FedAvg round: fedmoe_pl, Flower and pfl-research beside a bare PyTorch loop.

    python benchmarks/peers.py --flower DIR/bin/python --pfl-research DIR/bin/python
    python benchmarks/peers.py --flower DIR/bin/python --pfl-research DIR/bin/python --batch-size 64 --workers 1

The work is that of ``round.py``: LeNet-5 on random images of shape (3, 32, 32), 500 samples a client, SGD with learning
rate 0.01 and momentum 0.5, all clients in every round, no evaluation. Each peer is installed in an environment of its
own, and one that is not is left out:

    python -m venv DIR && DIR/bin/pip install "flwr[simulation]" torch
    python -m venv DIR && DIR/bin/pip install "pfl[pytorch]"

Everybody runs in a long-lived process and is held up between two rounds (a callback or a strategy waits for this
script), so that set-up is in no round. They take turns, bare, one, bare, another, and the first turn of each is
dropped. The bare loop starts its turn from the weights of the one whose turn is next and shuffles with the same seeds,
so that both must end with the same weights, or there is nothing to compare. Nothing but processes is parallel: each
computes with one thread, the bare loop in one process, the others in ``--workers``. Who waits idles, but for Ray and
Flower: about 4 % of a core.

Memory is measured in rounds that are not timed, with nobody else running: the largest sum, over a process and all that
descend from it, of proportional set sizes (Linux).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

import torch
from peers_harness import Task
from plain import Work
from torch import Tensor, nn
from workload import RandomImages, make_model, restart_with_environment

from fedmoe_pl.seeds import derive_seed

BARE = "bare loop"
SAMPLES_PER_CLIENT = 500
PEERS = {  # name: (harness, what it imports, what installs it)
    "Flower": ("peers_flower.py", ("flwr", "ray", "torch"), '"flwr[simulation]" torch'),
    "pfl-research": ("peers_pfl_research.py", ("pfl", "torch"), '"pfl[pytorch]"'),
}
TASK, START = "task.pt", "start.pt"
MEMORY_ROUNDS = 2
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
            env={**os.environ, **QUIET},
            start_new_session=True,
        )

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, and what it may have left behind."""
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
        with contextlib.suppress(BrokenPipeError):  # said below
            print(json.dumps([round, start or self.weights]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.errors.seek(0)
            raise SystemExit(f"{self.name} has stopped; the end of what it said:\n{self.errors.read()[-2000:]}")
        self.seconds, self.weights, self.versions = json.loads(answer)


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


def proportional_set_size(pid: int) -> float:
    """A process's resident memory in MiB; what it shares with others is divided among them."""
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def check_same_work(name: str, start: dict[str, Tensor], expected: dict[str, Tensor], weights: str) -> float:
    """Compare the averaged weights after a round with those of the bare loop, which started from the same.

    Returns:
        The largest difference.
    """
    actual = torch.load(weights)
    difference, moved = largest_difference(actual, expected), largest_difference(actual, start)
    if not (difference <= 1e-4 and moved >= 1e-3):  # false for nan, too
        raise SystemExit(
            f"{name}: its weights are {difference:.1e} from those of the bare loop and {moved:.1e} from the start; "
            "the two did not do the same work"
        )
    return difference


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest absolute difference of any weight."""
    return torch.cat([(a[name] - b[name]).abs().flatten() for name in b]).max().item()


def write_task(folder: Path, options: argparse.Namespace) -> None:
    """Write what all have to do, and the weights to start from."""
    data = RandomImages(options.clients, SAMPLES_PER_CLIENT, options.batch_size)
    data.setup()
    expert = make_model(gate_weight=1).global_expert
    # Taken apart, as the peers' environments have torch but not fedmoe_pl.
    model = nn.Sequential(expert.get_submodule("extractor"), expert.get_submodule("classifier"))
    # The federation's seeds of these clients; one round more than are run, so that nobody packs up while others run.
    rounds = range(max(options.repeats + 1, MEMORY_ROUNDS) + 1)
    seeds = [[derive_seed(0, 3, client, round) for client in range(options.clients)] for round in rounds]
    work = Work(data.x, data.y, list(data.train_samples), options.batch_size, options.epochs)
    torch.save(Task(work, model, seeds, options.workers), folder / TASK)
    torch.save(model.state_dict(), folder / START)


def commands(task: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """The command line of everybody who takes part, by name; the bare loop is the first."""
    found = {BARE: [sys.executable, script("peers_bare.py"), str(task)]}
    for backend in options.backends:
        found[f"fedmoe_pl, {backend}"] = [sys.executable, script("peers_fedmoe.py"), str(task), backend]
    for name, (file, modules, packages) in PEERS.items():
        option = name.lower().replace("-", "_")
        python = getattr(options, option)
        if python and is_installed(python, modules):
            found[name] = [python, script(file), str(task)]
        else:
            install = f"python -m venv DIR && DIR/bin/pip install {packages}"
            print(f"{name} is not installed and left out; to have it: {install}, and --{name.lower()} DIR/bin/python")
    return found


def script(file: str) -> str:
    """Path of a file beside this one."""
    return str(Path(__file__).with_name(file))


def is_installed(python: str, modules: tuple[str, ...]) -> bool:
    """Whether this Python can import these modules."""
    code = f"from importlib.util import find_spec; raise SystemExit(not all(map(find_spec, {modules})))"
    try:
        return subprocess.run([python, "-c", code]).returncode == 0
    except OSError:
        return False


def measure_memory(name: str, command: list[str], start: Path) -> float:
    """Peak memory of some rounds in MiB, with nobody else running."""
    with Harness(name, command, start) as harness, PeakMemory(harness.process.pid) as peak:
        for round in range(MEMORY_ROUNDS):
            harness.run(round)
    print(f"{name}: {harness.versions}; peak memory {peak.mebibytes:.0f} MiB", flush=True)
    return peak.mebibytes


def take_turns(found: dict[str, list[str]], repeats: int, start: Path) -> dict[str, list[float]]:
    """Seconds of everybody's counted rounds."""
    seconds = defaultdict(list)
    with contextlib.ExitStack() as stack:
        bare, *others = [stack.enter_context(Harness(name, command, start)) for name, command in found.items()]
        for round in range(repeats + 1):
            for other in others:
                before = torch.load(other.weights)
                bare.run(round, start=other.weights)
                other.run(round)
                difference = check_same_work(other.name, before, torch.load(bare.weights), other.weights)
                line = "  ".join(f"{harness.name} {harness.seconds:.3f}" for harness in (bare, other))
                print(
                    f"{line}  weights differ by {difference:.0e}{'' if round else '  warm-up, not counted'}", flush=True
                )
                if round:
                    for harness in (bare, other):
                        seconds[harness.name].append(harness.seconds)
    return seconds


def report(seconds: dict[str, list[float]], peaks: dict[str, float]) -> None:
    """Print the table."""
    medians = {name: statistics.median(rounds) for name, rounds in seconds.items()}
    width = max(map(len, medians))
    print(f"\n{'':{width}}  {'s a round':>9}  {'to bare':>7}  {'peak MiB':>8}")
    for name, median in medians.items():
        print(f"{name:{width}}  {median:9.3f}  {median / medians[BARE]:7.2f}  {peaks[name]:8.0f}")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--flower", metavar="PYTHON", help="Python of the environment that has Flower")
    parser.add_argument("--pfl-research", metavar="PYTHON", help="Python of the environment that has pfl-research")
    parser.add_argument("--backends", nargs="*", default=["auto"], help="fedmoe_pl's: auto or classes; may be none")
    parser.add_argument("--workers", type=int, default=cores, help="processes of all but the bare loop")
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5, help="local epochs of a client")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5, help="counted turns of each; the bare loop has one per peer")
    options = parser.parse_args()
    restart_with_environment()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, options)
        found = commands(folder / TASK, options)
        print(
            f"{options.clients} clients, {options.epochs} epochs, batch size {options.batch_size}, {options.workers} "
            f"workers, {cores} cores"
        )
        peaks = {name: measure_memory(name, command, folder / START) for name, command in found.items()}
        report(take_turns(found, options.repeats, folder / START), peaks)


if __name__ == "__main__":
    main()
