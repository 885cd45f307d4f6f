"""Models and algorithms whose processes behave differently, where several train one client."""

import contextlib
import os
import signal
import time
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import SumMetric

from fedmoe_pl.algorithms import FedAvg


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


class SquareOfMean(Own):
    """Its loss of a batch is no mean over samples."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) ** 2


class SquareInTraining(Own):
    """Its loss of a batch is no mean over samples in train mode only."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) ** (2 if self.training else 1)


class WithDropout(Own):
    """Its dropout is no module, and draws other numbers for a part of a batch."""

    def forward(self, x):
        return self.layer(F.dropout(x, 0.5, self.training))


class WithMixup(Own):
    """Scales each input by a number of NumPy's generator."""

    def forward(self, x):
        return self.layer(x * torch.from_numpy(np.random.beta(1, 1, (len(x), 1))) if self.training else x)


class Manual(Own):
    """Optimizes manually."""

    def __init__(self, folder):
        super().__init__(folder)
        self.automatic_optimization = False


sgd, adam = partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.01)
