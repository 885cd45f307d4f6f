"""In which runs a method is the same, although other methods of these runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedmoe_pl import algorithms
from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.phases.phase import INITIAL
from fedmoe_pl.report.runs import RunFiles
from fedmoe_pl.report.settings import Setting, phase_and_key


def settings_of_method(method: str, settings: Sequence[Setting]) -> list[Setting]:
    """Joins the settings that differ only in what has no influence on a method: the phases that it does not start from.

    Args:
        method: the method, which all settings have.
        settings: settings of the same condition.

    Returns:
        The settings with the values that the method depends on, in order. If several runs of one have the same seed,
        the last one that has the method's result is taken; without any, the last.
    """
    found: dict[str, tuple[Mapping[str, Any], dict[Any, RunFiles]]] = {}
    for setting in settings:
        needed = _phases_behind(method, setting.runs[0].config)
        values = {key: value for key, value in setting.values.items() if _is_of(needed, key)}
        _, by_seed = found.setdefault(repr(sorted(values.items())), (values, {}))
        for run in setting.runs:
            if run.seeds not in by_seed or _has_result(method, run) or not _has_result(method, by_seed[run.seeds]):
                by_seed[run.seeds] = run
    return [Setting([runs[seed] for seed in sorted(runs, key=repr)], values) for values, runs in found.values()]


def _has_result(method: str, run: RunFiles) -> bool:
    return any(row["method"] == method for row in run.summary)


def _is_of(phases: set[str], key: str) -> bool:
    of_phase = phase_and_key(key)
    return of_phase is None or of_phase[0] in phases


def _phases_behind(method: str, config: Mapping[str, Any]) -> set[str]:
    """The phase of a method, and those that it starts from: all before it if the configuration does not say which."""
    phases = {phase["name"]: phase for phase in config.get("federation", {}).get("phases", [])}
    names = [*phases]
    own = [name for name in names if method == name or method.startswith(f"{name} ")]  # "... after aggregation"
    todo, found = [max(own, key=len)] if own else names, set[str]()
    while todo:
        name = todo.pop()
        if name in phases and name not in found:
            found.add(name)
            todo += _starts(phases[name], names[: names.index(name)])
    return found


def _starts(phase: Mapping[str, Any], earlier: list[str]) -> list[str]:
    start = phase.get("start")
    if start is not None:
        return [*start.values()] if isinstance(start, dict) else [start]
    module, _, name = phase.get("algorithm", {}).get("class_path", "").rpartition(".")
    kind = getattr(algorithms, name, None) if module == algorithms.__name__ else None
    return [INITIAL] if kind is not None and kind.follows is Algorithm.follows else earlier
