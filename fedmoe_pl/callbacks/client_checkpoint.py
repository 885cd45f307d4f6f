"""The clients' models as checkpoints of Lightning."""

from __future__ import annotations

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.commands.export import write_lightning
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run


class ClientCheckpoint(FederationCallback):
    """Writes the model of every client of every method as a Lightning checkpoint at the end of its phase.

    ``PersonalizedMoE.load_from_checkpoint("<run>/clients/<method>/client_007.ckpt")`` loads one; the file of a client
    with a name is called as the client. A method whose clients all have the same model is written once, as
    ``all_clients.ckpt``. Of a method that predicts with more than a model, such as kNN-Per, it is the model alone. At
    any later time, ``fedmoe export --format lightning`` writes the same whole models.

    Args:
        methods: names of the methods to write; None for all.
    """

    needs_clients = True

    def __init__(self, methods: list[str] | None = None) -> None:
        self.methods = methods

    def on_fit_start(self, run: Run) -> None:
        """Refuses names that no evaluated phase has."""
        names = [phase.name for phase in run.phases if phase.evaluate]
        for method in self.methods or []:
            if method not in names:
                raise InvalidArgumentError(self, "methods", method, f"names of evaluated phases, {', '.join(names)}")

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes the clients' models of an evaluated phase."""
        if evaluation is None or (self.methods is not None and phase.name not in self.methods):
            return
        names = run.datamodule.client_names
        for method in map(phase.method, phase.evaluation_points):
            folder = run.folder / "clients" / method
            write_lightning(run, method, {client: folder / f"{names.file(client)}.ckpt" for client in run.clients})
