"""Freezes the parameters that are not trained in a local epoch."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from fedmoe_pl.backends.training import LocalTraining


class Freezing(Callback):
    """Freezes the parameters that the algorithm does not train in a local epoch.

    Modules without a trainable parameter are put into eval mode, unless the algorithm keeps them in train mode.

    Args:
        training: the local training of the phase's clients.
        module: the client's module; parameters that need no gradient already stay frozen.
        round: the round of the phase, counted from 0.
    """

    def __init__(self, training: LocalTraining, module: LightningModule, round: int) -> None:
        self.training = training
        self.module = module
        self.round = round
        self.frozen: list[nn.Module] = []
        self.frozen_by_user = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}

    def freeze(self, epoch: int) -> None:
        """Freezes the parameters that are not trained in an epoch."""
        for name, parameter in self.module.named_parameters():
            trainable = self.training.algorithm.is_trainable(name, self.round, epoch)
            parameter.requires_grad_(trainable and name not in self.frozen_by_user)
        if not self.training.algorithm.frozen_train_mode:
            self.frozen = [
                submodule for submodule in self.module.modules() if submodule.training and _is_frozen(submodule)
            ]
            for submodule in self.frozen:
                submodule.eval()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freezes the parameters that are not trained in this epoch."""
        self.freeze(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts frozen modules back into train mode, because other parts may be frozen in the next epoch."""
        for submodule in self.frozen:
            submodule.train()


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
