"""Which runs are seeds of one another, which have the same data, and in which a method is the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedmoe_pl.report.runs import RunFiles
from fedmoe_pl.report.settings import conditions, differences, labels, settings_of
from fedmoe_pl.report.tables import Method, difference

ALPHA = "data__init_args__partitioner__init_args__alpha"
FEDAVG, LONGER = ({"name": "FedAvg", "algorithm": "FedAvg", "rounds": rounds} for rounds in (3, 5))
SCAFFOLD, STOPPED = ({"name": "SCAFFOLD", "algorithm": "SCAFFOLD", "rounds": rounds} for rounds in (3, 2))
FINE_TUNED = {"name": "PFL-FB", "algorithm": "FineTuning"}
OF_FEDAVG = FINE_TUNED | {"start": "FedAvg"}
OF_BOTH = FINE_TUNED | {"start": {"global_expert": "FedAvg", "local_expert": "SCAFFOLD"}}
LOCAL = {"name": "Local", "algorithm": "Local"}
MIXED = {"name": "PFL-MF", "algorithm": "PFLMoE", "init_args": {"gate_fraction": 0}}
OWN = {"name": "own", "algorithm": "x.Own"}
FOUR = {"trainer__max_epochs": 2, "trainer__a": 1, "trainer__b": 1, "trainer__c": 1}  # more than a label names


def run(name="a", *phases, seed=0, cell=None, evaluated=None, **changes):
    """A run of phases, by default FedAvg; ``changes`` replace values, by their key with __ for dots."""
    phases = [dict(phase) for phase in phases or (FEDAVG,)]
    for phase in phases:
        path = phase["algorithm"] if "." in phase["algorithm"] else f"fedmoe_pl.algorithms.{phase['algorithm']}"
        phase["algorithm"] = {"class_path": path, "init_args": phase.pop("init_args", {})}
    data = {"num_clients": 5, "partitioner": {"class_path": "data.Dirichlet", "init_args": {"alpha": 0.5}}}
    config = {
        "seed_everything": seed,
        "trainer": {"max_epochs": 1, "devices": 1},
        "data": {"class_path": "data.Digits", "init_args": data},
        "federation": {"name": name, "phases": phases},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        part = config
        for step in path:
            part = part[step]
        part[last] = value
    names = [phase["name"] for phase in phases]
    rounds, summary = (
        [{"method": method} for method in of] for of in (names, names if evaluated is None else evaluated)
    )
    return RunFiles(Path("runs") / name / "version_0", rounds, [], summary, [], [], config, cell or {})


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"name": "b", "seed": 1}, {"trainer__devices": 2, "seed": 1}, {"data__init_args__partition_seed": 1}],
)
def test_runs_that_differ_only_in_the_seed_are_one_setting(change):
    (setting,), left_out = settings_of([run(), run(**change)])
    assert len(setting.runs) == 2 and not left_out


def test_of_runs_with_the_same_seed_one_that_lacks_a_phase_does_not_count():
    whole, cut = run("whole", FEDAVG, LOCAL), run("cut", FEDAVG, LOCAL, evaluated=["FedAvg"])
    assert whole.is_finished and not cut.is_finished
    (setting,), left_out = settings_of([whole, cut])
    assert setting.runs == [whole] and left_out == [cut]


def test_metrics_that_only_a_later_phase_has_are_some_of_the_run_s():
    of_first = {"method": "A", "global_test_mean": 0.5, "global_test_worst_tenth": 0.5}
    of_second = {"method": "B", "global_test_rmse_mean": 2.0, "global_test_rmse_worst_tenth": 3.0}
    assert replace(run(), rounds=[of_first, of_second], summary=[]).metrics == ["global_test", "global_test_rmse"]


def test_runs_that_differ_in_more_are_not():
    changes = [{}, {ALPHA: 0.1}, {"trainer__max_epochs": 2}, {"federation__failures": {"min_clients": 4}}]
    settings, _ = settings_of([*(run(seed=seed, **change) for seed, change in enumerate(changes)), run("a", LONGER)])
    assert len(settings) == 5


def test_a_folder_is_the_data_unless_they_can_be_downloaded():
    roots = [{"data__init_args__root": folder} for folder in ("a", "b")]
    assert len(settings_of([run(**root) for root in roots])[0]) == 2
    assert len(conditions(settings_of([run(**root) for root in roots])[0])) == 2
    downloaded = [run(seed=seed, data__init_args__download=True, **root) for seed, root in enumerate(roots)]
    assert len(settings_of(downloaded)[0]) == 1


def test_a_method_that_is_evaluated_at_another_moment_is_another_row():
    def evaluated(seed, after, point):
        tuned = OF_FEDAVG | {"name": "FedAvg + FT"}
        rows = [{"method": name, "evaluation_point": at} for name, at in (("FedAvg", point), (tuned["name"], "after"))]
        return replace(run("a", FEDAVG | {"evaluate": after}, tuned, seed=seed), rounds=rows, summary=rows)

    before = evaluated(0, {"after": "aggregation"}, "after aggregation")
    after = evaluated(1, {"after": "local_training"}, "after local training")
    assert [len(settings_of([before, after], method)[0]) for method in ("FedAvg", "FedAvg + FT")] == [2, 1]
    for the_same in (True, {"after": "both"}):  # the row of this name is then after aggregation, too
        assert len(settings_of([before, evaluated(1, the_same, "after aggregation")], "FedAvg")[0]) == 1
    assert len(settings_of([before, evaluated(0, {"after": "local_training"}, "x")])[0]) == 2, "neither is left out"


def test_runs_of_one_seed_and_several_partitions_are_paired_by_both():
    ours, theirs = (
        Method(
            name, name, [replace(run(data__init_args__partition_seed=seed), clients=rows) for seed, rows in pairs], True
        )
        for name, pairs in (
            ("ours", [(0, [{"client": 0, "m": 0.5}]), (1, [{"client": 0, "m": 0.75}])]),
            ("theirs", [(0, [{"client": 0, "m": 0.25}]), (1, [{"client": 0, "m": 0.5}])]),
        )
    )
    assert difference(ours, theirs, "m").mean == 0.25


def test_conditions_are_named_by_what_is_needed_to_tell_them_apart():
    changes = [{}, {ALPHA: 0.1, "data__init_args__num_clients": 9}, {"trainer__max_epochs": 2, "name": "b"}]
    settings, _ = settings_of([run(**change) for change in changes])
    assert {name: len(group) for name, group in conditions(settings).items()} == {
        "num_clients 5": 2,
        "num_clients 9": 1,
    }
    assert [*conditions(settings, ["trainer"])] == [
        "max_epochs 1, num_clients 5",
        "max_epochs 1, num_clients 9",
        "max_epochs 2, num_clients 5",
    ]


def test_a_cell_of_a_grid_and_a_run_with_the_same_data_are_of_one_condition():
    """The order of their keys differs."""
    cell = {"values": {"data.init_args.partitioner.init_args.alpha": 0.5}}
    settings, _ = settings_of([run(cell=cell), run("b", trainer__max_epochs=2)])
    assert conditions(settings) == {"": settings}


@pytest.mark.parametrize(
    "changes",
    [
        [{"data__init_args__train_dir": f"/data/{of}/train"} for of in ("chest", "skin")],
        [{"data__init_args__partitioner": {"x": {"n": 1}}}, {"data__init_args__partitioner": {"y": {"n": 1}}}, {}],
    ],
)
def test_conditions_whose_short_names_are_the_same_are_told_apart(changes):
    settings, _ = settings_of([run(**change) for change in changes])
    assert [*conditions(settings).values()] == [[setting] for setting in settings]


def test_cells_of_a_grid_are_conditions_named_by_their_values():
    key = "data.init_args.partitioner.init_args.alpha"
    cells = [{"variant": "small", "values": {key: alpha, "seed_everything": 0}} for alpha in (0.5, 0.1)]
    settings, _ = settings_of([run(cell=cells[0]), run(cell=cells[1], **{ALPHA: 0.1})])
    assert [*conditions(settings)] == ["alpha 0.5", "alpha 0.1"]
    other = {"variant": "large", "values": {key: 0.5}}
    settings, _ = settings_of([run(cell=cells[0]), run(cell=other, data__init_args__num_clients=50)])
    assert [*conditions(settings)] == ["variant small", "variant large"]


def test_a_method_of_several_settings_is_labelled_by_what_differs_there():
    settings, _ = settings_of([run("one", FEDAVG, SCAFFOLD), run("two", FEDAVG, FINE_TUNED), run("three", LONGER)])
    assert labels("FedAvg", settings[1:]) == ["FedAvg (rounds 3)", "FedAvg (rounds 5)"]
    assert labels("FedAvg", settings[:1]) == ["FedAvg"]
    names = [f"FedAvg ({name}/version_0)" for name in ("one", "two", "three")]
    assert labels("FedAvg", settings) == names, "two of them have the same rounds"


def test_only_keys_that_differ_are_listed_and_phases_only_where_they_are():
    settings, _ = settings_of([run("a", FEDAVG, SCAFFOLD), run("a", LONGER, FINE_TUNED)])
    rows = differences([setting.values for setting in settings])
    assert rows == {"federation/phases/FedAvg/rounds": ["3", "5"]}


@pytest.mark.parametrize(
    ("method", "phases", "others", "expected"),
    [
        ("FedAvg", (FEDAVG, SCAFFOLD), (FEDAVG, STOPPED), [["a", "b"]]),  # the other phase has no influence
        ("SCAFFOLD", (FEDAVG, SCAFFOLD), (FEDAVG, STOPPED), [["a"], ["b"]]),
        ("PFL-FB", (FEDAVG, FINE_TUNED), (LONGER, FINE_TUNED), [["a"], ["b"]]),  # it starts from the phase before it
        ("PFL-FB", (FEDAVG, OF_FEDAVG), (LONGER, OF_FEDAVG), [["a"], ["b"]]),
        ("PFL-FB", (FEDAVG, SCAFFOLD, OF_FEDAVG), (FEDAVG, STOPPED, OF_FEDAVG), [["a", "b"]]),
        ("PFL-FB", (FEDAVG, SCAFFOLD, OF_BOTH), (FEDAVG, STOPPED, OF_BOTH), [["a"], ["b"]]),
        ("own", (SCAFFOLD, OWN), (STOPPED, OWN), [["a"], ["b"]]),  # it may start from any phase before it
        ("PFL-FB", (FEDAVG, LOCAL, FINE_TUNED), (FEDAVG, FINE_TUNED), [["a", "b"]]),  # Local is no start for it
        ("PFL-MF", (FEDAVG, FINE_TUNED, LOCAL, MIXED), (FEDAVG, FINE_TUNED, MIXED), [["a", "b"]]),
        ("PFL-FB", (FEDAVG, SCAFFOLD, FINE_TUNED), (FEDAVG, FINE_TUNED), [["a"], ["b"]]),
        ("PFL-FB", (SCAFFOLD, FEDAVG, FINE_TUNED), (FEDAVG, FINE_TUNED), [["a", "b"]]),
        ("PFL-FB", (FEDAVG, OWN, FINE_TUNED), (FEDAVG, FINE_TUNED), [["a"], ["b"]]),  # it may start from the other
    ],
)
def test_runs_are_seeds_of_a_method_if_it_and_what_it_starts_from_are_the_same(method, phases, others, expected):
    found, _ = settings_of([run("a", *phases), run("b", *others, seed=1)], method)
    assert [[each.folder.parent.name for each in setting.runs] for setting in found] == expected
    if method == "SCAFFOLD":
        assert labels(method, found) == ["SCAFFOLD (rounds 3)", "SCAFFOLD (rounds 2)"]


def test_a_method_after_aggregation_is_that_of_its_phase():
    runs = [run("a", FEDAVG, SCAFFOLD), run("b", FEDAVG, STOPPED, seed=1)]
    (setting,), _ = settings_of(runs, "FedAvg after aggregation")
    assert setting.runs == runs


@pytest.mark.parametrize(("evaluated", "counted"), [(None, "b"), ([], "a")])
def test_of_runs_with_one_seed_the_last_with_the_result_counts(evaluated, counted):
    runs = [run("a", FEDAVG, SCAFFOLD), run("b", FEDAVG, STOPPED, evaluated=evaluated)]
    ((setting,), (other,)) = settings_of(runs, "FedAvg")
    assert [each.folder.parent.name for each in (*setting.runs, other)] == [counted, "ab".replace(counted, "")]


def test_runs_of_several_seeds_are_named_by_what_their_names_have_in_common():
    changed = [{}, FOUR]
    runs = [
        run(f"alpha {place},seed_everything={seed}", seed=seed, **change)
        for place, change in enumerate(changed)
        for seed in (0, 1)
    ]
    settings, _ = settings_of(runs)
    assert labels("FedAvg", settings) == ["FedAvg (alpha 0)", "FedAvg (alpha 1)"]
    assert [setting.name for setting in settings_of(runs[:1])[0]] == ["alpha 0,seed_everything=0/version_0"]
    assert settings_of([run("a"), run("b", seed=1)])[0][0].name == "a and others"


def test_runs_of_several_seeds_with_one_name_are_called_by_their_folders():
    runs = [run("a", seed=seed, **change) for change in ({}, FOUR) for seed in (0, 1)]
    runs = [replace(each, folder=Path(f"runs/a/version_{version}")) for version, each in enumerate(runs)]
    settings, _ = settings_of(runs)
    assert labels("FedAvg", settings) == ["FedAvg (runs/a/version_0)", "FedAvg (runs/a/version_2)"]


def test_runs_are_in_the_order_of_their_seeds():
    (setting,), _ = settings_of([run(seed=seed) for seed in (10, 2, None, 0)])
    assert [each.seed for each in setting.runs] == [None, 0, 2, 10]
