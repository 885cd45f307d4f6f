"""The settings of ``fedmoe tune``, which may be in the files of the run's configuration; see docs/guide/tune.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jsonargparse.typing import PositiveFloat, PositiveInt


@dataclass
class Tuning:
    """What is searched, and how.

    Args:
        space: the values of each key: ``{low: 0.01, high: 1.0}``, with ``log: true`` or a ``step``, or
            ``{choices: [...]}``. Numbers are integers if both ends are. A phase is named by its name.
        metric: what is best: ``validation`` (accuracy), ``validation_loss``, or a metric of the federation on
            validation samples, such as ``validation_f1``.
        method: the phase whose metric it is; by default, the last one that is evaluated. Only it and those that it
            starts from are run.
        trials: number of trials, with those of earlier calls.
        timeout: seconds after which no trial begins.
        seed: seed of the sampler.
        parallel: trials at a time; on GPUs, each has one of its own, in turn.
        folder: where trials and results are written; by default, that of the run's name with ``_tune``.
        sampler: class and arguments of the sampler.
        pruner: class and arguments of the pruner.
    """

    space: dict
    metric: str = "validation"
    method: str | None = None
    trials: PositiveInt = 20  # pyright: ignore[reportInvalidTypeForm]
    timeout: PositiveFloat | None = None  # pyright: ignore[reportInvalidTypeForm]
    seed: int = 0
    parallel: PositiveInt = 1  # pyright: ignore[reportInvalidTypeForm]
    folder: str | None = None
    sampler: dict[str, Any] = field(default_factory=dict)
    pruner: dict[str, Any] = field(default_factory=dict)
