"""The local training of a phase: everything that is the same for all its clients."""

from __future__ import annotations

import hmac
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable
from lightning.pytorch.strategies import ParallelStrategy
from torch.nn.modules.conv import _ConvNd
from torchmetrics import Metric

from fedmoe_pl.aggregation import Aggregation, SecureAggregation
from fedmoe_pl.algorithms.algorithm import Algorithm, overrides
from fedmoe_pl.backends.dp_sgd import DPSGD
from fedmoe_pl.backends.optimizers import learning_rates
from fedmoe_pl.backends.untrained import DeviceCopies, ModuleCopies, SharedParts
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.layers import has_batch_norm
from fedmoe_pl.trees import Tree, copy_module, of_module

_MOST_EPOCHS = 100_000  # going through so many takes about a second
_AT_ONCE = 4096  # samples that are copied and hashed at once


def epochs_to_try(algorithm: Algorithm, rounds: range, max_epochs: int) -> tuple[Iterator[tuple[int, int]], bool]:
    """Pairs of round and epoch for which to ask an algorithm what it trains, and whether they cover the phase."""
    epochs = range(max_epochs)
    if not overrides(algorithm, "is_trainable"):
        rounds, epochs = rounds[:1], epochs[:1]
    rounds = rounds if epochs else rounds[:0]  # `itertools.product` would first make a list of all rounds
    shows_all = len(rounds) * len(epochs) <= _MOST_EPOCHS
    if not shows_all:
        rounds = rounds[: max(math.isqrt(_MOST_EPOCHS), _MOST_EPOCHS // len(epochs))]
        epochs = epochs[: _MOST_EPOCHS // len(rounds)]
    return itertools.product(rounds, epochs), shows_all


def is_distributed(trainer: Mapping[str, Any]) -> bool:
    """Whether the strategy in a Trainer's arguments trains each client in several processes."""
    strategy = trainer.get("strategy", "auto")
    return isinstance(strategy, ParallelStrategy) or (isinstance(strategy, str) and strategy.startswith("ddp"))


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """The local training of a phase: everything that is the same for all of its clients.

    Attributes:
        module: the phase's module with its initial tensors; clients train copies of it.
        initial: the module's initial tensors by name, on the CPU.
        algorithm: the phase's algorithm.
        datamodule: the data and the clients that hold them; already set up.
        trainer: arguments of every client's ``Trainer``, except its devices.
        batch_size: overrides the data module's batch size; None keeps it.
        seed: the run's seed.
        participants: ids of the clients that take part in the phase, from which its rounds are drawn.
        rounds: number of rounds of the phase.
        rounds_before: number of rounds of the phases that this one goes on from; random numbers depend on this number
            plus the round, so that a phase does not repeat the random numbers of an earlier one.
        round_lr_scheduler: makes a scheduler of the learning rate that is stepped once per round; None for none.
        keep_optimizer: whether clients keep the state of their optimizer for their next round.
        keep_trained: whether clients keep a copy of what they trained, for an evaluation before aggregation.
        aggregation: combines the clients' updates; None for the algorithm itself.
        secure_aggregation: how clients encode what they send; None if the server sees it as it is.
        sample_privacy: how single samples are protected; None if they are not.
        noise_multipliers: each client's noise multiplier, by client id, if ``sample_privacy`` has a target epsilon.
        secret_seed: replaces ``seed`` for random numbers that must stay secret, on a client's own machine; or None.
        record_transfers: whether to describe each tensor that clients send, for callbacks.
        device: the device that clients train on.
        devices: the devices of all processes that train each client together, this process's among them; empty if one
            process trains a client.
        client_timeout: the most seconds that a client's training may take; None for no limit.
        stop_after: the number of local epochs after which clients stop, as if interrupted; None to train all of them.
        phase_name: the phase's name.
        run_name: the end of the run's folder, such as ``runs/quickstart/version_0``.
        metrics: the metrics that are evaluated besides accuracy, by name.
        elsewhere: copies of what clients share, on a device other than the CPU.
    """

    module: LightningModule
    initial: Tree
    algorithm: Algorithm
    datamodule: FederatedDataModule
    trainer: dict[str, Any]
    batch_size: int | None
    seed: int
    participants: Sequence[int]
    rounds: int = 1
    rounds_before: int = 0
    round_lr_scheduler: LRSchedulerCallable | None = None
    keep_optimizer: bool = False
    keep_trained: bool = False
    aggregation: Aggregation | None = None
    secure_aggregation: SecureAggregation | None = None
    sample_privacy: DPSGD | None = None
    noise_multipliers: Mapping[int, float] = field(default_factory=dict)
    secret_seed: int | None = field(default=None, repr=False)
    record_transfers: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    devices: Sequence[torch.device] = ()
    client_timeout: float | None = None
    stop_after: int | None = None
    phase_name: str = ""
    run_name: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    elsewhere: DeviceCopies = field(default_factory=DeviceCopies, repr=False)
    # what was computed already
    _hashes: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    _learning_rates: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False)
    _of_architectures: dict[int, LocalTraining | None] = field(default_factory=dict, init=False, repr=False)
    _trainable_in: dict[tuple[int, int], frozenset[str]] = field(default_factory=dict, init=False, repr=False)
    _parts_without: dict[frozenset[str], tuple[str, ...]] = field(default_factory=dict, init=False, repr=False)

    @property
    def max_epochs(self) -> int:
        """The number of local epochs of a client."""
        return self.trainer["max_epochs"]

    @property
    def validates(self) -> bool:
        """Whether clients validate in their training."""
        return bool(self.trainer["limit_val_batches"] and len(self.datamodule.validation_samples.indices))

    @property
    def private_seed(self) -> int:
        """The seed of dropout and, with DP-SGD, of noise and batches: the secret one, if servers must not know them."""
        return self.seed if self.secret_seed is None else self.secret_seed

    @property
    def in_half_precision(self) -> bool:
        """Whether steps compute in bfloat16."""
        return self.trainer.get("precision") in ("bf16", "bf16-mixed")

    @property
    def combining(self) -> Algorithm | Aggregation | SecureAggregation:
        """The object whose ``combine`` folds updates."""
        return self.secure_aggregation or self.aggregation or self.algorithm

    def start_of_changes(self, tensors: Tree) -> Tree:
        """Of the tensors at the start of a round, those that are subtracted for encoding and added after decoding."""
        by_aggregation = self.aggregation is not None and self.aggregation.averages_changes
        return {} if by_aggregation or self.algorithm.messages.changes else of_module(tensors)

    def noise_multiplier(self, client_id: int) -> float:
        """The noise multiplier of a client; requires ``sample_privacy``."""
        assert self.sample_privacy is not None
        fixed = self.sample_privacy.noise_multiplier
        return self.noise_multipliers[client_id] if fixed is None else fixed

    def hash_of_samples(self, client_id: int) -> str:
        """A hash of every byte of a client's training samples, which reveals nothing to those without the seed."""
        if client_id not in self._hashes:
            samples = self.datamodule.train_samples[client_id]
            keyed = hmac.new(str(self.private_seed).encode(), digestmod="sha256")
            for values in (self.datamodule.x, self.datamodule.y):
                keyed.update(f"{values.dtype} {(len(samples), *values.shape[1:])}".encode())
                for some in samples.split(_AT_ONCE):
                    keyed.update(values[some].cpu().contiguous().view(torch.uint8).numpy().data)
            self._hashes[client_id] = keyed.hexdigest()
        return self._hashes[client_id]

    def learning_rates(self, round: int) -> list[float] | None:
        """The learning rate of each parameter group in a round, counted from 0; None without a schedule over rounds."""
        if self.round_lr_scheduler is None:
            return None
        if round not in self._learning_rates:
            self._learning_rates[round] = learning_rates(self.module, self.round_lr_scheduler, round)
        return self._learning_rates[round]

    def architecture(self, client_id: int) -> int:
        """The number of a client's architecture; 0 for modules with only one."""
        return self.module.client_architecture(client_id) if isinstance(self.module, MixtureOfExperts) else 0

    def by_architecture(self, clients: Sequence[int]) -> list[list[int]]:
        """Groups clients by architecture, keeping their order."""
        groups: dict[int, list[int]] = {}
        for client in clients:
            groups.setdefault(self.architecture(client), []).append(client)
        return list(groups.values())

    def of(self, client_id: int) -> LocalTraining:
        """The local training for a client's architecture; its module has only the parts of that architecture."""
        architecture = self.architecture(client_id)
        if architecture not in self._of_architectures:
            module = copy_module(self.module, {name for name, _ in self.module.named_parameters()})
            if isinstance(module, MixtureOfExperts):
                module.keep_architecture(architecture)
            names = module.state_dict().keys()
            if names == self.module.state_dict().keys():
                self._of_architectures[architecture] = None  # `self` would make a reference cycle, which is freed late
            else:
                initial = {name: self.initial[name] for name in names}
                module = copy_module(module)  # which owns its memory
                self._of_architectures[architecture] = replace(self, module=module, initial=initial)
        return self._of_architectures[architecture] or self

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out cached values, which can be recomputed."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def trainable_in(self, round: int, epoch: int) -> frozenset[str]:
        """Names of the parameters that the algorithm trains in a local epoch, even those that the user has frozen."""
        moment = (round, epoch) if overrides(self.algorithm, "is_trainable") else (0, 0)
        if moment not in self._trainable_in:
            is_trainable = self.algorithm.is_trainable
            names = frozenset(name for name, _ in self.module.named_parameters() if is_trainable(name, *moment))
            self._trainable_in[moment] = next((known for known in self._trainable_in.values() if known == names), names)
        return self._trainable_in[moment]

    @cached_property
    def trainable(self) -> dict[frozenset[str], tuple[int, int]]:
        """Every set of parameters that are trained together, with the first (round, epoch) that trains exactly it."""
        names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        is_trainable, first = self.algorithm.is_trainable, {}
        for round, epoch in epochs_to_try(self.algorithm, range(self.rounds), self.max_epochs)[0]:
            first.setdefault(frozenset(name for name in names if is_trainable(name, round, epoch)), (round, epoch))
        first.pop(frozenset(), None)
        return first

    @cached_property
    def untrained(self) -> frozenset[str]:
        """Names of the parameters that no client trains; empty if there are too many epochs to tell."""
        all_known = epochs_to_try(self.algorithm, range(self.rounds), self.max_epochs)[1]
        names = {name for name, _ in self.module.named_parameters()} if all_known else ()
        return frozenset(names).difference(*self.trainable)

    @cached_property
    def copies(self) -> ModuleCopies:
        """Makes the clients' modules, which share the parameters that no client trains."""
        return ModuleCopies(self.module, self.initial, self.untrained, self.elsewhere)

    @cached_property
    def shared_parts(self) -> SharedParts:
        """Outputs of parts of the clients' models on the global test set, remembered in this process."""
        return SharedParts()

    @cached_property
    def has_batch_norm(self) -> bool:
        """Whether the module has batch normalization in train mode, which needs at least two samples in a batch."""
        return has_batch_norm(self.module)

    @cached_property
    def frozen_modules(self) -> frozenset[str]:
        """Names of the submodules whose parameters never change in the phase: neither trained nor received again.

        Empty if there are too many epochs to know what each of them trains; ``trained_names`` then warns.
        """
        all_known = epochs_to_try(self.algorithm, range(self.rounds), self.max_epochs)[1]
        if self.algorithm.frozen_train_mode or not all_known:
            return frozenset()
        trained = frozenset().union(*self.trainable)
        changing = {
            name
            for name, _ in self.module.named_parameters(remove_duplicate=False)
            if name in trained or (self.rounds > 1 and self.algorithm.is_shared(name))
        }
        return frozenset(self.parts_without(frozenset(changing))) - {""}

    def parts_without(self, names: frozenset[str]) -> tuple[str, ...]:
        """Names of the submodules that have parameters, but none of these; the module itself has the empty name."""
        if names not in self._parts_without:
            parameters = self.module.named_parameters(remove_duplicate=False)
            these = {id(parameter) for name, parameter in parameters if name in names}
            parts = {name: {*map(id, part.parameters())} for name, part in self.module.named_modules()}
            self._parts_without[names] = tuple(name for name, own in parts.items() if own and own.isdisjoint(these))
        return self._parts_without[names]

    @cached_property
    def idle(self) -> tuple[str, ...]:
        """Name prefixes of experts that no loss computes, because a fixed gate never selects them."""
        if overrides(self.algorithm, "client_loss") or not isinstance(self.module, MixtureOfExperts):
            return ()
        return tuple(f"{part}." for part in self.module.idle_parts)

    @cached_property
    def frozen_in_use(self) -> frozenset[str]:
        """The names in ``frozen_modules`` that a loss may compute."""
        return frozenset(name for name in self.frozen_modules if not f"{name}.".startswith(self.idle))

    @cached_property
    def trains_convolutions(self) -> bool:
        """Whether some convolution is trained, and thus computed in every step."""
        trained = frozenset().union(*self.trainable)
        layers = [f"{name}." for name, part in self.module.named_modules() if isinstance(part, _ConvNd)]
        names = [name for name in trained if not name.startswith(self.idle)]
        return any(name.startswith(layer) for name in names for layer in layers)
