"""Early stopping of a client, with its best epoch restored."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from fedmoe_pl.checks import check_at_least, check_choice, check_number
from fedmoe_pl.trees import is_borrowed, load_tree


class BestEpoch(EarlyStopping):
    """Ends a client's training when its validation metric stops improving, and restores its best epoch.

    Add it to ``train.callbacks`` of a phase, and set in ``train.trainer`` how often clients validate, for example
    ``{limit_val_batches: 1.0, check_val_every_n_epoch: 5}``. The module's tensors are restored; the state of an
    optimizer that ``keep_optimizer`` keeps is that after the last epoch. A client without validation samples trains
    all epochs. Callbacks that average weights are refused beside it.

    Args:
        monitor: a metric that the clients' modules log on their validation samples.
        min_delta: for ``patience``, only an improvement by more than this counts; the best epoch is the one with the
            best metric, however small its lead.
        patience: training ends after this many consecutive validations without an improvement.
        mode: ``min`` if a lower metric is better, ``max`` if a higher one is.

    Attributes:
        steps: the number of optimizer steps up to the best epoch so far; 0 if there is none.

    Raises:
        MisconfigurationException: if ``min_delta``, ``patience`` or ``mode`` is out of range.
    """

    def __init__(
        self,
        monitor: str = "validation_loss",
        min_delta: float = 0.0,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        check_number(self, "min_delta", min_delta, least=0)
        check_at_least(self, "patience", patience, 1)
        check_choice(self, "mode", mode, ("min", "max"))
        super().__init__(monitor, min_delta=min_delta, patience=patience, mode=mode, check_on_train_epoch_end=False)
        self.steps = 0
        self._best_metric: Tensor | None = None
        self._best: dict[str, Tensor] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copies the module's tensors if the metric is the best so far."""
        super().on_validation_end(trainer, pl_module)
        metric = trainer.callback_metrics.get(self.monitor)
        if trainer.sanity_checking or metric is None or metric.isnan():
            return
        if self._best_metric is None or self.monitor_op(metric, self._best_metric):
            self._best_metric, self.steps = metric.detach().clone(), trainer.global_step
            tensors = pl_module.state_dict(keep_vars=True).items()
            self._best = {name: tensor.detach().clone() for name, tensor in tensors if not is_borrowed(tensor)}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the tensors of the best epoch."""
        if self._best:
            load_tree(pl_module, self._best)
        self._best_metric, self._best = None, {}
