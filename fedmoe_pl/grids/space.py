"""The values that a key may have in a search, as a distribution of Optuna."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from fedmoe_pl.checks import InvalidArgumentError, is_finite, reason_of
from fedmoe_pl.grids.grid import SEED, value_name

_ALLOWED = "{low: 1, high: 5}, perhaps with log: true or a step, or {choices: [...]}"


def distribution_of(key: str, entry: Any) -> BaseDistribution:
    """The distribution that an entry of ``space`` says, such as ``{low: 0.01, high: 1.0, log: true}``.

    Example:
        >>> distribution_of("trainer.max_epochs", {"low": 1, "high": 9, "step": 2})
        IntDistribution(high=9, log=False, low=1, step=2)
        >>> distribution_of("model.init_args.gate", {"choices": ["LinearGate", {"class_path": "FeatureGate"}]})
        CategoricalDistribution(choices=('LinearGate', 'FeatureGate'))
    """
    argument = f"space.{key}"
    if key == SEED:
        raise InvalidArgumentError("tune", argument, entry, "left out", "the best one of some seeds is luck")
    if isinstance(entry, Mapping) and {*entry} == {"choices"} and isinstance(entry["choices"], list):
        names = [_name(choice) for choice in entry["choices"]]
        if not names or any(str(one) == str(other) or one == other for one, other in combinations(names, 2)):
            because = "1, 1.0 and true are one to Optuna" if names else ""
            argument, allowed = f"{argument}.choices", "a list that has every value once"
            raise InvalidArgumentError("tune", argument, names, allowed, because)
        return CategoricalDistribution(names)
    if not isinstance(entry, Mapping) or not {"low", "high"} <= {*entry} <= {"low", "high", "log", "step"}:
        raise InvalidArgumentError("tune", argument, entry, _ALLOWED)
    numbers = {name: entry[name] for name in ("low", "high", "step") if name in entry}
    for name, number in numbers.items():
        if not is_finite(number):
            raise InvalidArgumentError("tune", f"{argument}.{name}", number, "a finite number")
    if not isinstance(entry.get("log", False), bool):
        raise InvalidArgumentError("tune", f"{argument}.log", entry["log"], "true or false")
    kind = IntDistribution if all(isinstance(number, int) for number in numbers.values()) else FloatDistribution
    try:
        return kind(**entry)
    except ValueError as error:
        raise InvalidArgumentError("tune", argument, dict(entry), "a range", reason_of(error)) from error


def _name(choice: Any) -> Any:
    """A choice as Optuna stores it: numbers and words themselves, and the name of a class."""
    return choice if choice is None or isinstance(choice, bool | int | float | str) else value_name(choice)


def value_of(entry: Mapping[str, Any], drawn: Any) -> Any:
    """The value in the configuration that a drawn one stands for."""
    return next((choice for choice in entry.get("choices", []) if _name(choice) == drawn), drawn)


def ends_of(space: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a few combinations in which each choice, and both ends of each range, are once.

    Example:
        >>> [*ends_of({"lr": {"low": 0.1, "high": 1.0}, "gate": {"choices": ["A", "B", "C"]}})]
        [{'lr': 0.1, 'gate': 'A'}, {'lr': 1.0, 'gate': 'B'}, {'lr': 0.1, 'gate': 'C'}]
    """
    lists = [entry.get("choices") or [entry["low"], entry["high"]] for entry in space.values()]
    for index in range(max(map(len, lists))):
        yield {key: values[index % len(values)] for key, values in zip(space, lists, strict=True)}
