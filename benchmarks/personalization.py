"""Seconds of PFL-MoE's personalization, against a bare PyTorch loop over the clients.

    python benchmarks/personalization.py
    python benchmarks/personalization.py --clients 20 --epochs 40 --devices 1
    python benchmarks/personalization.py --accelerator gpu --bare-clients 6

PFL-FB and the gates of PFL-MF and PFL-MFE for LeNet-5 on random images of shape (1, 32, 32), Dirichlet 0.5, 600
samples a client on average, batch size 64, no augmentation, the optimizers of configs/pfl_moe_fmnist_lenet5.yaml. The
bare loop computes the frozen extractors in every step, client by client, in one process with ``--threads`` threads.
The federation computes them once, stacks the clients and uses ``--devices`` processes. Both draw the same random
numbers and must end with the same classifiers and gates, or there is nothing to compare. ``--bare-clients`` lets the
bare loop do fewer clients, of which the time is then scaled to all by numbers of samples. No evaluation, no
checkpoints, no logs; starting the processes is in the federation's time. On a GPU, both compute without TF32.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from plain import Work, shuffled_batches
from round import RoundTimer
from torch import Generator, Tensor
from workload import peak_memory, reset_peak_memory, restart_with_environment

from fedmoe_pl.algorithms import FineTuning, PFLMoE
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.data import Arrays, Dirichlet, FederatedDataModule
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import ConstantGate, FeatureGate, LeNet5, LinearGate, PersonalizedMoE
from fedmoe_pl.phases.phase import Phase, Train
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.seeds import derive_seed

BATCH_SIZE = 64
GATE_FRACTION = 0.25
EXPERT_OPTIMIZER = partial(torch.optim.SGD, lr=0.001, momentum=0.9, weight_decay=0.0005)
GATE_OPTIMIZER = partial(torch.optim.Adam, lr=0.001, weight_decay=0.0005)
TOLERANCE = 0.01  # rounding grows over thousands of steps in single precision
GATES = {"PFL-MF": LinearGate, "PFL-MFE": FeatureGate}


class GrayImages(FederatedDataModule):
    """Random images of shape (1, 32, 32) in ten classes, dealt unevenly to the clients."""

    def load(self) -> Arrays:
        """Draws the images."""
        generator = Generator().manual_seed(0)
        n = 600 * (self.requested_clients or 1)
        x = torch.randint(256, (n, 1, 32, 32), generator=generator, dtype=torch.uint8)
        y = torch.randint(10, (n,), generator=generator)
        return Arrays(x, y, x[:1], y[:1])


class PhaseTimer(RoundTimer):
    """What the only round of every phase takes, by the phase's name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Stops the clock."""
        self.seconds[phase.name] = self.clock.read()[0]


def train(module: PersonalizedMoE, trained: str, make_optimizer: Callable, work: Work, client: int, round: int) -> None:
    """A client's local training of the parameters under a prefix, in plain PyTorch."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    optimizer = make_optimizer([parameter for parameter in module.parameters() if parameter.requires_grad])
    generator = Generator().manual_seed(derive_seed(0, 3, client, round))  # as the federation shuffles
    forward = module if trained.startswith("gate") else module.local_expert
    for _ in range(work.epochs):
        for x, y in shuffled_batches(work, client, generator):
            loss = torch.nn.functional.cross_entropy(forward(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def bare_personalization(
    model: PersonalizedMoE, data: GrayImages, epochs: int, clients: int, device: torch.device
) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
    """Seconds of each phase, and the state dicts of the clients' modules of PFL-MF and PFL-MFE."""
    seconds = dict.fromkeys(("PFL-FB", *GATES), 0.0)
    found = []
    x, y = data.x.to(device), data.y.to(device)
    for client in range(clients):
        seen = Client(client, 0, 0, model, data.train_samples[client], {}, data)
        samples = {"expert": FineTuning(gate_fraction=GATE_FRACTION), "gate": PFLMoE(GATE_FRACTION)}
        work = {
            name: Work(x, y, {client: algorithm.client_samples(seen)}, BATCH_SIZE, epochs)
            for name, algorithm in samples.items()
        }
        start = time.perf_counter()
        personalized = copy.deepcopy(model)
        personalized.local_expert.load_state_dict(model.global_expert.state_dict())
        train(personalized.to(device), "local_expert.classifier", EXPERT_OPTIMIZER, work["expert"], client, round=0)
        personalized.cpu()  # also waits for the GPU
        seconds["PFL-FB"] += time.perf_counter() - start
        for name, gate in GATES.items():
            start = time.perf_counter()
            module = PersonalizedMoE(copy.deepcopy(personalized.global_expert), personalized.local_expert, gate())
            torch.manual_seed(derive_seed(0, 0, client, 1))  # the federation's after the round of PFL-FB
            module.gate.reset_parameters()
            train(module.to(device), "gate", GATE_OPTIMIZER, work["gate"], client, round=1)
            module.cpu()
            seconds[name] += time.perf_counter() - start
            found.append(copy.deepcopy(module.state_dict()))
    return seconds, found


def federated_personalization(
    model: PersonalizedMoE, data: GrayImages, options: argparse.Namespace
) -> tuple[dict[str, float], Federation]:
    """Seconds of each phase, and the finished federation."""
    timer = PhaseTimer()
    expert = FineTuning("local_expert.classifier.*", GATE_FRACTION)
    phases = [
        Phase(
            "PFL-FB",
            expert,
            start="initial",
            gate=ConstantGate(0),
            train=Train(optimizer=EXPERT_OPTIMIZER),
            evaluate=False,
        ),
        *(
            Phase(
                name,
                PFLMoE(GATE_FRACTION),
                start="PFL-FB",
                gate=gate(),
                train=Train(optimizer=GATE_OPTIMIZER),
                evaluate=False,
            )
            for name, gate in GATES.items()
        ),
    ]
    callbacks: list[FederationCallback] = [timer]
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            phases=phases,
            trainer={
                "max_epochs": options.epochs,
                "accelerator": options.accelerator,
                "devices": options.devices,
            },
            callbacks=callbacks,
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        federation.fit(model, data)
    return timer.seconds, federation


def measure(options: argparse.Namespace) -> None:
    """Runs both and prints their seconds and ratios, phase by phase."""
    data = GrayImages(options.clients, Dirichlet(0.5), BATCH_SIZE)
    data.setup()
    torch.manual_seed(0)
    model = PersonalizedMoE(LeNet5())
    reset_peak_memory(options.accelerator)
    seconds, federation = federated_personalization(model, data, options)
    peaks = {"federation": peak_memory(options.accelerator)}
    bare_clients = options.bare_clients or options.clients
    torch.set_num_threads(options.threads)
    reset_peak_memory(options.accelerator)
    device = torch.device("cuda" if options.accelerator == "gpu" else "cpu")
    bare, modules = bare_personalization(model, data, options.epochs, bare_clients, device)
    peaks["bare"] = peak_memory(options.accelerator)
    expected = iter(modules)
    largest = 0.0
    for client in range(bare_clients):
        for name in GATES:
            own = federation.client_module(name, client).state_dict()
            difference = max((own[key] - tensor).abs().max().item() for key, tensor in next(expected).items())
            if difference > TOLERANCE:
                raise SystemExit(f"{name} of client {client} differs by {difference:.1e}: not the same work")
            largest = max(largest, difference)
    samples = [len(own) for own in data.train_samples]
    scale = sum(samples) / sum(samples[:bare_clients])
    print(f"{options.clients} clients, {options.epochs} epochs, {options.devices} processes")
    print(f"bare loop: {bare_clients} clients, {options.threads} threads; weights differ by {largest:.0e}")
    for name in (*seconds, "all"):
        ours, theirs = (sum(all_.values()) if name == "all" else all_[name] for all_ in (seconds, bare))
        print(f"{name:<8} bare {theirs * scale:8.1f} s  federation {ours:7.1f} s  ratio {theirs * scale / ours:6.1f}")
    where = "the GPU" if options.accelerator == "gpu" else "this process"
    print(f"peak memory of {where}: bare loop {peaks['bare']:.0f} MiB, federation {peaks['federation']:.0f} MiB")


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--devices", type=int, help="processes of the federation; default one per core, or one GPU")
    parser.add_argument("--threads", type=int, default=1, help="threads of the bare loop")
    parser.add_argument("--bare-clients", type=int, help="clients of the bare loop, if not all")
    options = parser.parse_args()
    if options.devices is None:
        options.devices = 1 if options.accelerator == "gpu" else len(os.sched_getaffinity(0))
    torch.backends.cudnn.allow_tf32 = False  # it rounds factors to 11 bits, which thousands of steps make visible
    restart_with_environment()
    measure(options)


if __name__ == "__main__":
    main()
