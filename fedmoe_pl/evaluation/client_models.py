"""Evaluates the model that each client uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Algorithm, EvaluationPoint, chooses_model, needs_server_state, received
from fedmoe_pl.algorithms.shared.parts import counted, pair_of
from fedmoe_pl.backends import TRAINED, LocalTraining, Plan, client_of, one_thread
from fedmoe_pl.checkpoints.client_state import StatesOnDisk
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.evaluation.measure import evaluate
from fedmoe_pl.evaluation.outputs import Predictor, labelled_batches, load_to_evaluate, mixture_of
from fedmoe_pl.evaluation.results import ClientEvaluation
from fedmoe_pl.evaluation.stacked_models import StackedModels, evaluation_groups
from fedmoe_pl.models import FixedGate, MixtureOfExperts
from fedmoe_pl.trees import Tree, copy_module, of_module, subtree


def evaluate_clients(
    training: LocalTraining,
    server: Tree,
    kept: Mapping[int, Tree],
    round: int,
    evaluation_point: EvaluationPoint,
    clients: Sequence[int] | None = None,
    plan: Plan | None = None,
) -> list[ClientEvaluation]:
    """Evaluates the model that each client would use now, made of the tensors that the server sends and of its own.

    Clients that receive the same tensors and keep none have the same model, which is evaluated once, on the samples of
    all of them, unless the algorithm has a ``predictor`` or a ``validation_loss``. Only validation samples that opt in
    count.
    """
    clients = range(training.datamodule.num_clients) if clients is None else clients
    with_predictor = training.algorithm.predictor is not None
    with_hook = with_predictor or training.algorithm.validation_loss is not None
    alone = [*clients] if with_hook else _with_own_model(training, kept, clients, evaluation_point)
    of_alone = set(alone)
    together = [client for client in clients if client not in of_alone]
    job = partial(_evaluate_groups, round=round, evaluation_point=evaluation_point)
    groups = [[client] for client in alone] if with_predictor else evaluation_groups(training, alone)
    found = (
        plan.map(job, server, groups, kept)
        if plan
        else map(_Evaluator(training, server, kept, round, evaluation_point), groups)
    )
    evaluations = {evaluation.client: evaluation for group in found for evaluation in group}
    evaluations |= {evaluation.client: evaluation for evaluation in _evaluate_shared(training, server, kept, together)}
    training.copies.check(training.algorithm)
    return [evaluations[client] for client in clients]


def evaluate_points(
    training: LocalTraining,
    server: Tree,
    kept: Mapping[int, Tree],
    round: int,
    evaluation_points: Sequence[EvaluationPoint],
    clients: Sequence[int],
    plan: Plan | None,
) -> list[list[ClientEvaluation]]:
    """The evaluations at each evaluation point; the other arguments are those of :func:`evaluate_clients`."""
    return [evaluate_clients(training, server, kept, round, point, clients, plan) for point in evaluation_points]


def _evaluate_shared(
    training: LocalTraining, server: Tree, kept: Mapping[int, Tree], clients: Sequence[int]
) -> Iterator[ClientEvaluation]:
    """Evaluates each distinct model of clients without a model of their own, on the samples of all that use it."""
    validation = _opted_in_validation(training)
    for group in training.by_architecture(clients):
        group_training = training.of(group[0])
        for tensors, sharing in _models(group_training, server, kept, group):
            module = group_training.copies.move(group_training.copies.copy(), training.device)
            load_to_evaluate(module, {**group_training.initial, **tensors})
            yield from evaluate(module, training.datamodule, sharing, validation, training.metrics)
            del module  # a device may not have room for two


def have_one_model(
    training: LocalTraining,
    server: Tree,
    kept: Mapping[int, Tree],
    clients: Sequence[int],
    evaluation_point: EvaluationPoint,
) -> bool:
    """Whether all of some clients have the same model, that is the same architecture and received tensors only."""
    own = _with_own_model(training, kept, clients, evaluation_point)
    return not own and len(training.by_architecture(clients)) == 1 == len([*_models(training, server, kept, clients)])


def _with_own_model(
    training: LocalTraining, kept: Mapping[int, Tree], clients: Sequence[int], evaluation_point: EvaluationPoint
) -> list[int]:
    """The clients with a model of their own; a file whose names say no is still read, to detect damage."""
    if chooses_model(training.algorithm):
        return [*clients]
    keeping = set(kept)  # a set, because every look-up on disk takes time

    def has_own(client: int) -> bool:
        names = kept.names(client) if isinstance(kept, StatesOnDisk) else ()
        return _are_of_model(names, evaluation_point) or _are_of_model(kept[client], evaluation_point)

    return [client for client in clients if client in keeping and has_own(client)]


def _are_of_model(kept: Iterable[str], evaluation_point: EvaluationPoint) -> bool:
    """Whether a client that keeps tensors of these names has a model of its own."""
    return any("/" not in name or (evaluation_point == "local_training" and name.startswith(TRAINED)) for name in kept)


def _evaluate_groups(
    plan: Plan,
    server: Tree,
    groups: Sequence[Sequence[int]],
    kept: Mapping[int, Tree],
    round: int,
    evaluation_point: EvaluationPoint,
) -> list[list[ClientEvaluation]]:
    """Evaluates groups of clients with models of their own; also runs in worker processes."""
    with one_thread():
        found = [*map(_Evaluator(plan.training, server, kept, round, evaluation_point), groups)]
    plan.training.copies.check(plan.training.algorithm)  # copies of this process
    return found


@dataclass
class _Evaluator:
    """Evaluates groups of clients with models of their own, one after another; arguments as in evaluate_clients."""

    training: LocalTraining
    server: Tree
    kept: Mapping[int, Tree]
    round: int
    evaluation_point: EvaluationPoint
    stackable: dict[int, bool] = field(default_factory=dict)  # whether models of an architecture can be stacked

    def __post_init__(self) -> None:
        self.validation = _opted_in_validation(self.training)

    def __call__(self, clients: Sequence[int]) -> list[ClientEvaluation]:
        """The evaluations of clients that all have the same architecture."""
        evaluations = self._evaluate(clients)
        if self.training.algorithm.validation_loss is None:
            return evaluations
        return [replace(each, validation_loss=self._validation_loss(each.client)) for each in evaluations]

    def _validation_loss(self, client: int) -> float:
        """The algorithm's own loss on a client's validation samples; NaN if there are none."""
        training, samples, total, number = self.training.of(client), self.validation[client], 0.0, 0
        own_loss = training.algorithm.validation_loss
        assert own_loss is not None
        module = self._module(training)
        load_to_evaluate(module, self._state(training, module, client))
        with torch.inference_mode():
            for batch, y in labelled_batches(training.datamodule, samples, mixture_of(module)):
                pair = move_data_to_device((pair_of(module, batch)[0], y), module.device)
                if size := counted(module, y):  # the mean over nothing is nan
                    total, number = total + own_loss(module, pair, {}).item() * size, number + size
        return total / number if number else math.nan

    def _evaluate(self, clients: Sequence[int]) -> list[ClientEvaluation]:
        """The evaluations, with the validation loss computed from the clients' predictions."""
        training, architecture = self.training.of(clients[0]), self.training.architecture(clients[0])
        if len(clients) > 1 and self.stackable.get(architecture, True):
            module, data = self._module(training), training.datamodule
            # a module for each, because an algorithm may return tensors of the module that it was given
            states = [self._state(training, self._module(training), client) for client in clients]
            models = StackedModels(module, states)
            if architecture not in self.stackable:
                self.stackable[architecture] = models.work(data)
            if self.stackable[architecture]:
                return [*evaluate(module, data, clients, self.validation, training.metrics, models)]
        return [evaluation for client in clients for evaluation in self._evaluate_alone(training, client)]

    def _evaluate_alone(self, training: LocalTraining, client: int) -> list[ClientEvaluation]:
        module = self._module(training)
        state = self._state(training, module, client)
        load_to_evaluate(module, state)
        predictor = client_predictor(training, module, self.server, client, self.kept, self.round)
        shared = training.shared_parts.looked_up(module, state) if predictor is module else None
        data = training.datamodule
        return [*evaluate(predictor, data, [client], self.validation, training.metrics, shared=shared)]

    def _module(self, training: LocalTraining) -> LightningModule:
        """A module for a client; it shares no memory if the algorithm's hooks may write to it."""
        shares = not needs_server_state(training.algorithm)
        return training.copies.move(training.copies.copy() if shares else copy_module(training.module), training.device)

    def _state(self, training: LocalTraining, module: LightningModule, client: int) -> Tree:
        """The tensors of a client's model."""
        arguments = self.server, client, self.kept.get(client, {}), self.round, self.evaluation_point
        return {**training.initial, **personal_tensors(training, module, *arguments)}


def _opted_in_validation(training: LocalTraining) -> ClientSamples:
    samples = training.datamodule.validation_samples
    return training.algorithm.opt_out.opted_in_of_all(samples, training.seed, validation=True)


def evaluated_model(module: LightningModule, algorithm: Algorithm) -> str:
    """Which part of the module is evaluated, in the words of ``Evaluation.model``."""
    if algorithm.predictor is not None:
        return f"predictor of {type(algorithm).__name__}"
    if not isinstance(module, MixtureOfExperts):
        return type(module).__name__
    if isinstance(module.gate, FixedGate) and len(module.gate.active) == 1:
        if not module.has_global_expert:
            return "one expert"
        return "local expert" if module.gate.active[0] == len(module.gate.weights) - 1 else "global expert"
    return "mixture"


def personal_tensors(
    training: LocalTraining,
    module: LightningModule,
    server: Tree,
    client_id: int,
    kept: Tree,
    round: int,
    evaluation_point: EvaluationPoint,
) -> Tree:
    """The tensors of the model that a client uses at an evaluation point of the last round; all others are initial.

    After local training, these are the tensors that the client trained last. A client that was never trained uses the
    same model as after aggregation, ``Algorithm.personal_tensors``.
    """
    trained = subtree(kept, TRAINED)
    if evaluation_point == "local_training" and trained:
        # an exchange may have changed what is kept; then `trained` has all that differs from the initial tensors
        return {**of_module(kept), **trained} if not training.algorithm.messages.exchanged else trained
    if chooses_model(training.algorithm):
        load_to_evaluate(module, training.initial)
    with torch.inference_mode():
        return training.algorithm.personal_tensors(client_of(training, module, client_id, kept, round), server)


def client_predictor(
    training: LocalTraining,
    module: LightningModule,
    server: Tree,
    client_id: int,
    kept: Mapping[int, Tree],
    round: int,
) -> LightningModule:
    """The module that a client predicts with: its own, or one that calls ``Algorithm.predictor``."""
    if training.algorithm.predictor is None:
        return module
    client = client_of(training, module, client_id, kept.get(client_id, {}), round)
    with torch.inference_mode():
        return Predictor(module, training.algorithm.predictor(client, server))


def _models(
    training: LocalTraining, server: Tree, kept: Mapping[int, Tree], clients: Sequence[int]
) -> Iterator[tuple[Tree, list[int]]]:
    """The tensors of each distinct model of clients that keep none of its tensors, and the clients that use it."""
    shared: Tree = {}
    sharing: list[int] = []
    algorithm = training.algorithm
    for client in clients:
        state = kept.get(client, {}) if algorithm.messages.request else {}
        tensors = of_module(received(algorithm, server, client, state))
        if sharing and not (tensors.keys() == shared.keys() and all(tensors[name] is shared[name] for name in shared)):
            yield shared, sharing
            sharing = []
        shared = tensors
        sharing.append(client)
    if sharing:
        yield shared, sharing
