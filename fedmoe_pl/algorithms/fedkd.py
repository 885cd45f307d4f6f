"""FedKD: Wu et al., Nature Communications 2022, Algorithm 1 (https://doi.org/10.1038/s41467-022-29763-x).

======================  ===============================  ===========================  ================================
topic                   paper                            official code                here
======================  ===============================  ===========================  ================================
gradients               not mentioned                    each loss trains both        the partner's outputs and the
                                                         models                       divisor are constants
divergence              not mentioned                    mean over all outputs        mean over samples
hidden states           a learned matrix maps the        no matrix; hidden states     no matrix; features of one width
                        student's to the teacher's       and attention of one width   or ``hidden_states: false``
energy in round t < T   rises from 0.95 to 0.98          0.95 + (t + 1) / T 0.03      as in the code
rank                    smallest that reaches it         the same, but 0 if it would  smallest that reaches it, in
                                                         be full; when clients send,  both directions
                                                         smallest that exceeds it
======================  ===============================  ===========================  ================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Messages, Parts, Weighting
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.parts import (
    both_logits,
    distillation_loss,
    logits_loss,
    mean_of_labelled,
    pair_of,
    split_expert,
)
from fedmoe_pl.checks import InvalidArgumentError, check_number
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import Tree, difference, mean_of_two, of_module, precise, problem_of_shapes, subtree, with_prefix

_UPDATE = "update/"  # prefix of a student's tensor: its change in a round, compressed
_STUDENT = "student/"  # prefix of a student's tensor as it was before a client's training
_SENDERS = "senders/"  # prefix of the id of a client that trained in the last round; tensors of no size
_ROUNDS = "rounds/number_and_all"  # rounds that the server has seen, and the phase's


class FedKD(Algorithm):
    """A private teacher and a shared student teach each other; the student's updates travel compressed, both ways.

    The teacher is ``local_expert``, which may be of another architecture, also from client to client; the student is
    ``global_expert``. Both have the same divergences and the distance of their features in their losses, divided by the
    sum of their cross-entropies, so that they count less while the predictions are poor. Clients send the student's
    update as truncated singular value decompositions. The server averages these, compresses the mean, and adds it to
    its student, as each client does. Use the gate ``LocalOnly`` to evaluate the teachers, as in the paper.

    Traffic is that of the factors, in bytes; only the first round sends the student itself. Its ``parameters`` count
    no factors.

    Args:
        energy_start: share of the squared singular values, above 0, that an update keeps, before the first round.
        energy_end: the same in the last round, with a linear change in between. If both are 1, nothing is compressed.
        hidden_states: whether the losses have the squared distance between the features of both models, which must
            have the same shape.
        shared: glob patterns of the parameters and buffers that are averaged.
        weighting: how the average weighs clients, as in :class:`~fedmoe_pl.algorithms.FedAvg`.
    """

    needs = ("all_clients", "classes", "whole_batches", "own_server_step", "fixed_gate")
    parts = Parts(local_expert_predicts=True)
    # new clients have no student to which they could add an update
    messages = Messages(per_client=(_UPDATE, _SENDERS, _ROUNDS))

    def __init__(
        self,
        energy_start: float = 0.95,
        energy_end: float = 0.98,
        hidden_states: bool = True,
        shared: str | list[str] = "global_expert.*",
        weighting: Weighting = "uniform",
    ) -> None:
        check_number(self, "energy_start", energy_start, above=0, most=1)
        check_number(self, "energy_end", energy_end, above=0, most=1)
        super().__init__(shared, ["global_expert.*", "local_expert.*"], weighting)
        if energy_start != energy_end:
            self.needs += ("fixed_rounds",)
        self.energy_start = energy_start
        self.energy_end = energy_end
        self.hidden_states = hidden_states

    def server_init(self, module: LightningModule) -> Tree:
        """Refuses experts whose features cannot be computed, if the losses need them."""
        for expert in ("local_expert", "global_expert") if self.hidden_states else ():
            split_expert(module, expert)
        return super().server_init(module)

    def server_begin(self, server: Tree, clients: Iterable[Client]) -> Tree:
        """Counts the rounds from here on."""
        return {**server, _ROUNDS: torch.tensor([0, next(iter(clients)).rounds])}

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """The compressed mean of the last round's updates; the student if the client missed that round."""
        if f"{_SENDERS}{client_id}" not in server:
            return of_module(server)
        return {name: tensor for name, tensor in server.items() if name.startswith(_UPDATE)}

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Applies the update to the client's copy of the student."""
        return super().client_init(client, self._student(client.state, sent))

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The sum of both models' losses; their gradients do not interact."""
        x, y = pair_of(module, batch)
        if self.hidden_states:
            extractor, classifier = split_expert(module, "local_expert")
            small_extractor, small_classifier = split_expert(module, "global_expert")
            features, small_features = call(extractor, x), call(small_extractor, x)
            teacher, student = classifier(features), small_classifier(small_features)
            distances = self._distance(features, small_features.detach(), y)
            distances = distances + self._distance(small_features, features.detach(), y)
        else:
            (teacher, student), distances = both_logits(module, x), 0
        cross_entropy = logits_loss(module, teacher, y) + logits_loss(module, student, y)
        mutual = distillation_loss(teacher, student, y) + distillation_loss(student, teacher, y) + distances
        divisor = cross_entropy.detach().clamp_min(torch.finfo(cross_entropy.dtype).eps)  # it may be rounded to 0
        return cross_entropy + mutual / divisor

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends the compressed update of the student, and keeps the student that it was added to."""
        student = self._student(client.state, client.loaded)
        update = super().client_final(client, constants)
        change = compressed(difference(update.sent, student), self._energy(client.round, client.rounds))
        kept = {**update.state, **with_prefix(student, _STUDENT)}
        sender = {f"{_SENDERS}{client.id}": torch.empty(0)}
        return Update(with_prefix(change, _UPDATE) | sender, update.weight, kept)

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """The update of every shared tensor, whole or as factors, and the sender."""
        shared = {name: tensor for name, tensor in initial.items() if self.is_shared(name)}
        flat = {name: (tensor.flatten(1) if tensor.ndim > 1 else tensor).shape for name, tensor in shared.items()}
        return problem_of_shapes(_changes(update.sent) | _senders(update.sent), flat | {f"{_SENDERS}{client_id}": (0,)})

    def combine(self, a: Update, b: Update) -> Update:
        """The weighted mean of the updates that the factors stand for, and all senders."""
        mean = mean_of_two(_changes(a.sent), a.weight, _changes(b.sent), b.weight)
        senders = _senders(a.sent) | _senders(b.sent)
        return Update(with_prefix(mean, _UPDATE) | senders, a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """Compresses the mean update, and adds to the student what the clients will add."""
        round, rounds = server[_ROUNDS].tolist()
        change = with_prefix(compressed(_changes(combined.sent), self._energy(round, rounds)), _UPDATE)
        counted = {_ROUNDS: server[_ROUNDS] + torch.tensor([1, 0])}
        return {**_added(server, change), **change, **counted, **_senders(combined.sent)}

    def server_final(self, server: Tree, is_last: bool) -> Tree | None:
        """The student alone, which is complete."""
        return of_module(server) if is_last else None

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The client's own tensors and the student, to which it has added the last update like the server."""
        return of_module({**server, **client.state})

    def _student(self, kept: Tree, received: Tree) -> Tree:
        """The student before a client's training, from what it kept and received."""
        if any(name.startswith(_UPDATE) for name in received):
            return _added(subtree(kept, _STUDENT), received)
        return {name: tensor for name, tensor in of_module(received).items() if self.is_shared(name)}

    def _energy(self, round: int, rounds: int) -> float:
        """The share of the squared singular values to keep in a round, counted from 0."""
        done = min((round + 1) / rounds, 1)  # a run may be continued with more rounds than it began with
        return self.energy_start + done * (self.energy_end - self.energy_start)

    def _distance(self, features: Tensor, other: Tensor, y: Tensor) -> Tensor:
        """The mean squared difference of features (B, ...) over all values."""
        if features.shape != other.shape:
            shapes = " and ".join(str(tuple(tensor.shape[1:])) for tensor in (features, other))
            raise InvalidArgumentError(self, "hidden_states", True, f"False for features of shapes {shapes}")
        return mean_of_labelled((precise(features) - precise(other)).square().flatten(1).mean(1), y)


def _changes(tree: Mapping[str, Tensor]) -> Tree:
    """The whole updates, matrices in two dimensions, of a tree in which they may be compressed."""
    return expanded(subtree(tree, _UPDATE))


def _senders(tree: Tree) -> Tree:
    return {name: tensor for name, tensor in tree.items() if name.startswith(_SENDERS)}


def _added(student: Tree, received: Tree) -> Tree:
    """The student's tensors with the received update added."""
    changes = _changes(received)
    return {name: student[name] + change.reshape_as(student[name]) for name, change in changes.items()}


def compressed(tree: Mapping[str, Tensor], energy: float) -> Tree:
    """Replaces each matrix by the factors of its truncated singular value decomposition, if these are smaller.

    A tensor (m, ...) is a matrix with m rows. The factors ``<name>/u`` (m, r), ``<name>/s`` (r,) and ``<name>/v``
    (r, n) keep at least the share ``energy`` of the squared singular values; 1 compresses nothing.

    Example:
        >>> {name: tuple(factor.shape) for name, factor in compressed({"w": torch.ones(4, 3, 2)}, 0.95).items()}
        {'w/u': (4, 1), 'w/s': (1,), 'w/v': (1, 6)}
    """
    result: Tree = {}
    for name, tensor in tree.items():
        matrix = tensor.flatten(1) if tensor.ndim > 1 else tensor
        is_compressible = tensor.ndim > 1 and tensor.is_floating_point() and bool(tensor.isfinite().all())
        factors = _factors(matrix, energy) if is_compressible and energy < 1 else {}
        if factors and sum(factor.numel() for factor in factors.values()) < matrix.numel():
            result |= {f"{name}/{factor}": values for factor, values in factors.items()}
        else:
            result[name] = matrix
    return result


def expanded(tree: Mapping[str, Tensor]) -> Tree:
    """The tensors of a compressed tree: matrices (m, n), of which those with factors are their products.

    Example:
        >>> expanded({"w/u": torch.ones(2, 1), "w/s": torch.tensor([3.0]), "w/v": torch.ones(1, 2)})
        {'w': tensor([[3., 3.],
                [3., 3.]])}
    """
    result: Tree = {}
    for name, tensor in tree.items():
        whole, _, factor = name.rpartition("/")
        if not whole:
            result[name] = tensor
        elif factor == "u":
            result[whole] = (tensor * tree[f"{whole}/s"]) @ tree[f"{whole}/v"]
    return result


def _factors(matrix: Tensor, energy: float) -> Tree:
    """The truncated singular value decomposition of a matrix."""
    u, s, v = torch.linalg.svd(precise(matrix), full_matrices=False)
    reached = s.double().square().cumsum(0)
    rank = min(int((reached < energy * reached[-1]).sum()) + 1, len(s))
    factors = {"u": u[:, :rank], "s": s[:rank], "v": v[:rank]}
    return {name: factor.clone().to(matrix.dtype) for name, factor in factors.items()}
