"""Early stopping of a client that goes back to its best epoch."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor


class BestEpoch(EarlyStopping):
    """Ends a client's training when its validation stops getting better, and goes back to its best epoch.

    A true copy of the best parameters is kept (METHODS section 0, finding 8). For ``Phase.callbacks``; the phase's
    ``trainer`` says how often clients validate: ``{limit_val_batches: 1.0, check_val_every_n_epoch: 5}``. A client
    without validation samples trains all epochs.

    Args:
        monitor: what the clients' modules log on their validation samples.
        min_delta: less is no improvement.
        patience: number of checks in a row without an improvement, after which training ends.
        mode: ``min`` where less is better, ``max`` where more is.
    """

    def __init__(
        self,
        monitor: str = "validation_loss",
        min_delta: float = 0.0,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        super().__init__(monitor, min_delta=min_delta, patience=patience, mode=mode, check_on_train_epoch_end=False)
        self._best: dict[str, Tensor] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copies the parameters if they are the best so far."""
        before = self.best_score
        super().on_validation_end(trainer, pl_module)
        if self.best_score is not before:
            self._best = {name: tensor.detach().clone() for name, tensor in pl_module.state_dict().items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Goes back to the best epoch."""
        if self._best:
            pl_module.load_state_dict(self._best)
            self._best = {}
