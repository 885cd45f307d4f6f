"""Models and algorithms whose processes behave differently, where several train one client."""

import contextlib
import os
import signal
import time
from functools import partial

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import SumMetric

from fedmoe_pl.algorithms import FedAvg
from helpers import TensorData


def rank() -> int | None:
    """The process's number; None in the process that tests run in."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else None


class Misbehaves(FedAvg):
    """The second process kills itself once in the training of client 0, and fails in that of client 1."""

    def __init__(self, file):
        super().__init__()
        self.file = str(file)

    def client_init(self, client, sent):
        return {**super().client_init(client, sent), "client": client.id}

    def client_loss(self, module, batch, constants):
        if rank() == 1 and constants["client"] == 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.file)
                os.kill(os.getpid(), signal.SIGKILL)
        if rank() == 1 and constants["client"] == 1:
            raise ZeroDivisionError("in the second process")
        return super().client_loss(module, batch, constants)


class Hangs(FedAvg):
    """The second process says that it is there, and trains for ever."""

    def __init__(self, file):
        super().__init__()
        self.file = str(file)

    def client_loss(self, module, batch, constants):
        while rank() == 1:
            open(self.file, "w").close()
            time.sleep(0.1)
        return super().client_loss(module, batch, constants)


class Own(LightningModule):
    """A user's own module, which counts its validation samples, and notes in a file who has trained."""

    def __init__(self, folder):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.unused = nn.Linear(5, 3)
        self.number = SumMetric()
        self.folder = str(folder)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        assert isinstance(self.trainer.strategy.model, DistributedDataParallel) is (rank() is not None)
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.number(len(batch[1]))
        self.log("number", self.number)

    def on_fit_end(self):
        with open(f"{self.folder}/{rank()}", "a") as file:
            file.write(f"{int(self.trainer.callback_metrics.get('number', 0))}\n")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Centered(nn.Linear):
    """A layer that compares the samples of a batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class Ignoring(TensorData):
    """Most training samples have a label that does not count."""

    ignored = None

    def setup(self, stage=None):
        super().setup(stage)
        if self.ignored is not None:
            generator = torch.Generator().manual_seed(1)
            y = self.y[: len(self.arrays.y_train)]
            y[torch.rand(y.shape, generator=generator) < 0.6] = self.ignored


def sample_weighted(scores, y):
    """A mean that weighs samples by their class."""
    losses, weights = F.cross_entropy(scores, y, reduction="none"), 1 + y.to(scores.dtype)
    return (losses * weights).sum() / weights.sum()


def own_mean(scores, y):
    """A mean over samples that this package does not know."""
    return F.multi_margin_loss(scores, y)


class Manual(Own):
    """Optimizes manually."""

    def __init__(self, folder):
        super().__init__(folder)
        self.automatic_optimization = False


adam = partial(torch.optim.Adam, lr=0.01)
