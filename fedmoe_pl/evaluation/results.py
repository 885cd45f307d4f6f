"""Accuracies, other metrics and gate weights of the clients' models, and their spread over the clients."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError

if TYPE_CHECKING:
    import pandas

ACCURACIES = ("local_test", "reweighted_test", "global_test", "validation")
"""The accuracies; unless another is named, the first one that clients have is shown and compared."""
MONITORS = (*ACCURACIES, "validation_loss")
LOSS = "loss"
"""The name of the mean loss, a metric of mixtures for data without class labels."""
SPLITS = ("local_test", "global_test", "validation")
"""The sets of samples on which torchmetrics are computed; values have names such as ``local_test_<metric>``."""


class Spread(NamedTuple):
    """The spread of one metric over the clients.

    Attributes:
        mean: unweighted mean over the clients.
        std: population standard deviation over the clients.
        worst_tenth: mean over the worst tenth of the clients (at least one): those with the lowest values, or with the
            highest if lower is better.
    """

    mean: float
    std: float
    worst_tenth: float


@dataclass(frozen=True)
class ClientEvaluation:
    """Accuracies (fractions in [0, 1]) and other metrics of the model that one client would use.

    Accuracies are NaN for data without class labels.

    Attributes:
        client: the client's id.
        n_train: number of the client's training samples.
        local_test: accuracy on the client's held-out samples; NaN if it has none.
        reweighted_test: accuracy per class on the global test set, weighted by the client's class shares; NaN for
            rotated images.
        global_test: accuracy on the global test set.
        validation: accuracy on the client's validation samples (in a phase with opt-out, only those that opt in); NaN
            if there are none.
        gate_weights: weights of the experts, shape (n, experts), on the client's own samples (the held-out ones
            if it has any, else its training samples); None for a model without a trained gate.
        gate_labels: labels of the same samples, shape (n,), -100 for none; None for data without class labels.
        validation_loss: mean loss on the same samples as ``validation``; NaN if there are none.
        has_global_expert: whether all experts except the last one are global.
        metrics: the values of other metrics, such as ``local_test_f1`` on the client's held-out samples; NaN if there
            are none.
        name: the client's name in the data; empty if it has none.
        n_test: number of the client's held-out samples.
    """

    client: int
    n_train: int
    local_test: float
    reweighted_test: float
    global_test: float
    validation: float
    gate_weights: Tensor | None = field(default=None, repr=False)
    gate_labels: Tensor | None = field(default=None, repr=False)
    validation_loss: float = math.nan
    has_global_expert: bool = True
    metrics: dict[str, float] = field(default_factory=dict)
    name: str = ""
    n_test: int = 0

    def value(self, metric: str) -> float:
        """An accuracy, the loss, the mean gate weight, or another metric, by name; NaN if the client lacks it.

        Raises:
            MisconfigurationException: if the model has no such metric.
        """
        if metric not in self.names:
            raise InvalidArgumentError("Evaluation", "metric", metric, f"one of {', '.join(self.names)}")
        return self.metrics[metric] if metric in self.metrics else getattr(self, metric)

    @property
    def names(self) -> list[str]:
        """The names of all values: accuracies, loss, mean gate weight and other metrics."""
        return [*MONITORS, "mean_gate_weight", *self.metrics]

    @property
    def has_values(self) -> bool:
        """Whether the client was evaluated: in a deployed federation, it may have been disconnected."""
        values = (*(getattr(self, metric) for metric in MONITORS), *self.metrics.values())
        return not all(map(math.isnan, values))

    @property
    def mean_gate_weight(self) -> float:
        """Mean of the global experts' total weight over the client's own samples; NaN without such weights."""
        weights = self.global_weights
        return math.nan if weights is None else weights.double().mean().item()

    @property
    def has_weights_of_samples(self) -> bool:
        """Whether ``gate_weights`` are those of single samples; of a deployed federation's client, they are means."""
        return self.gate_weights is not None and len(self.gate_weights) == (self.n_test or self.n_train)

    @property
    def global_weights(self) -> Tensor | None:
        """Total weight of the global experts (all except the last one), shape (n,); None without such weights."""
        if self.gate_weights is None or not self.has_global_expert:
            return None
        return self.gate_weights[:, :-1].sum(dim=1)


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one method on the clients, with all that is needed to identify its values.

    Attributes:
        method: the name of the row: that of the phase, perhaps with the evaluation point.
        round: number of rounds that the phase had completed.
        model: the evaluated model: "global expert", "local expert", "one expert", "mixture", the class of a user's
            module, or "predictor of ..." with the class of an algorithm that predicts in its own way.
        evaluation_point: "after aggregation" or "after local training".
        selection: "last round", "this round" for an earlier one, "best round by ..." with the metric that selected it,
            "given checkpoint", or "fewer epochs".
        clients: one entry per client, in the order of their ids.
        drawn_from: number of clients from which the evaluated ones were drawn; None if all were evaluated.
        lower_is_better: names of the metrics for which lower is better.
        epochs: number of epochs of the phase's only round, if it is also evaluated after fewer epochs; otherwise None.
    """

    method: str
    round: int
    model: str
    evaluation_point: str
    selection: str
    clients: list[ClientEvaluation]
    drawn_from: int | None = None
    lower_is_better: list[str] = field(default_factory=list)
    epochs: int | None = None

    @property
    def step(self) -> int:
        """The position on the x-axis of the method's curves: the round, or the epoch if several are evaluated."""
        return self.round if self.epochs is None else self.epochs

    @property
    def metrics(self) -> list[str]:
        """The names of the accuracies and of the other metrics."""
        return [*ACCURACIES, *(self.clients[0].metrics if self.clients else ())]

    @property
    def rows(self) -> list[dict[str, object]]:
        """The rows of ``clients.csv``, one per client; accuracies and gate weights are fractions."""
        return [
            {
                **{name: getattr(self, name) for name in ("method", "round", "model", "evaluation_point", "selection")},
                "client": client.client,
                **({"name": client.name} if client.name else {}),
                "n_train": client.n_train,
                "n_test": client.n_test,
                **{metric: getattr(client, metric) for metric in ACCURACIES},
                "mean_gate_weight": client.mean_gate_weight,
                **client.metrics,
                **({"validation_loss": client.validation_loss} if client.metrics else {}),
            }
            for client in self.clients
        ]

    def to_pandas(self) -> pandas.DataFrame:
        """The rows of ``clients.csv`` as a data frame; needs pandas.

        ``pandas.concat(each.to_pandas() for each in federation.fit(model, data).values())`` has those of all methods.
        """
        import pandas

        return pandas.DataFrame(self.rows)

    def __repr__(self) -> str:
        spreads = {metric: self.spread(metric).mean for metric in self.metrics if self.values(metric)}
        means = ", ".join(
            f"{metric} {100 * mean:.2f} %" if metric in ACCURACIES else f"{metric} {mean:.4g}"
            for metric, mean in spreads.items()
        )
        return f"Evaluation({self.method}, round {self.round}, {self.evaluated} clients: {means})"

    @property
    def evaluated(self) -> str:
        """How many of the clients were evaluated, in words.

        Example:
            >>> Evaluation("FedAvg", 1, "mixture", "after aggregation", "last round", [], drawn_from=100).evaluated
            '0 of 100'
        """
        asked, number = len(self.clients), sum(client.has_values for client in self.clients)
        if self.drawn_from is None and number == asked:
            return f"all {number}"
        return f"{number} of {asked if self.drawn_from is None else self.drawn_from}"

    def values(self, metric: str, clients: Collection[int] | None = None) -> list[float]:
        """The values of the clients that have the metric; empty if it was not measured.

        Args:
            metric: one of ``ClientEvaluation.names``.
            clients: the clients to count; None for all.
        """
        if not self.clients or metric not in self.clients[0].names:
            return []
        values = (c.value(metric) for c in self.clients if clients is None or c.client in clients)
        return [value for value in values if not math.isnan(value)]

    @property
    def local_test_pooled(self) -> float:
        """The accuracy over the held-out samples of all clients, as PFLlib and FL-bench report it; NaN without any.

        It is the mean of ``local_test`` weighted by the clients' numbers of held-out samples.

        Example:
            >>> nan = float("nan")
            >>> of_one = ClientEvaluation(0, 10, 1.0, nan, nan, nan, n_test=1)
            >>> clients = [of_one, ClientEvaluation(1, 10, 0.5, nan, nan, nan, n_test=4)]
            >>> evaluation = Evaluation("FedAvg", 1, "global expert", "after aggregation", "last round", clients)
            >>> evaluation.spread("local_test").mean, evaluation.local_test_pooled
            (0.75, 0.6)
        """
        tested = [client for client in self.clients if client.n_test and not math.isnan(client.local_test)]
        right = math.fsum(client.n_test * client.local_test for client in tested)
        return right / sum(client.n_test for client in tested) if tested else math.nan

    def spread(self, metric: str, clients: Collection[int] | None = None) -> Spread:
        """Mean, standard deviation and worst tenth over the clients that have the metric.

        Args:
            metric: one of ``ClientEvaluation.names``.
            clients: the clients to count; None for all.

        Raises:
            MisconfigurationException: if the metric was not measured.

        Example:
            >>> nan = float("nan")
            >>> clients = [ClientEvaluation(i, 10, a, nan, a, nan) for i, a in enumerate((0.5, 0.7, 0.9))]
            >>> evaluation = Evaluation("FedAvg", 1, "global expert", "after aggregation", "last round", clients)
            >>> spread = evaluation.spread("local_test")
            >>> round(spread.mean, 3), round(spread.std, 3), spread.worst_tenth
            (0.7, 0.163, 0.5)
        """
        if not self.values(metric, clients):
            measured = [name for client in self.clients[:1] for name in client.names if self.values(name, clients)]
            raise InvalidArgumentError("Evaluation", "metric", metric, f"one of {', '.join(measured)}")
        return self.spread_or_nan(metric, clients)

    def spread_or_nan(self, metric: str, clients: Collection[int] | None = None) -> Spread:
        """Like :meth:`spread`, but all values are NaN if the metric was not measured."""
        values = torch.tensor(self.values(metric, clients), dtype=torch.float64).sort().values
        if not len(values):
            return Spread(math.nan, math.nan, math.nan)
        lowest = values[0]  # subtracted and added back, so that equal accuracies have a deviation of exactly 0
        above = values - lowest
        tenth = math.ceil(len(values) / 10)
        worst = above[-tenth:] if metric in self.lower_is_better else above[:tenth]
        return Spread((lowest + above.mean()).item(), above.std(correction=0).item(), (lowest + worst.mean()).item())


def gate_rows(evaluation: Evaluation, num_classes: int) -> Iterator[dict[str, object]]:
    """One method's rows of ``gate_weights.csv``: the gate's mean weights on each client's own samples of each class.

    A client has one row, for the total weight of the global experts, or if no expert is global, a row per expert.
    """
    for client in evaluation.clients:
        if client.gate_weights is None or client.gate_labels is None:
            continue
        if client.global_weights is not None:
            weights = {"global": client.global_weights}
        else:
            weights = {str(expert): column for expert, column in enumerate(client.gate_weights.unbind(dim=1))}
        for expert, column in weights.items():
            means = _means_by_class(column, client.gate_labels, num_classes).tolist()
            yield {
                "method": evaluation.method,
                "evaluation_point": evaluation.evaluation_point,
                "client": client.client,
                **({"name": client.name} if client.name else {}),
                "expert": expert,
                **{f"class_{label}": mean for label, mean in enumerate(means)},
            }


def _means_by_class(weights: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Mean of the weights (n,) of each class's samples, shape (num_classes,); NaN for classes without a sample."""
    labels, weights = labels.cpu(), weights.detach().cpu().double()
    labels, weights = labels[labels >= 0], weights[labels >= 0]  # training samples may have none
    sums = torch.zeros(num_classes, dtype=torch.float64).index_add(0, labels, weights)
    return sums / torch.bincount(labels, minlength=num_classes)  # 0 / 0 is NaN


def expert_usage(evaluation: Evaluation) -> Tensor:
    """The share of each client's own samples for which each expert has the largest weight, shape (clients, experts)."""
    weights = [client.gate_weights for client in evaluation.clients]
    most = max(client_weights.shape[1] for client_weights in weights if client_weights is not None)
    shares = torch.full((len(weights), most), math.nan, dtype=torch.float64)
    for row, client_weights in zip(shares, weights, strict=True):
        if client_weights is not None:
            samples, experts = client_weights.shape
            row[:experts] = client_weights.argmax(dim=1).bincount(minlength=experts).double() / samples
    return shares
