"""Freezes the parameters that are not trained in a local epoch."""

from __future__ import annotations

from functools import cached_property

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.models.layers import modes_of, set_modes


class Freezing(Callback):
    """Freezes the parameters that the algorithm does not train in a local epoch.

    Modules without a trainable parameter are put into eval mode, unless the algorithm keeps them in train mode.
    Parameters that the user's own hooks and callbacks freeze or unfreeze during training stay as they are.
    """

    def __init__(self, training: LocalTraining, module: LightningModule, round: int) -> None:
        self.training = training
        self.module = module
        self.round = round
        self.parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._modes: dict[nn.Module, bool] = {}  # modes before the epoch of the parts that it puts into eval mode
        self._frozen_here = set[str]()

    @cached_property
    def epochs(self) -> int:
        """The number of local epochs of the round, not counting final ones that train nothing."""
        return next((epoch + 1 for epoch in reversed(range(self.training.max_epochs)) if self._trained_in(epoch)), 0)

    @property
    def stop_after(self) -> int:
        """The number of local epochs after which training ends: ``epochs``, or fewer if clients stop earlier."""
        stop = self.training.stop_after
        return self.epochs if stop is None else min(stop, self.epochs)

    def freeze(self, epoch: int) -> None:
        """Freezes the parameters that are not trained in an epoch."""
        trained = self._trained_in(epoch)
        self.reset()
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and name not in trained:
                parameter.requires_grad_(False)
                self._frozen_here.add(name)
        for name in () if self.training.algorithm.frozen_train_mode else self.training.parts_without(trained):
            if (part := self.module.get_submodule(name)).training:
                self._modes |= modes_of(part)
                part.eval()

    def unfreeze(self) -> None:
        """Restores the modes of frozen modules, because the next epoch may freeze other parts."""
        set_modes(self._modes)
        self._modes = {}

    def reset(self) -> None:
        """Makes the parameters trainable again that are frozen here."""
        for name in self._frozen_here:
            self.parameters[name].requires_grad_(True)
        self._frozen_here.clear()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freezes what is not trained in this epoch."""
        self.freeze(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the modes, and ends training after ``stop_after`` epochs."""
        self.unfreeze()
        if trainer.current_epoch + 1 == self.training.stop_after:
            trainer.fit_loop.max_epochs = self.training.stop_after

    def _trained_in(self, epoch: int) -> frozenset[str]:
        return self.training.trainable_in(self.round, epoch).intersection(self.parameters)
