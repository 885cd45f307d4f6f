"""Phases, their rounds, and the steps of a round: clients train, and the server aggregates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import Failure, LocalTraining, NotFiniteError, Plan, check_finite, guarded, one_thread
from fedmoe_pl.backends.backend import updated_server
from fedmoe_pl.backends.optimizers import load_optimizer_state, optimizer_state, with_strides_of
from fedmoe_pl.backends.traffic import Traffic, TransferLog
from fedmoe_pl.checkpoints.client_state import EXCHANGED, readable
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.evaluation.flops import FlopCounter
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.phases.client_failures import RETRIES, ClientError, RoundWarning, client_error
from fedmoe_pl.phases.participation import cohort_of, phase_cohort
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.begin import first_clients, freeze_shared, share_memory
from fedmoe_pl.rounds.evaluate import evaluate_epochs, evaluate_phase, evaluate_round, is_evaluated_after, is_over
from fedmoe_pl.rounds.privacy import count_round, count_steps, log_epsilons, update_epsilons
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.rounds.unfinished import UnfinishedRound
from fedmoe_pl.seeds import Purpose, generator_of
from fedmoe_pl.trees import Tree, digest_of, names_of_same_tensors, of_module


def fit(run: Run) -> None:
    """Runs all phases that are not finished."""
    run.call("on_fit_start")
    for phase in run.phases:
        if phase.name not in run.states or not run.states[phase.name].finished:
            run_phase(run, phase)
    run.save()  # so that the previous checkpoint, too, is that of the finished run
    run.store.remove_replaced()
    run.call("on_fit_end")


def run_phase(run: Run, phase: Phase) -> None:
    """Runs the remaining rounds of a phase and determines its result."""
    module = run.module(phase)
    state = run.state_of(phase, module)
    update_epsilons(phase, state)  # a result from a checkpoint, or a changed delta, needs a new value
    training = run.local_training(phase, module, state.initial)
    evaluations: list[Evaluation] = []
    plan: Plan | None = None
    if state.round < phase.rounds:
        if state.round == 0 and state.server_learns:
            clients = first_clients(training, draw_cohort(run, phase), readable(state.clients))
            state.server = phase.algorithm.server_begin(state.server, clients)
        freeze_shared(training, state)
        share_memory(training, run.initial_model(phase))
        state.server = training.copies.known(state.server)
        plan, counter = run.plans.pop(phase.name).begin(training), FlopCounter(training)
        if phase.evaluation.every_n_epochs not in (None, state.curve) and state.server_learns:
            evaluate_epochs(run, phase, plan, _asked(run, phase))
            state.curve = phase.evaluation.every_n_epochs
        while state.round < phase.rounds and not state.stopped:
            evaluations = run_round(run, phase, plan, counter)
    elif state.server_learns and not state.stopped:  # the phase began with more rounds, or was killed after the last
        state.server = _final(phase, state)
    if phase.evaluate and not evaluations:  # the last round was not evaluated, or was run before a resume
        evaluations = evaluate_round(run, phase, training, plan)
    state.finished = True
    if state.best_round:
        state.select_best()
        evaluations = evaluate_phase(run, phase, training, plan)
    state.evaluations = evaluations
    # before the checkpoint, so that it is called again if the process is killed in between
    run.call("on_phase_end", phase, evaluations[0] if evaluations else None)
    for evaluation_point in phase.evaluation_points:
        run.loggers.close(phase.method(evaluation_point))
    run.save(finished=phase.name)
    run.store.remove_rest(phase.name, state.clients)
    log_epsilons(run, phase, training)
    training.elsewhere.clear()


def run_round(
    run: Run, phase: Phase, plan: Plan, counter: FlopCounter | None, cohort: Sequence[int] | None = None
) -> list[Evaluation]:
    """Runs a round; returns its evaluations, one for each of ``Phase.evaluation_points``, or none."""
    state, algorithm = run.states[phase.name], phase.algorithm
    round = state.round
    run.call("on_round_start", phase, round)
    log = TransferLog(run.records_transfers)
    trained = train_round(run, phase, plan, counter, log, cohort)
    state.round, state.clients, state.trained = round + 1, trained.client_states, {}
    count_steps(phase, state, plan.training, trained.asked)
    if state.server_learns:
        if algorithm.federated:
            _update_server(run, phase, plan.training, trained)
        state.server = _final(phase, state)
        _exchange(run, phase, plan, trained.failed, round, log)
    update_epsilons(phase, state)
    run.progress.end_round()
    run.call("on_server_update", phase, round)
    # with a selection, the evaluation decides this
    state.stopped = phase.select is None and is_over(run, phase, plan.training)
    evaluations: list[Evaluation] = []
    if is_evaluated_after(run, phase, state.round):
        if cohort is None:
            announce_round(run, phase, plan)
        evaluations = evaluate_round(run, phase, plan.training, plan)
    state.stopped = is_over(run, phase, plan.training)
    plan.training.copies.check(algorithm)
    if log.transfers:
        run.call("on_transfers", phase, round, log.transfers)
    run.save()
    run.store.remove_replaced(state.clients, state.best_clients)
    run.call("on_round_end", phase, round)
    return evaluations


def _final(phase: Phase, state: PhaseState) -> Tree:
    """The server's state after a round: the phase's result if that was the last one."""
    final = phase.algorithm.server_final(state.server, is_last=state.round == phase.rounds)
    return state.server if final is None else final


def _update_server(run: Run, phase: Phase, training: LocalTraining, trained: Trained) -> None:
    """Makes the server's next state from the clients' updates; a server optimizer steps from the old state to it."""
    state, combined, secure = run.states[phase.name], trained.update, training.secure_aggregation
    if secure is not None and combined is not None:
        combined = secure.decoded(combined, state.server, training.start_of_changes(state.server))
    if phase.aggregation is not None:
        combined = aggregated(run, phase, training.module, combined)
    assert combined is not None, "only cohorts of an aggregation may be empty"
    if phase.aggregation is None and not combined.weight:
        raise ClientError(f"{phase}, round {state.round}: all clients' updates have weight 0, so they have no mean.")
    with one_thread():  # with several threads, sums and decompositions may differ in their bits
        new = updated_server(phase.algorithm, state.server, combined)
    if phase.server_optimizer is not None:
        old, optimizer = state.server, state.server_optimizer
        new, state.server_optimizer = server_step(phase.server_optimizer, training.module, old, new, optimizer)
    try:
        check_finite([of_module(new)], 1, training.initial)
    except NotFiniteError as error:
        text = f"{phase}, round {state.round}: the server cannot go on: {error}, although all that clients sent is."
        raise ClientError(text) from error
    state.server = new
    count_round(run, phase)


def _exchange(run: Run, phase: Phase, plan: Plan, failed: Sequence[int], round: int, log: TransferLog) -> None:
    """Lets clients send each other tensors, all of them computed from what clients kept before the exchange."""
    state, written = run.states[phase.name], dict[int, Any]()
    left = {*state.clients}.difference(cohort_of(phase, run.datamodule.num_clients, run.seed).participants)
    for client, client_state, sent, received in plan.exchange(state.server, state.clients, left.union(failed), round):
        written.update(run.store.write(phase.name, EXCHANGED + round + 1, {client: client_state}))
        state.add_traffic("down", Traffic.of(sent))
        state.add_traffic("between_clients", Traffic.of(received))
        log.add("down", client, sent)
        log.add("between_clients", client, received)
    if written:
        state.clients = run.store.updated(phase.name, state.clients, written)


@dataclass(frozen=True)
class Trained:
    """The clients of a round after their training."""

    update: Update | None
    """The combined update of the clients that answered; None if none did, which an aggregation may allow."""
    failed: list[int]
    """The clients that failed or dropped out."""
    client_states: Mapping[int, Tree]
    """What each client keeps now, for all clients."""
    asked: set[int]
    """The clients that were asked to train, including in tries whose result was discarded."""


def train_round(
    run: Run,
    phase: Phase,
    plan: Plan,
    counter: FlopCounter | None,
    log: TransferLog,
    cohort: Sequence[int] | None,
) -> Trained:
    """Trains the clients of the round; retries if too few answer. Retries count towards traffic and FLOPs."""
    state, failures, attempt = run.states[phase.name], run.failures, 0
    unfinished = UnfinishedRound(run, phase)
    aggregation = plan.training.aggregation
    asked: set[int] = set()
    poisson = aggregation is not None and aggregation.poisson_sampling
    secure = plan.training.secure_aggregation
    needed, why = failures.needed(aggregation, secure)
    while True:
        drawn = draw_cohort(run, phase, attempt) if cohort is None else cohort
        dropped = _dropped(run, phase, drawn, attempt)
        clients = [client for client in drawn if client not in dropped]
        asked.update(clients)
        tried, added = TransferLog(log.active), _added(state, plan)
        down = _count_costs(phase, state, plan, clients, added, counter, tried)
        run.logged = {}
        combined, written, failed = _train_clients(run, phase, plan, clients, added, tried, unfinished)
        _count_down(state, down, failed, tried, log)
        state.failed += len(dropped) + len(failed)
        failures.report(phase, state.round + 1, failed, run.datamodule.client_names)
        answered = [client for client in clients if client not in failed]
        expected = clients if poisson else drawn  # redrawing a Poisson cohort would make clients' dropout dependent
        if len(answered) >= (needed if secure else min(needed, len(expected))):
            client_states = run.store.updated(phase.name, state.clients, written)
            return Trained(combined, [*dropped, *failed], client_states, asked)
        run.progress.end_round()
        reason = f"{len(answered)} of {len(drawn)} clients answered, but {why}"
        is_of_code = len(failed) > 1 and len(failed) == len(clients) and _fail_alike([*failed.values()])
        if attempt == RETRIES or is_of_code:
            client, failure = min(failed.items(), key=lambda item: item[0], default=(0, None))
            example = f"; client {run.datamodule.client_names[client]}: {failure.reason}" if failure else ""
            tries = " and all failed alike" if is_of_code else f", also after {RETRIES} more tries"
            raise client_error(f"{phase}, round {state.round + 1}: {reason}{tries}{example}", failure)
        rank_zero_warn(RoundWarning(phase, state.round + 1, f"{reason}; the round is tried again."))
        plan.before_another_try()
        unfinished.end()
        attempt += 1


def _fail_alike(failures: Sequence[Failure]) -> bool:
    """Whether all failed with the same exception, which a retry would repeat; not an OSError, as a disk may recover."""
    return len({each.reason for each in failures}) == 1 and not isinstance(failures[0].error, OSError | None)


def announce_round(run: Run, phase: Phase, plan: Plan) -> None:
    """Announces the next round to the plan, if it takes place whatever this round's evaluation shows."""
    state = run.states[phase.name]
    if state.round == phase.rounds or is_over(run, phase, plan.training):
        return
    plan.announce({**state.server, **_added(state, plan)}, _asked(run, phase), state.clients, state.round)


def _asked(run: Run, phase: Phase) -> list[int]:
    """The clients that the next round asks to train, in its first try."""
    drawn = draw_cohort(run, phase)
    dropped = _dropped(run, phase, drawn, attempt=0)
    return [client for client in drawn if client not in dropped]


def _dropped(run: Run, phase: Phase, drawn: Sequence[int], attempt: int) -> list[int]:
    """The clients of a cohort that drop out before their training."""
    round, aggregation = run.rounds_before(phase) + run.states[phase.name].round, phase.aggregation
    one_stays = aggregation is None or not aggregation.poisson_sampling
    return run.failures.dropped(drawn, run.seed, round, attempt, one_stays)


def _added(state: PhaseState, plan: Plan) -> Tree:
    """What the aggregation sends to clients in addition to the algorithm."""
    return {} if plan.training.aggregation is None else plan.training.aggregation.for_clients(state.aggregation)


def draw_cohort(run: Run, phase: Phase, attempt: int = 0) -> list[int]:
    """The clients of the round; all clients if the server does not learn and they only train what they keep."""
    num_clients, state = run.datamodule.num_clients, run.states[phase.name]
    if not state.server_learns:
        return [*range(num_clients)]
    return phase_cohort(phase, num_clients, run.seed, run.rounds_before(phase) + state.round, attempt, run.secret)


def _count_costs(
    phase: Phase,
    state: PhaseState,
    plan: Plan,
    clients: Sequence[int],
    added: Tree,
    counter: FlopCounter | None,
    log: TransferLog,
) -> dict[int, Traffic]:
    """Counts requests and training's operations; returns the traffic to each client.

    Clients that train alone are sent nothing; a result from a checkpoint is sent once.
    """
    down: dict[int, Traffic] = {}
    receive = phase.algorithm.federated and (state.server_learns or not state.round)
    requests = plan.requests(state.server, clients, state.clients, state.round) if receive else {}
    with one_thread():
        for client, request in requests.items():
            answer = phase.algorithm.server_send(state.server, client, request)
            state.add_traffic("up", Traffic.of(request))
            down[client] = Traffic.of(answer)
            log.add("requests", client, request)
            log.add("down", client, answer)
    for client in clients if added else ():
        down[client] = down.get(client, Traffic()) + Traffic.of(added)
        log.add("down", client, added)
    if counter is not None:  # guarded, because it trains a client for a batch, which may hang
        count = partial(counter.of_round, state.server, clients, readable(state.clients), state.round)
        with one_thread():
            operations = guarded(count, plan.training.client_timeout)
        state.flops += math.nan if isinstance(operations, Failure) else operations
    return down


def _count_down(
    state: PhaseState, down: Mapping[int, Traffic], failed: Mapping[int, Failure], tried: TransferLog, log: TransferLog
) -> None:
    """Counts and logs what was sent to clients, except to those that are not connected."""
    absent = {client for client, failure in failed.items() if failure.is_absent}
    for client, traffic in down.items():
        if client not in absent:
            state.add_traffic("down", traffic)
    log.transfers += [each for each in tried.transfers if each.direction != "down" or each.client not in absent]


def _train_clients(
    run: Run,
    phase: Phase,
    plan: Plan,
    clients: Sequence[int],
    added: Tree,
    log: TransferLog,
    unfinished: UnfinishedRound,
) -> tuple[Update | None, dict[int, Any], dict[int, Failure]]:
    """Trains clients; returns the combined update (None if all failed), what the store wrote, and the failures."""
    state, failures = run.states[phase.name], run.failures
    combined: Update | None = None
    failed: dict[int, Failure] = {}
    groups, written = unfinished.split(plan.groups(clients))
    for _ in written:
        run.progress.add_client(phase, len(clients))
    for group in plan.train({**state.server, **added}, groups, state.clients, state.round) if groups else ():
        failures.stop(phase, state.round + 1, group.failed, run.datamodule.client_names)
        if group.update is not None:
            with one_thread():
                combined = group.update if combined is None else plan.training.combining.combine(combined, group.update)
        rows = run.store.write(phase.name, state.round + 1, group.clients)
        written.update(rows)
        failed |= group.failed
        run.logged |= group.logged
        if state.server_learns:
            state.add_traffic("up", group.sent)
            log.transfers += group.transfers
        for client in (*group.clients, *group.failed):
            run.progress.add_client(phase, len(clients))
            if client not in group.failed:
                run.call("on_client_end", phase, state.round, client)
        unfinished.add(group, rows)
    run.logged = {client: run.logged[client] for client in clients if client in run.logged}  # sums depend on the order
    return combined, written, failed


def shared_by(algorithm: Algorithm, server: Tree) -> Tree:
    """The server's tensors that clients send."""
    return {name: tensor for name, tensor in server.items() if algorithm.is_shared(name)}


def aggregated(run: Run, phase: Phase, module: LightningModule, combined: Update | None) -> Update:
    """The aggregated update for ``Algorithm.server_update``; updates the state of the phase's aggregation.

    A tensor that the module has under several names is aggregated once, so that it gets noise once.
    """
    state, aggregation = run.states[phase.name], phase.aggregation
    assert aggregation is not None
    cohort = cohort_of(phase, run.datamodule.num_clients, run.seed)
    # phases draw different noise: equal noise would cancel in the difference of their results
    keys: list[int | str] = [Purpose.NOISE, phase.name, state.round]
    if run.secret is not None:
        # equal noise of two sums would cancel, too, and after a kill, other clients may take part in a repeated round
        sent, weight = ({}, 0) if combined is None else (combined.sent, combined.weight)
        keys += [digest_of(sent, state.aggregation), str(weight)]
    generator = generator_of(run.seed if run.secret is None else run.secret, *keys)
    same = {other: name for name, *others in names_of_same_tensors(module) for other in others}
    start = {name: each for name, each in shared_by(phase.algorithm, state.server).items() if name not in same}
    with one_thread():
        update, state.aggregation = aggregation.aggregate(start, combined, state.aggregation, cohort, generator)
    again = {other: update.sent[name] for other, name in same.items() if name in update.sent}
    return replace(update, sent=update.sent | again)


def server_step(
    factory: OptimizerCallable, module: LightningModule, old: Tree, new: Tree, state: Tree
) -> tuple[Tree, Tree]:
    """Steps an optimizer from the old parameters, using old - new as the gradient; returns new tensors and its state.

    FedOpt, Reddi et al., ICLR 2021, Algorithm 1 (https://arxiv.org/abs/2003.00295).

    Buffers, such as the statistics of batch normalization, and the algorithm's own tensors are taken from ``new``.
    Parameters that no client changed get no gradient, so that they and their optimizer state stay as they are.
    """
    parameters = {name: nn.Parameter(old[name].clone()) for name in server_parameters(module, old)}
    optimizer = factory([*parameters.values()])
    if state:
        load_optimizer_state(parameters.items(), optimizer, state)
    changed = [name for name in parameters if not torch.equal(old[name], new[name])]
    for name in changed:
        parameters[name].grad = with_strides_of(old[name], old[name] - new[name])
    with one_thread():
        optimizer.step()
    stepped = {name: parameters[name].detach() for name in changed}
    return {**new, **stepped}, optimizer_state(parameters.items(), optimizer)


def server_parameters(module: LightningModule, server: Tree) -> list[str]:
    """Names of the module's floating-point parameters that the server holds; all names of one shared by two parts."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if name in server and parameter.is_floating_point()]
