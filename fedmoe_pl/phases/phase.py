"""A phase of a federation: one algorithm for a number of rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from numbers import Number
from operator import attrgetter
from typing import Any, Literal, get_args

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from fedmoe_pl.aggregation import Aggregation, SecureAggregation
from fedmoe_pl.algorithms.algorithm import Algorithm, EvaluationPoint, check_declarations
from fedmoe_pl.backends.dp_sgd import DPSGD
from fedmoe_pl.backends.fitting import listed
from fedmoe_pl.checks import (
    InvalidArgumentError,
    check_at_least,
    check_choice,
    check_kind,
    check_made,
    check_number,
    is_file_name,
    is_finite,
    plain,
)
from fedmoe_pl.models import Gate
from fedmoe_pl.models.mixtures.mixing import Mixing

INITIAL = "initial"
"""The ``start`` of a phase that begins with the untrained model."""


@dataclass
class Select:
    """Selects a phase's result: the round with the best mean of a metric over the participants, not the last round.

    Args:
        monitor: the metric: one of ``validation``, ``validation_loss``, ``local_test``, ``reweighted_test`` and
            ``global_test``, or a metric of the federation, such as ``validation_f1``. All but those on validation
            samples select on test data, and tables say so.
        from_round: first round that may be selected, counted from 1.
        patience: ends the phase after this many evaluations in a row without a better metric; None never does.
        min_delta: for ``patience``, a metric is better only if it improves by more than this.
    """

    monitor: str
    from_round: int = 1
    patience: int | None = None
    min_delta: float = 0.0


@dataclass
class Evaluate:
    """When a phase is evaluated.

    Args:
        every_n_rounds: evaluate after every n rounds, 0 only at the end; None means the federation's.
        every_n_epochs: for phases of one round in which clients train alone: callbacks and loggers also get the
            evaluations after 0, n, 2n ... epochs, so that the phase is a curve over epochs. The clients train from the
            start for each, with schedules of the whole phase, which changes no result, but costs as much as these
            epochs together. None plots only the final result.
        after: the part of a round after which clients' models are evaluated: ``local_training``, with the parameters
            that each client trained last, ``aggregation``, which includes an exchange between clients, or ``both``;
            None means the paper's. With ``both``, the table has two rows; the paper's comes first, ``select``
            reads it, and the other row's name says which it is. Phases without aggregation have only
            ``local_training``.
    """

    every_n_rounds: int | None = None
    every_n_epochs: int | None = None
    after: EvaluationPoint | Literal["both"] | None = None


@dataclass
class Train:
    """How the clients train in a phase: what differs from the trainer, the data module and the model.

    Args:
        max_epochs: local epochs of a client in a round; None means the trainer's.
        batch_size: local batch size; None means the data module's.
        optimizer: local optimizer; None means the model's. Unless ``keep_optimizer``, each round has a new one.
        lr_scheduler: its scheduler, new in each round and stepped once per local epoch; None means the model's.
        round_lr_scheduler: scheduler of the learning rate over rounds: any of PyTorch's that needs no metric, stepped
            once per round. A scheduler over epochs starts from the round's learning rate. The local rounds of new
            clients begin with the rate of the first round.
        keep_optimizer: whether a client keeps the state of its optimizer, such as momentum, for its next round in this
            phase.
        callbacks: Lightning callbacks of each client's Trainer in this phase, such as ``BestEpoch``, in addition to the
            federation's.
        trainer: arguments of each client's Trainer in this phase, in place of the federation's; ``accelerator``,
            ``devices``, ``num_nodes`` and ``strategy`` are the same in all phases.
    """

    max_epochs: int | None = None
    batch_size: int | None = None
    optimizer: OptimizerCallable | None = None
    lr_scheduler: LRSchedulerCallable | None = None
    round_lr_scheduler: LRSchedulerCallable | None = None
    keep_optimizer: bool = False
    callbacks: list[Callback] | None = None
    trainer: dict[str, Any] | None = None


@dataclass
class Phase:
    """One algorithm for a number of rounds; its result is a row of the final table, and a start for later phases.

    Args:
        name: the method's name in tables, logs and files; the names of a run differ in more than case and symbols.
        algorithm: says what is shared, how clients train, and how their results are combined.
        rounds: number of rounds.
        clients_per_round: how many clients train in a round: an int is a number of clients, a float a share of all N
            clients, ``max(int(share * N), 1)``. 1.0 and None are all that take part.
        clients: ids of the clients that take part, counted from 0, so that clients may join or leave between two phases
            of a run; the others do not train in the phase, but are evaluated. None means all that the algorithm lets
            take part.
        model: replaces the federation's model in this phase and in the phases that start from it, so that one run can
            compare methods with different models. A phase with a model of its own takes those parts from its start that
            both models have; they must have the same tensors, except the gate, which otherwise starts anew, and a list
            of experts, which may have grown: the added ones are the phase's own.
        gate: replaces the model's gate in this phase; ``GlobalOnly`` trains and evaluates only the global expert,
            ``LocalOnly`` only the local expert.
        mixing: replaces the model's ``mixing``, which says what it mixes: logits or probabilities.
        start: name of the earlier phase whose result this one starts from, or ``initial`` for the untrained model;
            None means the last phase that the algorithm follows (personalization follows the federated phase). A dict
            names one for each part of the model, such as ``{"global_expert": "FedAvg", "local_expert": "Ditto"}``: the
            phase takes the server's tensors of this part and those that clients kept. Parts that are not named start
            from the initial model. The rounds before the phase are then those of its longest chain of starts.
        train: how the clients train in this phase, where it differs from the trainer, the data module and the model.
        server_optimizer: takes the server's step in place of the mean: its gradient is the server's parameters minus
            the clients' mean. It may be any of PyTorch's that needs only a gradient, with a constant learning rate:
            ``torch.optim.SGD`` with a rate of 1 and a momentum is FedAvgM; ``FedAdagrad``, ``FedAdam`` and ``FedYogi``
            are in ``algorithms``. Buffers take the mean. None means the mean.
        aggregation: combines clients' updates in place of the algorithm's weighted mean, for example robustly
            (``TrimmedMean``) or with differential privacy (``DifferentialPrivacy``); see ``fedmoe_pl.aggregation``. The
            algorithm must be one that averages parameters. A ``server_optimizer`` takes the step to its result. None
            means the algorithm's own.
        secure_aggregation: whether the server learns only the sum of a round's updates, and no single one; a
            :class:`SecureAggregation` says how. The algorithm must be one whose server needs only their mean. A
            simulation does the same arithmetic, but hides nothing: it is one process.
        sample_privacy: protects each single sample of a client in its training with DP-SGD. It protects all parameters
            that the phase trains, whether they are shared or not. None trains without.
        select: selects the round that is the phase's result, and may end the phase early; None takes the last round.
        evaluate: when the phase is evaluated; False if it is only a start for others, without a row in the table.
        ckpt_path: a checkpoint to take the phase's result from, in place of training: a federation's (its phase of the
            same name), or Lightning's with the same parameter names; for an ``AdapterMoE``, also a folder that peft
            wrote, with the adapter of the global expert.
    """

    name: str
    algorithm: Algorithm
    rounds: int = 1
    clients_per_round: int | float | None = 1.0  # with None as default, jsonargparse would make floats of integers
    clients: list[int] | None = None
    model: LightningModule | None = None
    gate: Gate | None = None
    mixing: Mixing | None = None
    start: str | dict[str, str] | None = None
    train: Train = field(default_factory=Train)
    server_optimizer: OptimizerCallable | None = None
    aggregation: Aggregation | None = None
    secure_aggregation: SecureAggregation | bool = False
    sample_privacy: DPSGD | None = None
    select: Select | None = None
    evaluate: Evaluate | bool = True
    ckpt_path: str | None = None

    def __post_init__(self) -> None:
        """Checks the arguments, in which numbers of NumPy become those of Python."""
        kinds = {"train": (Train, "a Train"), "select": (Select | None, "a Select or None")}
        kinds |= {"algorithm": (Algorithm, "an Algorithm, such as FedAvg()")}
        kinds |= {"gate": (Gate | None, "a Gate, such as NetworkGate(network) of a network, or None")}
        kinds |= {"aggregation": (Aggregation | None, "an Aggregation")}
        kinds |= {"evaluate": (Evaluate | bool, "an Evaluate, True or False")}
        kinds |= {"secure_aggregation": (SecureAggregation | bool, "a SecureAggregation, True or False")}
        kinds |= {"sample_privacy": (DPSGD | None, "a DPSGD or None")}
        kinds |= {"start": (str | dict | None, "the name of an earlier phase, or a dict of such names by part")}
        kinds |= {"clients": (Collection | None, "a list of ids"), "rounds": (Number, "an integer of at least 1")}
        if isinstance(self.select, Select):
            kinds |= {f"select.{name}": (Number, "a number") for name in ("from_round", "min_delta")}
        kinds |= {"train.callbacks": (list | tuple | None, "a list of Lightning's Callbacks")}
        kinds |= {"train.trainer": (dict | None, "a dict of arguments of a Trainer")}
        for name in ("server_optimizer", "train.optimizer", "train.lr_scheduler", "train.round_lr_scheduler"):
            example = "StepLR, step_size=1" if "scheduler" in name else "torch.optim.SGD, lr=0.1"
            kinds[name] = ((Callable, type(None)), f"a function that makes one, such as partial({example})")
        for name, (kind, allowed) in kinds.items():
            value = attrgetter(name)(self)
            if not isinstance(value, kind):
                raise InvalidArgumentError(str(self), name, value, allowed)
            check_made(str(self), name, value)
        for callback in self.train.callbacks or ():
            check_kind(str(self), "train.callbacks", callback, Callback, " of Lightning")
        check_declarations(self.algorithm)
        others = self.secure_aggregation, self.sample_privacy
        for settings in (self, self.train, self.select, self.evaluate, *others):
            for each in [] if settings is None or isinstance(settings, bool) else fields(settings):
                setattr(settings, each.name, plain(getattr(settings, each.name)))
        trainer = self.train.trainer
        self.train.trainer = trainer and {name: plain(value) for name, value in trainer.items()}
        if not isinstance(self.name, str) or not is_file_name(self.name) or self.name == INITIAL:
            allowed = f"printable, of at most 200 bytes, without '/' and other than '..' and '{INITIAL}'"
            raise InvalidArgumentError("Phase", "name", self.name, allowed, "files and logs are named after it")
        self._check_numbers()
        self._check_combinations()
        self._check_trainer()

    def __str__(self) -> str:
        """The phase's name in messages."""
        return f"Phase '{self.name}'"

    @property
    def monitor(self) -> str | None:
        """The metric that selects the phase's result; None for the last round."""
        return self.select and self.select.monitor

    @property
    def secure(self) -> SecureAggregation | None:
        """How the server learns only the sum of updates; None if it sees each."""
        if isinstance(self.secure_aggregation, SecureAggregation):
            return self.secure_aggregation
        return SecureAggregation() if self.secure_aggregation else None

    @property
    def evaluation(self) -> Evaluate:
        """When the phase is evaluated, if it is."""
        return self.evaluate if isinstance(self.evaluate, Evaluate) else Evaluate()

    @property
    def aggregates(self) -> bool:
        """Whether the server combines what clients send; otherwise their models are those of their local training."""
        return self.algorithm.federated and self.algorithm.messages.combined

    @property
    def evaluation_points(self) -> list[EvaluationPoint]:
        """The points of a round at which the phase is evaluated; ``select`` reads the first one."""
        usual: EvaluationPoint = self.algorithm.evaluated_after if self.aggregates else "local_training"
        if self.evaluation.after == "both":
            return sorted(get_args(EvaluationPoint), key=lambda point: point != usual)
        return [self.evaluation.after or usual]

    def method(self, evaluation_point: EvaluationPoint) -> str:
        """The name in tables, logs and files of the phase's evaluation after one of its ``evaluation_points``."""
        is_first = evaluation_point == self.evaluation_points[0]
        return self.name if is_first else f"{self.name} after {evaluation_point.replace('_', ' ')}"

    def epochs(self, trainer: dict[str, Any]) -> int:
        """Local epochs of a client in a round; the argument are all clients' Trainers' arguments."""
        return trainer["max_epochs"] if self.train.max_epochs is None else self.train.max_epochs

    def client_trainer(self, trainer: dict[str, Any]) -> dict[str, Any]:
        """Arguments of each client's Trainer in this phase, from those of all phases."""
        arguments = {**trainer, **(self.train.trainer or {}), "max_epochs": self.epochs(trainer)}
        if self.train.callbacks:
            arguments["callbacks"] = [*listed(arguments, "callbacks"), *self.train.callbacks]
        return arguments

    def _check_numbers(self) -> None:
        for name, value, lowest in (
            ("rounds", self.rounds, 1),
            ("train.max_epochs", self.train.max_epochs, 0),
            ("train.batch_size", self.train.batch_size, 1),
            ("evaluate.every_n_rounds", self.evaluation.every_n_rounds, 0),
            ("evaluate.every_n_epochs", self.evaluation.every_n_epochs, 1),
        ):
            check_at_least(str(self), name, value, lowest)
        if self.select is not None:
            check_at_least(str(self), "select.from_round", self.select.from_round, 1, self.rounds)
            check_at_least(str(self), "select.patience", self.select.patience, 1)
            check_number(str(self), "select.min_delta", self.select.min_delta, 0)
        size = self.clients_per_round
        in_range = size is None or (is_finite(size) and (0 < size <= 1 if isinstance(size, float) else size >= 1))
        if not in_range:
            allowed = "a number of clients, an integer of at least 1, or a share of them, a float above 0 and at most 1"
            raise InvalidArgumentError(str(self), "clients_per_round", size, allowed)

    def _check_combinations(self) -> None:
        """Refuses arguments that would be overlooked, or that the algorithm's arithmetic does not fit."""
        if isinstance(self.start, dict) and self.gate is not None and "gate" in self.start:
            because = "the phase has a gate of its own"
            raise InvalidArgumentError(str(self), "start", self.start, "without 'gate'", because)
        evaluation = self.evaluation
        if evaluation.after is not None:
            evaluation_points = (*get_args(EvaluationPoint), "both") if self.aggregates else ("local_training",)
            check_choice(str(self), "evaluate.after", evaluation.after, evaluation_points)
        if evaluation.every_n_epochs is not None and (self.rounds > 1 or self.algorithm.federated):
            allowed = "left out, except in phases of one round in which clients train alone"
            raise InvalidArgumentError(str(self), "evaluate.every_n_epochs", evaluation.every_n_epochs, allowed)

    def _check_trainer(self) -> None:
        """Refuses arguments of the Trainer that would be overlooked."""
        reasons = dict.fromkeys(("accelerator", "devices", "num_nodes", "strategy"), "it is the same for all phases")
        for name, because in {**reasons, "max_epochs": "it is an argument of 'train' itself"}.items():
            if name in (self.train.trainer or {}):
                raise InvalidArgumentError(str(self), "train.trainer", self.train.trainer, f"without {name}", because)
