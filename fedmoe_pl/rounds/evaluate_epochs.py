"""Evaluates what clients that train alone would have after fewer epochs, so that a personalization is a curve."""

from __future__ import annotations

from dataclasses import replace

from fedmoe_pl.backends import Plan, one_thread
from fedmoe_pl.backends.backend import fold
from fedmoe_pl.backends.client_loggers import SilentLogger
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.evaluate_round import evaluate_phase
from fedmoe_pl.rounds.run import Run


def evaluate_epochs(run: Run, phase: Phase, plan: Plan) -> None:
    """Hands the callbacks an evaluation after 0, n, 2n ... epochs, before the only round of a phase.

    For each of them, the clients train from the start for so many epochs, and what they have learned is forgotten.
    The phase's result therefore has the same bits as without, and so has every point of the curve as the result of a
    phase of so many epochs. The clients' own loggers get nothing of it.

    """
    assert phase.evaluation.every_n_epochs is not None, "the caller has asked"
    logger = SilentLogger() if plan.training.trainer.get("logger") else False
    for epochs in range(0, phase.epochs(run.trainer), phase.evaluation.every_n_epochs):
        trainer = {**plan.training.trainer, "max_epochs": epochs, "logger": logger}
        shorter = plan.begin(replace(plan.training, trainer=trainer))
        state = _trained(run, phase, shorter)
        for evaluation in evaluate_phase(run, phase, shorter.training, shorter, state):
            run.call("on_evaluation_end", phase, replace(evaluation, selection="fewer epochs", epochs=epochs))


def _trained(run: Run, phase: Phase, plan: Plan) -> PhaseState:
    """The state of the phase after the training of the clients that are evaluated; nothing is stored."""
    state = run.states[phase.name]
    kept = {client: state.clients[client] for client in run.evaluated if client in state.clients}
    updates = []
    for group in plan.train(state.server, run.evaluated, state.clients, state.round):
        kept |= group.clients
        updates += [] if group.update is None else [group.update]
    server = state.server
    if updates:
        with one_thread():
            server = phase.algorithm.server_update(server, fold(phase.algorithm, updates))
    return replace(state, server=server, clients={client: tree for client, tree in kept.items() if tree}, round=1)
