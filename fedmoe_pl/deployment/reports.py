"""What a client of a deployed federation reports of evaluations, by its own configuration, and its record of that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchmetrics import Metric

from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.checkpoints.files import read_json, write_json
from fedmoe_pl.checks import InvalidArgumentError, check_at_least
from fedmoe_pl.deployment.messages import BadMessageError
from fedmoe_pl.evaluation.metrics import names_of
from fedmoe_pl.evaluation.results import ACCURACIES, ClientEvaluation
from fedmoe_pl.phases.phase import Phase

_OF_SHARES = "reweighted_test"  # a few of its values give the client's number of samples of each class
_GATE = "gate_weights"
_FILE = "evaluations.json"


@dataclass(frozen=True)
class Reports:
    """What a client of a deployed federation reports of an evaluation; without effect in a simulation.

    Each client goes by its own configuration, which may differ from the server's. What it does not report counts as not
    measured. Whatever the arguments, a client evaluates one model in a round of a phase, and only in rounds after which
    its own configuration evaluates the phase; ``evaluations.json`` in its folder of the run has what it has reported.

    Args:
        metrics: names of what is reported: accuracies such as ``local_test``, ``validation_loss``, ``gate_weights`` for
            their mean, and metrics such as ``local_test_f1``. None is all but ``reweighted_test``, which gives the
            client's class counts away, or nothing if a phase has ``secure_aggregation``, ``sample_privacy`` or
            ``DifferentialPrivacy``, which cover no evaluation.
        min_samples: what is computed on fewer samples is not reported.
        digits: number of significant digits that are reported; None for all.

    Raises:
        InvalidArgumentError: if an argument is out of range.
    """

    metrics: list[str] | None = None
    min_samples: int = 1
    digits: int | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        check_at_least(self, "min_samples", self.min_samples, 1)
        check_at_least(self, "digits", self.digits, 1)

    def check(self, metrics: Mapping[str, Metric]) -> None:
        """Refuses names that no metric has."""
        known = _known(metrics)
        if unknown := [name for name in self.metrics or () if name not in known]:
            raise InvalidArgumentError(self, "metrics", unknown[0], f"one of {', '.join(known)}")

    def names(self, phases: Sequence[Phase], metrics: Mapping[str, Metric]) -> list[str]:
        """The names of what is reported in a federation with these phases and metrics."""
        if self.metrics is not None:
            return self.metrics
        return [] if any(map(is_private, phases)) else [name for name in _known(metrics) if name != _OF_SHARES]

    def withheld(self, phases: Sequence[Phase], metrics: Mapping[str, Metric]) -> set[str]:
        """The names of all else."""
        return {*_known(metrics)} - {*self.names(phases, metrics)}

    def reported(
        self, evaluation: ClientEvaluation, names: Sequence[str], samples: Mapping[str, int]
    ) -> ClientEvaluation:
        """What is reported of an evaluation; nan in place of everything else.

        Args:
            evaluation: a client's evaluation; gate weights of shape (n, experts) are replaced by their mean, shape
                (1, experts), because single ones would tell of single samples.
            names: those of what is reported.
            samples: on how many samples each accuracy, and each metric whose name begins so, is computed.
        """

        def value(name: str, value: float) -> float:
            split = next(split for split in samples if name.startswith(split))
            return self._rounded(value) if name in names and samples[split] >= self.min_samples else math.nan

        weights = evaluation.gate_weights
        if weights is not None:
            enough = _GATE in names and len(weights) >= self.min_samples
            weights = weights.double().mean(0, keepdim=True).apply_(self._rounded) if enough else None
        return replace(
            evaluation,
            **{name: value(name, getattr(evaluation, name)) for name in (*ACCURACIES, "validation_loss")},
            metrics={name: value(name, each) for name, each in evaluation.metrics.items()},
            gate_weights=weights,
            gate_labels=None,
            name="",
        )

    def _rounded(self, value: float) -> float:
        return value if self.digits is None else float(f"{value:.{self.digits - 1}e}")


def _known(metrics: Mapping[str, Metric]) -> list[str]:
    return [*ACCURACIES, "validation_loss", *names_of(metrics, with_loss=True), _GATE]


def is_private(phase: Phase) -> bool:
    """Whether a phase promises to hide something of what its clients' models are trained with."""
    hides = phase.secure is not None or phase.sample_privacy is not None
    return hides or isinstance(phase.aggregation, DifferentialPrivacy)


class Reported:
    """What a client has reported: in a run, in its file there; and since this process has begun, in any run.

    A run that begins anew asks about the same models as the one before, if nothing has changed; with
    ``DifferentialPrivacy``, its noise is other noise, so that clients that report metrics must be started again. A
    client that was started again may be asked about other models in another run.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[str, int, str], str] = {}  # by phase, round and evaluation point
        self._last: dict[str, int] = {}  # the round after which each phase has ended early
        self._rows: list[dict[str, Any]] = []
        self._path = Path()

    def begin(self, folder: Path) -> None:
        """Goes on with the record in a run's folder."""
        self._path = folder / _FILE
        self._rows = read_json(self._path)["evaluations"] if self._path.is_file() else []
        self._models |= {(row["phase"], row["round"], row["evaluation_point"]): row["model"] for row in self._rows}
        self._last |= {row["phase"]: row["round"] for row in self._rows if row["ends_early"]}

    def check(self, phase: str, round: int, point: str, model: str, is_scheduled: bool) -> None:
        """Refuses a second model in a round, and rounds after which the phase is not evaluated, but for its last one.

        Args:
            phase: name of the phase.
            round: number of completed rounds.
            point: the evaluation point.
            model: a digest of the model.
            is_scheduled: whether the phase is evaluated after this round by the client's own configuration; one that
                ends early is evaluated after its last one, too.
        """
        if self._models.get((phase, round, point), model) != model:
            raise BadMessageError(f"it has evaluated another model after round {round} of phase '{phase}'")
        if not is_scheduled and self._last.get(phase, round) != round:
            raise BadMessageError(f"phase '{phase}' is not evaluated after round {round}")

    def add(self, phase: str, round: int, point: str, model: str, is_scheduled: bool, said: ClientEvaluation) -> None:
        """Notes what is reported, before it is; other arguments as in :meth:`check`."""
        if (phase, round, point) in {(row["phase"], row["round"], row["evaluation_point"]) for row in self._rows}:
            return
        values = {name: getattr(said, name) for name in (*ACCURACIES, "validation_loss")} | said.metrics
        values = {name: value for name, value in values.items() if not math.isnan(value)}
        if said.gate_weights is not None:
            values[_GATE] = said.gate_weights.flatten().tolist()
        where = {"phase": phase, "round": round, "evaluation_point": point, "model": model}
        rows = [*self._rows, {**where, "ends_early": not is_scheduled, "reported": values}]
        write_json(self._path, {"evaluations": rows})
        self._rows, self._models[phase, round, point] = rows, model
        if not is_scheduled:
            self._last[phase] = round
