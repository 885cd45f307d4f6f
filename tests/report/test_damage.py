"""No file that a run has written at any moment is refused as damaged."""

import shutil
from dataclasses import replace

import pytest
from helpers.runs import Kill, data, federation, model, phases

from fedmoe_pl import Evaluate, Train
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.report.runs import read_run


class Reads(FederationCallback):
    """Reads the run's files as a report does, whenever they may have changed; it comes after what writes them."""

    def __init__(self):
        self.times = 0

    def read(self, run, *arguments):
        read_run(run.folder)
        self.times += 1

    on_fit_start = on_round_start = on_evaluation_end = on_round_end = on_phase_end = on_fit_end = read


def test_a_run_can_be_read_while_its_first_phase_draws_a_curve(tmp_path):
    """What is evaluated after fewer epochs has no row, and there is none before."""
    reads, evaluate = Reads(), Evaluate(every_n_epochs=1)
    local = replace(phases()[0], train=Train(max_epochs=2), evaluate=evaluate)
    federation(tmp_path, [local], callbacks=[reads]).fit(model(), data())
    assert reads.times == 8, "three evaluations, and the hooks around them"


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 3])
def test_a_run_in_progress_can_be_read_at_any_time_also_after_a_kill(every, tmp_path):
    """It goes on from its last checkpoint, and once from an old one, after which phases are not finished again yet."""
    reads = Reads()

    def fit(*stops, ckpt_path="last"):
        callbacks = [reads, *stops]
        of_run = [replace(phase, select=phase.select if every else None) for phase in phases()]
        it = federation(tmp_path, of_run, callbacks=callbacks, evaluate_every_n_rounds=every)
        it.fit(model(), data(), ckpt_path)
        return it

    for stop, ckpt_path in ((Kill("on_round_end", 1), None), (Kill("on_round_end", 2), "last")):
        with pytest.raises(KeyboardInterrupt):
            fit(stop, ckpt_path=ckpt_path)
    checkpoints = tmp_path / "federation/version_0/checkpoints"
    shutil.copytree(checkpoints, tmp_path / "old")
    fit()
    shutil.copytree(tmp_path / "old", checkpoints, dirs_exist_ok=True)
    with pytest.raises(KeyboardInterrupt):
        fit(Kill("on_round_start", 2), ckpt_path="last")
    methods = read_run(tmp_path / "federation/version_0").methods
    fit()
    assert methods[0] == "Local" and "PFL-MF" not in methods and reads.times > 20
