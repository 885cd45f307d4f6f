"""Files of a run: its results, and the clients' models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning import __version__
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms.algorithm import chooses_model
from fedmoe_pl.callbacks.callback import FederationCallback
from fedmoe_pl.rounds.results import client_rows, format_table, summary_row, write_csv

if TYPE_CHECKING:
    from fedmoe_pl.federation import Federation
    from fedmoe_pl.rounds.evaluation import Evaluation
    from fedmoe_pl.rounds.phase import Phase


class ResultFiles(FederationCallback):
    """Writes ``rounds.csv``, ``clients.csv``, ``summary.csv`` into the run folder and prints the table at the end."""

    def on_evaluation_end(self, federation: Federation, phase: Phase, evaluation: Evaluation) -> None:
        """Writes the rows of all rounds so far."""
        write_csv(federation.run_dir / "rounds.csv", federation.rows)

    def on_phase_end(self, federation: Federation, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes the results of all methods so far."""
        results = federation.results.values()
        if results:
            write_csv(federation.run_dir / "clients.csv", [row for result in results for row in client_rows(result)])
            write_csv(federation.run_dir / "summary.csv", [summary_row(result) for result in results])

    def on_fit_end(self, federation: Federation) -> None:
        """Prints the table."""
        if federation.results:
            print(f"\n{format_table(federation.results.values())}\n\nFiles: {federation.run_dir}", flush=True)


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
