"""One progress bar for the whole run."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.results import percent
from fedmoe_pl.rounds.run import FederationCallback, Run


class ProgressBar(FederationCallback):
    """One bar on stderr for the whole run: phase, round, time left and the newest mean accuracies.

    Progress is counted in training samples (``Run.progress``), so that a round of 200 local epochs counts as much as it
    costs. If stderr is not a terminal (a batch job, a log file), one short line per phase is written instead.
    """

    _bar: tqdm
    _begun: str | None
    _start_time: float
    _start_work: float

    def on_fit_start(self, run: Run) -> None:
        """Opens the bar; a resumed run's bar starts at the work already done."""
        self._begun = None
        self._start_time = time.monotonic()
        self._start_work = run.progress.completed(run.states)
        self._bar = tqdm(
            total=run.progress.total,
            initial=run.progress.completed(run.states),
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            mininterval=0.5,
            # The time left follows the speed of the last ten seconds or, with slow clients, of the last 20 clients.
            smoothing=0.05,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
        )

    def on_round_start(self, run: Run, phase: Phase, round: int) -> None:
        """Shows phase and round."""
        self._begun = phase.name
        self._bar.set_description_str(f"{phase.name} round {round + 1}/{phase.rounds}")

    def on_client_end(self, run: Run, phase: Phase, round: int, client: int) -> None:
        """Moves the bar to the work done so far."""
        self._bar.update(run.progress.completed(run.states) - self._bar.n)

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Shows the newest accuracies."""
        self._bar.set_postfix_str(f"{evaluation.method}: {_accuracies(evaluation)}")

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes one line if there is no terminal."""
        if self._bar.disable:
            accuracies = "" if evaluation is None else f", {_accuracies(evaluation)}"
            print(
                f"{self._time(run)} {phase.name}: {self._rounds(run, phase)}{accuracies}", file=sys.stderr, flush=True
            )

    def on_fit_end(self, run: Run) -> None:
        """Closes the bar, which stays visible."""
        self._bar.close()

    def _rounds(self, run: Run, phase: Phase) -> str:
        """How many rounds the phase had, which may be fewer than ``phase.rounds``, or that it had none."""
        state = run.states[phase.name]
        if state.given_round is not None and self._begun != phase.name:
            return "given checkpoint"  # as in the table
        return "1 round" if state.round == 1 else f"{state.round} rounds"

    def _time(self, run: Run) -> str:
        """Share done, elapsed and remaining time, as in the bar: ``[ 71% 02:10<00:53]``."""
        done, total = run.progress.completed(run.states), run.progress.total
        share = done / total if total else 1.0  # there is no work if every phase is read from a checkpoint
        elapsed = time.monotonic() - self._start_time
        work = done - self._start_work
        remaining = tqdm.format_interval(elapsed * (total - done) / work) if work else "?"
        return f"[{100 * share:3.0f}% {tqdm.format_interval(elapsed)}<{remaining}]"


def _accuracies(evaluation: Evaluation) -> str:
    local, overall = (percent(evaluation.spread(metric).mean) for metric in ("local_test", "global_test"))
    return f"local {local} %, global {overall} %"
