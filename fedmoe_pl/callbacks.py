"""What may be hooked into a federation, between the rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from lightning import __version__
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from fedmoe_pl.algorithm import chooses_model

if TYPE_CHECKING:
    from fedmoe_pl.evaluation import Evaluation
    from fedmoe_pl.federation import Federation, Phase


class FederationCallback:
    """Hooks of a federation; each does nothing by default.

    A Lightning ``Callback`` in the ``trainer:`` section sees one client's training; a ``FederationCallback`` sees
    what happens between the rounds.
    """

    def on_fit_start(self, federation: Federation) -> None:
        """Called once, after every check and before the first round."""

    def on_round_start(self, federation: Federation, phase: Phase, round: int) -> None:
        """Called before the clients of a round train; ``round`` counts from 0 in every phase."""

    def on_client_end(self, federation: Federation, phase: Phase, round: int, client: int) -> None:
        """Called when a client has finished its local training."""

    def on_evaluation_end(self, federation: Federation, phase: Phase, evaluation: Evaluation) -> None:
        """Called after every evaluated round."""

    def on_round_end(self, federation: Federation, phase: Phase, round: int) -> None:
        """Called after aggregation, evaluation and checkpoint of a round."""

    def on_phase_end(self, federation: Federation, phase: Phase, evaluation: Evaluation | None) -> None:
        """Called with the final evaluation of the phase; None where the phase is not evaluated."""

    def on_fit_end(self, federation: Federation) -> None:
        """Called once, after the last phase."""


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


class ClientCheckpoint(FederationCallback):
    """Writes the model of every client of every method as a Lightning checkpoint.

    ``PersonalizedMoE.load_from_checkpoint("<run>/clients/<method>/client_007.ckpt")`` loads one. A method whose clients
    all have the same model is written once, as ``all_clients.ckpt``.

    Args:
        methods: names of the methods to write; None for all. Many clients with large models take much room.
    """

    def __init__(self, methods: list[str] | None = None) -> None:
        self.methods = methods

    def on_fit_start(self, federation: Federation) -> None:
        """Refuses a method that there is not.

        Raises:
            MisconfigurationException: with one sentence.
        """
        names = [phase.name for phase in federation.phases]
        for method in self.methods or []:
            if method not in names:
                raise MisconfigurationException(
                    f"ClientCheckpoint's init_args.methods has '{method}', but federation.phases are {names}."
                )

    def on_phase_end(self, federation: Federation, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes the clients' models of an evaluated phase."""
        if evaluation is None or (self.methods is not None and phase.name not in self.methods):
            return
        folder = federation.run_dir / "clients" / phase.name
        folder.mkdir(parents=True, exist_ok=True)
        personalized = bool(federation.states[phase.name].kept) or chooses_model(phase.algorithm)
        for client in range(federation.datamodule.num_clients if personalized else 1):
            module = federation.client_module(phase.name, client)
            checkpoint = {
                "pytorch-lightning_version": __version__,
                "state_dict": module.state_dict(),
                "hyper_parameters": {},
            }
            module.on_save_checkpoint(checkpoint)
            torch.save(checkpoint, folder / (f"client_{client:03d}.ckpt" if personalized else "all_clients.ckpt"))
