"""Windows of time series: which steps they have, and that none of a later period is in training."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.data import refusal_of, refused_argument, set_up
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.data import IID, SyntheticTimeSeries, TimeSeriesDataModule, TimeSeriesFile
from fedmoe_pl.data.partitioners.given import AllToOne


class Given(TimeSeriesDataModule):
    """Series of a test."""

    def __init__(self, of_clients: Mapping[Any, np.ndarray | Sequence[np.ndarray]], **kwargs):
        super().__init__(**{"context_length": 3, "prediction_length": 2, "standardize": False} | kwargs)
        self.of_clients = of_clients

    def series(self):
        return self.of_clients


def counted(steps: int, first: int = 0) -> np.ndarray:
    """A series whose value is the number of its step."""
    return np.arange(first, first + steps, dtype=float)


def windows(data: TimeSeriesDataModule, samples: torch.Tensor) -> list[tuple[list[float], list[float]]]:
    return [(data.x[i, :, 0].tolist(), data.y[i].tolist()) for i in samples.tolist()]


def steps_of(data: TimeSeriesDataModule, samples: torch.Tensor) -> tuple[set[float], set[float]]:
    """The steps in the inputs and in the targets of some windows of counted series."""
    return {*data.x[samples].flatten().tolist()}, {*data.y[samples].flatten().tolist()}


SHAPES = {
    "steps": st.integers(5, 80),
    "context_length": st.integers(1, 12),
    "prediction_length": st.integers(1, 6),
    "stride": st.integers(1, 9),
    "test_fraction": st.sampled_from([0.1, 0.2, 0.33, 0.5]),
    "validation_fraction": st.sampled_from([0.0, 0.1, 0.25]),
}


@given(st.fixed_dictionaries(SHAPES))
@settings(max_examples=60, deadline=None)
def test_every_window_that_fits_is_there_once_and_none_has_a_step_of_a_later_period(arguments):
    try:
        data = set_up(Given({"a": counted(steps := arguments.pop("steps"))}, **arguments))
    except MisconfigurationException:  # which is tested below
        assume(False)
        raise
    context, horizon = arguments["context_length"], arguments["prediction_length"]
    begin_test = steps - round(steps * arguments["test_fraction"])
    begin_validation = begin_test - round(steps * arguments["validation_fraction"])
    parts = {(0, begin_validation): data.train_samples[0], (begin_test, steps): data.test_samples[0]}
    if arguments["validation_fraction"]:
        parts[begin_validation, begin_test] = data.validation_samples[0]
    for (begin, end), samples in parts.items():
        expected, target = [], max(begin, context)
        while target + horizon <= end:
            inputs, targets = range(target - context, target), range(target, target + horizon)
            expected.append(([float(step) for step in inputs], [float(step) for step in targets]))
            target += arguments["stride"]
        assert windows(data, samples) == expected
        of_inputs, of_targets = steps_of(data, samples)
        assert of_targets <= {*range(begin, end)} and max(of_inputs, default=0) < end
    assert data.global_test.tolist() == sorted(data.test_samples[0].tolist())


def test_a_window_of_every_period_by_hand():
    data = set_up(Given({"a": counted(20)}, stride=2, test_fraction=0.2, validation_fraction=0.25))
    assert windows(data, data.train_samples[0]) == [
        ([0, 1, 2], [3, 4]),
        ([2, 3, 4], [5, 6]),
        ([4, 5, 6], [7, 8]),
        ([6, 7, 8], [9, 10]),
    ]
    assert windows(data, data.validation_samples[0]) == [([8, 9, 10], [11, 12]), ([10, 11, 12], [13, 14])]
    assert windows(data, data.test_samples[0]) == [([13, 14, 15], [16, 17]), ([15, 16, 17], [18, 19])]


def noisy(steps: int, variables: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(5, 3, (steps, variables))


def of_part(data: TimeSeriesDataModule, parts) -> tuple[torch.Tensor, torch.Tensor]:
    return data.x[parts.indices], data.y[parts.indices]


@pytest.mark.parametrize("begin", [60, 80])  # of the validation and of the test period
def test_values_of_a_later_period_change_nothing_earlier(begin):
    arguments: dict[str, Any] = {"test_fraction": 0.2, "validation_fraction": 0.2, "standardize": True}
    series = {"a": noisy(100, 2, 0), "b": noisy(100, 2, 1)}
    changed = {name: np.where(np.arange(100)[:, None] < begin, values, 1e3) for name, values in series.items()}
    one, other = (set_up(Given(each, **arguments)) for each in (series, changed))
    same = [one.train_samples, *([one.validation_samples] if begin == 80 else [])]
    for parts in same:
        for before, after in zip(of_part(one, parts), of_part(other, parts), strict=True):
            assert torch.equal(before, after)
    assert not torch.equal(of_part(one, one.test_samples)[1], of_part(other, one.test_samples)[1])
    assert all((one.scales[name] == other.scales[name]).all() for name in series)


def test_each_client_is_standardized_by_its_own_training_steps():
    series = {"a": [noisy(50, 2, 0), noisy(30, 2, 1)], "b": noisy(40, 2, 2) * 100}
    data = set_up(Given(series, standardize=True, test_fraction=0.2, validation_fraction=0.1))
    of_training = {"a": np.concatenate([series["a"][0][:35], series["a"][1][:21]]), "b": series["b"][:28]}
    for client, (name, values) in enumerate(of_training.items()):
        mean, std = torch.tensor(values).mean(0), torch.tensor(values).std(0, correction=0)
        assert data.scales[name] == pytest.approx(np.stack([mean, std]))
        last = torch.as_tensor(series[name][-1] if name == "a" else series[name])[-5:]  # of the last test window
        window = data.x[data.test_samples[client][-1]], data.y[data.test_samples[client][-1]]
        torch.testing.assert_close(window[0], ((last[:3] - mean) / std).float())
        torch.testing.assert_close(window[1], ((last[3:, 0] - mean[0]) / std[0]).float())


def test_a_variable_that_does_not_change_becomes_0():
    for value in (7.0, 0.1):  # whose mean over 30 steps is not 0.1
        data = set_up(Given({"a": np.full(30, value)}, standardize=True))
        assert data.x.abs().max() < 1e-12 and data.y.abs().max() < 1e-12


def test_a_client_may_have_several_series_of_different_lengths_and_no_window_has_two():
    data = set_up(Given({"b": [counted(20), counted(30, 100)], "a": counted(25, 1000)}))
    assert [*data.client_names] == ["a", "b"]
    lengths = [(25, 1000)], [(20, 0), (30, 100)]
    for client, series in enumerate(lengths):
        for part, counts in (
            (data.train_samples, [steps - round(steps * 0.2) - 4 for steps, _ in series]),
            (data.test_samples, [round(steps * 0.2) - 1 for steps, _ in series]),
        ):
            assert len(part[client]) == sum(counts)
            for inputs, targets in windows(data, part[client]):
                assert np.diff([*inputs, *targets]).tolist() == [1] * 4
                assert any(first <= inputs[0] and targets[-1] < first + steps for steps, first in series)


def test_a_file_has_the_series_of_each_client_under_its_name(tmp_path):
    hourly, weekly = noisy(40, 2, 0), np.stack([noisy(30, 2, 1), noisy(30, 2, 2)])
    np.savez(tmp_path / "series.npz", north=hourly, south=weekly)
    data = set_up(TimeSeriesFile(str(tmp_path / "series.npz"), context_length=3, prediction_length=2))
    expected = set_up(Given({"north": hourly, "south": [*weekly]}, standardize=True))
    assert [*data.client_names] == ["north", "south"]
    assert torch.equal(data.x, expected.x) and torch.equal(data.y, expected.y)


def test_windows_keep_their_periods_with_any_partitioner():
    everyone = set_up(Given({"a": counted(60), "b": counted(60)}, num_clients=3, partitioner=IID()))
    assert max(steps_of(everyone, everyone.train_samples.indices)[1]) < 48
    assert min(steps_of(everyone, everyone.test_samples.indices)[1]) >= 48
    alone = set_up(Given({"a": counted(60)}, partitioner=AllToOne(2)))
    assert alone.train_samples.sizes.tolist() == [0, 0, 44] and alone.test_samples.sizes.tolist() == [0, 0, 11]


def test_synthetic_series_of_a_client_do_not_depend_on_the_others():
    few, many = SyntheticTimeSeries(num_clients=3).series(), SyntheticTimeSeries(num_clients=5).series()
    assert all((few[client] == many[client]).all() for client in few)
    assert len({tuple(series) for series in many.values()}) == 5 and {len(series) for series in many.values()} == {400}


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("context_length", lambda: Given({"a": counted(20)}, context_length=0)),
        ("prediction_length", lambda: Given({"a": counted(20)}, prediction_length=0)),
        ("stride", lambda: Given({"a": counted(20)}, stride=0)),
        ("test_fraction", lambda: Given({"a": counted(20)}, test_fraction=0.0)),
        ("test_fraction", lambda: Given({"a": counted(20)}, test_fraction=1.0)),
        ("validation_fraction", lambda: Given({"a": counted(20)}, validation_fraction=0.8)),
        ("validation_fraction", lambda: Given({"a": counted(20)}, validation_fraction=0.01)),
        ("series", lambda: Given({})),
        ("series", lambda: Given({"a": noisy(20, 1, 0), "b": noisy(20, 2, 0)})),
        ("a series of client 'a'", lambda: Given({"a": np.full(20, np.nan)})),
        ("a series of client 'a'", lambda: Given({"a": np.array(["1"] * 20)})),
        ("a series of client 'a'", lambda: Given({"a": np.zeros((20, 0))})),
        ("a series of client 'a'", lambda: Given({"a": np.zeros((1, 20, 2, 2))})),
        ("num_clients", lambda: Given({"a": counted(12)}, partitioner=IID(), num_clients=6)),
        ("num_clients", lambda: Given({"a": counted(20)}, num_clients=2)),
    ],
)
def test_what_gives_no_windows_is_refused(argument, make):
    assert refused_argument(make) == argument


@pytest.mark.parametrize(
    ("argument", "value", "reason"),
    [
        ("context_length", 15, "the training period of client 'a' has 16 steps, and a window 17"),
        ("test_fraction", 0.05, "these are 1 of 20 steps of client 'a', fewer than prediction_length"),
    ],
)
def test_refusals_say_what_is_too_short(argument, value, reason):
    refusal = refusal_of(lambda: Given({"a": counted(20)}, **{argument: value}))
    assert refusal.argument == argument and reason in str(refusal)
