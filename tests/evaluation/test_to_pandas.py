"""Evaluations as data frames."""

import math

import pandas
from helpers.reports import csv_rows
from helpers.runs import data, federation, model


def test_the_frames_are_clients_csv(tmp_path):
    fed = federation(tmp_path)
    frame = pandas.concat(each.to_pandas() for each in fed.fit(model(), data()).values())
    rows = csv_rows(fed.run_dir / "clients.csv")
    assert list(frame.columns) == [*rows[0]]
    for (_, ours), row in zip(frame.iterrows(), rows, strict=True):
        assert (ours["method"], str(ours["client"])) == (row["method"], row["client"])
        assert ours["global_test"] == float(row["global_test"])
        assert math.isnan(ours["local_test"]) and row["local_test"] == ""
