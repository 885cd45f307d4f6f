"""Which runs are seeds of one another, and what tells the others apart."""

from pathlib import Path

import pytest

from fedmoe_pl.report.runs import RunFiles
from fedmoe_pl.report.settings import conditions, differences, labels, settings_of


def run(name="a", seed=0, methods=("FedAvg",), cell=None, **changes):
    """A run with the phases of ``methods``; ``changes`` replace values, by their key with _ for dots."""
    data = {"num_clients": 5, "partitioner": {"class_path": "data.Dirichlet", "init_args": {"alpha": 0.5}}}
    config = {
        "seed_everything": seed,
        "trainer": {"max_epochs": 1, "devices": 1},
        "data": {"class_path": "data.Digits", "init_args": data},
        "federation": {"name": name, "phases": [{"name": method, "rounds": 3} for method in methods]},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        part = config
        for step in path:
            part = part[int(step)] if isinstance(part, list) else part[step]
        part[last] = value
    rows = [{"method": method} for method in methods]
    return RunFiles(Path("runs") / name / "version_0", rows, [], rows, [], [], config, cell or {})


ALPHA = "data__init_args__partitioner__init_args__alpha"


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"name": "b", "seed": 1}, {"trainer__devices": 2, "seed": 1}, {"data__init_args__partition_seed": 1}],
)
def test_runs_that_differ_only_in_the_seed_are_one_setting(change):
    (setting,), left_out = settings_of([run(), run(**change)])
    assert len(setting.runs) == 2 and not left_out


@pytest.mark.parametrize("change", [{ALPHA: 0.1}, {"trainer__max_epochs": 2}, {"federation__phases__0__rounds": 4}])
def test_runs_that_differ_in_more_are_not(change):
    settings, _ = settings_of([run(), run(seed=1, **change)])
    assert len(settings) == 2


def test_conditions_are_named_by_what_is_needed_to_tell_them_apart():
    changes = [{}, {ALPHA: 0.1, "data__init_args__num_clients": 9}, {"trainer__max_epochs": 2, "name": "b"}]
    settings, _ = settings_of([run(**change) for change in changes])
    found = conditions(settings)
    assert {name: len(group) for name, group in found.items()} == {"num_clients 5": 2, "num_clients 9": 1}
    assert [*conditions(settings, ["trainer"])] == [
        "max_epochs 1, num_clients 5",
        "max_epochs 1, num_clients 9",
        "max_epochs 2, num_clients 5",
    ]


def test_cells_of_a_grid_are_conditions_named_by_their_values():
    key = "data.init_args.partitioner.init_args.alpha"
    cells = [{"variant": "small", "values": {key: alpha, "seed_everything": 0}} for alpha in (0.5, 0.1)]
    settings, _ = settings_of([run(cell=cells[0]), run(cell=cells[1], **{ALPHA: 0.1})])
    assert [*conditions(settings)] == ["alpha 0.5", "alpha 0.1"]
    other = {"variant": "large", "values": {key: 0.5}}
    settings, _ = settings_of([run(cell=cells[0]), run(cell=other, data__init_args__num_clients=50)])
    assert [*conditions(settings)] == ["variant small", "variant large"]


def test_a_method_of_several_settings_is_labelled_by_what_differs_there():
    settings, _ = settings_of(
        [
            run("one", methods=("FedAvg", "Ditto")),
            run("two", methods=("FedAvg", "APFL"), federation__phases__1__rounds=9),
            run("three", methods=("FedAvg",), federation__phases__0__rounds=8),
        ]
    )
    assert labels("FedAvg", settings[1:]) == ["FedAvg (rounds 3)", "FedAvg (rounds 8)"]
    assert labels("FedAvg", settings[:1]) == ["FedAvg"]
    names = [f"FedAvg ({name}/version_0)" for name in ("one", "two", "three")]
    assert labels("FedAvg", settings) == names, "two of them have the same rounds"


def test_only_keys_that_differ_are_listed_and_phases_only_where_they_are():
    settings, _ = settings_of(
        [run(methods=("FedAvg", "Ditto")), run(methods=("FedAvg", "APFL"), federation__phases__0__rounds=8)]
    )
    rows = differences([setting.values for setting in settings])
    assert rows == {"federation/phases/FedAvg/rounds": ["3", "8"]}
