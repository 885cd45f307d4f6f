"""Seconds and memory of one FedAvg round, against the shortest PyTorch loop that does the same.

    taskset -c 1 python benchmarks/round.py --batch-size 10
    taskset -c 1 python benchmarks/round.py --clients 40 --samples 10 --epochs 1
    taskset -c 1 python benchmarks/round.py --batch-size 64 --backends TrainerBackend StackedBackend
    python benchmarks/round.py --accelerator gpu --clients 100 --expert VGG16

LeNet-5 or VGG-16 on random images of shape (3, 32, 32), SGD with learning rate 0.01 and momentum
0.5, one thread or one GPU. Loop and federation take turns in one process, so that both see the same machine; the first
turn of each is dropped. Both shuffle with the same seeds and must end with the same weights, or there is nothing to
compare. Evaluation, checkpoints and logs are off. Where other processes hold the core, the ratio in CPU seconds says
more than the one in seconds. The floor of a round is what it computes and moves at least: its operations, and for every
step of a client the parameters, gradients and momentum that are read and written once.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time

import torch
from plain import Work, bare_round
from torch.utils.flop_counter import FlopCounterMode
from workload import RandomImages, make_model, memory, reset_peak_memory, restart_with_environment

import fedmoe_pl.backends
import fedmoe_pl.models
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import PersonalizedMoE
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.seeds import derive_seed
from fedmoe_pl.trees import Tree


class Clock:
    """Seconds and CPU seconds of this process since it was made."""

    def __init__(self) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds and CPU seconds since then."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self.seconds, time.process_time() - self.cpu_seconds


class RoundTimer(FederationCallback):
    """What a round takes from its start to its end."""

    def on_round_start(self, run: Run, phase: Phase, round: int) -> None:
        """Start the clock."""
        self.clock = Clock()

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Stop the clock."""
        self.took = self.clock.read()


def federated_round(
    model: PersonalizedMoE, data: RandomImages, backend: str, options: argparse.Namespace
) -> tuple[tuple[float, float], Tree]:
    """The same round by a ``Federation``: its seconds and CPU seconds, and the averaged weights."""
    timer = RoundTimer()
    phase = Phase("FedAvg", FedAvg(shared="global_expert.*"), evaluate=False)
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            phases=[phase],
            trainer={"max_epochs": options.epochs, "accelerator": options.accelerator, "devices": 1},
            backend="auto" if backend == "auto" else getattr(fedmoe_pl.backends, backend)(),
            callbacks=[timer],
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        federation.fit(model, data)
    server = federation.run.states["FedAvg"].server
    return timer.took, {name.removeprefix("global_expert."): tensor for name, tensor in server.items()}


def measure(options: argparse.Namespace) -> None:
    """Let the loop and each backend take turns, and print what they took."""
    data = RandomImages(options.clients, options.samples, options.batch_size)
    data.setup()
    model = make_model(1, getattr(fedmoe_pl.models, options.expert))
    device = torch.device("cuda" if options.accelerator == "gpu" else "cpu")
    expert = copy.deepcopy(model.global_expert).to(device)
    work = Work(data.x.to(device), data.y.to(device), data.train_samples, options.batch_size, options.epochs)
    seeds = [derive_seed(0, 3, client, 0) for client in range(options.clients)]  # the federation's of these clients
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in ("bare", *options.backends)}
    peaks: dict[str, float] = {}
    print(f"{options.clients} clients, {options.epochs} epochs, batch size {options.batch_size}: seconds (CPU) a round")
    print_floor(expert, work)
    for turn in range(options.repeats + 1):
        for backend in options.backends:
            reset_peak_memory()
            clock = Clock()
            expected = bare_round(expert, work, seeds)
            bare, peaks["bare"] = clock.read(), memory("VmHWM")
            reset_peak_memory()
            federated, weights = federated_round(model, data, backend, options)
            peaks[backend] = memory("VmHWM")
            difference = max((weights[name] - expected[name].cpu()).abs().max().item() for name in expected)
            if difference > options.tolerance:
                raise SystemExit(f"the weights differ by {difference:.1e}: the two did not do the same work")
            line = f"bare {bare[0]:.3f} ({bare[1]:.3f})  {backend} {federated[0]:.3f} ({federated[1]:.3f})"
            print(f"{line}  weights differ by {difference:.0e}{'' if turn else '  warm-up, not counted'}", flush=True)
            if turn:
                took["bare"].append(bare)
                took[backend].append(federated)
    report(took, peaks, options.clients)


def print_floor(expert: torch.nn.Module, work: Work) -> None:
    """What a round computes and moves at least."""
    x, y = work.x[: work.batch_size], work.y[: work.batch_size]
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.cross_entropy(expert(x), y).backward()
    expert.zero_grad()
    steps = work.epochs * sum(-(-len(work.samples[client]) // work.batch_size) for client in range(len(work.samples)))
    parameters = sum(parameter.numel() for parameter in expert.parameters())
    moved = 4 * parameters * 5  # read: parameters, gradients, momentum; written: parameters, momentum
    operations = counter.get_total_flops() * steps
    print(f"floor of a round: {steps} client steps, {operations / 1e12:.3f} TFLOP, {steps * moved / 1e9:.1f} GB moved")


def report(took: dict[str, list[tuple[float, float]]], peaks: dict[str, float], clients: int) -> None:
    """Print medians, their ratios, what a client costs beside the loop, and peak memory."""
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in took.items()}
    for name, (seconds, cpu_seconds) in medians.items():
        ratios = f"ratio {seconds / medians['bare'][0]:.3f}, {cpu_seconds / medians['bare'][1]:.3f} in CPU seconds"
        fixed = [
            1000 * (mine - bare) / clients for mine, bare in zip((seconds, cpu_seconds), medians["bare"], strict=True)
        ]
        print(f"{name}: {fixed[0]:.2f} ms a client beside the loop, {fixed[1]:.2f} in CPU time")
        print(f"{name}: median {seconds:.3f} s, {cpu_seconds:.3f} CPU s; {ratios}; peak memory {peaks[name]:.0f} MiB")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5, help="local epochs of a client")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--samples", type=int, default=500, help="training samples of a client")
    parser.add_argument("--repeats", type=int, default=5, help="counted turns of each")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--expert", choices=["LeNet5", "VGG16"], default="LeNet5")
    parser.add_argument("--backends", nargs="+", default=["auto"], help="auto, TrainerBackend, StackedBackend")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference of weights")
    options = parser.parse_args()
    restart_with_environment()
    measure(options)


if __name__ == "__main__":
    main()
