"""What may be hooked into a federation, between the rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedmoe_pl.federation import Federation
    from fedmoe_pl.rounds.evaluation import Evaluation
    from fedmoe_pl.rounds.phase import Phase


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
