"""Freezes the parameters that are not trained in a local epoch."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.models.layers import modes_of, set_modes


class Freezing(Callback):
    """Freezes the parameters that the algorithm does not train in a local epoch.

    Modules without a trainable parameter are put into eval mode, unless the algorithm keeps them in train mode. What
    the user's own hooks and callbacks freeze or unfreeze in training stays so.
    """

    def __init__(self, training: LocalTraining, module: LightningModule, round: int) -> None:
        self.training = training
        self.round = round
        self._modes: dict[nn.Module, bool] = {}  # before the epoch, of parts that are in eval mode for it
        self.parameters = [(name, parameter, parameter.requires_grad) for name, parameter in module.named_parameters()]
        self.in_train_mode = [submodule for submodule in module.modules() if submodule.training]
        self._frozen_here = set[nn.Parameter]()
        self._trained: dict[int, tuple[bool, ...]] = {}
        self._modules: dict[tuple[bool, ...], list[nn.Module]] = {}

    @property
    def epochs(self) -> int:
        """Local epochs of the round, without those at its end that train nothing."""
        epochs = reversed(range(self.training.max_epochs))
        return next((epoch + 1 for epoch in epochs if any(self._trained_in(epoch))), 0)

    @property
    def stop_after(self) -> int:
        """Local epochs after which training ends: all of them, unless clients stop earlier."""
        stop = self.training.stop_after
        return self.epochs if stop is None else min(stop, self.epochs)

    def freeze(self, epoch: int) -> None:
        """Freezes the parameters that are not trained in an epoch."""
        trained = self._trained_in(epoch)
        for (_, parameter, by_user), is_trained in zip(self.parameters, trained, strict=True):
            if is_trained:
                if parameter in self._frozen_here:
                    parameter.requires_grad_(True)
                    self._frozen_here.remove(parameter)
            elif by_user and parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen_here.add(parameter)
        if not self.training.algorithm.frozen_train_mode:
            if trained not in self._modules:  # found once, because the search takes as long as a small step
                stepped = {parameter for (_, parameter, _), is_ in zip(self.parameters, trained, strict=True) if is_}
                self._modules[trained] = [part for part in self.in_train_mode if _is_frozen(part, stepped)]
            for submodule in self._modules[trained]:
                if submodule.training:  # `eval` of the module that it is in may have reached it
                    self._modes |= modes_of(submodule)
                    submodule.eval()

    def unfreeze(self) -> None:
        """Undoes the eval mode of frozen modules, because other parts may be frozen in the next epoch."""
        set_modes(self._modes)
        self._modes = {}

    def reset(self) -> None:
        """Undoes the freezing of parameters."""
        self._frozen_here.clear()
        for _, parameter, by_user in self.parameters:
            parameter.requires_grad_(by_user)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freezes what is not trained in this epoch."""
        self.freeze(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends it, and the training where clients stop."""
        self.unfreeze()
        if trainer.current_epoch + 1 == self.training.stop_after:
            trainer.fit_loop.max_epochs = self.training.stop_after

    def _trained_in(self, epoch: int) -> tuple[bool, ...]:
        if epoch not in self._trained:
            names = self.training.trainable_in(self.round, epoch)
            self._trained[epoch] = tuple(by_user and name in names for name, _, by_user in self.parameters)
        return self._trained[epoch]


def _is_frozen(module: nn.Module, trained: set[nn.Parameter]) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and trained.isdisjoint(parameters)
