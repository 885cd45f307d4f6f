"""What would leave the clients of a federation, from a dry run of its first rounds."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from fedmoe_pl.aggregation import CollectingAggregation
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.overrides import overrides
from fedmoe_pl.backends import LocalTraining, Transfer
from fedmoe_pl.backends.dry import DryPlan
from fedmoe_pl.backends.traffic import WEIGHT
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.parts import Parts
from fedmoe_pl.rounds.begin import first_clients
from fedmoe_pl.rounds.cohort import cohort_of
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.rounds import run_round
from fedmoe_pl.rounds.run import FederationCallback, Run
from fedmoe_pl.rounds.train import draw_cohort

_SAMPLES = 8  # of each client; what is sent does not depend on how many there are
_OF_SAMPLES = ("samples", "batches", "shuffled_samples")  # attributes of a client that give its samples
_PUBLIC = ("num_clients", "num_classes")  # attributes of the data that say nothing of a client


@dataclass
class PhaseAudit:
    """What leaves the clients in a phase, and what stays with them.

    Attributes:
        phase: the phase.
        num_clients: number of clients of the federation.
        participants: number of clients from which cohorts are drawn.
        cohort: number of clients in a round; with Poisson sampling, the expected one.
        transfers: what was sent in the first rounds, a list for each.
        stays: names of the tensors that stay with their client: those of the module that it does not receive from the
            server either, and those that the algorithm keeps.
        may_leave: names of the module's tensors that the algorithm shares, too: it sends them depending on the clients'
            data, or something that it computes from them.
        before: what the server used before the first round without its being sent, in words.
        weight: what the weight of a client's update is, in words; empty if none is sent.
        only_mean: whether the server needs only the weighted mean of the updates.
        names: names of the module's tensors.
    """

    phase: Phase
    num_clients: int
    participants: int
    cohort: int
    transfers: list[list[Transfer]] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)
    may_leave: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    weight: str = ""
    only_mean: bool = False
    names: list[str] = field(default_factory=list)


class _Recorder(FederationCallback):
    """Collects what is sent in each round."""

    def __init__(self) -> None:
        self.transfers: list[list[Transfer]] = []

    def on_transfers(self, run: Run, phase: Phase, round: int, transfers: list[Transfer]) -> None:
        """Adds the transfers of a round."""
        self.transfers.append(transfers)


def audit_run(run: Run) -> list[PhaseAudit]:
    """Runs the first rounds of every phase dry: as they would be run, but nothing is trained, evaluated or written.

    Clients have a few of their samples. Phases in which clients train alone have one client of each architecture.

    Args:
        run: a run that has been checked and has not begun; it is not changed.
    """
    dry = replace(
        run,
        phases=[_unevaluated(phase) for phase in run.phases],
        enable_checkpointing=False,
        training_data=_with_few_samples(run.datamodule),
        given_results=dict(run.given_results),
        states={},
        callbacks=[recorder := _Recorder()],
    )
    return [
        _audit_phase(dry, phase, original, recorder) for phase, original in zip(dry.phases, run.phases, strict=True)
    ]


def _audit_phase(dry: Run, phase: Phase, original: Phase, recorder: _Recorder) -> PhaseAudit:
    algorithm, num_clients = phase.algorithm, dry.datamodule.num_clients
    module = dry.module(phase)
    state = dry.state_of(phase, module)
    training = dry.local_training(phase, module, state.initial)
    drawn = cohort_of(phase, num_clients, dry.seed)
    audit = PhaseAudit(original, num_clients, len(drawn.participants), drawn.size, names=[*module.state_dict()])
    if state.round == phase.rounds:  # the result comes from a checkpoint
        audit.stays = audit.names
        return audit
    plan, recorder.transfers = DryPlan(training), []
    if state.server_learns:
        state.aggregation = {} if phase.aggregation is None else phase.aggregation.begin()
        cohort = draw_cohort(dry, phase, state)
        watch = _Watch(dry.datamodule, len(cohort))
        clients = first_clients(replace(training, datamodule=dry.datamodule), cohort, state.clients)
        state.server = algorithm.server_begin(state.server, watch.watched(clients))
        audit.before = [*watch.used]
    alone = None if algorithm.federated else _one_of_each_architecture(training, num_clients)
    for _ in range(min(phase.rounds, algorithm.message_period + 1)):
        if not state.stopped:
            # Poisson sampling may draw nobody
            cohort = alone or draw_cohort(dry, phase, state) or drawn.participants[:1]
            run_round(dry, phase, plan, None, cohort)
    audit.transfers = recorder.transfers
    _describe(audit, plan, {name for tree in state.clients.values() for name in tree})
    if state.round < phase.rounds:
        state.server = algorithm.server_final(state.server)
    state.finished = True
    return audit


def _describe(audit: PhaseAudit, plan: DryPlan, kept: set[str]) -> None:
    """Says what stays, what may leave, and what the weights are."""
    phase, algorithm = audit.phase, audit.phase.algorithm
    sent = [each for transfers in audit.transfers for each in transfers if each.direction != "down"]
    leaving = {own_name(each) for each in sent}
    exchanged = {without_numbers(own_name(each)) for each in sent if each.direction == "between_clients"}
    audit.may_leave = [
        name
        for name in audit.names
        if name not in leaving and (algorithm.is_shared(name) or without_numbers(name) in exchanged)
    ]
    own = sorted(kept - {*audit.names}) + (["optimizer/*"] if phase.keep_optimizer else [])
    received = {each.tensor for transfers in audit.transfers for each in transfers if each.direction == "down"}
    audit.stays = [name for name in audit.names + own if name not in {*leaving, *audit.may_leave, *received}]
    audit.only_mean = not overrides(algorithm, "combine") and not isinstance(phase.aggregation, CollectingAggregation)
    if any(each.tensor == WEIGHT for each in sent):
        weights = plan.weights.values()
        counted = "its number of training samples" if all(n == size for n, size in weights) else "a number"
        audit.weight = "1, the same for all" if all(weight == 1 for weight, _ in weights) else counted


def own_name(transfer: Transfer) -> str:
    """A tensor's name at the client that sent it."""
    return transfer.tensor.partition(".")[2] if transfer.direction == "between_clients" else transfer.tensor


def without_numbers(name: str) -> str:
    """The name with a star in place of every number between dots and slashes, such as that of an expert or a client.

    Example:
        >>> without_numbers("experts.12.fc1.weight"), without_numbers("features/3")
        ('experts.*.fc1.weight', 'features/*')
    """
    return re.sub(r"(?<=[./])\d+(?=[./]|$)", "*", name)


def _unevaluated(phase: Phase) -> Phase:
    """The phase without evaluations and what depends on them."""
    return replace(
        phase,
        evaluate=False,
        select=None,
    )


def _one_of_each_architecture(training: LocalTraining, num_clients: int) -> list[int]:
    return [clients[0] for clients in training.by_architecture(range(num_clients))]


def _with_few_samples(datamodule: FederatedDataModule) -> FederatedDataModule:
    few, parts = copy.copy(datamodule), datamodule.train_samples
    samples = [samples[:_SAMPLES] for samples in parts]
    few.train_samples = Parts(torch.cat(samples), parts.sizes.clamp(max=_SAMPLES))
    return few


class _Watch:
    """Finds out what of its clients an algorithm uses before the first round.

    Args:
        datamodule: the data of all clients.
        number: number of clients of the first round.

    Attributes:
        used: what was used, in words, each once.
    """

    def __init__(self, datamodule: FederatedDataModule, number: int) -> None:
        self.datamodule = datamodule
        self.number = number
        self.used: dict[str, None] = {}

    def watched(self, clients: Iterable[Client]) -> Iterator[Client]:
        """The clients, which note what is asked of them."""
        for client in clients:
            yield cast(Client, _WatchedClient(client, self))


class _WatchedClient:
    def __init__(self, client: Client, watch: _Watch) -> None:
        self._client = client
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        watch = self._watch
        if name == "datamodule":
            return _WatchedData(watch)
        if name in _OF_SAMPLES:
            watch.used[f"what the algorithm computes from training samples of {watch.number} clients"] = None
        if name == "state":
            watch.used[f"tensors that {watch.number} clients kept from earlier phases"] = None
        return getattr(self._client, name)


class _WatchedData:
    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        datamodule = self._watch.datamodule
        if name not in _PUBLIC:
            self._watch.used[f"{name} of all {datamodule.num_clients} clients"] = None
        return getattr(datamodule, name)
