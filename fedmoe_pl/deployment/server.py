"""The server of a deployed federation: the same rounds as in a simulation, with clients on their own machines."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import EvaluationPoint, asks_clients
from fedmoe_pl.backends import Failure, LocalTraining, Plan
from fedmoe_pl.callbacks import ClusterMonitor, ResultFiles
from fedmoe_pl.checkpoints.checkpoint import find_checkpoint
from fedmoe_pl.checkpoints.files import DamagedFileError, read_json, write_json
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.client_names import ClientNames
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.deployment.answers import evaluation_of, without_values
from fedmoe_pl.deployment.descriptions import read_descriptions, settings_of, wait_for, write_descriptions
from fedmoe_pl.deployment.messages import Message
from fedmoe_pl.deployment.plan import ClientsBackend, ClientsPlan
from fedmoe_pl.deployment.private_rounds import SECRET, new_secret, read_secret
from fedmoe_pl.deployment.remote_clients import Clients, ClientsStore, files_of
from fedmoe_pl.deployment.transport import Transport
from fedmoe_pl.evaluation.results import ClientEvaluation, Evaluation
from fedmoe_pl.phases.participation import cohort_of
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.interruption import requeued
from fedmoe_pl.rounds.run import FederationCallback, Run
from fedmoe_pl.setup.data import TooManyClassesError
from fedmoe_pl.trees import Tree

_FILE = "handed_over.json"
"""Which clients have the last phase's result."""


def evaluate_at_clients(
    asked: Clients,
    training: LocalTraining,
    server: Tree,
    kept: Mapping[int, Tree],
    round: int,
    evaluation_points: Sequence[EvaluationPoint],
    clients: Sequence[int],
    plan: Plan | None,
) -> list[list[ClientEvaluation]]:
    """Has clients evaluate their models on their own samples; other arguments as in ``evaluate_points``.

    An algorithm that chooses a client's model from the server's state gets all of it, as in a simulation. Clients whose
    next training was announced to the plan train in the same message.
    """
    messages = ClientsPlan(training, asked).about_result("evaluate", server, clients, kept, round)
    of_points = {
        client: [replace(message, values={**message.values, "evaluation_point": point}) for point in evaluation_points]
        for client, message in messages.items()
    }
    plan = plan if isinstance(plan, ClientsPlan) else ClientsPlan(training, asked)
    answers = plan.ask_before_training(of_points)
    return [
        [_evaluation(answers[client][i], training, client) for client in clients]
        for i, _ in enumerate(evaluation_points)
    ]


def _evaluation(answer: Message | Failure, training: LocalTraining, client: int) -> ClientEvaluation:
    """A client's evaluation; without values, and with a warning, if its answer is none."""
    evaluation = answer if isinstance(answer, Failure) else evaluation_of(answer, training, client)
    if isinstance(evaluation, Failure):
        rank_zero_warn(f"phase '{training.phase_name}': client {client} is not evaluated: {evaluation.reason}")
        return without_values(training, client)
    return evaluation


class HandOver(FederationCallback):
    """Gives every client the result of a finished phase, with which its machine works alone."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self._have_last = set[int]()
        self._had_last = set[int]()  # when an earlier process ended

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Sends the result to all clients, and those of earlier phases to clients that were away then."""
        self._hand_over(run, phase, range(self.clients.num_clients))

    def on_fit_end(self, run: Run) -> None:
        """Sends all results to clients that have come back since, also after a run that had ended before."""
        with suppress(DamagedFileError):  # they say it again
            self._had_last = {*read_json(run.folder / _FILE)["clients"]}
        self._hand_over(run, run.phases[-1], [each for each in self.clients if each not in self._have_last])

    def _hand_over(self, run: Run, phase: Phase, clients: Sequence[int]) -> None:
        held = self._send(run, phase, clients)
        if phase is run.phases[-1]:
            self._have_last |= {*held}
            write_json(run.folder / _FILE, {"clients": sorted(self._had_last | self._have_last)})
        for earlier in run.phases:
            if earlier.name in run.states and run.states[earlier.name].finished and earlier is not phase:
                self._send(run, earlier, [client for client, phases in held.items() if earlier.name not in phases])

    def _send(self, run: Run, phase: Phase, clients: Sequence[int]) -> dict[int, list[str]]:
        """Sends a phase's result to clients; returns the phases whose results they have, by client that has it."""
        if not clients:
            return {}
        state, training = run.states[phase.name], run.training(phase)
        plan = ClientsPlan(training, self.clients)
        messages = plan.about_result("finish", state.server, clients, state.clients, state.round)
        of_state = {name: getattr(state, name) for name in ("round", "stopped", "best_round")}
        for client, message in messages.items():
            evaluations = [_of_client(each, client) for each in state.evaluations]
            message.values.update(state=of_state, evaluations=evaluations)
        held = {}
        for client, answer in self.clients.ask(training, messages).items():
            if not isinstance(answer, Failure):
                held[client] = answer.values["phases"]
            elif client not in self._had_last:
                rank_zero_warn(f"{phase}: client {client} has not confirmed that it has the result: {answer.reason}")
        self._tell_untrained(run, phase, held)
        return held

    def _tell_untrained(self, run: Run, phase: Phase, clients: Iterable[int]) -> None:
        """Says which of these clients were to train their own part alone, and have not, such as those away."""
        files = {client: files_of(run.states[phase.name].clients, client) for client in self.clients}
        trained = [client for client in self.clients if phase.name in [of_phase for of_phase, *_ in files[client]]]
        if phase.algorithm.federated or not trained:
            return
        participants = cohort_of(phase, self.clients.num_clients, run.seed).participants
        asked = {*clients}.intersection(participants).difference(trained)
        why = "has not trained, so its model is the one it began with"
        untrained = {client: f"{phase}: client {client} {why}" for client in sorted(asked)}
        for text in untrained.values():
            rank_zero_warn(text)
        if untrained:
            self.clients.transport.tell(untrained)


def _of_client(evaluation: Evaluation, client: int) -> dict[str, Any]:
    """A client's own part of an evaluation, as plain values."""
    own = [replace(each, gate_weights=None) for each in evaluation.clients if each.client == client]
    return {**vars(evaluation), "clients": [vars(each) for each in own]}


def check_deployable(phases: Sequence[Phase]) -> None:
    """Refuses phases that need what no client sends."""
    allowed = "left out in a deployed federation"
    for phase in phases:
        if phase.ckpt_path is not None:
            because = "its clients keep their part of a result on their own machines"
            raise InvalidArgumentError(str(phase), "ckpt_path", phase.ckpt_path, allowed, because)
        if (every := phase.evaluation.every_n_epochs) is not None:
            raise InvalidArgumentError(str(phase), "evaluate.every_n_epochs", every, allowed)
        if asks_clients(phase.algorithm, {}):
            raise MisconfigurationException(
                f"{phase}: {type(phase.algorithm).__name__} cannot be deployed, because its server computes with the "
                "clients' data or models before the first round."
            )


class _StandIn(FederatedDataModule):
    """As many samples as the clients have, all of them zero, for the server's checks and counts."""

    def __init__(self, descriptions: Sequence[dict[str, Any]], batch_size: int) -> None:
        super().__init__(num_clients=len(descriptions), batch_size=batch_size)
        first, sizes = descriptions[0], torch.tensor([each["sizes"] for each in descriptions])
        total, of_test = int(sizes.sum()), max(each["global_test"] for each in descriptions)
        self.num_clients = len(descriptions)
        self.client_names = ClientNames.numbers(self.num_clients)
        self.num_classes = max(each["num_classes"] for each in descriptions)
        self.num_shared = total
        self.x = _zeros(total + of_test, first["shape"], first["dtype"])
        self.y = _zeros(total + of_test, first["target_shape"], first["target_dtype"])
        if self.num_classes:
            self.y = torch.arange(total + of_test).remainder_(self.num_classes)
        ends = sizes.sum(0).cumsum(0)
        self.train_samples, self.validation_samples, self.test_samples = (
            ClientSamples(torch.arange(int(end - of_part.sum()), int(end)), of_part.contiguous())
            for end, of_part in zip(ends, sizes.T, strict=True)
        )
        self.global_test = torch.arange(total, total + of_test)
        self.classes, self.columns = first.get("classes"), first.get("columns")
        self.normalization = first["normalization"]
        self.black = torch.zeros(1, 1, 1)
        self.class_shares = self.class_counts()
        self.is_set_up = True

    def load(self) -> NoReturn:
        """Never called: there are no data."""
        raise NotImplementedError

    def class_counts(self) -> Tensor:
        """No classes: no client describes how often it has one."""
        return torch.zeros(self.num_clients, 0, dtype=torch.float64)


def _zeros(n: int, shape: Sequence[int], dtype: str) -> Tensor:
    """Zeros of shape (n, ...) that take the memory of one sample."""
    return torch.zeros(1, *shape, dtype=getattr(torch, dtype)).expand(n, *shape)


def callbacks_of_server(callbacks: Sequence[FederationCallback]) -> list[FederationCallback]:
    """The callbacks without those that need clients' data or models, which never come here; says which these are."""
    left_out = [type(callback).__name__ for callback in callbacks if callback.needs_clients]
    if left_out:
        rank_zero_info(f"{', '.join(left_out)}: left out, because clients' data and models stay with them.")
    return [_of_server(callback) for callback in callbacks if not callback.needs_clients]


def _of_server(callback: FederationCallback) -> FederationCallback:
    """The callback without what it would compute from clients' data."""
    if isinstance(callback, ResultFiles):
        return ResultFiles(partition=False, gate_weights=callback.gate_weights)
    return ClusterMonitor(by_client=False) if isinstance(callback, ClusterMonitor) else callback


def serve(
    federation: Any,
    model: LightningModule,
    datamodule: FederatedDataModule,
    transport: Transport,
    num_clients: int,
    ckpt_path: str | None = None,
) -> dict[str, Evaluation]:
    """Runs all phases with clients on other machines, once all of them have described their data.

    A run that is continued knows the descriptions, and waits a minute for clients that are away. The data of
    ``datamodule``, as in the clients' configuration, are not read. Phases that cannot be deployed, and clients that do
    not fit together, are refused before any training.
    """
    check_deployable(federation.phases)
    known = {}
    if ckpt_path := ckpt_path or requeued(federation.runs, federation.command):
        try:
            known = read_descriptions(find_checkpoint(ckpt_path, federation.runs).parent.parent)
        except MisconfigurationException as error:  # as in Lightning, `last` begins a new run if there is none
            rank_zero_warn(f"{error} A new run begins.")
            ckpt_path = None
    ours = settings_of(federation, model, datamodule)
    names, at_least = [phase.name for phase in federation.phases], federation.failures.min_clients or 1
    descriptions = wait_for(transport, num_clients, ours, names, known, at_least)
    data = _StandIn([*descriptions.values()], datamodule.batch_size)
    data.withheld = federation.reports.withheld(federation.phases, federation.metrics)
    if not federation.reports.names(federation.phases, federation.metrics):
        rank_zero_info(
            "serve: clients report no accuracies or other metrics, because none is in federation.reports.metrics, and "
            "privacy covers none of them."
        )
    clients = Clients(transport, descriptions, data.num_classes, federation.failures.max_change)
    settings = replace(
        federation.settings,
        backend=ClientsBackend(clients),
        callbacks=[*callbacks_of_server(federation.callbacks), HandOver(clients)],
        evaluate=partial(evaluate_at_clients, clients),
        make_store=partial(_make_store, clients),
    )
    try:
        return federation.fit_on_server(model, data, ckpt_path, settings)
    except TooManyClassesError as error:
        most = [client for client, each in descriptions.items() if each["num_classes"] == data.num_classes]
        if len(most) == len(descriptions):
            raise
        who = f"client {most[0]} has" if len(most) == 1 else f"clients {', '.join(map(str, most))} have"
        owner, argument, value, allowed, because = error.args
        because = f"{because}; only {who} that many classes"
        raise TooManyClassesError(owner, argument, value, allowed, because) from error


def _make_store(clients: Clients, run: Run) -> ClientsStore:
    """The store of a run; a resumed run has its old name, by which clients find what they keep of it."""
    path = run.folder / "deployment.json"
    clients.is_continued = path.is_file()
    if not clients.is_continued:
        write_json(path, {"run": uuid.uuid4().hex})
    try:
        clients.name, clients.states = read_json(path)["run"], run.states
    except DamagedFileError as error:
        raise MisconfigurationException(
            f"'{path}', which has the run's name among its clients, is damaged; it must be as the run wrote it."
        ) from error
    run.secret = _secret_of(run, clients.name)
    write_descriptions(run.folder, clients.descriptions)
    return ClientsStore()


def _secret_of(run: Run, name: str) -> int | None:
    """The secret of a run with differential privacy of clients, made when it begins; None for another run.

    Clients know the seed, so they could subtract noise that followed from it.
    """
    private = [phase for phase in run.phases if phase.aggregation is not None and phase.aggregation.poisson_sampling]
    if not private:
        return None
    path, begun = run.folder / SECRET, [phase for phase in private if phase.name in run.states]
    secret, of_run = read_secret(path) if path.is_file() else (b"", "")
    if of_run != name:
        if begun:
            raise MisconfigurationException(
                f"'{path}', from which the noise of phase '{begun[0].name}' follows, is missing or another run's; it "
                "must be as the run wrote it."
            )
        secret = new_secret(path, name)
    return int.from_bytes(secret, "little")
