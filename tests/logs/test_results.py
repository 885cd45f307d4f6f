"""Evaluations as rows of files and as the table that ends a run."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.evaluations import evaluation, mixture, nan
from helpers.reports import csv_rows

from fedmoe_pl.evaluation.results import ClientEvaluation, Evaluation, expert_usage, gate_rows
from fedmoe_pl.logs.summary import evaluation_row, format_table, summary_row, write_csv


def test_an_evaluation_s_row_names_what_was_evaluated_and_spreads_over_clients():
    row = evaluation_row(evaluation(selection="best round by global_test"))
    assert {k: row[k] for k in ("method", "round", "model", "clients", "evaluation_point", "selection")} == {
        "method": "FedAvg",
        "round": 4,
        "model": "global expert",
        "clients": "all 3",
        "evaluation_point": "after aggregation",
        "selection": "best round by global_test",
    }
    assert row["reweighted_test_mean"] == pytest.approx(0.7)
    assert row["reweighted_test_std"] == pytest.approx(math.sqrt(0.08 / 3))
    assert row["reweighted_test_worst_tenth"] == 0.5
    assert math.isnan(row["validation_mean"]) and math.isnan(row["validation_loss_mean"])
    clients = [
        replace(each, validation_loss=loss) for each, loss in zip(evaluation().clients, (0.25, 0.5, 1.5), strict=True)
    ]
    assert evaluation_row(replace(evaluation(), clients=clients))["validation_loss_mean"] == 0.75


def test_client_rows_and_summary_row_have_the_mean_gate_weight():
    rows = mixture().rows
    assert [row["mean_gate_weight"] for row in rows] == pytest.approx([0.4375, 0.75, 0.15])
    assert [row["n_train"] for row in rows] == [10, 11, 12]
    assert summary_row(mixture())["mean_gate_weight_mean"] == pytest.approx((0.4375 + 0.75 + 0.15) / 3)
    assert math.isnan(summary_row(evaluation())["mean_gate_weight_mean"])


def test_csv_keeps_every_digit_and_leaves_nan_empty(tmp_path):
    rows = [{"method": "a, b", "round": 1, "x": 1 / 3}, {"method": "c", "round": 2, "x": nan}]
    write_csv(tmp_path / "a.csv", rows)
    write_csv(tmp_path / "b.csv", rows)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    read = csv_rows(tmp_path / "a.csv")
    assert float(read[0]["x"]) == 1 / 3
    assert read[0]["method"] == "a, b"
    assert read[1] == {"method": "c", "round": "2", "x": ""}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv"]


def test_failed_csv_leaves_the_old_file(tmp_path):
    write_csv(tmp_path / "a.csv", [{"x": 1}])

    class Unprintable:
        def __str__(self):
            raise RuntimeError("no text")

    with pytest.raises(RuntimeError):
        write_csv(tmp_path / "a.csv", [{"x": Unprintable()}])
    assert (tmp_path / "a.csv").read_text() == "x\n1\n"


def test_table():
    evaluations = [evaluation(), mixture(round=1, reweighted=(0.91, 0.93, 1.0))]
    expected = """\
                reweighted test                 global test
method       mean     std worst tenth      mean     std worst tenth
-------------------------------------------------------------------
FedAvg      70.00   16.33       50.00     60.00    0.00       60.00
PFL-MFE     94.67    3.86       91.00     60.00    0.00       60.00

Accuracy in percent over all 3 clients: mean, standard deviation, mean of the worst tenth.
reweighted test: accuracy per class on the global test set, weighted by the client's class shares
global test: accuracy on the global test set, the same for all clients
FedAvg: global expert, after aggregation, last round (round 4)
PFL-MFE: mixture, after local training, last round (round 1)"""
    assert format_table(evaluations) == expected


def test_table_begins_with_the_held_out_samples_where_there_are_some():
    assert "local test" not in format_table([evaluation()])
    table = format_table([evaluation(local=0.25), evaluation("Local")])
    lines = table.splitlines()
    assert lines[0].split() == ["local", "test", "reweighted", "test", "global", "test"]
    assert lines[3].split()[1:4] == ["25.00", "0.00", "25.00"]
    assert lines[4].split()[1:4] == ["-", "-", "-"]
    assert "FedAvg, Local: global expert, after aggregation, last round (round 4)" in lines


def test_a_method_of_which_a_client_was_away_says_so():
    away = evaluation("PFL-MFE")
    nothing = ClientEvaluation(2, 12, math.nan, math.nan, math.nan, math.nan)
    away = replace(away, clients=[*away.clients[:2], nothing])
    lines = format_table([evaluation(), away]).splitlines()
    assert "Accuracy in percent over all 3 clients: mean, standard deviation, mean of the worst tenth." in lines
    assert "PFL-MFE: global expert, after aggregation, last round (round 4), over 2 of 3 clients" in lines
    assert not any("clients have it" in line for line in lines)


def test_an_accuracy_that_a_client_has_no_samples_for_says_so():
    whole = evaluation(local=0.25)
    clients = [*whole.clients[:2], replace(whole.clients[2], local_test=math.nan)]
    two, three = (replace(whole, method=name, clients=clients) for name in ("Local", "FedRep"))
    one = replace(two, method="FedBN", clients=[replace(clients[0], local_test=math.nan), *clients[1:]])
    for evaluations, said in (
        ([two, three], "2 of the 3 clients have it"),
        ([whole, two, three], "Local, FedRep: 2 of the 3 clients have it"),
        ([two, one], "Local: 2 of the 3 clients have it; FedBN: 1 of the 3 clients have it"),
        ([two, evaluation()], "2 of the 3 clients have it"),
    ):
        (line,) = (line for line in format_table(evaluations).splitlines() if line.startswith("local test:"))
        assert line == f"local test: accuracy on the client's held-out samples; {said}"
    rotated = evaluation(local=0.25, reweighted=(0.5, nan, nan))
    (line,) = (line for line in format_table([rotated]).splitlines() if line.startswith("reweighted test:"))
    assert line.endswith("; 1 of the 3 clients have it")


def test_a_row_says_how_many_clients_have_a_metric():
    whole = evaluation()
    pairs = zip(whole.clients, (1.0, 0.5, math.nan), strict=True)
    clients = [replace(client, metrics={"local_test_auroc": value}) for client, value in pairs]
    row = evaluation_row(replace(whole, clients=clients))
    assert (row["local_test_auroc_mean"], row["local_test_auroc_clients"], row["clients"]) == (0.75, 2, "all 3")


def test_gate_rows_of_a_mixture_without_a_global_expert_have_every_expert():
    weights = torch.tensor([[0.75, 0.25], [0.25, 0.75], [0.5, 0.5]])
    client = ClientEvaluation(
        4, 3, 0.5, math.nan, 0.5, math.nan, weights, torch.tensor([0, 0, 2]), has_global_expert=False
    )
    rows = [*gate_rows(Evaluation("DA", 1, "mixture", "after aggregation", "last round", [client]), 3)]
    assert [(row["client"], row["expert"], row["class_0"], row["class_2"]) for row in rows] == [
        (4, "0", 0.5, 0.5),
        (4, "1", 0.5, 0.5),
    ]
    assert all(math.isnan(row["class_1"]) for row in rows)
    assert [*gate_rows(evaluation(), 3)] == []


def test_shares_of_samples_by_expert_leave_out_experts_that_a_client_does_not_have():
    rows = [[[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.7, 0.2, 0.1], [0.1, 0.1, 0.8]], [[0.1, 0.9]]]
    clients = [
        ClientEvaluation(client, 4, 0.5, math.nan, 0.5, math.nan, torch.tensor(own), has_global_expert=False)
        for client, own in enumerate(rows)
    ]
    usage = expert_usage(Evaluation("DA", 1, "mixture", "after aggregation", "last round", clients))
    expected = torch.tensor([[0.5, 0.25, 0.25], [0, 1, math.nan]], dtype=torch.float64)
    torch.testing.assert_close(usage, expected, equal_nan=True)
