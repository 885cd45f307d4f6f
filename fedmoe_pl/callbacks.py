"""What may be hooked into a federation, between the rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning import __version__

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


class ClientCheckpoint(FederationCallback):
    """Writes the model of every client of every method as a Lightning checkpoint.

    ``PersonalizedMoE.load_from_checkpoint("<run>/clients/<method>/client_007.ckpt")`` loads one. A method whose clients
    all have the same model is written once, as ``all_clients.ckpt``.
    """

    def on_phase_end(self, federation: Federation, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes the clients' models of an evaluated phase."""
        if evaluation is None:
            return
        folder = federation.run_dir / "clients" / phase.name
        folder.mkdir(parents=True, exist_ok=True)
        personalized = bool(federation.states[phase.name].kept)
        for client in range(federation.datamodule.num_clients if personalized else 1):
            module = federation.client_module(phase.name, client)
            checkpoint = {
                "pytorch-lightning_version": __version__,
                "state_dict": module.state_dict(),
                "hyper_parameters": {},
            }
            module.on_save_checkpoint(checkpoint)
            torch.save(checkpoint, folder / (f"client_{client:03d}.ckpt" if personalized else "all_clients.ckpt"))
