"""Evaluations as data frames."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from helpers.reports import csv_rows
from helpers.runs import data, federation, model
from scipy.stats import bootstrap
from sklearn.metrics import confusion_matrix, recall_score

PAGE = Path(__file__).parents[2] / "docs/guide/results.md"


def test_the_frames_are_clients_csv(tmp_path):
    fed = federation(tmp_path)
    frame = pandas.concat(each.to_pandas() for each in fed.fit(model(), data()).values())
    rows = csv_rows(fed.run_dir / "clients.csv")
    assert list(frame.columns) == [*rows[0]]
    for (_, ours), row in zip(frame.iterrows(), rows, strict=True):
        assert (ours["method"], str(ours["client"])) == (row["method"], row["client"])
        assert ours["global_test"] == float(row["global_test"])
        assert math.isnan(ours["local_test"]) and row["local_test"] == ""


def test_the_statistics_of_the_page_are_those_of_other_programs(tmp_path):
    fed = federation(tmp_path)
    results = fed.fit(model(), data(sizes=(20, 31, 12), test_fraction=0.4))
    fed.predict(model(), data(sizes=(20, 31, 12), test_fraction=0.4))
    section = PAGE.read_text().split("## Other statistics")[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    found: dict[str, Any] = {}
    exec(code.replace("runs/quickstart/version_0", str(fed.run_dir)), found)
    for name, evaluation in results.items():
        own = np.sort(evaluation.values("local_test"))
        n, order = len(own), np.arange(1, len(own) + 1)
        assert found["lowest"][name] == own[0] and found["best_tenth"][name] == own[-1]
        assert found["gini"][name] == pytest.approx(((2 * order - n - 1) * own).sum() / (n * own.sum()))
        assert found["jain"][name] == pytest.approx(own.sum() ** 2 / (n * (own**2).sum()))
        assert found["weighted"][name] == pytest.approx(evaluation.local_test_pooled)
        rows = found["predictions"].query("method == @name")
        assert (found["confusion"].loc[name].values == confusion_matrix(rows.label, rows.prediction)).all()
        for client, of_client in rows.groupby("client"):
            labels = sorted({*of_client.label})
            expected = recall_score(of_client.label, of_client.prediction, labels=labels, average=None)
            assert found["recall"][name, client].values == pytest.approx(expected)
    resampled = bootstrap([found["difference"]], np.mean, method="percentile", rng=0)
    assert found["interval"] == pytest.approx([*resampled.confidence_interval], abs=0.02)
