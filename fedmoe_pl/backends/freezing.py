"""Freezes the parameters that are not trained in a local epoch."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from fedmoe_pl.backends.training import LocalTraining


class Freezing(Callback):
    """Freezes the parameters that the algorithm does not train in a local epoch.

    Modules without a trainable parameter are put into eval mode, unless the algorithm keeps them in train mode.
    """

    def __init__(self, training: LocalTraining, module: LightningModule, round: int) -> None:
        self.training = training
        self.round = round
        self.frozen: list[nn.Module] = []  # outermost ones, whose methods reach those in them
        self.parameters = [(name, parameter, parameter.requires_grad) for name, parameter in module.named_parameters()]
        self._modes = [(part, part.training) for part in module.modules()]
        self._trained: dict[int, tuple[bool, ...]] = {}
        self._frozen: dict[tuple[bool, ...], list[nn.Module]] = {}

    @property
    def epochs(self) -> int:
        """Local epochs of the round, without those at its end that train nothing."""
        epochs = reversed(range(self.training.max_epochs))
        return next((epoch + 1 for epoch in epochs if any(self._trained_in(epoch))), 0)

    def freeze(self, epoch: int) -> None:
        """Freezes the parameters that are not trained in an epoch."""
        trained = self._trained_in(epoch)
        for (_, parameter, _), is_trained in zip(self.parameters, trained, strict=True):
            parameter.requires_grad_(is_trained)
        if not self.training.algorithm.frozen_train_mode:
            if trained not in self._frozen:  # found once, because the search takes as long as a small step
                self._frozen[trained] = _outermost(part for part, mode in self._modes if mode and _is_frozen(part))
            self.frozen = self._frozen[trained]
            for part in self.frozen:
                part.eval()

    def unfreeze(self) -> None:
        """Puts frozen modules back into the mode that they had, because other parts may be frozen in the next epoch."""
        for part in self.frozen:
            part.train()
        self.restore_modes()

    def reset(self) -> None:
        """Undoes all of it."""
        for _, parameter, by_user in self.parameters:
            parameter.requires_grad_(by_user)
        self.restore_modes()

    def restore_modes(self) -> None:
        """Puts every part into the mode that it had."""
        for part, mode in self._modes:
            if part.training is not mode:
                part.training = mode

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freezes what is not trained in this epoch."""
        self.freeze(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends it."""
        self.unfreeze()

    def _trained_in(self, epoch: int) -> tuple[bool, ...]:
        if epoch not in self._trained:
            is_trainable = self.training.algorithm.is_trainable
            self._trained[epoch] = tuple(
                by_user and is_trainable(name, self.round, epoch) for name, _, by_user in self.parameters
            )
        return self._trained[epoch]


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _outermost(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that are in no other one; a module comes before those in it."""
    found, within = list[nn.Module](), set[nn.Module]()
    for part in parts:
        if part not in within:
            found.append(part)
            within.update(part.modules())
    return found
