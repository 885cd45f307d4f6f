"""The fastest right backend for a phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedmoe_pl.backends.backend import Backend, GroupUpdate, LocalTraining
from fedmoe_pl.backends.stacked import StackedBackend, try_to_stack
from fedmoe_pl.backends.trainer import TrainerBackend
from fedmoe_pl.trees import Tree


class AutoBackend(Backend):
    """Stacks clients where that gives the result of a ``Trainer`` per client sooner, by a rule, not by a clock.

    On a GPU stacked clients share the launches of kernels. On a CPU they share the calls of PyTorch, on which small
    linear layers spend their time; convolutions gain nothing there (DESIGN section 4).
    """

    def __init__(self) -> None:
        self._decided: tuple[LocalTraining, Backend, str] | None = None

    def choose(self, training: LocalTraining) -> Backend:
        """The backend for this phase."""
        return self._decide(training)[0]

    def describe(self, training: LocalTraining) -> str:
        """What was chosen for this phase, and why."""
        return self._decide(training)[1]

    def _decide(self, training: LocalTraining) -> tuple[Backend, str]:
        if self._decided is None or self._decided[0] is not training:
            self._decided = training, *_decide(training)
        return self._decided[1:]

    def groups(self, training: LocalTraining, cohort: Sequence[int]) -> list[list[int]]:
        """Those of the chosen backend."""
        return self.choose(training).groups(training, cohort)

    def train_group(
        self, training: LocalTraining, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int
    ) -> GroupUpdate:
        """Trains with the chosen backend."""
        return self.choose(training).train_group(training, server, clients, kept, round)


def _decide(training: LocalTraining) -> tuple[Backend, str]:
    """Chooses by what one stacked step of two clients tells."""
    trial = try_to_stack(training)
    if isinstance(trial, str):
        return TrainerBackend(), f"a Trainer per client ({trial})"
    if training.device.type == "cpu" and trial.convolves:
        return TrainerBackend(), "a Trainer per client (convolutions gain nothing from stacking on a CPU)"
    most = trial.clients_per_stack
    why = "no convolution is left to compute" if training.device.type == "cpu" else "they share the launches of kernels"
    return StackedBackend(most), f"up to {most} clients stacked in one Trainer ({why})"
