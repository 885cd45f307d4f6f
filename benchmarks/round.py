"""Seconds and memory of one FedAvg round, against the shortest PyTorch loop that does the same.

    taskset -c 1 python benchmarks/round.py --batch-size 10
    taskset -c 1 python benchmarks/round.py --batch-size 64

LeNet-5 on random images of shape (3, 32, 32), 500 samples a client, SGD with learning rate 0.01 and momentum 0.5, one
thread. Loop and federation take turns in one process, so that both see the same machine; the first turn of each is
dropped. Both shuffle with the same seeds and must end with the same weights, or there is nothing to compare. Evaluation,
checkpoints and logs are off.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from torch import Tensor, nn
from workload import RandomImages, make_model, memory, reset_peak_memory, restart_with_environment

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import PersonalizedMoE
from fedmoe_pl.phase import Phase
from fedmoe_pl.seeds import derive_seed

SAMPLES_PER_CLIENT = 500


def bare_round(expert: nn.Module, data: RandomImages, batch_size: int, epochs: int) -> dict[str, Tensor]:
    """One round of FedAvg: a fresh optimizer per client, a permutation per epoch, the mean of the state dicts."""
    start = {name: tensor.clone() for name, tensor in expert.state_dict().items()}
    mean = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for client, samples in enumerate(data.train_samples):
        expert.load_state_dict(start)
        optimizer = torch.optim.SGD(expert.parameters(), lr=0.01, momentum=0.5)
        generator = torch.Generator().manual_seed(derive_seed(0, 0, client, 0))  # the federation's seed of this client
        for _ in range(epochs):
            order = samples[torch.randperm(len(samples), generator=generator)]
            for batch in order.split(batch_size):
                loss = nn.functional.cross_entropy(expert(data.x[batch]), data.y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for name, tensor in expert.state_dict().items():
            mean[name] += tensor / data.num_clients
    expert.load_state_dict(start)
    return mean


class RoundTimer(FederationCallback):
    """Seconds from the start of the round to its end."""

    def on_round_start(self, federation: Federation, phase: Phase, round: int) -> None:
        """Starts the clock."""
        self.started = time.perf_counter()

    def on_round_end(self, federation: Federation, phase: Phase, round: int) -> None:
        """Stops the clock."""
        self.seconds = time.perf_counter() - self.started


def federated_round(model: PersonalizedMoE, data: RandomImages, epochs: int) -> tuple[float, dict[str, Tensor]]:
    """The same round by a ``Federation``: its seconds and the averaged weights."""
    timer = RoundTimer()
    phase = Phase("FedAvg", FedAvg(shared="global_expert.*"), evaluate=False)
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            phases=[phase],
            trainer={"max_epochs": epochs, "accelerator": "cpu"},
            callbacks=[timer],
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        federation.fit(model, data)
    server = federation.states["FedAvg"].server
    return timer.seconds, {name.removeprefix("global_expert."): tensor for name, tensor in server.items()}


def measure(options: argparse.Namespace) -> None:
    """Let both take turns, and print what they took."""
    data = RandomImages(options.clients, SAMPLES_PER_CLIENT, options.batch_size)
    data.setup()
    model = make_model(gate_weight=1)
    seconds: dict[str, list[float]] = {"bare": [], "federation": []}
    peaks: dict[str, float] = {}
    print(f"{options.clients} clients, {options.epochs} epochs, batch size {options.batch_size}: seconds a round")
    for turn in range(options.repeats + 1):
        reset_peak_memory()
        started = time.perf_counter()
        expected = bare_round(model.global_expert, data, options.batch_size, options.epochs)
        bare_seconds, peaks["bare"] = time.perf_counter() - started, memory("VmHWM")
        reset_peak_memory()
        federation_seconds, weights = federated_round(model, data, options.epochs)
        peaks["federation"] = memory("VmHWM")
        difference = max((weights[name] - expected[name]).abs().max().item() for name in expected)
        if difference > 1e-4:
            raise SystemExit(f"the weights differ by {difference:.1e}: the two did not do the same work")
        print(f"bare {bare_seconds:.3f}  federation {federation_seconds:.3f}  weights differ by {difference:.0e}", end="")
        print("  (warm-up, not counted)" if turn == 0 else "", flush=True)
        if turn:
            seconds["bare"].append(bare_seconds)
            seconds["federation"].append(federation_seconds)
    for name, values in seconds.items():
        print(f"{name}: median {statistics.median(values):.3f} s, minimum {min(values):.3f} s, peak {peaks[name]:.0f} MiB")
    ratio = statistics.median(seconds["federation"]) / statistics.median(seconds["bare"])
    print(f"ratio of medians: {ratio:.3f}")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5, help="local epochs of a client")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5, help="counted turns of each")
    options = parser.parse_args()
    restart_with_environment()
    measure(options)


if __name__ == "__main__":
    main()
