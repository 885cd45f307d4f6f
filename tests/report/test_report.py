"""A report is one file that needs no other, and has the numbers of the runs."""

import json
import re
import shutil
import statistics

import pytest
from helpers.data import refused_argument
from helpers.reports import Page, csv_rows, markdown_tables
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.logs.summary import write_csv
from fedmoe_pl.report.report import report
from fedmoe_pl.report.runs import find_runs
from fedmoe_pl.report.search import divided

LOCAL, GLOBAL = "reweighted_test", "global_test"
RMSE = {f"local_test_rmse{of}": 2.0 for of in ("", "_mean", "_std", "_worst_tenth")} | {"lower_is_better": ""}


def rows_of(folder, name="summary"):
    return csv_rows(folder / f"{name}.csv")


@pytest.fixture(scope="module")
def page(finished, tmp_path_factory):
    """The page and the Markdown of the finished run, and the folder that they are in."""
    folder = tmp_path_factory.mktemp("report")
    report([str(finished), "--output", str(folder / "report.html")])
    text = (folder / "report.html").read_text()
    return Page(text), (folder / "report.md").read_text(), folder, text


@pytest.mark.slow
def test_the_page_needs_nothing_but_itself(page):
    parsed, _, folder, text = page
    addresses = [address for address in parsed.addresses if not address.startswith("data:image/png;base64,")]
    pictures = {address for address in addresses if not address.startswith("#")}
    assert pictures and all((folder / address).is_file() for address in pictures), "PDFs beside the page"
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\((?!#)|<script|<link", text)
    assert len(parsed.ids) == len(set(parsed.ids)), "the pictures' ids are not each other's"
    assert {address[1:] for address in parsed.addresses if address.startswith("#")} <= {*parsed.ids}
    assert parsed.unclosed == []


@pytest.mark.slow
def test_every_number_of_the_summary_is_on_the_page(page, finished):
    parsed, *_ = page
    header, *lines = parsed.tables["every"]
    for line, row in zip(lines, rows_of(finished), strict=True):
        assert line[0].startswith(f"{row['method']}, tiny/version_0")
        shown = dict(zip(header[1:], line[1:], strict=True))
        for column, value in row.items():
            if value and column.startswith((LOCAL, GLOBAL)):
                assert shown[column.replace("_", " ")] == f"{100 * float(value):.2f}"
        if row["mean_gate_weight_mean"]:
            assert shown["mean gate weight mean"] == f"{float(row['mean_gate_weight_mean']):.4f}"
        assert shown["round"] == row["round"]


def test_numbers_that_only_some_runs_have_are_on_the_page_with_those_of_the_summary(copied, written):
    folder = copied("a")
    of_f1 = {f"local_test_f1_{name}": 0.5 for name in ("mean", "std", "worst_tenth")} | {"local_test_f1_clients": 12345}
    own = {"local_test_pooled": 0.12345, "validation_loss_mean": 1.25, **of_f1}
    write_csv(folder / "summary.csv", [row | own for row in rows_of(folder)])
    header, *lines = written(folder)[0].tables["every"]
    for line in lines:
        shown = dict(zip(header, line, strict=True))
        assert [shown[name.replace("_", " ")] for name in own] == ["12.35", "1.25", "0.5", "0.5", "0.5", "12345"]


def test_a_metric_that_some_clients_lack_says_so_for_each_method(copied, written):
    def said(*methods):
        rows = [
            row | {LOCAL: ""} if row["client"] == "0" and row["method"] in methods else row
            for row in rows_of(folder, "clients")
        ]
        write_csv(folder / "clients.csv", rows)
        text = " ".join(written(folder)[1].split())
        return text.partition("* reweighted test: ")[2].partition(" * ")[0].partition("; ")[2]

    folder = copied("a")
    assert said() == ""
    assert said("FedAvg") == "FedAvg: 2 of the 3 clients have it."
    assert said("FedAvg", "PFL-MF") == "FedAvg, PFL-MF: 2 of the 3 clients have it."
    assert said("Local", "FedAvg", "PFL-FB", "PFL-MF") == "2 of the 3 clients have it."


def test_the_table_of_methods_has_mean_and_deviation_over_clients(page, finished):
    parsed, *_ = page
    _, header, *lines = parsed.tables["methods"]
    assert header == ["mean", "± over clients", "worst tenth"] * 2
    for line, row in zip(lines, rows_of(finished), strict=True):
        numbers = [float(row[f"{m}_{n}"]) for m in (LOCAL, GLOBAL) for n in ("mean", "std", "worst_tenth")]
        assert line == [row["method"], row["round"], *(f"{100 * number:.2f}" for number in numbers)]


def test_the_markdown_has_the_numbers_of_the_summary(page, finished):
    _, markdown, *_ = page
    ((header, *lines),) = markdown_tables(markdown)
    assert header == ["method", "reweighted test", "global test"]
    assert [line[0] for line in lines] == ["Local", "FedAvg", "PFL-FB", "PFL-MF"]
    for (_, local, of_all), row in zip(lines, rows_of(finished), strict=True):
        assert float(local) == pytest.approx(100 * float(row["reweighted_test_mean"]), abs=0.005)
        assert float(of_all) == pytest.approx(100 * float(row["global_test_mean"]), abs=0.005)
    assert "cores." in markdown and "fedmoe report" in markdown
    assert "* FedAvg: global expert, after aggregation, best round by global_test (round 4), all 3 clients." in markdown


def test_methods_whose_rounds_have_no_costs_are_left_out_of_those_of_a_target(finished, tmp_path):
    run = tmp_path / "tiny" / "version_0"
    shutil.copytree(finished, run)
    of_costs = ("flops", "bytes_", "parameters_")
    rows = [{key: each for key, each in row.items() if not key.startswith(of_costs)} for row in rows_of(run, "rounds")]
    write_csv(run / "rounds.csv", rows)
    report([str(run), "--markdown", str(tmp_path / "report.md"), "--target", "0.5"])
    methods, costs = markdown_tables((tmp_path / "report.md").read_text())
    assert len(methods) == 5 and len(costs) == 1


def test_costs_that_are_unknown_are_dashes_which_the_text_explains(copied, written):
    """As those of a method that starts from a given result."""
    folder = copied("a")
    rows = rows_of(folder, "rounds")
    unknown = dict.fromkeys((name for name in rows[0] if name.endswith("_before")), "")
    write_csv(folder / "rounds.csv", [row | unknown if row["method"] == "FedAvg" else row for row in rows])
    _, markdown = written(folder, "--target", "0.01", "--metric", LOCAL)
    costs = {row[0]: row[1:4] for row in markdown_tables(markdown)[1]}
    assert costs["FedAvg"] == ["-"] * 3 and "-" not in costs["Local"]
    assert "reached it, or if a checkpoint gave a result, whose costs are unknown)" in " ".join(markdown.split())


def test_clients_that_failed_are_named_below_every_table(finished, tmp_path):
    run = tmp_path / "tiny" / "version_0"
    shutil.copytree(finished, run)
    rows = rows_of(run, "rounds")
    write_csv(run / "rounds.csv", [{**row, "failed": 4} if row["method"] == "Local" else row for row in rows])
    report([str(run), "--markdown", str(tmp_path / "report.md"), "--latex", str(tmp_path / "table.tex")])
    for name in ("report.md", "table.tex"):
        text = " ".join((tmp_path / name).read_text().split())
        assert "lients that failed or dropped out, counted over all rounds: Local 4; one that never" in text


def test_pictures_are_as_wide_as_a_column(page):
    *_, folder, text = page
    pdfs = sorted((folder / "report_pictures").iterdir())
    names = [path.stem for path in pdfs]
    assert names == sorted(
        [f"{kind}_{metric}" for kind in ("curves", "clients") for metric in (LOCAL, GLOBAL)]
        + ["bytes_reweighted_test", "flops_reweighted_test", "gate_PFL-MF", "partition"]
    )
    for path in pdfs:
        width = re.search(rb"/MediaBox \[\s*0 0 ([\d.]+)", path.read_bytes())
        assert float(width[1]) == pytest.approx(3.4 * 72)
    assert text.count('<svg viewBox="0 0 244.8 ') == len(pdfs), "vector, and in the page itself"
    assert "currentColor" in text and "#000001" not in text, "text has the colour of the page, light or dark"


def test_seeds_are_one_row_with_mean_and_deviation(copied, written, tmp_path):
    folders = [copied(f"seed{seed}", seed, better=0.01 * seed) for seed in range(3)]
    parsed, markdown = written(*folders)
    ((_, *lines),) = markdown_tables(markdown)
    for i, line in enumerate(lines):
        values = [100 * float(rows_of(folder)[i]["reweighted_test_mean"]) for folder in folders]
        assert line[1] == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
        assert line[2].endswith("± 0.00")
    assert "3 seeds" in markdown
    assert "They differ only in the seed." in parsed.text
    assert len(parsed.tables["every"]) == 1 + 3 * 4


def test_a_table_says_whether_its_seeds_have_one_partition(copied, written):
    def partition(seed):
        return lambda config: config["data"]["init_args"].update(partition_seed=seed)

    sentence = "All seeds have the same partition"
    folders = [copied("one", 0, partition(7)), copied("two", 1, partition(7)), copied("three", 1, partition(8))]
    assert [sentence in written(*folders[:number])[1] for number in (1, 2, 3)] == [False, True, False]


def test_conditions_have_tables_of_their_own_and_the_same_colours(copied, written, tmp_path):
    def alpha(config):
        config["data"]["init_args"]["partitioner"]["init_args"]["alpha"] = 0.1

    folder = copied("half", better=0.1).parents[1]
    copied("tenth", change=alpha)
    parsed, markdown = written(folder)
    assert re.findall("^### (.*)$", markdown, re.MULTILINE) == ["alpha 0.5", "alpha 0.1"]
    assert markdown.count("* Accuracy in percent") == markdown.count("* FedAvg: global expert") == 1, (
        "not for each table"
    )
    first, second = markdown_tables(markdown)
    assert float(first[1][1]) == pytest.approx(float(second[1][1]) + 10, abs=0.011)
    text = (tmp_path / "page.html").read_text()
    swatches = re.findall(r'background: (\S+)"></span>(\w\S*)</th>', text)
    assert len({label for _, label in swatches}) == len(set(swatches)) == 4
    assert len(swatches) == 2 * (4 + 4), "tables of methods and of costs"
    assert ["data/partitioner/alpha", "0.5", "0.1"] in [row for table in parsed.tables.values() for row in table]


def test_methods_of_the_same_name_are_told_apart_by_what_differs(copied, written, tmp_path):
    def rate(config):
        config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 0.2

    folders = copied("slow"), copied("fast", change=rate)
    ((_, *lines),) = markdown_tables(written(*folders)[1])
    assert [line[0] for line in lines][:4] == ["Local (lr 0.1)", "Local (lr 0.2)", "FedAvg (lr 0.1)", "FedAvg (lr 0.2)"]
    _, markdown = written(*folders, "--split", "model.init_args.optimizer")
    assert re.findall("^### (.*)$", markdown, re.MULTILINE) == ["lr 0.1", "lr 0.2"]


def test_the_papers_numbers_are_beside_ours(copied, written, tmp_path):
    folder = copied("cell")
    paper = [{"table": "Guo et al. 2021, Table I", "metric": LOCAL, "cells": {"FedAvg": [90.0, None], "X": [1, 2]}}]
    paper += [{"table": "Table II", "metric": LOCAL, "cells": {"Local": [80.5, 0.25]}}]
    cell = {"variant": None, "values": {"seed_everything": 0}, "baseline": None, "paper": paper}
    (folder.parent / "cell.json").write_text(json.dumps(cell))
    parsed, markdown = written(folder)
    ((header, *lines),) = markdown_tables(markdown)
    assert header == ["method", "reweighted test", "paper", "global test"]
    assert [line[2] for line in lines] == ["80.50 ± 0.25", "90.00", "-", "-"]
    assert "Paper: Guo et al. 2021, Table I." in markdown and "Paper: Table II." in parsed.text
    assert [row[3] for row in parsed.tables["methods"][2:]] == ["80.50 ± 0.25", "90.00", "-", "-"]


def test_runs_without_the_newer_files_have_a_report_that_says_so(copied, written):
    folder = copied("old")
    (folder / "gate_weights.csv").unlink()
    (folder / "partition.csv").unlink()
    parsed, _ = written(folder)
    assert "No gate_weights.csv in the runs of PFL-MF: no picture." in parsed.text
    assert "The runs have no partition.csv: no picture." in parsed.text


def test_a_running_run_is_shown_as_far_as_it_is(copied, written):
    folder = copied("running")
    rounds = (folder / "rounds.csv").read_text().splitlines()
    (folder / "rounds.csv").write_text("\n".join(rounds[:4]) + "\n")
    for name in ("summary.csv", "clients.csv", "gate_weights.csv"):
        (folder / name).unlink(missing_ok=True)
    parsed, markdown = written(folder)
    ((header, *lines),) = markdown_tables(markdown)
    assert header == ["method", "round", "reweighted test", "global test"]
    assert [line[:2] for line in lines] == [["Local", "1 so far"], ["FedAvg", "2 so far"]]
    assert "Not finished, with the results so far: running/version_0." in parsed.text


def test_of_runs_with_the_same_seed_the_last_finished_one_counts(copied, written, tmp_path):
    folders = copied("one", better=0.1), copied("two")
    parsed, markdown = written(*folders)
    ((_, first, *_),) = markdown_tables(markdown)
    assert float(first[1]) == pytest.approx(100 * float(rows_of(folders[1])[0]["reweighted_test_mean"]), abs=0.005)
    assert f"Left out, because another run has the same configuration and seed: {folders[0]}." in parsed.text


def test_all_runs_below_a_folder_are_read_but_those_of_newcomers(copied, tmp_path):
    for name in ("tiny", "tiny/new_clients"):
        copied(name)
    shutil.copytree(tmp_path / "runs/tiny/version_0", tmp_path / "runs/tiny/version_10")
    shutil.copytree(tmp_path / "runs/tiny/version_0", tmp_path / "runs/tiny/version_2")
    folders = [
        run.folder.relative_to(tmp_path) for run in find_runs([tmp_path / "runs", tmp_path / "runs/tiny/version_2"])
    ]
    assert [str(folder) for folder in folders] == [f"runs/tiny/version_{number}" for number in (0, 2, 10)]
    (run,) = find_runs([tmp_path / "runs/tiny/new_clients"])
    assert run.name == "new_clients/version_0"


@pytest.mark.parametrize("target", ["best", "0.01"])
def test_costs_are_those_until_the_target_with_the_phases_that_a_method_starts_from(target, finished, written):
    rounds = [row for row in rows_of(finished, "rounds") if row["method"] == "FedAvg"]
    best = max(float(row["reweighted_test_mean"]) for row in rounds)
    target = best if target == "best" else float(target)
    parsed, markdown = written(finished, "--target", repr(target), "--metric", LOCAL)
    (table,) = (table for table in parsed.tables.values() if "sent" in table[0])
    assert table in markdown_tables(markdown)
    costs = {row[0]: row for row in table}
    reached = next(row for row in rounds if float(row["reweighted_test_mean"]) >= target)
    expected = {"FedAvg": (reached["round"], reached)}
    if target < best:  # all reach it
        expected["PFL-FB"] = (f"{len(rounds) + 1}", rounds[-1])
    for method, (number, row) in expected.items():
        sent = sum(int(row[f"bytes_{way}"]) for way in ("down", "up", "between_clients"))
        size, unit = costs[method][2].split()
        assert costs[method][1] == number
        assert float(size) * {"B": 1, "kB": 1e3}[unit] == pytest.approx(sent, rel=0.01)
    assert costs["FedAvg"][4] == f"{100 * best:.2f}"


def test_trials_are_a_table_and_the_best_one_s_run_is_read(tmp_path):
    lines = [
        "trial,state,best,round,validation,model.init_args.lr",
        "trial_000,complete,,3,0.5,0.1",
        "trial_001,pruned,,1,,0.25",
        "trial_002,complete,best,4,0.75,0.0123456",
    ]
    folder = tmp_path / "tiny_tune"
    folder.mkdir()
    (folder / "trials.csv").write_text("\n".join([*lines, ""]))
    ((title, table, best),), runs = divided([folder, tmp_path])
    assert (title, best, runs) == ("3 trials of tiny", "trial_002", [folder / "trial_002", tmp_path])
    assert table.header == ["trial", "state", "round", "validation", "lr"]
    assert table.rows == [
        ["trial_000", "complete", "3", "50.00", "0.1"],
        ["trial_001", "pruned", "1", "-", "0.25"],
        ["trial_002", "complete", "4", "75.00", "0.01235"],
    ]


def test_a_section_of_a_page_is_replaced_and_the_rest_stays(finished, tmp_path):
    path = tmp_path / "results.md"
    path.write_text("# Results\n<!-- fedmoe report: tiny -->\nold\n<!-- end of tiny -->\nThey agree.\n")
    for _ in range(2):
        report([str(finished), "--markdown", str(path), "--section", "tiny"])
        text = path.read_text()
        assert text.startswith("# Results\n<!-- fedmoe report: tiny -->\n\nTensorData, 3 clients")
        assert text.endswith("```\n\n<!-- end of tiny -->\nThey agree.\n") and "old" not in text
    with pytest.raises(MisconfigurationException, match="--section is 'other', but must be a section of the Markdown"):
        report([str(finished), "--markdown", str(path), "--section", "other"])


def test_differences_to_a_baseline_are_paired_over_the_clients_of_each_seed(copied, written):
    folders = [copied(f"seed{seed}", seed) for seed in range(2)]
    parsed, markdown = written(*folders, "--baseline", "FedAvg")
    ((header, *lines),) = markdown_tables(markdown)
    assert header == ["method", "reweighted test", "to FedAvg", "global test", "to FedAvg"]
    means = [100 * float(row["reweighted_test_mean"]) for row in rows_of(folders[0])]
    assert [line[2].rstrip("*") for line in lines] == [
        f"{means[0] - means[1]:+.2f}",
        "-",
        f"{means[2] - means[1]:+.2f}",
        "+0.00",
    ]
    assert "to FedAvg: difference in points; " in markdown and "to FedAvg" in parsed.tables["methods"][1]


@pytest.mark.parametrize("dropped", ["nothing", ("reweighted_test", "global_test")])
def test_differences_of_metrics_that_are_no_accuracies_are_not_called_points(dropped, copied, written):
    folder = copied("a")
    for name in ("summary", "rounds", "clients"):
        rows = [{key: row[key] for key in row if not key.startswith(dropped)} for row in rows_of(folder, name)]
        write_csv(folder / f"{name}.csv", [row | RMSE for row in rows])
    _, markdown = written(folder, "--baseline", "FedAvg")
    how = "difference, of accuracies in points" if dropped == "nothing" else "difference"
    assert f"to FedAvg: {how}; " in markdown


def test_the_table_in_latex_has_the_numbers_of_the_markdown(copied, written, tmp_path):
    folders = [copied(f"seed{seed}", seed, better=0.01 * seed) for seed in range(2)]
    path = tmp_path / "table.tex"
    _, markdown = written(*folders, "--baseline", "FedAvg", "--latex", str(path))
    ((_, *expected),) = markdown_tables(markdown)
    lines = path.read_text().splitlines()
    columns = len(re.findall("r", re.search(r"X(r+)\}", path.read_text())[1]))
    rows = [line.removesuffix(r" \\").split(" & ") for line in lines if " & " in line]
    assert rows[1] == ["method", "accuracy", r"$\Delta$", "accuracy"], "no paper has these numbers"
    assert rows[0] == ["", r"\multicolumn{2}{c}{reweighted test}", r"\multicolumn{1}{c}{\shortstack{global\\test}}"]
    assert ("Wilcoxon" in lines[3]) == ("*" in "".join(line[2] for line in expected)), (
        "stars are explained where some are"
    )
    assert r"Accuracy in percent, mean over the clients; $\pm$ is the sample standard deviation over seeds" in lines[3]
    assert sum(int(number) for number in re.findall(r"\\multicolumn\{(\d)\}", " ".join(rows[0]))) == columns
    bold = [max(float(line[column].split()[0]) for line in expected) for column in (1, 3)]
    for (name, *cells), line in zip(rows[2:], expected, strict=True):
        plain = [re.sub(r"\\mathbf\{(.+?)\}", r"\1", cell) for cell in cells]
        plain = [re.sub(r"_\{\\pm (.+?)\}", r" ± \1", cell).strip("$").replace("^{*}", "*") for cell in plain]
        assert [name, *plain] == [
            rf"\mbox{{{line[0]}}}" if "-" in line[0] else line[0],
            line[1],
            line[2].replace("-", "\\textemdash") if line[2] == "-" else line[2],
            line[3],
        ]
        assert [r"\mathbf" in cells[0], r"\mathbf" in cells[2]] == [
            float(line[column].split()[0]) == best for column, best in zip((1, 3), bold, strict=True)
        ]


def test_a_metric_that_fits_is_in_latex_also_if_one_before_it_does_not(copied, written, tmp_path):
    folder = copied("a")
    for name in ("summary", "rounds", "clients"):
        write_csv(folder / f"{name}.csv", [row | RMSE for row in rows_of(folder, name)])
    paper = [{"table": "Table I", "metric": metric, "cells": {"FedAvg": [90.0, None]}} for metric in (LOCAL, GLOBAL)]
    (folder.parent / "cell.json").write_text(json.dumps({"baseline": "FedAvg", "paper": paper}))
    written(folder, "--latex", str(tmp_path / "table.tex"))
    text = (tmp_path / "table.tex").read_text()
    assert "because they do not fit: global_test\n" in text and r"\shortstack{local test\\rmse}" in text


def test_accuracies_after_some_rounds_are_a_table(copied, written):
    folder = copied("every_second")
    rows = [row for row in rows_of(folder, "rounds") if row["round"] != "3"]
    write_csv(folder / "rounds.csv", rows)
    parsed, markdown = written(folder, "--rounds", "2,3,4,9", "--metric", GLOBAL)
    _, (header, *lines) = markdown_tables(markdown)
    assert header == ["method", "round 2", "round 3", "round 4", "round 9"]
    rounds = {row["round"]: row for row in rows if row["method"] == "FedAvg"}
    second, last = (f"{100 * float(rounds[number]['global_test_mean']):.2f}" for number in ("2", "4"))
    assert lines == [["FedAvg", second, "-", last, "-"]], "the others have one round"
    assert [header, *lines] in parsed.tables.values()
    write_csv(folder / "rounds.csv", [row for row in rows if row["method"] != "FedAvg" or row["round"] == "4"])
    parsed, _ = written(folder)
    assert "No curve of Local (one round), FedAvg (only round 4 was evaluated: evaluate_every_n_rounds)" in parsed.text


def test_clients_that_have_names_have_a_table(copied, written):
    folders = [copied(f"seed_{seed}", seed, better=seed / 100) for seed in (0, 1)]
    parsed, _ = written(*folders)
    assert not any(table[0][:1] == ["client"] for table in parsed.tables.values())
    for folder in folders:
        rows = [row | {"name": f"site {row['client']}"} for row in rows_of(folder, "clients")]
        write_csv(folder / "clients.csv", rows)
    parsed, _ = written(*folders)
    (table,) = (table for table in parsed.tables.values() if table[0][0] == "client")
    assert [line[0] for line in table] == ["client", "site 0", "site 1", "site 2"]
    method = table[0][1]
    values = [
        float(row["reweighted_test"])
        for folder in folders
        for row in rows_of(folder, "clients")
        if (row["method"], row["client"]) == (method, "0")
    ]
    assert table[1][1] == f"{100 * sum(values) / 2:.2f}"


def test_a_metric_on_validation_samples_is_shown_if_it_is_chosen(copied, written):
    folder = copied("a")
    for name in ("summary", "rounds"):
        rows = [row | {"validation_mean": 0.25} for row in rows_of(folder, name)]
        write_csv(folder / f"{name}.csv", rows)
    first, *_ = markdown_tables(written(folder)[1])
    assert "validation" not in first[0]
    first, *_ = markdown_tables(written(folder, "--metric", "validation")[1])
    assert [line[first[0].index("validation")] for line in first[1:]] == ["25.00"] * 4


def test_a_run_that_was_evaluated_on_validation_samples_alone_has_a_report(copied, written):
    """As that of a deployed federation whose clients report nothing else."""
    folder, others = copied("a"), ("local_test", "reweighted_test", "global_test")
    accuracies = {"validation_mean": 0.25, "validation_std": 0.0, "validation_worst_tenth": 0.25, "validation": 0.25}
    for name in ("summary", "rounds", "clients"):
        rows = [{key: row[key] for key in row if not key.startswith(others)} for row in rows_of(folder, name)]
        own = {key: value for key, value in accuracies.items() if key in rows[0]}
        write_csv(folder / f"{name}.csv", [row | own for row in rows])
    first, *_ = markdown_tables(written(folder)[1])
    assert [line[first[0].index("validation")] for line in first[1:]] == ["25.00"] * 4


@pytest.mark.parametrize(
    ("argument", "value"),
    [("--metric", "accuracy"), ("--baseline", "FedProx"), ("--rounds", "5,x"), ("--rounds", "900"), ("--target", "90")],
)
def test_a_choice_that_the_runs_do_not_have_is_refused(argument, value, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused_argument(lambda: report([str(finished), argument, value])) == argument
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["nowhere", "empty", "begun"])
def test_a_folder_without_results_is_refused(name, tmp_path):
    for folder in ("empty", "begun"):
        (tmp_path / folder).mkdir()
    (tmp_path / "begun/record.json").write_text("{}")
    assert refused_argument(lambda: find_runs([tmp_path / name])) == "RUN"
