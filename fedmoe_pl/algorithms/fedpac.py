"""FedPAC: Xu, Tong, Huang, ICLR 2023, Algorithm 1 (https://arxiv.org/abs/2306.11867).

The official code is at https://github.com/JianXu95/FedPAC:

====================  ===============================================  ============================================
topic                 official code                                    here
====================  ===============================================  ============================================
learning rates        0.1 for the classifier, 0.02 (CIFAR-10) or 0.01  an ``lr_scheduler`` over epochs, such as
                      for the extractor                                ``MultiStepLR`` with ``milestones: [1]`` and
                                                                       ``gamma: 0.1`` on a rate of 0.1
momentum, decay       0.5, 5e-4                                        ``optimizer``
optimizers            one for each part                                one; a frozen part takes no steps
train or eval mode    eval mode while training                         train mode; statistics in eval mode
classes without       fail                                             keep their prototype of earlier rounds
samples in a round
quadratic program     cvxpy in single precision, in which the matrix   SciPy's ``nnls`` in double precision
                      may have negative eigenvalues: it is then
                      rebuilt from those of at least 0.01; own
                      classifier if it still fails
reported accuracy     the round's clients, before the combination      all clients, after it
====================  ===============================================  ============================================
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Messages, shapes_of_shared
from fedmoe_pl.algorithms.client import Client, Constants, Exchange, Update
from fedmoe_pl.algorithms.shared.class_means import (
    class_means,
    combine_class_means,
    loss_with_targets,
    problem_of_class_means,
    received_means,
    update_class_means,
)
from fedmoe_pl.algorithms.shared.parts import expert_prefix, split_expert
from fedmoe_pl.checks import check_number
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import Tree, mean_of_two, of_module, precise, subtree, with_prefix

_PROTOTYPES = "prototypes/"  # of every class, the mean of features (C, F); see class_means
_CLASSIFIERS = "classifiers/"  # prefix of "<client>.<name>": a client's classifier
_FEATURES = "features/"  # prefix of a client's id: its mean features times its class shares, (C, F)
_VARIANCE = "variance/"  # prefix of a client's id: the variance of that estimate, shape ()
_SMALLEST_WEIGHT = 1e-3
_RIDGE = 1e-13  # relative to the mean of the diagonal; makes singular matrices regular


class FedPAC(Algorithm):
    """A shared extractor whose features are pulled to global prototypes, and a combination of classifiers per client.

    The first local epoch trains the classifier, all others the extractor, so that a round needs at least two epochs.
    The extractor's loss is cross-entropy plus, from the second round on, ``weight`` times the mean squared error
    between the features and the global prototype of the label; where there is none, the client's own prototype before
    its training.

    The server averages extractors by samples and prototypes by samples of the class. A client's classifier becomes the
    weighted mean of those of the round's clients, with the weights a that minimize ``a^T (diag(v) + D) a`` over the
    simplex; ``D_jl = sum_c <h_ic - h_jc, h_ic - h_lc>`` for the client i. Here h_jc is client j's mean feature of class
    c times its share of the class, and v_j the variance of the mean feature, both with the extractor as received.

    Args:
        expert: name of the expert that is trained, such as ``global_expert``; empty for a module that is itself an
            ``extractor`` and a ``classifier``.
        weight: weight of the distance to the prototypes, at least 0.
    """

    needs = ("classes", "fixed_gate")

    def __init__(self, expert: str = "global_expert", weight: float = 1.0) -> None:
        check_number(self, "weight", weight, least=0)
        prefix = expert_prefix(expert)
        super().__init__(shared=f"{prefix}extractor.*", trainable=f"{prefix}*")
        self.expert = expert
        self.weight = weight
        self._classifier = f"{prefix}classifier."
        self.messages = Messages(per_client=(_CLASSIFIERS,), exchanged=(self._classifier,))

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """The classifier in the first epoch, the extractor in the others."""
        return name.startswith(self._classifier) if epoch == 0 else name in self.shared

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the extractor and the classifier; computes the statistics and the targets of the features."""
        super().client_init(client, sent)
        local = class_means(client, self._features_and_square, "")
        counts = local["count"].to(local["mean"])
        means, squares = local["mean"][:, :-1], local["mean"][:, -1]
        size = counts.sum().clamp(min=1)
        shares = counts / size
        weighted = shares[:, None] * means
        variance = (shares @ squares - weighted.square().sum()).clamp(min=0) / size
        targets, known = received_means(client, sent, _PROTOTYPES)
        started = known.any()
        return {
            "targets": torch.where(known[:, None], targets, means),
            "known": started & (known | (local["count"] > 0)),
            "features": weighted,
            "variance": variance,
        }

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """Cross-entropy and the weighted distance to the targets, which has no gradient in the classifier's epoch."""
        return loss_with_targets(module, self.expert, batch, constants, self.weight)

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends its extractor, classifier, new prototypes and statistics."""
        update = super().client_final(client, constants)
        state = client.module.state_dict()
        classifier = {name: state[name].detach().cpu().clone() for name in state if name.startswith(self._classifier)}
        statistics = {
            f"{_FEATURES}{client.id}": constants["features"],
            f"{_VARIANCE}{client.id}": constants["variance"],
        }
        prototypes = class_means(client, lambda module, x: call(split_expert(module, self.expert)[0], x), _PROTOTYPES)
        return Update(update.sent | classifier | prototypes | statistics, update.weight, update.state)

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """Extractor, classifier, prototypes and statistics."""
        classes, samples = datamodule.num_classes, len(datamodule.train_samples[client_id])
        classifier = {name: initial[name].shape for name in initial if name.startswith(self._classifier)}
        shapes = shapes_of_shared(self, initial) | classifier
        shapes |= {f"{_FEATURES}{client_id}": (classes, None), f"{_VARIANCE}{client_id}": ()}
        return problem_of_class_means(update.sent, _PROTOTYPES, classes, samples, shapes)

    def combine(self, a: Update, b: Update) -> Update:
        """The mean extractor and prototypes, and every client's classifier and statistics."""
        a_sent, b_sent = self._by_client(a.sent), self._by_client(b.sent)
        extractor = mean_of_two(of_module(a_sent), a.weight, b_sent, b.weight)
        means = extractor | combine_class_means(a_sent, b_sent, _PROTOTYPES)
        return Update({**a_sent, **b_sent, **means}, a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """The mean extractor, the prototypes, and a combined classifier for each client of this round."""
        sent = self._by_client(combined.sent)
        clients = sorted(int(name.removeprefix(_VARIANCE)) for name in sent if name.startswith(_VARIANCE))
        classifiers = {client: subtree(sent, f"{_CLASSIFIERS}{client}.") for client in clients}
        features = torch.stack([sent[f"{_FEATURES}{client}"].double().flatten() for client in clients])
        variances = torch.stack([sent[f"{_VARIANCE}{client}"].double() for client in clients])
        new = {name: tensor for name, tensor in server.items() if not name.startswith(_CLASSIFIERS)}
        new |= {**of_module(sent), **update_class_means(server, sent, _PROTOTYPES)}
        for row, client in enumerate(clients):
            weights = combination_weights(features, variances, row)
            combination = _weighted_mean([*classifiers.values()], weights, classifiers[client])
            new |= with_prefix(combination, f"{_CLASSIFIERS}{client}.")
        return new

    def exchange(self, server: Tree, clients: Collection[int], round: int) -> Exchange:
        """Sends the round's clients their combined classifiers, which they keep in place of those that they trained."""
        for client in clients:
            if combined := subtree(server, f"{_CLASSIFIERS}{client}."):
                yield client, with_prefix(combined, self._classifier), {}

    def _features_and_square(self, module: LightningModule, x: Tensor) -> Tensor:
        """Features and their squared norm, (B, F + 1), so that one pass gives the means of both."""
        features = precise(call(split_expert(module, self.expert)[0], x)).flatten(1)
        return torch.cat([features, features.square().sum(1, keepdim=True)], dim=1)

    def _by_client(self, sent: Tree) -> Tree:
        """What a client or a group of clients sent; a single client's classifier is named after the client."""
        classifier = subtree(sent, self._classifier)
        if not classifier:
            return sent
        client = next(name for name in sent if name.startswith(_VARIANCE)).removeprefix(_VARIANCE)
        others = {name: tensor for name, tensor in sent.items() if not name.startswith(self._classifier)}
        return others | with_prefix(classifier, f"{_CLASSIFIERS}{client}.")


def combination_weights(features: Tensor, variances: Tensor, client: int) -> Tensor:
    """The weights (clients,) in one client's combination, from features (clients, C * F); small ones become 0."""
    differences = features[client] - features
    matrix = variances.diag() + differences @ differences.T
    weights = simplex_minimum(matrix)
    weights = torch.where(weights > _SMALLEST_WEIGHT, weights, 0.0)
    return weights / weights.sum()


def _weighted_mean(trees: list[Tree], weights: Tensor, classifier: Tree) -> Tree:
    """The weighted mean of floating-point tensors; others, such as counters, are the client's own."""
    return {
        name: torch.einsum("i,i...->...", weights.to(tensor), torch.stack([tree[name] for tree in trees]))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in classifier.items()
    }


def simplex_minimum(matrix: Tensor) -> Tensor:
    """The weights a >= 0 (n,) with sum 1 that minimize ``a^T P a``, in float64.

    They are multiples of the a >= 0 that minimize ``a^T P a + (sum(a) - 1)^2``, a problem of least squares.

    Example:
        >>> simplex_minimum(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    from scipy.optimize import nnls  # slow to import, and only needed here

    matrix = matrix.double()
    values, vectors = torch.linalg.eigh(matrix / (matrix.diagonal().mean() + torch.finfo(torch.float64).tiny))
    root = values.clamp(min=_RIDGE).sqrt()[:, None] * vectors.T
    rows, goal = torch.cat([root, torch.ones_like(root[:1])]), torch.eye(len(root) + 1, dtype=torch.float64)[-1]
    weights = torch.from_numpy(nnls(rows.numpy(), goal.numpy(), maxiter=10 * len(root) ** 2)[0])
    return weights / weights.sum()
