"""Results of a phase whose clients are on other machines: they evaluate them, and keep them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.algorithms.algorithm import EvaluationPoint
from fedmoe_pl.backends import Failure, LocalTraining, Plan
from fedmoe_pl.checkpoints.files import DamagedFileError, read_json, replacing, write_json
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.deployment.answers import evaluation_of, without_values
from fedmoe_pl.deployment.messages import Message
from fedmoe_pl.deployment.plan import ClientsPlan
from fedmoe_pl.deployment.remote_clients import Clients, files_of
from fedmoe_pl.evaluation.evaluation import ClientEvaluation, Evaluation
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run
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
    """Has clients evaluate their models on their own samples; other arguments as in ``evaluate_moments``.

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
        rank_zero_warn(f"phase '{training.phase}': client {client} is not evaluated: {evaluation.reason}")
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
            with replacing(run.folder / _FILE) as temporary:
                write_json(temporary, {"clients": sorted(self._had_last | self._have_last)})
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
        self._tell_untrained(phase, state, held)
        return held

    def _tell_untrained(self, phase: Phase, state: PhaseState, clients: Iterable[int]) -> None:
        """Says which of these clients were away while each trained its own part alone."""
        files = {client: files_of(state.clients, client) for client in self.clients}
        trained = [client for client in self.clients if phase.name in [of_phase for of_phase, *_ in files[client]]]
        if phase.algorithm.federated or not trained:
            return
        away = {client: f"{phase}: client {client} was away, so its model is not trained" for client in clients}
        away = {client: text for client, text in away.items() if client not in trained}
        for text in away.values():
            rank_zero_warn(text)
        if away:
            self.clients.transport.tell(away)


def _of_client(evaluation: Evaluation, client: int) -> dict[str, Any]:
    """A client's own part of an evaluation, as plain values."""
    own = [replace(each, gate_weights=None) for each in evaluation.clients if each.client == client]
    return {**vars(evaluation), "clients": [vars(each) for each in own]}
