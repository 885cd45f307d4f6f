"""Which runs repeat one another with another seed, which have the same data, and in what the others differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedmoe_pl import algorithms
from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.checkpoints.configuration import PARTS, relevant
from fedmoe_pl.phases.phase import INITIAL
from fedmoe_pl.report.runs import RunFiles, phases_of

_NOT_COMPARED = re.compile(r"data/(partition_seed|download)|(.*/)?evaluate(/every_n_epochs)?")
_MOMENT = "/evaluate/after"  # of training at which a phase is evaluated
_OF_TRAINING = re.compile(r"data/(batch_size|augmentation)(/.*)?")
_PHASES = "federation/phases/"
_FEW = 3  # keys that a label may name


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs that differ only in the seed.

    Attributes:
        runs: the runs, by ascending seed.
        values: what the results depend on, but the seed: flat names of the configuration and their values.
    """

    runs: list[RunFiles]
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the run or, of several, what their names have in common without their versions."""
        names = [run.folder.parent.name for run in self.runs]
        common = [word for word in names[0].split(",") if all(word in other.split(",") for other in names)]
        return self.runs[0].name if len(names) == 1 else ",".join(common) or f"{names[0]} and others"


def settings_of(runs: Iterable[RunFiles], method: str = "") -> tuple[list[Setting], list[RunFiles]]:
    """Groups runs that differ only in the seed or, for a method, also in phases that it does not start from.

    Of runs with the same seed, the last one that is finished, or has the method's result, counts; without any, the
    last. The others are returned as well.
    """
    groups: dict[str, dict[Any, RunFiles]] = {}
    values: dict[str, Mapping[str, Any]] = {}
    left_out = []
    for run in runs:
        of_run = _values_of(run, method)
        key = repr(sorted(of_run.items()))
        values[key] = of_run
        before = groups.setdefault(key, {}).get(run.seeds)
        if before is not None and _is_done(before, method) and not _is_done(run, method):
            left_out.append(run)
            continue
        if before is not None:
            left_out.append(before)
        groups[key][run.seeds] = run
    seeds = ([of_group[seed] for seed in sorted(of_group, key=_ascending)] for of_group in groups.values())
    return [Setting(group, values[key]) for key, group in zip(groups, seeds, strict=True)], left_out


def _ascending(seeds: Iterable[int | None]) -> list[tuple[bool, int]]:
    """A key to sort seeds, of which some may be None."""
    return [(seed is not None, seed or 0) for seed in seeds]


def left_out_notes(left_out: Sequence[RunFiles]) -> list[str]:
    """A sentence that names the runs that do not count; none if all count."""
    names = ", ".join(str(run.folder) for run in left_out)
    return [f"Left out, because another run has the same configuration and seed: {names}."] if names else []


def _is_done(run: RunFiles, method: str) -> bool:
    return any(row["method"] == method for row in run.summary) if method else run.is_finished


def _values_of(run: RunFiles, method: str) -> Mapping[str, Any]:
    """What the results of a run, or of one of its methods, depend on: flat names of the configuration, and values."""
    if not run.config:
        return {"run": str(run.folder)}
    of_run = _flat(relevant(run.config, of_two_runs=True))
    values = {
        key: value if isinstance(value, int | float | str) else str(value)
        for key, value in of_run.items()
        # a folder says what the data are, unless they can be downloaded to it
        if not _NOT_COMPARED.fullmatch(key) and not (key == "data/root" and "data/download" in of_run)
    }
    if not method:
        return values
    phases = {None, *phases_behind(method, run.config)}
    of_phases = {key: value for key, value in values.items() if _phase_of(key) in phases and not key.endswith(_MOMENT)}
    points = {row.get("evaluation_point", "") for row in (*run.rounds, *run.summary) if row["method"] == method}
    return of_phases | {"evaluation_point": ", ".join(sorted(points))}


def _flat(value: object, name: str = "") -> dict[str, object]:
    """Flattens a nested configuration; a class is the value of its own name, and what is None is left out.

    Example:
        >>> gate = {"class_path": "FeatureGate", "init_args": {"hidden": 64, "bias": None}}
        >>> _flat({"model": {"gate": gate}, "phases": [{"name": "FedAvg", "rounds": 9}], "seeds": [0, 1]})
        {'model/gate': 'FeatureGate', 'model/gate/hidden': 64, 'phases/FedAvg/rounds': 9, 'seeds': [0, 1]}
    """
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        names = [str(item.get("name", i)) for i, item in enumerate(value)]
        value = {n: {k: v for k, v in item.items() if k != "name"} for n, item in zip(names, value, strict=True)}
    if not isinstance(value, dict):
        return {} if value is None else {name: value}
    flat = {}
    for key, item in value.items():
        flat |= _flat(item, name if key in ("class_path", "init_args") else f"{name}/{key}".lstrip("/"))
    return flat


def flat_name(key: str) -> str:
    """The flat name of a configuration's key.

    Example:
        >>> flat_name("data.init_args.partitioner.init_args.alpha")
        'data/partitioner/alpha'
    """
    return key.replace(".init_args.", "/").replace(".", "/")


def conditions(settings: Sequence[Setting], keys: Collection[str] = ()) -> dict[str, list[Setting]]:
    """Groups settings whose results may be compared: those with the same data, and of the same column of a grid.

    The name of each group has the keys in which they differ. ``keys`` are further keys that tell groups apart, or the
    beginnings of keys.
    """
    values = [_condition(setting, keys) for setting in settings]

    def told_apart(*keys: str) -> int:
        return len({repr([of_setting.get(key) for key in keys]) for of_setting in values})

    naming = list[str]()  # the first keys that suffice to tell all groups apart
    for key in differing(values):
        naming += [key] if told_apart(*naming, key) > told_apart(*naming) else []

    def names(text: Callable[[str, Any], str]) -> list[str]:
        return [", ".join(text(key, each[key]) for key in naming if key in each) for each in values]

    short = names(lambda key, value: f"{key.rpartition('/')[2]} {brief(value)}")
    are_told_apart = len({*short}) == told_apart(*naming)  # not so /data/a/train and /data/b/train
    found: dict[str, list[Setting]] = {}
    for setting, name in zip(settings, short if are_told_apart else names("{} {}".format), strict=True):
        found.setdefault(name, []).append(setting)
    return found


def _condition(setting: Setting, keys: Collection[str]) -> dict[str, Any]:
    cell = setting.runs[0].cell
    variant = {"variant": cell["variant"]} if cell.get("variant") else {}
    first = {name: setting.values[name] for key in cell.get("values", {}) if (name := flat_name(key)) in setting.values}
    return variant | first | {key: value for key, value in setting.values.items() if _is_of_condition(key, keys)}


def _is_of_condition(key: str, keys: Collection[str]) -> bool:
    is_of_data = key.partition("/")[0] in ("data", "run") and not _OF_TRAINING.fullmatch(key)
    return is_of_data or any(key == other or key.startswith(f"{other}/") for other in keys)


def differing(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ, in the order of the first mapping that has them."""
    keys = dict.fromkeys(key for mapping in values for key in mapping)
    return [key for key in keys if len({repr(mapping.get(key)) for mapping in values}) > 1]


def differences(values: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The keys in which configurations differ, and their values in each; ``-`` where one has none.

    A phase's keys are compared only among the configurations that have the phase.
    """
    phases = [{_phase_of(key) for key in mapping} for mapping in values]
    rows: dict[str, list[str]] = {}
    for key in differing(values):
        phase = _phase_of(key)
        having = [mapping for mapping, its in zip(values, phases, strict=True) if phase is None or phase in its]
        if len({repr(mapping.get(key)) for mapping in having}) > 1:
            rows[key] = [brief(mapping.get(key, "-")) for mapping in values]
    named = {key: row for key, row in rows.items() if not key.endswith(f"/{PARTS}")}
    return named if len({*zip(*named.values(), strict=True)}) == len({*zip(*rows.values(), strict=True)}) else rows


def labels(method: str, settings: Sequence[Setting]) -> list[str]:
    """A row's name for a method in each of several settings: its name, and what differs."""
    if len(settings) == 1:
        return [method]
    rows = differences([setting.values for setting in settings])
    # the same of two experts, of which one is a copy of the other, is said once
    named = {tuple(f"{key.rpartition('/')[2]} {value}" for value in row): None for key, row in rows.items()}
    by_values = [", ".join(texts) for texts in zip(*named, strict=True)]
    by_name = [setting.name for setting in settings]
    by_folder = [str(setting.runs[0].folder) for setting in settings]
    few = [by_values] if len(named) <= _FEW else []
    texts = next(texts for texts in (*few, by_name, by_folder) if len({*texts}) == len(settings))
    return [f"{method} ({text})" for text in texts]


def brief(value: object) -> str:
    """A value as short text: of a class or a file its name.

    Example:
        >>> brief("fedmoe_pl.data.Dirichlet"), brief("/data/cifar10.npz"), brief(0.5)
        ('Dirichlet', 'cifar10.npz', '0.5')
    """
    text = str(value)
    if re.fullmatch(r"[a-z_][\w.]*\.[A-Z]\w*", text):
        return text.rpartition(".")[2]
    return text.rpartition("/")[2] if text.startswith(("/", "./", "~")) else text


def _phase_of(key: str) -> str | None:
    """The phase that a key belongs to; None for keys of no phase."""
    return key.removeprefix(_PHASES).partition("/")[0] if key.startswith(_PHASES) else None


def phases_behind(method: str, config: Mapping[str, Any]) -> set[str]:
    """The phase of a method, and those that it starts from: all before it if the configuration does not say which."""
    phases = {phase["name"]: phase for phase in phases_of(config)}
    names = [*phases]
    own = [name for name in names if method == name or method.startswith(f"{name} ")]  # "... after aggregation"
    todo, found = [max(own, key=len)] if own else [*names], set[str]()
    while todo:
        name = todo.pop()
        if name in phases and name not in found:
            found.add(name)
            todo += _starts(phases[name], [phases[other] for other in names[: names.index(name)]])
    return found


def _starts(phase: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a phase starts from, as a run finds it; where a class is not known, each phase that it may be."""
    start = phase.get("start")
    if start is not None:
        return [*start.values()] if isinstance(start, dict) else [start]
    algorithm, possible = _algorithm(phase), list[str]()
    if algorithm is not None and not algorithm.parts.needed:
        return [INITIAL]
    for other in reversed(earlier):
        before = _algorithm(other)
        if algorithm is None or before is None:
            possible.append(other["name"])
        elif not algorithm.missing_start([before]):
            possible.append(other["name"])
            break
    return possible


def _algorithm(phase: Mapping[str, Any]) -> Algorithm | None:
    """A phase's algorithm, if it is one of the package that can be made from its configuration alone."""
    given = dict(phase.get("algorithm") or {})
    module, _, name = given.pop("class_path", "").rpartition(".")
    if not module.startswith(algorithms.__name__) or name not in algorithms.__all__:
        return None
    try:
        return getattr(algorithms, name)(**(given.pop("init_args", None) or given))
    except Exception:  # of arguments of any kind
        return None
