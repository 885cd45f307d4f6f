"""The progress of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.phases.participation import cohort_of
from fedmoe_pl.phases.phase import Phase

_STEP = 20  # samples: on a CPU, 8 with LeNet-5, 22 with ResNet-18 and 87 with a small MLP


class Progress:
    """Estimates the work of a run in training samples; each optimizer step counts as ``_STEP`` more.

    Only new clients have rounds to train after a result ``given`` by a checkpoint.

    Attributes:
        total: the work of the whole run.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        trainer: dict[str, Any],
        datamodule: FederatedDataModule,
        seed: int,
        given: Mapping[str, PhaseState],
        model_of: Callable[[Phase], LightningModule],
    ) -> None:
        self._rounds = {phase.name: phase.rounds for phase in phases}
        self._per_round = dict.fromkeys(self._rounds, 0.0)
        for phase in phases:
            if not phase.ckpt_path or (phase.name in given and given[phase.name].round < phase.rounds):
                epochs = phase.epochs(trainer)
                self._per_round[phase.name] = _work_of_round(phase, model_of(phase), datamodule, seed, epochs)
        self._in_round = 0.0
        self.total = sum(rounds * self._per_round[name] for name, rounds in self._rounds.items())

    def completed(self, states: Mapping[str, PhaseState]) -> float:
        """The work done so far."""
        rounds = {name: self._rounds[name] if state.stopped else state.round for name, state in states.items()}
        return sum(count * self._per_round[name] for name, count in rounds.items()) + self._in_round

    def add_client(self, phase: Phase, cohort_size: int) -> None:
        """Counts one client of the round that is being trained."""
        self._in_round += self._per_round[phase.name] / cohort_size

    def end_round(self) -> None:
        """Forgets the clients counted since the last round: ``completed`` counts their round from now on."""
        self._in_round = 0.0


def _work_of_round(
    phase: Phase, module: LightningModule, datamodule: FederatedDataModule, seed: int, epochs: int
) -> float:
    """The work of an average cohort in all epochs of a round, estimated from the share that the largest client uses."""
    cohort = cohort_of(phase, datamodule.num_clients, seed)
    sizes = datamodule.train_samples.sizes
    largest = max(cohort.participants, key=lambda client: int(sizes[client]))
    samples = datamodule.train_samples[largest]
    client = Client(largest, 0, seed, module, samples, {}, datamodule, participants=cohort.participants)
    chosen = phase.algorithm.client_samples(client)
    share = len(chosen) / len(samples) if len(chosen) else 1.0
    samples_of_one = share * sizes[[*cohort.participants]].double().mean().item()
    steps = max(samples_of_one / (phase.train.batch_size or datamodule.batch_size), 1)
    return epochs * cohort.size * (samples_of_one + _STEP * steps)
