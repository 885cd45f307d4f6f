"""What attackers and private noise do to FedAvg's model, and to the mixtures that clients build on it.

    python benchmarks/robustness.py attacks --data fashion_mnist.npz
    python benchmarks/robustness.py privacy --data fashion_mnist.npz

PFL-MoE on the images of an ``NpzFile``: FedAvg of a perceptron, then PFL-FT, equal weights, PFL-MF and PFL-MFE. The
table has the accuracy of the honest clients in percent: reweighted test (per class, weighted by the client's class
shares) and global test, each as mean and sample standard deviation over ``--seeds``, which also draw the partition.

* ``attacks``: ``--clients`` with Dirichlet 0.5, a fifth of them attackers, under each attack and each aggregation.
  Attackers by ``labels`` train FedAvg with the label 9 - y; all other attackers train honestly and send the attack.
* ``privacy``: all of ``--clients`` train in every round; the noise multipliers are ``--noise``.
* ``local``: clients train alone, as many epochs as there are rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from workload import stacked_federation

from fedmoe_pl import PersonalizedMoE, Phase, Train
from fedmoe_pl.aggregation import (
    Aggregation,
    ALittleIsEnough,
    Attack,
    DifferentialPrivacy,
    InnerProductManipulation,
    MultiKrum,
    RobustAggregation,
    TrimmedMean,
    UnderAttack,
)
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local, PFLMoE
from fedmoe_pl.data import Arrays, Dirichlet, NpzFile
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.models import EqualWeights, FeatureGate, GlobalOnly, LinearGate, LocalOnly, SmallMLP

LABELS = "labels"
METRICS = ("reweighted_test", "global_test")
ATTACKS: dict[str, Attack | str | None] = {
    "none": None,
    "IPM, scale 5": InnerProductManipulation(5.0),
    "ALIE, scale 1.5": ALittleIsEnough(1.5),
    LABELS: LABELS,
}
ADAM = partial(torch.optim.Adam, lr=0.001)


class Images(NpzFile):
    """The first images of a file; the training samples of some clients have the label ``C - 1 - y``."""

    def __init__(self, path: str, train: int, flipped: range, **kwargs: object) -> None:
        super().__init__(path, **kwargs)  # pyright: ignore[reportArgumentType]
        self.train = train
        self.flipped = flipped

    def load(self) -> Arrays:
        """The first ``train`` training images, and the first 1,000 test images."""
        arrays, n = super().load(), 1000
        return replace(
            arrays,
            x_train=arrays.x_train[: self.train],
            y_train=arrays.y_train[: self.train],
            x_test=arrays.x_test[:n],
            y_test=arrays.y_test[:n],
        )

    def setup(self, stage: str | None = None) -> None:
        """Flips the labels once the clients have their samples."""
        super().setup(stage)
        self.y = self.y.clone()
        for client in self.flipped:
            samples = self.train_samples[client]
            self.y[samples] = self.num_classes - 1 - self.y[samples]


def pfl_moe(rounds: int, aggregation: Aggregation | None) -> list[Phase]:
    """PFL-MoE on a federated phase with this aggregation."""
    fedavg = FedAvg("global_expert.*", weighting="uniform")
    return [
        Phase("FedAvg", fedavg, rounds, gate=GlobalOnly(), aggregation=aggregation),
        Phase("PFL-FT", FineTuning(gate_fraction=0.25), gate=LocalOnly(), train=Train(max_epochs=5)),
        Phase("equal weights", PFLMoE(), gate=EqualWeights(), train=Train(max_epochs=0)),
        Phase("PFL-MF", PFLMoE(), gate=LinearGate(), train=Train(max_epochs=5, optimizer=ADAM)),
        Phase("PFL-MFE", PFLMoE(), gate=FeatureGate(), train=Train(max_epochs=5, optimizer=ADAM)),
    ]


def evaluations(arguments: argparse.Namespace, phases: list[Phase], flipped: range = range(0)) -> dict[str, Evaluation]:
    """Trains and evaluates the phases.

    Args:
        arguments: those of the command line.
        phases: what is trained.
        flipped: the clients with flipped labels.
    """
    torch.manual_seed(arguments.seed)
    optimizer = partial(torch.optim.SGD, lr=arguments.lr, momentum=0.5)
    model = PersonalizedMoE(SmallMLP(784, arguments.width), optimizer=optimizer)
    given = {"num_clients": arguments.clients, "partitioner": Dirichlet(0.5), "batch_size": arguments.batch_size}
    data = Images(arguments.data, arguments.train, flipped, mean=(0.286,), std=(0.353,), **given)
    with tempfile.TemporaryDirectory() as folder:
        return stacked_federation(phases, arguments.seed, folder).fit(model, data)


def defenses(attackers: int) -> dict[str, RobustAggregation | None]:
    """The aggregations that are compared."""
    return {
        "mean": None,
        "trimmed mean": TrimmedMean(attackers),
        "Multi-Krum": MultiKrum(attackers),
    }


def rows_of_attacks(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Evaluation], int]]:
    """Yields the name, the evaluations and the number of attackers of every row."""
    attackers = arguments.clients // 5
    for attack_name, attack in ATTACKS.items():
        for name, defense in defenses(attackers).items():
            flipped = range(attackers if attack == LABELS else 0)
            attacked = UnderAttack(attack, range(attackers), defense) if isinstance(attack, Attack) else defense
            results = evaluations(arguments, pfl_moe(arguments.rounds, attacked), flipped)
            yield f"{attack_name} | {name}", results, attackers


def rows_of_privacy(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Evaluation], int]]:
    """The same for noise multipliers."""
    delta = 1 / (10 * arguments.clients)
    yield "FedAvg", evaluations(arguments, pfl_moe(arguments.rounds, None)), 0
    for noise in (0.0, *arguments.noise):
        private = DifferentialPrivacy(noise, arguments.max_norm, delta)
        epsilon = private.epsilon([[1.0, noise, arguments.rounds]])
        yield f"z = {noise:g}, epsilon {epsilon:.1f}", evaluations(arguments, pfl_moe(arguments.rounds, private)), 0


def rows_of_local(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Evaluation], int]]:
    """The rows of training alone: the clients that ``attacks`` calls honest, and all clients."""
    results = evaluations(
        arguments, [Phase("Local", Local(), gate=LocalOnly(), train=Train(max_epochs=arguments.rounds))]
    )
    yield "honest clients", results, arguments.clients // 5
    yield "all clients", results, 0


def spread(of_seeds: list[Evaluation], metric: str, attackers: int) -> str:
    """Mean and, of several seeds, standard deviation of the honest clients' mean accuracy, in percent."""
    means = []
    for evaluation in of_seeds:
        honest = [client for client in evaluation.clients if client.client >= attackers]
        means.append(100 * statistics.mean(getattr(client, metric) for client in honest))
    deviation = f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else ""
    return f"{statistics.mean(means):.2f}{deviation}"


ROWS = {"attacks": rows_of_attacks, "privacy": rows_of_privacy, "local": rows_of_local}


def main() -> None:
    """Prints a row of Markdown for every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=ROWS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--train", type=int, default=6000, help="number of training images of all clients")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--noise", type=float, nargs="+", default=[2.0, 8.0, 32.0])
    parser.add_argument("--seeds", type=int, default=1, help="number of runs of every row")
    arguments = parser.parse_args()
    start = time.process_time()
    of_seeds = [argparse.Namespace(**vars(arguments), seed=seed) for seed in range(arguments.seeds)]
    for rows in zip(*(ROWS[arguments.what](of_seed) for of_seed in of_seeds), strict=True):
        name, _, attackers = rows[0]
        cells = []
        for method in rows[0][1]:
            of_method = [results[method] for _, results, _ in rows]
            cells.append(f"{method}: " + " / ".join(spread(of_method, metric, attackers) for metric in METRICS))
        print(f"| {name} | {' | '.join(cells)} | {time.process_time() - start:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
