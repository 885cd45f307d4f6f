"""What it took to reach an accuracy."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
from helpers import blobs, run
from helpers.data import refused_argument
from helpers.pfedmoe import model
from helpers.reports import cost_rows, csv_rows
from helpers.runs import assert_same
from torchmetrics.classification import MulticlassHammingDistance

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import Local, PFedMoE
from fedmoe_pl.callbacks.cost_to_target import CostToTarget, target_rows
from fedmoe_pl.models import ConstantGate

SIZES = (13, 8, 11, 9)


rows = partial(cost_rows, spent=(10, 40, 1000), before=(7, 100, 400, 5000), every=2)


def test_the_cost_is_that_of_the_first_round_that_reaches_the_target_and_the_best_is_of_all_rounds():
    found = target_rows(
        [*rows("A", [0.1, 0.5, 0.4, 0.9, 0.9]), *rows("B", [0.2, 0.3]), *rows("C", [math.nan])], "reweighted_test", 0.5
    )
    common = {"evaluation_point": "any", "metric": "reweighted_test", "target": 0.5}
    never = dict.fromkeys(("earliest_rounds", "rounds", "parameters", "bytes", "flops"), math.nan)
    # the second row, 3 ways of 20 and 80, and what came before the phase
    reached = {"earliest_rounds": 3 + 7, "rounds": 4 + 7}
    reached |= {"parameters": 60 + 100, "bytes": 240 + 400, "flops": 2000 + 5000}
    assert_same(found[0], {"method": "A", **common, **reached, "best": 0.9, "best_round": 8})
    assert_same(found[1], {"method": "B", **common, **never, "best": 0.3, "best_round": 4})
    assert_same(found[2], {"method": "C", **common, **never, "best": math.nan, "best_round": math.nan})


def test_a_target_that_is_met_but_for_rounding_is_reached():
    (found,) = target_rows(rows("A", [0.1, 0.7 + 0.2]), "reweighted_test", 0.9)
    assert found["rounds"] == 4 + 7


@pytest.mark.slow
def test_a_run_writes_and_prints_what_reaching_the_target_took(tmp_path, capsys):
    phases = [Phase("pFedMoE", PFedMoE(), rounds=2), Phase("Standalone", Local(), gate=ConstantGate(0))]
    callbacks = [CostToTarget(1.0, "global_test"), CostToTarget(0.01, "reweighted_test")]
    fed = run(phases, model(), blobs(SIZES), tmp_path, callbacks=callbacks[1:])
    first, second = csv_rows(fed.run_dir / "target.csv")
    row = fed.run.rows[0]
    assert (first["method"], first["rounds"]) == ("pFedMoE", "1")
    assert (int(first["parameters"]), int(first["bytes"])) == (4 * 2 * 18, 4 * 2 * 18 * 8)
    assert int(first["flops"]) == row["flops"]
    assert float(first["best"]) == max(row["reweighted_test_mean"] for row in fed.run.rows[:2])
    assert (second["method"], second["bytes"]) == ("Standalone", "0")
    assert first["evaluation_point"] == second["evaluation_point"] == "after local training"
    assert "reweighted test of 1.00 percent" in capsys.readouterr().out
    run(phases, model(), blobs(SIZES), tmp_path, callbacks=callbacks[:1])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("pFedMoE  ") and " - " in line)
    assert line.split()[1:5] == ["-"] * 4


def test_a_target_that_is_no_fraction_is_refused():
    assert refused_argument(lambda: CostToTarget(90)) == "target"


def test_a_metric_that_does_not_say_which_values_are_better_is_refused():
    """Such as a root that is written as a power, of which torchmetrics does not know it."""
    metrics = {"error": MulticlassHammingDistance(3) ** 0.5}
    of_run = SimpleNamespace(datamodule=blobs(SIZES), metrics=metrics, models={"": model()})
    assert refused_argument(lambda: CostToTarget(0.1, "global_test_error").on_fit_start(of_run)) == "metric"
