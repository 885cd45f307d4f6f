"""Checks of a run before any training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from fedmoe_pl.algorithms.shared.requirements import warn_of_mixture
from fedmoe_pl.backends import changes_loss, overridden_hooks
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_kind, naming
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models import Gate, MixtureOfExperts, PooledMoE
from fedmoe_pl.models.normalization import has_batch_norm
from fedmoe_pl.phases.cohort import cohort_of, cohort_size, opted_in, takes_all
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import check_start, warn_of_computed_parts
from fedmoe_pl.rounds.aggregate import check_aggregation, check_chain
from fedmoe_pl.rounds.begin import check_moments
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.setup.check_data import check_metric, check_monitor, check_task
from fedmoe_pl.setup.check_optimizer import check_optimizer, check_server_optimizer
from fedmoe_pl.setup.check_trainer import check_stopping, check_trained, check_trainer
from fedmoe_pl.setup.needs import check_needs
from fedmoe_pl.setup.trained_parts import TrainedParts
from fedmoe_pl.trees import copy_module, names_of_same_tensors


def check_run(run: Run, read_result: Callable[[Phase, LightningModule], PhaseState]) -> None:
    """Checks a run before any training, and reads the results of phases that take theirs from a checkpoint."""
    _check_evaluated(run)
    by_name = {phase.name: phase for phase in run.phases}
    trained = TrainedParts(run.phases, run.starts)
    for phase in run.phases:
        trainer = phase.client_trainer(run.trainer)
        if phase.trainer:
            check_trainer(trainer, str(phase))
        module = run.module(phase)
        check_start(phase, run.starts[phase.name], module, lambda name: run.module(by_name[name]))
        warn_of_computed_parts(phase, run.starts[phase.name], by_name)
        check_needs(phase, module, run.datamodule, trainer)
        check_phase(phase, module, run.datamodule, run.seed, run.metrics)
        trained.add(phase, module, trainer["max_epochs"])
        trained.check_gate(phase, module)
        trained.warn_of_lost(phase, module)
        check_chain(phase, run.phases_before(phase))
        run.failures.check_cohort(phase, cohort_of(phase, run.datamodule.num_clients, run.seed).size)
        check_stopping(phase, module, trainer, run.datamodule)
        check_trained(phase, module, trainer["max_epochs"])
        if phase.ckpt_path and phase.name not in run.states:
            run.given_results[phase.name] = read_result(phase, module)
        state = run.states.get(phase.name)
        if state is not None and state.evaluations:
            check_moments(phase, state)


def _check_evaluated(run: Run) -> None:
    """Refuses to evaluate more clients than there are, and none of those by whom a phase selects its result."""
    number, num_clients = run.evaluation_cohort_size, run.datamodule.num_clients
    check_at_least("Federation", "evaluation_cohort_size", number, 1, num_clients)
    for phase in run.phases:
        if phase.monitor and not {*phase.algorithm.participants(range(num_clients), run.seed)} & {*run.evaluated}:
            because = f"none of these clients takes part in '{phase.name}', which selects a round"
            raise InvalidArgumentError("Federation", "evaluation_cohort_size", number, "larger", because)


def check_phases(phases: Sequence[Phase], evaluate_every_n_rounds: int) -> None:
    """Refuses phases of the same name, and one that selects a round although its rounds are not evaluated."""
    check_kind("Federation", "phases", phases, Sequence)
    for phase in phases:
        check_kind("Federation", "each of phases", phase, Phase)
        check_kind(str(phase), "gate", phase.gate, Gate)
        check_kind(str(phase), "model", phase.model, LightningModule)
        every = phase.evaluation.every_n_rounds
        if phase.select and not (phase.evaluate and (evaluate_every_n_rounds if every is None else every)):
            raise InvalidArgumentError(str(phase), "select", "given", "left out", "its rounds are not evaluated")
    names = [phase.method(point) for phase in phases for point in phase.evaluation_points]
    if not phases or len(set(names)) < len(names):
        raise InvalidArgumentError("Federation", "phases", names, "at least one phase, and every name once")


def check_phase(
    phase: Phase,
    module: LightningModule,
    datamodule: FederatedDataModule,
    seed: int,
    metrics: Mapping[str, Metric] | None = None,
) -> None:
    """Refuses a phase that does not fit its module or the data."""
    _check_cohort(phase, datamodule.num_clients, seed)
    _check_loss(phase, module)
    with naming(phase):
        phase.algorithm.check(module)
    _check_shared_names(phase, module)
    _check_architectures(phase, module, datamodule.num_clients)
    _check_pool(phase, module, datamodule.num_clients)
    check_task(phase, module, datamodule, metrics or {})
    check_metric(str(phase), "select.monitor", phase.monitor, datamodule, metrics or {}, [module])
    check_monitor(phase, metrics or {})
    _check_samples(phase, module, datamodule, seed)
    if phase.evaluate:
        warn_of_mixture(phase.algorithm, module)
    check_optimizer(phase, module)
    check_server_optimizer(phase, module)
    check_aggregation(phase, module, datamodule.num_clients, seed)


def _check_cohort(phase: Phase, num_clients: int, seed: int) -> None:
    """Refuses a cohort larger than the number of participants."""
    most = len(phase.algorithm.participants(range(num_clients), seed))
    size = phase.clients_per_round
    if not takes_all(size) and cohort_size(num_clients, size) > most:
        who = "clients" if most == num_clients else "clients that take part"
        raise InvalidArgumentError(str(phase), "clients_per_round", size, f"at most the number of {who}, {most}")


def _check_loss(phase: Phase, module: LightningModule) -> None:
    """Refuses modules that an algorithm with its own loss cannot train, or whose hooks it would skip."""
    if not changes_loss(phase.algorithm):
        return
    algorithm, name = type(phase.algorithm).__name__, type(module).__name__
    if not (callable(getattr(module, "loss", None)) and module.automatic_optimization):
        because = f"{name} lacks a method loss(batch) -> (loss, metrics) or automatic optimization, which it needs"
        raise InvalidArgumentError(str(phase), "algorithm", phase.algorithm, "another", because)
    if hooks := overridden_hooks(module):
        because = f"{algorithm} calls loss(batch) itself, and would skip {name}'s hooks ({', '.join(hooks)})"
        raise InvalidArgumentError(str(phase), "algorithm", phase.algorithm, "another", because)


def _check_shared_names(phase: Phase, module: LightningModule) -> None:
    """Refuses to share a tensor under one of its names only: what a client keeps under another would replace it."""
    for names in names_of_same_tensors(module):
        shared = [name for name in names if phase.algorithm.is_shared(name)]
        others = [name for name in names if name not in shared]
        if shared and others:
            raise MisconfigurationException(
                f"{phase}: {type(phase.algorithm).__name__} shares '{shared[0]}', but not '{others[0]}', another name "
                f"of the same tensor of the {type(module).__name__}; share all of its names or none."
            )


def _check_architectures(phase: Phase, module: LightningModule, num_clients: int) -> None:
    """Refuses to share tensors that clients of some architectures do not have."""
    if not isinstance(module, MixtureOfExperts):
        return
    shared = {name for name in module.state_dict() if phase.algorithm.is_shared(name)}
    for architecture in sorted({module.client_architecture(client) for client in range(num_clients)}):
        client_module = copy_module(module)
        client_module.keep_architecture(architecture)
        if missing := sorted(shared - client_module.state_dict().keys()):
            raise MisconfigurationException(
                f"{phase}: {type(phase.algorithm).__name__} shares '{missing[0]}', which clients of architecture "
                f"{architecture} do not have; only tensors that all clients have can be shared."
            )


def _check_pool(phase: Phase, module: LightningModule, num_clients: int) -> None:
    """Refuses a pool with room for another number of clients, unless it is given, as it is for new clients."""
    if isinstance(module, PooledMoE) and phase.ckpt_path is None and module.num_experts != num_clients:
        raise InvalidArgumentError(module, "num_experts", module.num_experts, f"num_clients, {num_clients}")


def _check_samples(phase: Phase, module: LightningModule, datamodule: FederatedDataModule, seed: int) -> None:
    """Refuses data without the samples that the phase's selection or batch normalization needs."""
    train = datamodule.train_samples
    sizes = opted_in(phase.algorithm, train, seed).sizes
    if phase.monitor == "reweighted_test" and ((sizes > 0) & (sizes < train.sizes)).any():
        because = "it depends on the classes of all samples of a client, also of those that opt out"
        raise InvalidArgumentError(str(phase), "select.monitor", phase.monitor, "another metric", because)
    single = (train.sizes == 1).nonzero().flatten()
    if len(single) and has_batch_norm(module):
        raise MisconfigurationException(
            f"{phase}: client {single[0]} has one training sample, but batch normalization needs two; lower "
            "num_clients or change partition_seed."
        )
