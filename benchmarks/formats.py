"""Milliseconds of a training step and of an evaluated batch in contiguous and in channels-last memory format.

    taskset -c 1 python benchmarks/formats.py
    taskset -c 1 python benchmarks/formats.py --networks LeNet5 VGG16

The networks and batch sizes are those of the configurations; SGD with momentum, random samples, one thread. The formats
take turns in one process. Medians of CPU time, because it depends less on other processes than the time of a clock.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from workload import restart_with_environment

from fedmoe_pl.models import CNN, IFCACNN, LEAFCNN, VGG16, ConvBlock, ConvExpert, GateCNN, LeNet5, TwoConvCNN

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int], int]] = {
    "LeNet5, colour, 10": (lambda: LeNet5(3), (3, 32, 32), 10),
    "LeNet5, colour, 64": (lambda: LeNet5(3), (3, 32, 32), 64),
    "LeNet5, gray, 10": (lambda: LeNet5(1), (1, 32, 32), 10),
    "VGG16, 10": (VGG16, (3, 32, 32), 10),
    "VGG16, 64": (VGG16, (3, 32, 32), 64),
    "TwoConvCNN, colour, 10": (TwoConvCNN, (3, 32, 32), 10),
    "TwoConvCNN, gray, 10": (lambda: TwoConvCNN(1, 10, 28), (1, 28, 28), 10),
    "LEAFCNN of CIFAR-10, 10": (LEAFCNN, (3, 32, 32), 10),
    "LEAFCNN of FEMNIST, 10": (lambda: LEAFCNN(1, 62, 32, 64, 2048, image_size=28), (1, 28, 28), 10),
    "GateCNN, 10": (GateCNN, (3, 32, 32), 10),
    "IFCACNN, 50": (IFCACNN, (3, 32, 32), 50),
    "CNN-1, 512": (CNN, (3, 32, 32), 512),
    "CNN-5, 512": (lambda: CNN(5), (3, 32, 32), 512),
    "FedMoE-DA of CIFAR-10, 100": (lambda: nn.Sequential(ConvBlock(), ConvExpert()), (3, 32, 32), 100),
    "FedMoE-DA of MNIST, 100": (
        lambda: nn.Sequential(ConvBlock(1, 32, 28), ConvExpert(32, 10, 12)),
        (1, 28, 28),
        100,
    ),
    "FedMoE-DA of digits, 10": (
        lambda: nn.Sequential(ConvBlock(1, 8, 16), ConvExpert(8, 10, 6, 16, 64)),
        (1, 16, 16),
        10,
    ),
}


def train(module: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    optimizer.zero_grad()
    cross_entropy(module(x), y).backward()
    optimizer.step()


@torch.no_grad()
def evaluate(module: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One batch."""
    cross_entropy(module(x), y)


def measure(name: str, seconds: float) -> None:
    """Print the medians of both formats, measured for about so many seconds."""
    make, shape, batch_size = NETWORKS[name]
    torch.manual_seed(0)
    module = make()
    modules = [module, copy.deepcopy(module).to(memory_format=torch.channels_last)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-4, momentum=0.5) for each in modules]
    x, y = torch.randn(batch_size, *shape), torch.arange(batch_size) % 7
    for work in (train, evaluate):
        took: list[list[float]] = [[], []]
        start = time.process_time()
        while len(took[0]) < 4 or time.process_time() - start < seconds:
            for index in range(2):
                begun = time.process_time()
                work(modules[index].train(work is train), x, y, optimizers[index])
                took[index].append(1000 * (time.process_time() - begun))
        contiguous, channels_last = (statistics.median(times[1:]) for times in took)
        line = f"{contiguous:8.2f} ms contiguous {channels_last:8.2f} ms channels-last"
        print(f"{name:27} {work.__name__:8} {line}  ratio {channels_last / contiguous:.2f}", flush=True)


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=[""], help="how the names of the networks begin")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line")
    options = parser.parse_args()
    restart_with_environment()
    for name in NETWORKS:
        if name.startswith(tuple(options.networks)):
            measure(name, options.seconds)


if __name__ == "__main__":
    main()
