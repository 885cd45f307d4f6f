"""A phase of a federation: one algorithm for a number of rounds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.loggers import Logger

from fedmoe_pl.aggregation import Aggregation
from fedmoe_pl.algorithms.algorithm import Algorithm, Moment
from fedmoe_pl.checks import MOST_COUNTED, check_kind, is_finite, plain
from fedmoe_pl.evaluation.evaluation import MONITORS, SPLITS
from fedmoe_pl.models import Gate
from fedmoe_pl.models.mixtures.mixing import Mixing
from fedmoe_pl.rounds.names import is_file_name

_SPLITS = tuple(f"{split}_" for split in SPLITS)  # what the names of the federation's metrics begin with
INITIAL = "initial"
"""The ``start`` of a phase that begins with the untrained model."""


@dataclass
class Phase:
    """One algorithm for a number of rounds; its result is a row of the final table, and a start for later phases.

    Args:
        name: the method's name in tables, logs and files.
        algorithm: says what is shared, how clients train, and how their results are combined.
        rounds: number of rounds.
        clients_per_round: how many clients train in a round: an int is a number of clients, a float a share of all N
            clients, ``max(int(share * N), 1)``. 1.0 and None are all that take part.
        model: replaces the federation's model in this phase and in the phases that start from it, so that one run can
            compare methods with different models. A phase with a model of its own takes those parts from its start that
            both models have; they must have the same tensors, except the gate, which otherwise starts anew.
        gate: replaces the model's gate in this phase; ``GlobalOnly`` trains and evaluates only the global expert,
            ``LocalOnly`` only the local expert.
        mixing: replaces the model's ``mixing``, which says what it mixes: logits or probabilities.
        start: name of the earlier phase whose result this one starts from, or ``initial`` for the untrained model;
            None means the last phase that the algorithm follows (personalization follows the federated phase). A dict
            names one for each part of the model, such as ``{"global_expert": "FedAvg", "local_expert": "Ditto"}``: the
            phase takes the server's tensors of this part and those that clients kept. Parts that are not named start
            from the initial model. The rounds before the phase are then those of its longest chain of starts.
        max_epochs: local epochs of a client in a round; None means the trainer's.
        batch_size: local batch size; None means the data module's.
        optimizer: local optimizer; None means the model's. Unless ``keep_optimizer``, each round has a new one.
        lr_scheduler: its scheduler, new in each round and stepped once per local epoch; None means the model's.
        round_lr_scheduler: scheduler of the learning rate over rounds: any of PyTorch's that needs no metric, stepped
            once per round. A scheduler over epochs starts from the round's learning rate. The local rounds of newcomers
            begin with the rate of the first round.
        keep_optimizer: whether a client keeps the state of its optimizer, such as momentum, for its next round in this
            phase.
        server_optimizer: takes the server's step in place of the mean: its gradient is the server's parameters minus
            the clients' mean. It may be any of PyTorch's that needs only a gradient, with a constant learning rate:
            ``torch.optim.SGD`` with a rate of 1 and a momentum is FedAvgM; ``FedAdagrad``, ``FedAdam`` and ``FedYogi``
            are in ``algorithms``. Buffers take the mean. None means the mean.
        aggregation: combines clients' updates in place of the algorithm's weighted mean, for example robustly
            (``TrimmedMean``) or with differential privacy (``DifferentialPrivacy``); see ``fedmoe_pl.aggregation``. The
            algorithm must be one that averages parameters. A ``server_optimizer`` takes the step to its result. None
            means the algorithm's own.
        monitor: metric that selects the result: the round with its best mean over the participants. One of
            ``validation``, ``validation_loss``, ``local_test``, ``reweighted_test`` and ``global_test``, or a metric of
            the federation, such as ``validation_f1``; None means the last round. All but those on validation samples
            select on test data, and tables say so.
        monitor_from_round: first round that may be selected, counted from 1.
        patience: ends the phase after this many evaluations in a row without a better ``monitor``; None never does.
        min_delta: for ``patience``, a metric is better only if it improves by more than this.
        evaluate_every_n_rounds: evaluate after every n rounds; None means the federation's.
        evaluate_every_n_epochs: for phases of one round in which clients train alone: callbacks and loggers also get
            the evaluations after 0, n, 2n ... epochs, so that the phase is a curve over epochs. The clients train from
            the start for each, which changes no result, but costs as much as these epochs together. None for a dot.
        callbacks: Lightning callbacks of each client's Trainer in this phase, such as ``BestEpoch``, in addition to the
            federation's.
        trainer: arguments of each client's Trainer in this phase, in place of the federation's; ``accelerator``,
            ``devices`` and ``num_nodes`` are the same in all phases.
        evaluate_after: the moment of a round after which clients' models are evaluated: ``local_training``, with the
            parameters that each client trained last, ``aggregation``, which includes an exchange between clients, or
            ``both``; None means the paper's. With ``both``, the table has two rows; the paper's moment comes first,
            ``monitor`` reads it, and the other row's name says its moment. Phases without aggregation have only
            ``local_training``.
        evaluate: whether the phase is evaluated and has a row in the table; False if it is only a start for others.
        ckpt_path: a checkpoint to take the phase's result from, in place of training: a federation's (its phase of the
            same name), or Lightning's with the same parameter names.
    """

    name: str
    algorithm: Algorithm
    rounds: int = 1
    clients_per_round: int | float | None = 1.0  # with None as default, jsonargparse would make floats of integers
    model: LightningModule | None = None
    gate: Gate | None = None
    mixing: Mixing | None = None
    start: str | dict[str, str] | None = None
    max_epochs: int | None = None
    batch_size: int | None = None
    optimizer: OptimizerCallable | None = None
    lr_scheduler: LRSchedulerCallable | None = None
    round_lr_scheduler: LRSchedulerCallable | None = None
    keep_optimizer: bool = False
    server_optimizer: OptimizerCallable | None = None
    aggregation: Aggregation | None = None
    monitor: str | None = None
    monitor_from_round: int = 1
    patience: int | None = None
    min_delta: float = 0.0
    evaluate_every_n_rounds: int | None = None
    evaluate_every_n_epochs: int | None = None
    callbacks: list[Callback] | None = None
    trainer: dict[str, Any] | None = None
    evaluate_after: Literal["local_training", "aggregation", "both"] | None = None
    evaluate: bool = True
    ckpt_path: str | None = None

    def __post_init__(self) -> None:
        """Checks the arguments, in which numbers of NumPy become those of Python.

        Raises:
            MisconfigurationException: if a value is out of range, or two contradict each other.
        """
        for field in fields(self):
            setattr(self, field.name, plain(getattr(self, field.name)))
        self.trainer = self.trainer and {name: plain(value) for name, value in self.trainer.items()}
        if not isinstance(self.name, str) or not is_file_name(self.name) or self.name == INITIAL:
            raise MisconfigurationException(
                f"Phase: name is {self.name!r}, but must be one that a file can have: printable, of at most 200 "
                f"bytes, without '/' and other than '..' and '{INITIAL}', because files and logs are named after it."
            )
        check_kind(str(self), "algorithm", self.algorithm, Algorithm)
        if type(self.algorithm) is Algorithm:
            raise MisconfigurationException(
                f"{self}: algorithm is Algorithm, but must be a class that derives from it, such as FedAvg, which has "
                "its defaults."
            )
        self._check_start()
        self._check_numbers()
        self._check_monitor()
        self._check_trainer()

    def __str__(self) -> str:
        """The phase's name in messages."""
        return f"Phase '{self.name}'"

    @property
    def moments(self) -> list[Moment]:
        """The moments of a round after which the phase is evaluated; ``monitor`` reads the first one."""
        usual: Moment = self.algorithm.evaluated_after if self.algorithm.aggregates else "local_training"
        if self.evaluate_after == "both":
            return sorted(get_args(Moment), key=lambda moment: moment != usual)
        return [self.evaluate_after or usual]

    def method(self, moment: Moment) -> str:
        """The name in tables, logs and files of the phase's evaluation after one of its ``moments``."""
        return self.name if moment == self.moments[0] else f"{self.name} after {moment.replace('_', ' ')}"

    def epochs(self, trainer: dict[str, Any]) -> int:
        """Local epochs of a client in a round.

        Args:
            trainer: arguments of all clients' Trainers.
        """
        return trainer["max_epochs"] if self.max_epochs is None else self.max_epochs

    def client_trainer(self, trainer: dict[str, Any]) -> dict[str, Any]:
        """Arguments of each client's Trainer in this phase.

        Args:
            trainer: arguments of all clients' Trainers.
        """
        arguments = {**trainer, **(self.trainer or {}), "max_epochs": self.epochs(trainer)}
        if self.callbacks:
            common = arguments.get("callbacks") or []
            arguments["callbacks"] = [*(common if isinstance(common, list) else [common]), *self.callbacks]
        return arguments

    def _check_start(self) -> None:
        if self.start is None or isinstance(self.start, str):
            return
        if not self.start:
            raise MisconfigurationException(f"{self}: start is {{}}, but must name a phase for at least one part.")
        if self.gate is not None and "gate" in self.start:
            raise MisconfigurationException(
                f"{self}: start is {self.start}, but must not name 'gate', because the phase has a gate of its own."
            )

    def _check_numbers(self) -> None:
        for name, lowest in (
            ("rounds", 1),
            ("max_epochs", 0),
            ("batch_size", 1),
            ("monitor_from_round", 1),
            ("patience", 1),
            ("min_delta", 0),
            ("evaluate_every_n_rounds", 0),
            ("evaluate_every_n_epochs", 1),
        ):
            value, may_be_none = getattr(self, name), getattr(type(self), name, None) is None
            is_number = is_finite(value) and (name == "min_delta" or isinstance(value, int))
            if value is None and may_be_none:
                continue
            if value is None or not (is_number and lowest <= value <= MOST_COUNTED):
                kind = "a finite number of " if name == "min_delta" else ""
                raise MisconfigurationException(
                    f"{self}: {name} is {value}, but must be {kind}at least {lowest} and at most {MOST_COUNTED:,}."
                )
        if self.keep_optimizer and self.rounds == 1:
            raise MisconfigurationException(
                f"{self}: keep_optimizer is True, but must be False for rounds 1, because no round follows."
            )
        if self.server_optimizer is not None and not self.algorithm.aggregates:
            raise MisconfigurationException(
                f"{self}: server_optimizer is given, but must be left out, because {type(self.algorithm).__name__} "
                "aggregates nothing."
            )
        size = self.clients_per_round
        in_range = size is None or (is_finite(size) and (0 < size <= 1 if isinstance(size, float) else size >= 1))
        if not in_range:
            raise MisconfigurationException(
                f"{self}: clients_per_round is {size}, but must be an integer of at least 1, which is a number of "
                "clients, or a float above 0 and at most 1, which is a share of them."
            )

    def _check_monitor(self) -> None:
        if not (self.monitor is None or self.monitor in MONITORS or self.monitor.startswith(_SPLITS)):
            raise MisconfigurationException(
                f"{self}: monitor is '{self.monitor}', but must be one of {', '.join(MONITORS)}, or a metric of the "
                f"federation by one of the names {', '.join(f'{split}NAME' for split in _SPLITS)}."
            )
        aggregates, name = self.algorithm.aggregates, type(self.algorithm).__name__
        allowed = (None, *get_args(Moment), "both") if aggregates else (None, "local_training")
        if self.evaluate_after not in allowed:
            reason = "" if aggregates else f", because {name} aggregates nothing"
            raise MisconfigurationException(
                f"{self}: evaluate_after is '{self.evaluate_after}', but must be "
                f"{' or '.join(str(moment) for moment in allowed[1:])}{reason}."
            )
        if self.evaluate_after and not self.evaluate:
            raise MisconfigurationException(
                f"{self}: evaluate_after is '{self.evaluate_after}', which needs evaluate to be true."
            )
        if self.monitor and not self.evaluate:
            raise MisconfigurationException(f"{self}: monitor is '{self.monitor}', which needs evaluate to be true.")
        if self.patience and not self.monitor:
            raise MisconfigurationException(f"{self}: patience is {self.patience}, which needs a monitor.")
        if self.monitor and self.evaluate_every_n_rounds == 0:
            raise MisconfigurationException(
                f"{self}: evaluate_every_n_rounds is 0, but monitor is '{self.monitor}'; it must be at least 1."
            )
        if self.monitor_from_round > self.rounds:
            raise MisconfigurationException(
                f"{self}: monitor_from_round is {self.monitor_from_round}, but must be at most rounds, {self.rounds}."
            )
        if self.monitor_from_round > 1 and not self.monitor:
            raise MisconfigurationException(
                f"{self}: monitor_from_round is {self.monitor_from_round}, which needs a monitor."
            )
        if self.min_delta and not self.patience:
            raise MisconfigurationException(f"{self}: min_delta is {self.min_delta}, which needs a patience.")
        if self.evaluate_every_n_rounds is not None and not self.evaluate:
            raise MisconfigurationException(
                f"{self}: evaluate_every_n_rounds is {self.evaluate_every_n_rounds}, which needs evaluate to be true."
            )
        alone = self.rounds == 1 and not self.algorithm.federated and self.evaluate
        if self.evaluate_every_n_epochs is not None and not alone:
            raise MisconfigurationException(
                f"{self}: evaluate_every_n_epochs is {self.evaluate_every_n_epochs}, but must be left out, except in "
                "evaluated phases of one round in which clients train alone."
            )

    def _check_trainer(self) -> None:
        for name in ("accelerator", "devices", "num_nodes"):
            if name in (self.trainer or {}):
                raise MisconfigurationException(
                    f"{self}: trainer has {name}, which is the same for all phases; it belongs in the federation's "
                    "trainer."
                )
        if "max_epochs" in (self.trainer or {}):
            raise MisconfigurationException(
                f"{self}: trainer has max_epochs, which is an argument of the phase itself; set it there."
            )
        given = {name: (self.trainer or {}).get(name) or [] for name in ("callbacks", "logger")}
        given = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
        for callback in given["callbacks"]:
            if not isinstance(callback, Callback):  # a name in a file, of which nobody makes an object
                raise MisconfigurationException(
                    f"{self}: trainer has the callback {callback!r}, but must leave out callbacks that are no objects; "
                    "the phase's own callbacks name their classes."
                )
        for logger in given["logger"]:
            if not isinstance(logger, bool | Logger):
                raise MisconfigurationException(
                    f"{self}: trainer has the logger {logger!r}, but must leave it out or have true or false; the "
                    "federation's trainer names the classes of loggers."
                )
