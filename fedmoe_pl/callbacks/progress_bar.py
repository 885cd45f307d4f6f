"""One progress bar for the whole run."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from fedmoe_pl.evaluation.results import ACCURACIES, Evaluation
from fedmoe_pl.logs.summary import present_metrics, value_text
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run

_SECONDS_BETWEEN_LINES = 60
_COLUMNS = 80  # of a notebook's output


class ProgressBar(FederationCallback):
    """One bar on stderr for the whole run: phase, round, time left and the phase's newest mean accuracy with its round.

    Progress is counted in training samples and steps (``Run.progress``), so that a round of 200 local epochs counts
    about as much as it costs. If stderr is neither a terminal nor a notebook's (a batch job, a log file), a short line
    is written at the end of each phase, and about once a minute, when a client's training ends.
    """

    def on_fit_start(self, run: Run) -> None:
        """Opens the bar; a resumed run's bar starts at the work already done."""
        self._begun = None
        self._newest = ""
        self._start_time = self._line_time = time.monotonic()
        self._start_work = run.progress.completed(run.states)
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=run.progress.total,
            initial=run.progress.completed(run.states),
            file=sys.stderr,
            disable=not (is_terminal or _in_notebook()),
            ncols=None if is_terminal else _COLUMNS,
            dynamic_ncols=is_terminal,
            mininterval=0.5,
            # The time left follows the speed of the last ten seconds or, with slow clients, of the last 20 clients.
            smoothing=0.05,
            bar_format="{desc} {percentage:3.0f}%|{bar:10}| {elapsed}<{remaining}{postfix}",
        )

    def on_round_start(self, run: Run, phase: Phase, round: int) -> None:
        """Shows phase and round."""
        if self._begun != phase.name:
            self._newest = ""
            self._bar.set_postfix_str("", refresh=False)
        self._begun = phase.name
        self._round = f"round {round + 1}/{phase.rounds}"
        self._bar.set_description_str(f"{phase.name} {round + 1}/{phase.rounds}")

    def on_client_end(self, run: Run, phase: Phase, round: int, client: int) -> None:
        """Moves the bar to the work done so far; writes a line if there is none, and the last line is a minute old."""
        self._bar.update(run.progress.completed(run.states) - self._bar.n)
        if self._bar.disable and time.monotonic() - self._line_time >= _SECONDS_BETWEEN_LINES:
            self._write(run, f"{phase.name}: {self._round}", self._newest)

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Shows the newest accuracy, unless the bar is still at another phase."""
        if self._begun == phase.name:
            self._newest = _accuracies(evaluation)
            self._bar.set_postfix_str(_accuracies(evaluation, at_most=1))

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes one line if there is no terminal."""
        if self._bar.disable:
            accuracies = "" if evaluation is None else _accuracies(evaluation)
            self._write(run, f"{phase.name}: {self._rounds(run, phase)}", accuracies)

    def on_fit_end(self, run: Run) -> None:
        """Closes the bar, which stays visible."""
        self._bar.close()

    def _write(self, run: Run, text: str, accuracies: str) -> None:
        self._line_time = time.monotonic()
        print(f"{self._time(run)} {text}{', ' if accuracies else ''}{accuracies}", file=sys.stderr, flush=True)

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


def _accuracies(evaluation: Evaluation, at_most: int = 2) -> str:
    """The first metric that clients have, the same one on the global test set, and their round."""
    present = present_metrics([evaluation])
    shown = [metric for metric in present if metric in (present[0], f"global_test{present[0].partition('_test')[2]}")]
    texts = [_text(metric, evaluation.spread(metric).mean) for metric in shown[:at_most]]
    return f"{', '.join(texts)} (round {evaluation.round})" if texts else ""


def _text(metric: str, mean: float) -> str:
    name = metric.replace("_test", "", 1).replace("_", " ")
    return f"{name} {value_text(metric, mean)}{' %' if metric in ACCURACIES else ''}"


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
