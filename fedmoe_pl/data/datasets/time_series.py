"""Time series, whose windows are samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_number
from fedmoe_pl.data.arrays import Arrays, read_npz
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.data.datamodule import FederatedDataModule

_PERIODS = ("training", "validation", "test")
_REGIME = 40  # mean number of steps of a synthetic regime


class TimeSeriesDataModule(FederatedDataModule):
    """Windows of time series, of which each client has one or several; derive from it and write ``series``.

    A sample is a window of one series. Its inputs are ``context_length`` steps of all variables, shape
    (context_length, variables), and its targets the first variable in the next ``prediction_length`` steps, shape
    (prediction_length,); the two names are those of GluonTS.

    Each series is cut by time into three periods, for training, validation and test. A window belongs to the period
    that has all of its targets. Inputs of validation and test windows may reach back into earlier periods, which are
    known when the forecast is made; those of training windows are in the training period, so that nothing of a later
    one is seen in training. Windows whose targets are in two periods are left out.

    Args:
        context_length: number of steps that a forecast is made from.
        prediction_length: number of steps to forecast.
        stride: steps between the beginnings of two windows of a period.
        test_fraction: share of the steps of each series, its last ones, that are its test period, in (0, 1). The test
            windows of all clients are the global test set.
        validation_fraction: share of the steps of each series, those before its test period, that are its validation
            period, in [0, 1).
        standardize: whether the mean of each variable of a client is subtracted and the result divided by the standard
            deviation, both over the training periods of the client's own series.
        **kwargs: arguments of ``FederatedDataModule``.

    Attributes:
        scales: mean and standard deviation of each client's variables, shape (2, variables), by its key in ``series``;
            0 and 1 without ``standardize``.
        owners: the client in ``series`` that each window is of, as the place of its key, int64, shape (n,). With
            another partitioner than ``NaturalIds``, a client of the federation may hold windows of several.
    """

    scales: dict[Any, np.ndarray]
    owners: np.ndarray
    _periods: np.ndarray  # of each window, an index of _PERIODS

    def __init__(
        self,
        context_length: int = 24,
        prediction_length: int = 6,
        stride: int = 1,
        test_fraction: float = 0.2,
        validation_fraction: float = 0.0,
        standardize: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            test_fraction=test_fraction,
            validation_fraction=validation_fraction,
            stratify=False,
            pool=True,  # the windows of all periods go to the client together
            rotations=None,
            **kwargs,
        )
        check_at_least(self, "context_length", context_length, 1)
        check_at_least(self, "prediction_length", prediction_length, 1)
        check_at_least(self, "stride", stride, 1)
        check_number(self, "test_fraction", test_fraction, above=0, below=1)
        self.context_length = context_length
        self.prediction_length = prediction_length
        self.stride = stride
        self.standardize = standardize

    @abstractmethod
    def series(self) -> Mapping[Any, np.ndarray | Sequence[np.ndarray]]:
        """Returns each client's series, by its name or number.

        A series has shape (steps,) or (steps, variables), with as many variables as all others; a list of series or an
        array of shape (series, steps, variables) is several. Their lengths may differ.
        """

    def load(self) -> Arrays:
        """Reads the series and cuts them into windows."""
        of_clients = {client: self._checked(client, series) for client, series in self.series().items()}
        self._check_widths(of_clients)
        windows, periods, owners, self.scales = [], [], [], {}
        for place, (client, all_series) in enumerate(of_clients.items()):
            starts = [self._starts(client, len(series)) for series in all_series]
            mean, std = self.scales[client] = self._scale(all_series)
            for series, by_period in zip(all_series, starts, strict=True):
                every = sliding_window_view((series - mean) / std, self._window, axis=0)  # (starts, variables, steps)
                windows.append(every[np.concatenate(by_period)].astype(np.float32))
                periods.append(np.repeat(np.arange(len(_PERIODS)), [len(each) for each in by_period]))
                owners.append(np.full(len(periods[-1]), place))
        self._periods, self.owners = np.concatenate(periods), np.concatenate(owners)
        together = torch.from_numpy(np.concatenate(windows)).transpose(1, 2)
        x, y = together[:, : self.context_length].contiguous(), together[:, self.context_length :, 0].contiguous()
        return Arrays(x, y, x[:0], y[:0], np.array([*of_clients])[self.owners])

    def split_clients(
        self, samples: np.ndarray, sizes: np.ndarray, labels: np.ndarray | None
    ) -> tuple[ClientSamples, ClientSamples, ClientSamples]:
        """Splits every client's windows by their periods."""
        clients, periods = np.repeat(np.arange(len(sizes)), sizes), self._periods[samples]
        train, validation, test = (
            ClientSamples(
                torch.from_numpy(samples[periods == period]),
                torch.from_numpy(np.bincount(clients[periods == period], minlength=len(sizes))),
            )
            for period in range(len(_PERIODS))
        )
        if len(without := np.flatnonzero((train.sizes.numpy() == 0) & (sizes > 0))):
            because = f"client {without[0]} gets no training windows"
            raise InvalidArgumentError(self, "num_clients", self.requested_clients, "lower", because)
        return train, validation, test

    @property
    def _window(self) -> int:
        """Number of steps of a window."""
        return self.context_length + self.prediction_length

    def _checked(self, client: Any, given: np.ndarray | Sequence[np.ndarray]) -> list[np.ndarray]:
        """The series of a client, each of shape (steps, variables)."""
        several = [*given] if isinstance(given, (list, tuple)) or np.ndim(given) == 3 else [given]
        checked = []
        for series in map(np.asarray, several):
            name = f"a series of client {client!r}"
            if series.dtype.kind not in "iuf" or series.ndim not in (1, 2) or not series.size:
                allowed, because = "numbers of shape (steps,) or (steps, variables)", f"its shape is {series.shape}"
                raise InvalidArgumentError(self, name, f"{series.dtype} values", allowed, because)
            series = series.astype(np.float64).reshape(len(series), -1)
            if len(wrong := np.flatnonzero(~np.isfinite(series).all(axis=1))):
                because = f"step {wrong[0]} is not; fill in what is missing, or cut it off"
                raise InvalidArgumentError(self, name, series, "finite", because)
            checked.append(series)
        return checked

    def _check_widths(self, of_clients: Mapping[Any, Sequence[np.ndarray]]) -> None:
        """Refuses series of different numbers of variables, and none."""
        widths = {series.shape[1]: client for client, all_series in of_clients.items() for series in all_series}
        if len(widths) != 1:
            found = [f"client {client!r} has {width}" for width, client in widths.items()]
            because = " and ".join(found[:2]) or "there are none"
            raise InvalidArgumentError(self, "series", [*of_clients], "of clients with equally many variables", because)

    def _ends(self, steps: int) -> list[int]:
        """The steps at which the three periods of a series end."""
        test, validation = round(steps * self.test_fraction), round(steps * self.validation_fraction)
        return [steps - test - validation, steps - test, steps]

    def _starts(self, client: Any, steps: int) -> list[np.ndarray]:
        """The first steps of the windows of the three periods of a series."""
        training, validation, test = ends = self._ends(steps)
        if training < self._window:
            because = f"the training period of client {client!r} has {training} steps, and a window {self._window}"
            raise InvalidArgumentError(self, "context_length", self.context_length, "lower", because)
        for name, length in (("validation_fraction", validation - training), ("test_fraction", test - validation)):
            if (fraction := getattr(self, name)) and length < self.prediction_length:
                because = f"these are {length} of {steps} steps of client {client!r}, fewer than prediction_length"
                raise InvalidArgumentError(self, name, fraction, "higher", because)
        targets = zip([self.context_length, *ends[:-1]], ends, strict=True)
        return [
            np.arange(first, end - self.prediction_length + 1, self.stride) - self.context_length
            for first, end in targets
        ]

    def _scale(self, all_series: Sequence[np.ndarray]) -> np.ndarray:
        """Mean and standard deviation over the training steps of a client, shape (2, variables)."""
        training = np.concatenate([series[: self._ends(len(series))[0]] for series in all_series])
        if not self.standardize:
            return np.stack([np.zeros(training.shape[1]), np.ones(training.shape[1])])
        std = training.std(axis=0)
        return np.stack([training.mean(axis=0), np.where(np.ptp(training, axis=0) > 0, std, 1.0)])


class TimeSeriesFile(TimeSeriesDataModule):
    """A user's own time series in an .npz file, which has the series of each client under the client's name.

    They are arrays of shape (steps,) or (steps, variables), or several of equal length, (series, steps, variables).

    Args:
        path: the file.
        **kwargs: arguments of ``TimeSeriesDataModule``.
    """

    def __init__(self, path: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path = path

    def series(self) -> dict[str, np.ndarray]:
        """Reads the file."""
        return read_npz(self, "path", self.path)


class SyntheticTimeSeries(TimeSeriesDataModule):
    """Oscillations that change between two regimes, a slow one and a fast one.

    Each client has its own periods, 20 to 30 and 6 to 9 steps, level, unit and share of slow steps. A regime lasts 40
    steps on average. What the next steps are thus depends on the regime, which the last steps tell, and on the client.

    Args:
        num_clients: number of clients, each with one series of one variable.
        num_steps: number of steps of each series.
        noise: standard deviation of the noise, where oscillations go from -1 to 1.
        **kwargs: arguments of ``TimeSeriesDataModule``.
    """

    def __init__(self, num_clients: int = 10, num_steps: int = 400, noise: float = 0.1, **kwargs: Any) -> None:
        super().__init__(num_clients=num_clients, **kwargs)
        check_at_least(self, "num_steps", num_steps, 1)
        check_number(self, "noise", noise, least=0)
        self.num_steps = num_steps
        self.noise = noise

    def series(self) -> dict[int, np.ndarray]:
        """Makes the series, the same in every call; a client's do not depend on the number of clients."""
        return {client: self._made(np.random.default_rng(client)) for client in range(self.requested_clients or 0)}

    def _made(self, rng: np.random.Generator) -> np.ndarray:
        """A series of shape (steps,)."""
        periods, share = rng.uniform([20, 6], [30, 9]), rng.uniform(0.2, 0.8)  # of slow steps
        means = _REGIME * 2 * np.array([share, 1 - share])  # steps of a slow and of a fast regime
        lengths = rng.geometric(1 / means, (self.num_steps, 2)).ravel()  # far more than the series has
        fast = np.repeat(np.arange(len(lengths)) % 2, lengths)[: self.num_steps]
        phase = rng.uniform(0, 2 * np.pi) + np.cumsum(2 * np.pi / periods[fast])
        level, unit = rng.uniform(-10, 10), rng.uniform(1, 5)
        return level + unit * (np.sin(phase) + self.noise * rng.standard_normal(self.num_steps))
