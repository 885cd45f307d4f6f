"""Clients that join after the federation's training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.rounds.phase import Phase


def phases_of_newcomers(phases: Sequence[Phase], ckpt_path: Path, rounds: int) -> list[Phase]:
    """The phases for newcomers: federated ones take their results from the checkpoint, the others are trained.

    Args:
        phases: the federation's phases.
        ckpt_path: the federation's checkpoint.
        rounds: local rounds in a federated phase, in which newcomers train the parameters that clients keep.

    Raises:
        MisconfigurationException: if ``rounds`` is below 1, or no phase is federated.
    """
    if rounds < 1:
        raise MisconfigurationException(f"rounds is {rounds}, but must be at least 1.")
    if not any(phase.algorithm.federated for phase in phases):
        raise MisconfigurationException(
            "personalize needs a federated phase, from whose result newcomers start, but none of the phases is "
            "federated; use fit to train clients alone."
        )
    return [_phase_of_newcomers(phase, ckpt_path, rounds) for phase in phases]


def _phase_of_newcomers(phase: Phase, ckpt_path: Path, rounds: int) -> Phase:
    phase = replace(phase, clients_per_round=None, ckpt_path=None)
    if not phase.algorithm.federated:
        return phase
    return replace(
        phase,
        ckpt_path=str(ckpt_path),
        rounds=rounds,
        monitor=None,
        monitor_from_round=1,
        patience=None,
        min_delta=0.0,
        keep_optimizer=phase.keep_optimizer and rounds > 1,
    )


def check_newcomers(path: Path, content: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuses newcomers' data that do not mean the same to the model as the federation's.

    Args:
        path: the federation's checkpoint.
        content: its content.
        identity: normalization and vocabulary of the newcomers' data (``checkpoint.identify``).

    Raises:
        MisconfigurationException: if images are normalized, or words numbered, in another way.
    """
    for name, what in (("normalization", "images are normalized"), ("vocabulary", "words are numbered")):
        if content[name] != identity[name]:
            raise MisconfigurationException(
                f"ckpt_path is '{path}', a federation whose {what} in another way than the newcomers' data; leave mean "
                "and std out or give the federation's, and let personalize set the data up."
            )
