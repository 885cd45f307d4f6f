"""Seconds and memory of one FedAvg round, against the shortest PyTorch loop that does the same.

    taskset -c 1 python benchmarks/round.py --batch-size 10
    taskset -c 1 python benchmarks/round.py --clients 40 --samples 10 --epochs 1
    taskset -c 1 python benchmarks/round.py --batch-size 64 --backends TrainerBackend StackedBackend
    taskset -c 1 python benchmarks/round.py --channels-last
    taskset -c 1 python benchmarks/round.py --channels-last --expert VGG16 --no-dropout --clients 2 --samples 64
    python benchmarks/round.py --accelerator gpu --precision bf16-mixed --clients 100 --samples 50 --rounds 3

LeNet-5 or VGG-16 on random images of shape (3, 32, 32), SGD with learning rate 0.01 and momentum
0.5, one thread or one GPU. Loop and federation take turns in one process, so that both see the same machine; the first
turn of each is dropped. Both shuffle with the same seeds and must end with the same weights, or there is nothing to
compare. Evaluation, checkpoints and logs are off. With ``--rounds`` above 1, the rounds of a turn follow each other,
and the first is dropped in place of the first turn: it also does what is done once per phase. Where other processes
hold the core, the ratio in CPU seconds says more than the one in seconds. The floor of a round is what it computes and
moves at least: its operations, and for every step of a client the parameters, gradients and momentum that are read and
written once. With ``--channels-last``, the federation takes another turn with its model in this memory format, against
the same loop in the contiguous one. VGG-16 needs ``--no-dropout`` to end with the same weights.

How much the weights may differ: 1e-4 on a CPU in single precision. Elsewhere it is a share of the largest change of a
weight, because the factors of products are rounded to fewer bits: to 11 by a GPU's TF32, to 8 in bfloat16. Backends
sum and round in different orders. Such a share finds a wrong client, batch order or learning rate, but not one missing
step of many.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from functools import partial

import torch
from plain import Work, bare_round
from torch.utils.flop_counter import FlopCounterMode
from workload import RandomImages, make_model, peak_memory, reset_peak_memory, restart_with_environment

import fedmoe_pl.backends
import fedmoe_pl.models
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import PersonalizedMoE
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.seeds import derive_seed
from fedmoe_pl.trees import Tree

Seconds = tuple[float, float]
"""Seconds and CPU seconds."""
SHARES = {"32-true": 0.05, "bf16-mixed": 0.2}
"""How much weights may differ on a GPU or in bfloat16, as a share of the largest change of a weight."""


class Clock:
    """Seconds and CPU seconds of this process since it was made."""

    def __init__(self) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter(), time.process_time()

    def read(self) -> Seconds:
        """Seconds and CPU seconds since then."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self.seconds, time.process_time() - self.cpu_seconds


class RoundTimer(FederationCallback):
    """What each round takes from its start to its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.took: list[Seconds] = []

    def on_round_start(self, run: Run, phase: Phase, round: int) -> None:
        """Start the clock."""
        self.clock = Clock()

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Stop the clock."""
        self.took.append(self.clock.read())
        if phase.rounds > 1:  # an interrupted turn has no other line
            print(f"{self.name}, round {round}: {self.took[-1][0]:.3f} s", flush=True)


def bare_rounds(expert: torch.nn.Module, work: Work, options: argparse.Namespace) -> tuple[list[Seconds], Tree, float]:
    """Rounds of the loop: what each took, the averaged weights, peak memory; leaves the expert unchanged."""
    reset_peak_memory(options.accelerator)
    start = copy.deepcopy(expert.state_dict())
    took = []
    for round in range(options.rounds):
        seeds = [derive_seed(0, 3, client, round) for client in range(options.clients)]  # the federation's
        clock = Clock()
        expert.load_state_dict(bare_round(expert, work, seeds))
        took.append(clock.read())
    weights = copy.deepcopy(expert.state_dict())
    expert.load_state_dict(start)
    return took, weights, peak_memory(options.accelerator)


def federated_rounds(
    model: PersonalizedMoE, data: RandomImages, backend: str, options: argparse.Namespace
) -> tuple[list[Seconds], Tree, float]:
    """The same rounds by a ``Federation``: what each took, the averaged weights, and peak memory."""
    reset_peak_memory(options.accelerator)
    timer = RoundTimer(backend)
    phase = Phase("FedAvg", FedAvg(shared="global_expert.*"), rounds=options.rounds, evaluate=False)
    trainer = {
        "max_epochs": options.epochs,
        "accelerator": options.accelerator,
        "devices": 1,
        "precision": options.precision,
    }
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            phases=[phase],
            trainer=trainer,
            backend="auto" if backend == "auto" else getattr(fedmoe_pl.backends, backend)(),
            callbacks=[timer],
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        federation.fit(model, data)
    server = federation.run.states["FedAvg"].server
    weights = {name.removeprefix("global_expert."): tensor for name, tensor in server.items()}
    return timer.took, weights, peak_memory(options.accelerator)


def measure(options: argparse.Namespace) -> None:
    """Let the loop and each backend take turns, and print what they took."""
    data = RandomImages(options.clients, options.samples, options.batch_size)
    data.setup()
    expert_class = getattr(fedmoe_pl.models, options.expert)
    make_expert = partial(expert_class, dropout=0.0) if options.no_dropout else expert_class
    models = {"": make_model(1, make_expert)}
    if options.channels_last:
        models[" in channels-last"] = make_model(1, make_expert, channels_last=True)
    turns = {backend + suffix: (backend, model) for backend in options.backends for suffix, model in models.items()}
    device = torch.device("cuda" if options.accelerator == "gpu" else "cpu")
    expert = copy.deepcopy(models[""].global_expert).to(device)
    half = options.precision == "bf16-mixed"
    work = Work(data.x.to(device), data.y.to(device), data.train_samples, options.batch_size, options.epochs, half)
    took: dict[str, list[Seconds]] = {name: [] for name in ("bare", *turns)}
    peaks: dict[str, float] = {}
    print(f"{options.clients} clients, {options.epochs} epochs, batch size {options.batch_size}: seconds (CPU) a round")
    print_floor(expert, work)
    same = True
    for turn in range(options.repeats + (options.rounds == 1)):
        for name, (backend, model) in turns.items():
            bare, expected, peaks["bare"] = bare_rounds(expert, work, options)
            federated, weights, peaks[name] = federated_rounds(model, data, backend, options)
            difference, allowed = compare(expert, expected, weights, options)
            same = same and difference <= allowed  # not if it is nan
            dropped = 1 if options.rounds > 1 or turn == 0 else 0
            for round, (loop, own) in enumerate(zip(bare, federated, strict=True)):
                line = f"bare {loop[0]:.3f} ({loop[1]:.3f})  {name} {own[0]:.3f} ({own[1]:.3f})"
                end = "  warm-up, not counted" if round < dropped else ""
                print(f"{line}  weights differ by {difference:.0e}, at most {allowed:.0e}{end}", flush=True)
            took["bare"] += bare[dropped:]
            took[name] += federated[dropped:]
    report(took, peaks, options.clients)
    if not same:
        raise SystemExit("the weights differ by more than rounding: the two did not do the same work")


def compare(expert: torch.nn.Module, expected: Tree, weights: Tree, options: argparse.Namespace) -> tuple[float, float]:
    """The largest difference of the loop's weights and the federation's, and how large it may be."""
    difference = max((weights[name] - tensor.cpu()).abs().max().item() for name, tensor in expected.items())
    if options.accelerator == "cpu" and options.precision == "32-true":
        return difference, options.tolerance
    start = expert.state_dict()
    moved = max((tensor - start[name]).abs().max().item() for name, tensor in expected.items())
    return difference, moved * SHARES[options.precision]


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


def report(took: dict[str, list[Seconds]], peaks: dict[str, float], clients: int) -> None:
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
    parser.add_argument(
        "--no-dropout", action="store_true", help="VGG16 without dropout, so that clients can be stacked"
    )
    parser.add_argument("--channels-last", action="store_true", help="also with the model in channels-last format")
    parser.add_argument("--precision", choices=[*SHARES], default="32-true", help="of the Trainer, and of the loop")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of a turn; above 1, the first is not counted")
    parser.add_argument("--backends", nargs="+", default=["auto"], help="auto, TrainerBackend, StackedBackend")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference of weights, on a CPU")
    options = parser.parse_args()
    restart_with_environment()
    measure(options)


if __name__ == "__main__":
    main()
