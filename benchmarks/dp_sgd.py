"""Time of a step with the privacy of single samples (``Phase.sample_privacy``), and of a plain one.

    python benchmarks/dp_sgd.py lenet5 resnet18
    python benchmarks/dp_sgd.py --accelerator gpu

Random images, two clients with batches of the same size on average, trained one by one and stacked, on one thread. The
first round of each setting warms up and is not counted. ResNet-18 has group normalization in place of its batch
normalization. Time is that of the process, so that other processes on the machine hardly change it, and on a GPU
that of a clock.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from lightning.pytorch import LightningModule
from size import Classifier
from torch import Tensor, nn
from torchvision.models import resnet18

from fedmoe_pl import DPSGD
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import LEAN_TRAINER, LocalTraining, StackedBackend, TrainerBackend
from fedmoe_pl.data import IID, Arrays, FederatedDataModule
from fedmoe_pl.models import LeNet5

# network, channels, height and width, batch size, steps of a client in a round
CASES = {
    "lenet5": (LeNet5, 1, 32, 64, 10),
    "resnet18": (partial(resnet18, num_classes=10, norm_layer=partial(nn.GroupNorm, 32)), 3, 32, 16, 2),
}
CLIENTS = 2


class PlainSteps(Classifier):
    """A network that is trained by plain SGD."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD without momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class PlainLoss(FedAvg):
    """FedAvg by the module's ``loss``, so that plain clients can share a Trainer and be stacked."""

    samples_in_loss_only = True

    def client_loss(self, module: LightningModule, batch: object, constants: object) -> Tensor:
        """The module's."""
        return module.loss(batch)[0]  # pyright: ignore[reportCallIssue]


class Noise(FederatedDataModule):
    """Random images."""

    def __init__(self, channels: int, size: int, batch_size: int, steps: int) -> None:
        super().__init__(num_clients=CLIENTS, partitioner=IID(), batch_size=batch_size)
        self.shape = CLIENTS * batch_size * steps, channels, size, size

    def load(self) -> Arrays:
        """Normal pixels, and classes in turn."""
        x, y = torch.randn(self.shape), torch.arange(self.shape[0]) % 10
        return Arrays(x, y, x[:10], y[:10])


def seconds_of_step(
    case: str, backend: TrainerBackend | StackedBackend, privacy: DPSGD | None, accelerator: str
) -> float:
    """Seconds of a client's step."""
    network, channels, size, batch_size, steps = CASES[case]
    torch.manual_seed(0)
    module, datamodule = PlainSteps(network()), Noise(channels, size, batch_size, steps)
    datamodule.setup()
    training = LocalTraining(
        module=module,
        initial={name: tensor.detach().clone() for name, tensor in module.state_dict().items()},
        algorithm=PlainLoss(),
        datamodule=datamodule,
        trainer={**LEAN_TRAINER, "accelerator": accelerator},
        device=torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu"),
        batch_size=None,
        seed=0,
        participants=range(CLIENTS),
        rounds=2,
        sample_privacy=privacy,
    )
    plan, server = backend.plan(training).begin(training), training.algorithm.server_init(module)
    clock, start = time.perf_counter if accelerator == "gpu" else time.process_time, 0.0
    for round in range(2):
        start = clock()
        list(plan.train(server, plan.groups(range(CLIENTS)), {}, round))
    return (clock() - start) / (CLIENTS * steps)


def main() -> None:
    """Prints a row of Markdown for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*CASES], help=", ".join(CASES))
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    options = parser.parse_args()
    backends = {"one by one": TrainerBackend(), "stacked": StackedBackend()}
    kinds = {"plain": None, "private": DPSGD(1.0, 1e-5, noise_multiplier=1.0)}
    torch.set_num_threads(1)
    names = [f"{kind}, {name}" for name in backends for kind in kinds]
    print(f"| network | {' | '.join(names)} |", flush=True)
    for case in options.cases:
        seconds = [
            seconds_of_step(case, backend, kind, options.accelerator)
            for backend in backends.values()
            for kind in kinds.values()
        ]
        print(f"| {case} | {' | '.join(f'{1000 * each:.1f} ms' for each in seconds)} |", flush=True)


if __name__ == "__main__":
    main()
