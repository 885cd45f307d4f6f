"""Several processes train one client: each computes a share of every batch, and DDP averages their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.shared.parts import pair_of
from fedmoe_pl.backends.loop import trains_by_loss
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import SampleBatches, Share
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.mixtures.tasks import OF_CLASSES, loss_weight
from fedmoe_pl.seeds import Purpose, derive_seed, seed_all


class Sharing(Callback):
    """Has this process's Trainer train on its share of each batch.

    Gradients are averaged over the processes, but shares may differ in size, and a share of a short batch may be empty.
    Each loss is therefore weighted by its share's size, so that the average is the gradient of the mean over the whole
    batch. A mean over labels is weighted by the labels that are not ignored, or by the sum of their classes' weights.
    """

    def __init__(self, training: LocalTraining, client: Client, batches: SampleBatches) -> None:
        self.rank = torch.distributed.get_rank()
        is_split = training.has_batch_norm and not training.trainer.get("sync_batchnorm")
        if not is_split and training.has_batch_norm and batches.size(len(batches) - 1) < len(training.devices):
            because = f"a last batch of client {client.id} has too few samples for {len(training.devices)} processes"
            raise InvalidArgumentError("Trainer", "trainer.sync_batchnorm", True, "left out", because)
        self.share = batches.share = Share(self.rank, len(training.devices), at_least=2 if is_split else 1)
        self.batches = batches
        self.has_labels = isinstance(module := client.module, MixtureOfExperts) and module.task in OF_CLASSES
        self.has_labels = self.has_labels and trains_by_loss(training)
        self.weight = 1.0
        self.is_spare = False  # whether the share counts for nothing, because other processes have the whole batch
        keys = client.id, client.rounds_before + client.round, self.rank
        self.seed = derive_seed(training.seed, Purpose.SHARE_OF_BATCH, *keys)

    def of_batch(self, trainer: Trainer, means: Mapping[str, tuple[Tensor, float]]) -> dict[str, tuple[Tensor, float]]:
        """The means over a whole batch, each with what it counts, from those over this process's share."""
        values = torch.stack([mean.detach().double() for mean, _ in means.values()]).nan_to_num()
        counts = values.new_tensor([0.0 if self.is_spare else count for _, count in means.values()])
        sums, counts = trainer.strategy.reduce(torch.stack([values * counts, counts]), reduce_op="sum")
        return {name: (mean, count.item()) for name, mean, count in zip(means, sums / counts, counts, strict=True)}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reseeds, because DDP has set the global seed, and each share needs dropout masks of its own."""
        seed_all(self.seed)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Computes the weight of this share's loss."""
        self.weight = self.share.weight(self.batches.size(batch_idx))
        self.is_spare = not self.weight
        if self.has_labels:
            module: Any = pl_module
            counts = loss_weight(module.task, module.criterion, pair_of(module, batch)[1]) if self.weight else 0.0
            mean = trainer.strategy.reduce(torch.tensor(counts, dtype=torch.float64, device=pl_module.device)).item()
            self.weight = counts / mean if mean else 0.0

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Scales the gradients; the logged loss stays unscaled."""
        weight = self.weight
        loss.register_hook(lambda gradient: gradient * weight)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps metrics from summing over processes, because each process validates all samples."""
        self._synchronize(pl_module, False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Has metrics sum over processes again."""
        self._synchronize(pl_module, True)

    def _synchronize(self, pl_module: LightningModule, does: bool) -> None:
        for part in pl_module.modules():
            if isinstance(part, Metric):
                part.sync_on_compute = does
