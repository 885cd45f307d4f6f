"""In which runs a method is the same, so that they are one row."""

from pathlib import Path

from fedmoe_pl.report.runs import RunFiles
from fedmoe_pl.report.settings import labels, settings_of


def run(folder, *phases, seed=0, evaluated=None):
    """A run of phases, each a name, a class and its settings; the names of those in ``evaluated`` have a result."""
    config = {
        "seed_everything": seed,
        "federation": {
            "phases": [
                {"name": name, "algorithm": {"class_path": f"fedmoe_pl.algorithms.{kind}"}, **settings}
                for name, kind, settings in phases
            ]
        },
    }
    names = [name for name, _, _ in phases] if evaluated is None else evaluated
    rounds = [{"method": name} for name, _, _ in phases]
    summary = [{"method": name} for name in names]
    return RunFiles(Path("runs") / folder / "version_0", rounds, [], summary, [], [], config, {})


def joined(method, *runs):
    """The folders of the runs of each setting of a method."""
    found, _ = settings_of((run for run in runs if method in run.methods), method)
    return [[each.folder.parent.name for each in setting.runs] for setting in found]


FEDAVG = ("FedAvg", "FedAvg", {"rounds": 3})
LONGER = ("FedAvg", "FedAvg", {"rounds": 5})
SCAFFOLD = ("SCAFFOLD", "SCAFFOLD", {"rounds": 3})
STOPPED = ("SCAFFOLD", "SCAFFOLD", {"rounds": 2})
FINE_TUNED = ("PFL-FB", "FineTuning", {})


def test_seeds_with_another_setting_of_another_method_are_seeds_of_this_one():
    runs = [run("a", FEDAVG, SCAFFOLD), run("b", FEDAVG, STOPPED, seed=1)]
    assert joined("FedAvg", *runs) == [["a", "b"]]
    assert joined("SCAFFOLD", *runs) == [["a"], ["b"]]
    assert labels("SCAFFOLD", settings_of(runs, "SCAFFOLD")[0]) == ["SCAFFOLD (rounds 3)", "SCAFFOLD (rounds 2)"]


def test_a_method_is_another_one_if_what_it_starts_from_is():
    assert joined("PFL-FB", run("a", FEDAVG, FINE_TUNED), run("b", LONGER, FINE_TUNED, seed=1)) == [["a"], ["b"]]
    named = ("PFL-FB", "FineTuning", {"start": "FedAvg"})
    assert joined("PFL-FB", run("a", FEDAVG, named), run("b", LONGER, named, seed=1)) == [["a"], ["b"]]


def test_a_start_that_is_named_is_the_only_one():
    named = ("PFL-FB", "FineTuning", {"start": "FedAvg"})
    runs = [run("a", FEDAVG, SCAFFOLD, named), run("b", FEDAVG, STOPPED, named, seed=1)]
    assert joined("PFL-FB", *runs) == [["a", "b"]]
    parts = ("PFL-FB", "FineTuning", {"start": {"global_expert": "FedAvg", "local_expert": "SCAFFOLD"}})
    runs = [run("a", FEDAVG, SCAFFOLD, parts), run("b", FEDAVG, STOPPED, parts, seed=1)]
    assert joined("PFL-FB", *runs) == [["a"], ["b"]]


def test_an_own_algorithm_may_start_from_any_phase_before_it():
    runs = [run("a", SCAFFOLD, ("mine", "x.Own", {})), run("b", STOPPED, ("mine", "x.Own", {}), seed=1)]
    assert joined("mine", *runs) == [["a"], ["b"]]


def test_a_method_after_aggregation_is_that_of_its_phase():
    first, second = run("a", FEDAVG, SCAFFOLD), run("b", FEDAVG, STOPPED, seed=1)
    for each in (first, second):
        each.summary.append({"method": "FedAvg after aggregation"})
    assert joined("FedAvg after aggregation", first, second) == [["a", "b"]]


def test_of_runs_with_one_seed_the_last_with_the_result_counts():
    ended, other = run("a", FEDAVG, SCAFFOLD), run("b", FEDAVG, STOPPED)
    assert joined("FedAvg", ended, other) == [["b"]]
    assert joined("FedAvg", ended, run("b", FEDAVG, STOPPED, evaluated=[])) == [["a"]]
