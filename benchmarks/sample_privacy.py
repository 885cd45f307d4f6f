"""What the privacy of single samples (``Phase.sample_privacy``) costs in accuracy: FedAvg's model, and what follows it.

    python benchmarks/sample_privacy.py --data fashion_mnist.npz --epsilon 1 3 8 --seeds 0 1 2
    python benchmarks/sample_privacy.py --data femnist.npz --writers --delta 1e-3 --epsilon 1 3 8 --seeds 0 1 2

A perceptron on the images of an ``NpzFile``, by Dirichlet 0.5 or by writer: FedAvg, the label prior, PFL-FB, equal
weights and PFL-MF. Every row has the accuracy of all clients in percent, as mean and sample standard deviation over the
seeds: reweighted test (per class, weighted by the client's class shares), and the test set of all clients.

* ``none``: no privacy.
* ``shared``: FedAvg is private, with the epsilon of the row after all of its rounds; what follows trains parts that
  stay with their clients, and is not protected.
* ``all``: FedAvg, PFL-FB and PFL-MF are private, with shares of the epsilon such that all together cost the row's. The
  label prior reads the labels themselves, so that it has no such row.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial

import torch
from workload import stacked_federation

from fedmoe_pl import DPSGD, PersonalizedMoE, Phase, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, LabelPrior, PFLMoE
from fedmoe_pl.data import Arrays, Dirichlet, NpzFile
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.models import EqualWeights, GlobalOnly, LinearGate, LocalOnly, SmallMLP

METRICS = ("reweighted_test", "global_test")
METHODS = ("FedAvg", "label prior", "PFL-FB", "equal weights", "PFL-MF")
SHARES = {"FedAvg": 0.8, "PFL-FB": 0.9, "PFL-MF": 1.0}  # of epsilon, each with what came before


class Images(NpzFile):
    """The first images of a file."""

    def __init__(self, path: str, train: int, **kwargs: object) -> None:
        super().__init__(path, **kwargs)  # pyright: ignore[reportArgumentType]
        self.train = train

    def load(self) -> Arrays:
        """The first ``train`` training images, and the first 2,000 test images; of writers, all of both."""
        arrays, n = super().load(), 2000
        if arrays.client_train is not None:
            return arrays
        x, y = arrays.x_train[: self.train], arrays.y_train[: self.train]
        return replace(arrays, x_train=x, y_train=y, x_test=arrays.x_test[:n], y_test=arrays.y_test[:n])


def phases(arguments: argparse.Namespace, what: str, epsilon: float) -> list[Phase]:
    """The phases of a row."""

    def private(name: str) -> DPSGD | None:
        if what == "none" or (what == "shared" and name != "FedAvg"):
            return None
        target = epsilon * (1.0 if what == "shared" else SHARES[name])
        return DPSGD(arguments.max_grad_norm, arguments.delta, target_epsilon=target)

    fedavg = FedAvg("global_expert.*", weighting="uniform")
    classifier = FineTuning("local_expert.classifier.*", gate_fraction=0.25)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
    train = Train(max_epochs=arguments.epochs, optimizer=sgd)
    label_prior = [Phase("label prior", LabelPrior(), gate=GlobalOnly(), start="FedAvg")] if what != "all" else []
    return [
        Phase("FedAvg", fedavg, arguments.rounds, gate=GlobalOnly(), sample_privacy=private("FedAvg")),
        *label_prior,
        Phase("PFL-FB", classifier, gate=LocalOnly(), train=train, start="FedAvg", sample_privacy=private("PFL-FB")),
        Phase("equal weights", PFLMoE(), gate=EqualWeights(), train=Train(max_epochs=0), start="PFL-FB"),
        Phase("PFL-MF", PFLMoE(), gate=LinearGate(), train=train, start="PFL-FB", sample_privacy=private("PFL-MF")),
    ]


def results(arguments: argparse.Namespace, seed: int, what: str, epsilon: float) -> dict[str, tuple[Evaluation, float]]:
    """The final evaluation of each phase, and its epsilon."""
    torch.manual_seed(seed)
    lr = arguments.lr if what == "none" else arguments.private_lr
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=0.5)
    model = PersonalizedMoE(SmallMLP(784, arguments.width, 62 if arguments.writers else 10), optimizer=optimizer)
    dealt = {} if arguments.writers else {"num_clients": arguments.clients, "partitioner": Dirichlet(0.5)}
    data = Images(arguments.data, arguments.train, mean=(0.0,), std=(1.0,), batch_size=arguments.batch_size, **dealt)
    with tempfile.TemporaryDirectory() as folder:
        federation = stacked_federation(phases(arguments, what, epsilon), seed, folder)
        evaluations = federation.fit(model, data)
        states = federation.run.states
        return {name: (evaluation, states[name].sample_epsilon) for name, evaluation in evaluations.items()}


def spread(of_seeds: list[Evaluation], metric: str) -> str:
    """Mean and, of several seeds, standard deviation of the clients' mean accuracy, in percent."""
    means = [100 * evaluation.spread(metric).mean for evaluation in of_seeds]
    deviation = f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else ""
    return f"{statistics.mean(means):.1f}{deviation}"


def main() -> None:
    """Prints a row of Markdown for every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--writers", action="store_true", help="clients are the file's own, with 62 classes")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--train", type=int, default=10_000, help="number of training images of all clients")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=5, help="of PFL-FB and of PFL-MF")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--private-lr", type=float, default=0.5, help="of rows with privacy")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    start = time.process_time()
    print(f"| protected | {' | '.join(METHODS)} | largest epsilon | CPU s |", flush=True)
    for what, epsilon in [("none", 0.0), *((what, e) for e in arguments.epsilon for what in ("shared", "all"))]:
        of_seeds = [results(arguments, seed, what, epsilon) for seed in arguments.seeds]
        cells, spent = [], 0.0
        for method in METHODS:
            found = [result[method] for result in of_seeds if method in result]
            evaluations = [evaluation for evaluation, _ in found]
            cells.append(" / ".join(spread(evaluations, metric) for metric in METRICS) if found else "-")
            spent = max([spent, *(epsilon for _, epsilon in found)])
        name = what if what == "none" else f"{what}, epsilon {epsilon:g}"
        cost = "" if what == "none" else f"{spent:.2f}"
        print(f"| {name} | {' | '.join(cells)} | {cost} | {time.process_time() - start:.0f} |", flush=True)


if __name__ == "__main__":
    main()
