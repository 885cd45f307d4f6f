"""Seconds and memory of one FedAvg round: fedmoe_pl and other frameworks, each beside a bare PyTorch loop.

    python benchmarks/peers.py --flower DIR/bin/python --pfl-research DIR/bin/python
    python benchmarks/peers.py --fluke DIR/bin/python --blazefl DIR/bin/python --batch-size 64 --workers 1
    python benchmarks/peers.py --flower DIR/bin/python --clients 100 --samples 50 --epochs 1
    python benchmarks/peers.py --flower DIR/bin/python --epochs 1 --evaluate 10000

The work is that of ``round.py``: LeNet-5 on random images of shape (3, 32, 32), SGD with learning rate 0.01 and
momentum 0.5, all clients in every round. The third command is the setting of pfl-research's own benchmark: many clients
of 50 samples, one local epoch, batch size 10. With ``--evaluate``, the model that every client has trained is evaluated
on as many test images, the same for all, before the round ends; only accuracies are computed.

Each peer is installed in an environment of its own, and one that is not is left out:

    python -m venv DIR && DIR/bin/pip install "flwr[simulation]" torch
    python -m venv DIR && DIR/bin/pip install "pfl[pytorch]"
    python -m venv DIR && DIR/bin/pip install fluke-fl
    python3.14 -m venv DIR && DIR/bin/pip install "blazefl[reproducibility]"

Everybody runs in a long-lived process and is held up between two rounds (a callback or a strategy waits for this
script), so that set-up is in no round. One framework is alive at a time: it and the bare loop take turns, the first
turns are dropped, both end, and what they left behind is killed before the next begins. A ratio is to the bare loop's
turns beside that framework. The bare loop starts its turn from the weights of the framework and shuffles with the same
seeds, so that both must end with the same weights and accuracies, or there is nothing to compare. Each process computes
with one thread, the bare loop in one process, the others in ``--workers``, as far as they can. Where other processes
hold the cores, the ratio in CPU seconds, of all of a framework's processes together, says more than the one in seconds.

Memory is measured in rounds that are not timed, with nobody else running: the largest sum, over a process and all that
descend from it, of proportional set sizes (Linux).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peers_processes import Harness, PeakMemory, adopt_orphans, end_orphans
from peers_task import write_configuration, write_task
from torch import Tensor
from workload import restart_with_environment

BARE = "bare loop"
PEERS = {  # name: (harness, what it imports, what installs it)
    "Flower": ("peers_flower.py", ("flwr", "ray", "torch"), '"flwr[simulation]" torch'),
    "pfl-research": ("peers_pfl_research.py", ("pfl", "torch"), '"pfl[pytorch]"'),
    "fluke": ("peers_fluke.py", ("fluke", "torch"), "fluke-fl"),
    "BlazeFL": ("peers_blazefl.py", ("blazefl", "numpy", "torch"), '"blazefl[reproducibility]"'),
}
MEMORY_ROUNDS = 2


class Row:
    """What was measured of a framework and of the bare loop in turns with it.

    Args:
        mebibytes: its peak memory.

    Attributes:
        seconds: of each counted round: the framework's, and the bare loop's.
        cpu_seconds: the same, computed by all processes together.
    """

    def __init__(self, mebibytes: float) -> None:
        self.mebibytes = mebibytes
        self.seconds: list[tuple[float, float]] = []
        self.cpu_seconds: list[tuple[float, float]] = []

    def add(self, other: Harness, bare: Harness) -> None:
        """Count the last round of the framework and of the bare loop."""
        self.seconds.append((other.seconds, bare.seconds))
        self.cpu_seconds.append((other.cpu_seconds, bare.cpu_seconds))

    def __str__(self) -> str:
        """Medians, and their ratios."""
        cells = []
        for columns in (self.seconds, self.cpu_seconds):
            own, bare = map(statistics.median, zip(*columns, strict=True))
            cells.append(f"{own:9.3f}  {bare:9.3f}  {own / bare:5.2f}")
        return f"{'  '.join(cells)}  {self.mebibytes:8.0f}"


def check_same_work(before: dict[str, Tensor], bare: Harness, other: Harness, images: int) -> float:
    """Compare the averaged weights and the accuracies after a round with those of the bare loop.

    Args:
        before: the weights that both started from.
        bare: the bare loop.
        other: the framework.
        images: number of test images, of which one may be classified differently, as two classes may tie to rounding.

    Returns:
        The largest difference of a weight.
    """
    expected, actual = torch.load(bare.weights), torch.load(other.weights)
    difference, moved = largest_difference(actual, expected), largest_difference(actual, before)
    if not (difference <= 1e-4 and moved >= 1e-3):  # false for nan, too
        raise SystemExit(
            f"{other.name}: its weights are {difference:.1e} from those of the bare loop and {moved:.1e} from the "
            "start; the two did not do the same work"
        )
    if len(bare.accuracies) != len(other.accuracies):
        raise SystemExit(f"{other.name}: {len(other.accuracies)} clients were evaluated, not {len(bare.accuracies)}")
    for client, (a, b) in enumerate(zip(bare.accuracies, other.accuracies, strict=True)):
        if not abs(a - b) * images < 1.5:
            raise SystemExit(f"{other.name}: the accuracy of client {client} is {b}, but {a} in the bare loop")
    return difference


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest absolute difference of any weight."""
    return torch.cat([(a[name] - b[name]).abs().flatten() for name in b]).max().item()


def commands(task: Path, configuration: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """The command line of everybody who takes part, by name."""
    found = {BARE: [sys.executable, script("peers_bare.py"), str(task)]}
    fit = [sys.executable, "-m", "fedmoe_pl", "fit", "--config", str(configuration), "--federation.backend"]
    for backend in options.backends:
        found[f"fedmoe_pl, {backend}"] = [*fit, backend]
    for name, (file, modules, packages) in PEERS.items():
        python = getattr(options, name.lower().replace("-", "_"))
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


def run_alone(harness: Harness) -> float:
    """Run the first rounds with nobody else running; returns the peak memory in MiB."""
    with PeakMemory(harness.process.pid) as peak:
        for round in range(MEMORY_ROUNDS):
            harness.run(round)
    print(f"{harness.name}: {harness.versions}; peak memory {peak.mebibytes:.0f} MiB", flush=True)
    return peak.mebibytes


def take_turns(name: str, found: dict[str, list[str]], options: argparse.Namespace, start: Path) -> Row:
    """Let the bare loop and a framework take turns, with nobody else alive.

    Args:
        name: the framework.
        found: the command lines of all.
        options: the options.
        start: file of the weights to start from.
    """
    with Harness(name, found[name], start) as other:
        row = Row(run_alone(other))
        with Harness(BARE, found[BARE], start) as bare:
            for round in range(MEMORY_ROUNDS, MEMORY_ROUNDS + options.repeats + 1):
                before = torch.load(other.weights)
                bare.run(round, start=other.weights)
                other.run(round)
                difference = check_same_work(before, bare, other, options.evaluate)
                line = "  ".join(f"{harness.name} {harness.seconds:.3f}" for harness in (bare, other))
                note = "" if round > MEMORY_ROUNDS else "  warm-up, not counted"
                print(f"{line}  weights differ by {difference:.0e}{note}", flush=True)
                if not note:
                    row.add(other, bare)
    end_orphans()
    return row


def report(rows: dict[str, Row], bare_mebibytes: float) -> None:
    """Print the table."""
    width = max(map(len, (BARE, *rows)))
    titles = f"{'s a round':>9}  {BARE:>9}  {'ratio':>5}  {'CPU s':>9}  {BARE:>9}  {'ratio':>5}  {'peak MiB':>8}"
    print(f"\n{'':{width}}  {titles}")
    for name, row in rows.items():
        print(f"{name:{width}}  {row}")
    print(f"{BARE:{width}}  {bare_mebibytes:{len(titles)}.0f}")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    for name in PEERS:
        parser.add_argument(f"--{name.lower()}", metavar="PYTHON", help=f"Python of the environment that has {name}")
    parser.add_argument("--backends", nargs="*", default=["auto"], help="fedmoe_pl's: auto or classes; may be none")
    parser.add_argument("--workers", type=int, default=cores, help="processes of all but the bare loop")
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5, help="local epochs of a client")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--samples", type=int, default=500, help="training samples of a client")
    parser.add_argument(
        "--evaluate", type=int, default=0, metavar="IMAGES", help="test images for every client's model in every round"
    )
    parser.add_argument("--repeats", type=int, default=5, help="counted turns of each")
    options = parser.parse_args()
    restart_with_environment()
    adopt_orphans()
    with tempfile.TemporaryDirectory() as name:
        task, start = Path(name, "task.pt"), Path(name, "start.pt")
        # one round more than are run, so that nobody packs up while others run
        rounds = MEMORY_ROUNDS + options.repeats + 2
        write_task(task, start, rounds, options)
        write_configuration(configuration := Path(name, "fedmoe.yaml"), task, rounds, options)
        found = commands(task, configuration, options)
        print(
            f"{options.clients} clients of {options.samples} samples, {options.epochs} epochs, batch size "
            f"{options.batch_size}, {options.evaluate} test images, {options.workers} workers, {cores} cores"
        )
        with Harness(BARE, found[BARE], start) as bare:
            mebibytes = run_alone(bare)
        report({name: take_turns(name, found, options, start) for name in found if name != BARE}, mebibytes)


if __name__ == "__main__":
    main()
