"""Checks a run before any training, and refuses what would give other results than those asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.aggregation.aggregation import Cohort
from fedmoe_pl.algorithms import FedDPA, FineTuning
from fedmoe_pl.algorithms.algorithm import (
    Algorithm,
    Need,
    averages,
    chooses_model,
    overrides,
    sees_losses_only,
    sends_more,
)
from fedmoe_pl.algorithms.shared.parts import warn_of_mixture
from fedmoe_pl.backends import is_distributed
from fedmoe_pl.backends.training import epochs_to_try
from fedmoe_pl.checks import InvalidArgumentError, check_at_least, naming
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.partitioners.given import AllToOne
from fedmoe_pl.evaluation.metrics import predicts_classes
from fedmoe_pl.logs.loggers import method_tag
from fedmoe_pl.models import FixedGate, LayerwiseAdapterMoE, MixtureOfExperts, SimilarityGate
from fedmoe_pl.models.layers import has_batch_norm
from fedmoe_pl.models.mixtures.tasks import IGNORED
from fedmoe_pl.phases.participation import cohort_of, cohort_size
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import chain_of_starts, check_start, warn_of_computed_parts
from fedmoe_pl.rounds.fit import shared_by
from fedmoe_pl.rounds.given_result import ReadResult, check_evaluation_points
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.setup.check_module import (
    check_has_optimizer,
    check_kept_optimizers,
    check_loss,
    check_optimizer,
    check_parts,
    check_predictions,
    check_shared,
    check_tensors,
    check_tied,
)
from fedmoe_pl.setup.check_trainer import (
    check_batches,
    check_callbacks,
    check_monitored,
    check_trainer,
    epochs_of_all,
    other_steps,
    samples_of_clients,
    trainer_key,
)
from fedmoe_pl.setup.data import check_direction, check_metric, check_task
from fedmoe_pl.trees import Tree, of_algorithm, same_memory

_NEEDS: dict[Need, str] = {
    "all_clients": "all clients in every round",
    "every_client": "every client to take part",
    "validation_samples": "validation samples of clients",
    "validation_samples_of_each": "validation samples of every client",
    "classes": "a class for each sample",
    "loss_of_outputs": "the loss of an expert's outputs, which only a mixture of experts knows without classes",
    "plain_steps": "the steps of plain SGD",
    "fresh_optimizers": "new optimizers in every round, in which a client may train other parameters under a name",
    "fixed_gate": "a gate without parameters, because it trains experts apart from the gate",
    "whole_batches": "whole batches, because its loss is not a mean over their samples",
    "step_of_each_batch": "the parameters after one step for each batch, because it computes with the steps",
    "own_server_step": "its own step of the server, whose result is not a mean of parameters",
}


def check_phases(phases: Sequence[Phase], evaluate_every_n_rounds: int) -> None:
    """Refuses phases whose names are alike, and a phase that selects a round although no rounds are evaluated."""
    for phase in phases:
        every = phase.evaluation.every_n_rounds
        if phase.select and not (phase.evaluate and (evaluate_every_n_rounds if every is None else every)):
            raise InvalidArgumentError(str(phase), "select", "given", "left out", "its rounds are not evaluated")
    if not phases:
        raise InvalidArgumentError("Federation", "phases", phases, "at least one phase")
    known = dict[str, str]()
    for name in (phase.method(point) for phase in phases for point in phase.evaluation_points):
        if (tag := method_tag(name).casefold()) in known:
            because = f"they are '{tag}' in tags of loggers, and in files where case makes no difference"
            allowed = "names that differ in more than case and symbols"
            raise InvalidArgumentError("Federation", "phases", [known[tag], name], allowed, because)
        known[tag] = name


def check_run(run: Run, read_result: ReadResult) -> None:
    """Checks a run before any training, and reads the results that phases take from checkpoints."""
    check_at_least("Federation", "evaluation_cohort_size", run.evaluation_cohort_size, 1, run.datamodule.num_clients)
    by_name, trained = {phase.name: phase for phase in run.phases}, dict[str, set[str]]()
    for phase in run.phases:
        trainer = phase.client_trainer(run.trainer)
        if phase.train.trainer or phase.train.callbacks:
            check_trainer(trainer, phase)
        module = run.module(phase)
        check_start(phase, run.starts[phase.name], module, lambda name: run.module(by_name[name]))
        warn_of_computed_parts(phase, run.starts[phase.name], by_name)
        _check_made_alone(run, phase)
        check_needs(run, phase, module)
        if phase.ckpt_path and phase.name not in run.states:
            run.given_results[phase.name] = read_result(phase, module, run.identity)
        state = run.states.get(phase.name) or run.given_results.get(phase.name)
        # with a given result, only new clients do
        trains = state is None or state.server_learns or state.round < phase.rounds
        _check_labels(run, phase, module, trains)
        check_phase(phase, module, run.datamodule, run.seed, run.metrics, epochs_of_all(trainer))
        _check_selection(run, phase)
        trained[phase.name] = trained_names(phase, module, trainer["max_epochs"])
        _check_weighed(run, trained, phase, module)
        _warn_of_lost(run, trained, phase, module)
        cohort = cohort_of(phase, run.datamodule.num_clients, run.seed)
        _check_cohort(run, phase, cohort)
        check_aggregation(run, phase, module, cohort, trained[phase.name])
        check_secure_aggregation(run, phase, module, cohort)
        check_sample_privacy(run, phase, module, trains)
        if trained[phase.name] and trains:
            samples = samples_of_clients(run, phase, module)
            check_has_optimizer(phase, module)
            check_kept_optimizers(phase, module, run.states.get(phase.name))
            check_batches(run, phase, module, samples)
            check_callbacks(run, phase, module)
            check_monitored(run, phase, module)
            if idle := [client for client, chosen in samples.items() if not len(chosen)]:
                who, name = run.datamodule.client_names.text(idle), type(phase.algorithm).__name__
                rank_zero_warn(f"{phase}: client_samples of {name} gives {who} no sample to train on in round 1.")
        if state is not None and state.evaluations:
            check_evaluation_points(phase, state)


def _check_made_alone(run: Run, phase: Phase) -> None:
    """Refuses to start from models that clients make in training where some clients of the phase would have none.

    These are clients that may drop out, and those that ``clients`` of the earlier phase leaves out.
    """
    participants = cohort_of(phase, run.datamodule.num_clients, run.seed).participants
    for before in run.phases_before(phase):
        if before.aggregates or not chooses_model(before.algorithm) or before.ckpt_path:
            continue
        because = f"{phase} starts from '{before.name}', whose models clients make in their training alone"
        if run.failures.dropout:
            raise InvalidArgumentError("Federation", "failures.dropout", run.failures.dropout, "0", because)
        if before.clients is not None and not {*participants} <= {*before.clients}:
            allowed = f"left out, or a list of all clients that take part in '{phase.name}'"
            raise InvalidArgumentError(str(before), "clients", before.clients, allowed, because)


def _check_selection(run: Run, phase: Phase) -> None:
    """Refuses to select a round by a metric that none of the evaluated participants can have."""
    if phase.monitor is None or isinstance(run.datamodule.partitioner, AllToOne):  # the others may have one
        return
    data, number, train = run.datamodule, run.evaluation_cohort_size, run.datamodule.train_samples.sizes
    validation = phase.algorithm.opt_out.opted_in_of_all(data.validation_samples, run.seed, validation=True)
    held_out = {"validation": validation.sizes, "local_test": data.test_samples.sizes}
    sizes = next((held_out[split] for split in held_out if phase.monitor.startswith(split)), train)
    participants = cohort_of(phase, data.num_clients, run.seed).participants
    able = [client for client in participants if sizes[client]]
    if participants and not able:
        because = "no client that takes part has a sample for it"
        raise InvalidArgumentError(str(phase), "select.monitor", phase.monitor, "another metric", because)
    if participants and not {*able} & {*run.evaluated}:
        selects = f"takes part in '{phase.name}', which selects a round by {phase.monitor}"
        because = f"none of these clients {selects}, and has samples for it"
        raise InvalidArgumentError("Federation", "evaluation_cohort_size", number, "larger", because)


def _check_cohort(run: Run, phase: Phase, cohort: Cohort) -> None:
    """Refuses a cohort larger than the number of participants, or smaller than the number that must answer."""
    size, clients = phase.clients_per_round, range(run.datamodule.num_clients)
    if phase.clients is not None and ({*phase.clients} - {*clients} or not cohort.participants):
        allowed = f"ids from 0 to {clients[-1]}, at least one of a client that the algorithm lets take part"
        raise InvalidArgumentError(str(phase), "clients", phase.clients, allowed)
    if cohort.size > (most := len(cohort.participants)):
        raise InvalidArgumentError(str(phase), "clients_per_round", size, f"at most {most}, the clients that take part")
    needed, because = run.failures.needed(phase.aggregation, phase.secure, cohort.size)
    if needed > cohort.size and phase.ckpt_path is None:
        raise InvalidArgumentError(str(phase), "clients_per_round", size, f"a cohort of at least {needed}", because)


def check_needs(run: Run, phase: Phase, module: LightningModule) -> None:
    """Refuses a phase that lacks something that its algorithm needs (``Algorithm.needs``)."""
    datamodule, trainer = run.datamodule, phase.client_trainer(run.trainer)
    owner, size, algorithm = str(phase), phase.clients_per_round, phase.algorithm
    number = cohort_size(datamodule.num_clients, size)
    is_mixture = isinstance(module, MixtureOfExperts)  # a mixture also finds targets in a dict
    has_classes = (datamodule.has_pairs or is_mixture) and predicts_classes(module, datamodule)
    another = owner, "algorithm", algorithm, "another for these data and this model"
    clip, fraction = trainer.get("gradient_clip_val"), datamodule.validation_fraction
    stepping = other_steps(phase, trainer)
    step = "server_optimizer" if phase.server_optimizer is not None else "aggregation"
    replaced, gate = getattr(phase, step), getattr(module, "gate", None)
    trains_gate = not (gate is None or isinstance(gate, FixedGate) or getattr(algorithm, "expert", None) == "")
    lacking: dict[Need, tuple[bool, tuple[object, str, Any, str]]] = {
        "all_clients": (number < datamodule.num_clients, (owner, "clients_per_round", size, "left out")),
        "every_client": (
            phase.clients is not None and not {*range(datamodule.num_clients)} <= {*phase.clients},
            (owner, "clients", phase.clients, "left out"),
        ),
        "validation_samples": (
            # a client of a deployed federation does not know what the others have; the server does
            not (len(datamodule.validation_samples.indices) or isinstance(datamodule.partitioner, AllToOne)),
            (datamodule, "validation_fraction", fraction, "above 0"),
        ),
        "validation_samples_of_each": (
            bool(((datamodule.train_samples.sizes > 0) & (datamodule.validation_samples.sizes == 0)).any()),
            (datamodule, "validation_fraction", fraction, "larger" if fraction else "above 0"),
        ),
        "classes": (not has_classes, another),
        "loss_of_outputs": (not (has_classes or is_mixture), another),
        "plain_steps": (bool(clip), (owner, trainer_key(phase, "gradient_clip_val"), clip, "left out")),
        "fresh_optimizers": (phase.train.keep_optimizer, (owner, "train.keep_optimizer", True, "False")),
        "fixed_gate": (trains_gate, (owner, "gate", gate, "EqualWeights, GlobalOnly or another fixed one")),
        "own_server_step": (replaced is not None, (owner, step, replaced, "left out")),
        "whole_batches": (
            is_distributed(trainer),
            (owner, "trainer.strategy", trainer.get("strategy"), "left out"),
        ),
        "step_of_each_batch": (
            bool(stepping),
            (owner, stepping, trainer.get(stepping.rpartition(".")[2]), "left out"),
        ),
        "fixed_rounds": (False, (owner, "rounds", phase.rounds, "")),  # checked when a run is resumed
    }
    if is_mixture and module.task == "causal_lm" and is_distributed(trainer):
        because = "processes would average the mean losses of different numbers of tokens"
        raise InvalidArgumentError(owner, "trainer.strategy", trainer.get("strategy"), "left out", because)
    for need in algorithm.needs:
        is_lacking, refused = lacking[need]
        if is_lacking:
            raise InvalidArgumentError(*refused, f"{type(algorithm).__name__} needs {_NEEDS[need]}")


def _check_labels(run: Run, phase: Phase, module: LightningModule, trains: bool) -> None:
    """Refuses training samples without a label where they could count, see :class:`~fedmoe_pl.data.Arrays`.

    Without training, they could still count in what an algorithm computes for the evaluation of a given result.
    """
    samples, algorithm = run.datamodule.train_samples.indices, phase.algorithm
    if len(run.datamodule.labelled(samples)) == len(samples):
        return
    trainer = phase.client_trainer(run.trainer)
    owner, because = str(phase), f"some training samples have no label ({IGNORED})"
    if not sees_losses_only(algorithm):
        allowed = "one that uses samples only in the losses of batches (samples_in_loss_only), such as FedAvg"
        raise InvalidArgumentError(owner, "algorithm", algorithm, allowed, because)
    if not trains:
        return
    for client, samples in samples_of_clients(run, phase, module).items():
        if len(samples) and not len(run.datamodule.labelled(samples)):
            allowed = "one that trains each client on a sample with a label"
            raise InvalidArgumentError(owner, "algorithm", algorithm, allowed, f"client {client} would have none")
    if isinstance(module, MixtureOfExperts):
        with naming(phase):
            if module.task != "multiclass":
                raise InvalidArgumentError(module, "task", module.task, "'multiclass'", because)
            if module.criterion is not None and getattr(module.criterion, "ignore_index", None) != IGNORED:
                allowed = f"left out or one with ignore_index {IGNORED}, such as CrossEntropyLoss"
                raise InvalidArgumentError(module, "loss", module.criterion, allowed, because)
    if phase.sample_privacy is not None:
        raise InvalidArgumentError(owner, "sample_privacy", phase.sample_privacy, "left out", because)
    if is_distributed(trainer):
        raise InvalidArgumentError(owner, "trainer.strategy", trainer.get("strategy"), "left out", because)


def check_phase(
    phase: Phase,
    module: LightningModule,
    datamodule: FederatedDataModule,
    seed: int,
    metrics: Mapping[str, Metric] | None = None,
    max_epochs: int = 0,
) -> None:
    """Refuses a phase that does not fit its module or the data."""
    check_tensors(module)
    if phase.evaluate:
        check_predictions(module)
    check_parts(phase, module)
    check_loss(phase, module)
    check_shared(phase, module, datamodule.num_clients)
    check_task(phase, module, datamodule, metrics or {})
    check_metric(str(phase), "select.monitor", phase.monitor, datamodule, metrics or {}, [module])
    check_direction(str(phase), "select.monitor", phase.monitor, metrics or {})
    _check_samples(phase, module, datamodule, seed)
    if phase.evaluate and phase.algorithm.parts.local_expert_predicts:
        warn_of_mixture(phase.algorithm, module)
    check_optimizer(phase, module, max_epochs)


def _check_samples(phase: Phase, module: LightningModule, datamodule: FederatedDataModule, seed: int) -> None:
    """Refuses data without the samples that the phase's selection or batch normalization needs."""
    train = datamodule.train_samples
    sizes = phase.algorithm.opt_out.opted_in_of_all(train, seed).sizes
    if phase.monitor == "reweighted_test" and ((sizes > 0) & (sizes < train.sizes)).any():
        because = "it depends on the classes of all samples of a client, even of those that opt out"
        raise InvalidArgumentError(str(phase), "select.monitor", phase.monitor, "another metric", because)
    single = (train.sizes == 1).nonzero().flatten()
    if len(single) and has_batch_norm(module):
        client = datamodule.client_names[int(single[0])]
        raise MisconfigurationException(
            f"{phase}: client {client} has one training sample, but batch normalization needs two; lower num_clients "
            "or change partition_seed."
        )


def trained_names(phase: Phase, module: LightningModule, max_epochs: int) -> set[str]:
    """The parameters that a phase trains; with a mixture's own loss, only those of experts that its gate weighs.

    Refuses a phase that has too few epochs or rounds to train any of the shared parameters.
    """
    algorithm = phase.algorithm
    epochs, shows_all = epochs_to_try(algorithm, range(phase.rounds), max(max_epochs, 1))
    if not shows_all and not phase.ckpt_path:
        rank_zero_warn(
            f"{phase}: rounds is {phase.rounds} and max_epochs is {max_epochs}, too many to know what "
            f"{type(algorithm).__name__} never trains; such parts are in train mode and computed in every step."
        )
    pairs, names = [*epochs], [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if max_epochs and not phase.ckpt_path:
        check_tied(phase, module, pairs)
    trained = {name for name in names if not shows_all or any(algorithm.is_trainable(name, *pair) for pair in pairs)}
    shared = {name for name, _ in module.named_parameters() if algorithm.is_shared(name)}
    if shared and trained and not trained & shared and max_epochs and not phase.ckpt_path:
        because = f"{type(algorithm).__name__} trains none of the shared parameters, such as '{min(shared)}'"
        raise InvalidArgumentError(
            str(phase), "train.max_epochs", max_epochs, "higher, or other parameters shared", because
        )
    if "fresh_optimizers" in algorithm.needs:  # such an algorithm trains shared parameters under other names
        return trained | (shared & {*names})
    if overrides(algorithm, "client_loss"):
        return trained
    idle = tuple(f"{part}." for part in getattr(module, "idle_parts", ()))
    weighed = {name for name in trained if not name.startswith(idle)}
    if trained and not weighed and max_epochs and not phase.ckpt_path:
        because = f"it leaves out all that {type(algorithm).__name__} trains, such as '{min(trained)}'"
        raise InvalidArgumentError(str(phase), "gate", module.gate, "one that weighs what is trained", because)
    return weighed


def _check_weighed(run: Run, trained: dict[str, set[str]], phase: Phase, module: LightningModule) -> None:
    """Refuses a gate that weighs an expert which neither the phase nor the phases that it starts from have trained.

    If all of the expert's parameters are frozen, it only warns, because the user may have trained them. It also warns
    of a gate that gives no weight to anything that the phase trains.
    """

    def is_trained(part: str) -> bool:
        if part in phase.algorithm.parts.computed:
            return True
        chain = chain_of_starts(run.phases, run.starts, phase.name, part.split(".")[0])
        names = (name for other in chain for name in trained[other.name])
        return any(other.ckpt_path for other in chain) or any(name.startswith(f"{part}.") for name in names)

    if not phase.evaluate or phase.algorithm.predictor is not None:
        return
    for part in _weighed(module):
        parameters = [*module.get_submodule(part).parameters()]
        if not parameters or is_trained(part):
            continue
        gate: Any = module.gate
        if any(parameter.requires_grad for parameter in parameters):
            others = ", ".join(filter(is_trained, _parts(module))) or "there is none"
            allowed = f"one that weighs trained experts only ({others})"
            because = f"no phase trains {part}; if it is pretrained, freeze its parameters"
            raise InvalidArgumentError(str(phase), "gate", gate, allowed, because)
        rank_zero_warn(
            f"{phase}: gate is {type(gate).__name__}, which weighs the module's {part}, but no phase trains it, "
            "because its parameters are frozen; is it pretrained?"
        )
    if isinstance(gate := getattr(module, "gate", None), SimilarityGate):
        chain = [phase] if phase.gate else chain_of_starts(run.phases, run.starts, phase.name, "gate")
        if not any(other.ckpt_path or _notes(other, module) for other in chain):
            because = (
                "only FedDPA and FineTuning of a LayerwiseAdapterMoE note the samples that it compares others with"
            )
            raise InvalidArgumentError(str(phase), "gate", gate, "another one", because)
    idle_parts = [part for part in _parts(module) if part not in _weighed(module)]
    idle, own = tuple(f"{part}." for part in idle_parts), trained[phase.name]
    trains = own and phase.ckpt_path is None and phase.epochs(run.trainer)
    if trains and all(name.startswith(idle) for name in own):
        rank_zero_warn(
            f"{phase}: gate is {type(module.gate).__name__}, which gives no weight to {', '.join(idle_parts)}, and "
            "this phase trains nothing else, so its results do not reflect that training."
        )


def _notes(phase: Phase, module: LightningModule) -> bool:
    """Whether the phase may fill a ``SimilarityGate``, as a user's algorithm always may."""
    of_user = not type(phase.algorithm).__module__.startswith("fedmoe_pl.")
    return of_user or (isinstance(module, LayerwiseAdapterMoE) and isinstance(phase.algorithm, FedDPA | FineTuning))


def _warn_of_lost(run: Run, trained: dict[str, set[str]], phase: Phase, module: LightningModule) -> None:
    """Warns of a shared parameter that clients trained only for themselves before: the server begins anew."""
    for name in (name for name, _ in module.named_parameters() if phase.algorithm.is_shared(name)):
        for other in chain_of_starts(run.phases, run.starts, phase.name, name.split(".")[0])[1:]:
            if other.algorithm.is_shared(name):
                break
            if name in trained[other.name]:
                rank_zero_warn(
                    f"{phase}: {type(phase.algorithm).__name__} shares '{name}', which the clients of "
                    f"'{other.name}' have each trained for themselves; the server begins with the initial one."
                )
                return


def _parts(module: LightningModule) -> Sequence[str]:
    """The parts of a mixture that its gate weighs, in order; empty for other modules."""
    return module.weighed_parts if isinstance(module, MixtureOfExperts) else []


def _weighed(module: LightningModule) -> list[str]:
    """The parts of a mixture to which its gate may give weight."""
    parts, gate = _parts(module), getattr(module, "gate", None)
    return [part for index, part in enumerate(parts) if not isinstance(gate, FixedGate) or index in gate.active]


def check_aggregation(
    run: Run, phase: Phase, module: LightningModule, cohort: Cohort, trained: Collection[str]
) -> None:
    """Refuses an aggregation that does not fit the algorithm or that refuses the phase, and privacy that would leak."""
    aggregation, algorithm, name = phase.aggregation, phase.algorithm, type(phase.algorithm).__name__
    if aggregation is None:
        return
    is_private, allowed, because = isinstance(aggregation, DifferentialPrivacy), "left out", ""
    if phase.ckpt_path is None:  # a result from a checkpoint is not aggregated
        server = algorithm.server_init(module)
        shared = shared_by(algorithm, server)
        idle = [name for name, _ in module.named_parameters() if name in shared and name not in trained]
        only_averages = averages(algorithm) and not (of_algorithm(server) or algorithm.messages.changes)
        hooks = sends_more(algorithm, server)
        if not only_averages or not any(tensor.is_floating_point() for tensor in shared.values()):
            because = f"what {name} combines is not the mean of parameters"
        elif is_private and hooks:
            because = f"clients of {name} send more than their updates ({', '.join(hooks)})"
        elif is_private and phase.monitor is not None:
            because = "a select by clients' data is not in epsilon"
        elif is_private and idle:
            because = f"it adds noise to all that is shared, but nobody trains '{idle[0]}'; do not share that"
        else:
            aggregation.check(shared, {name for name, _ in module.named_parameters(remove_duplicate=False)}, cohort)
    for other in run.phases_before(phase) if is_private else ():
        if other.algorithm.federated and not isinstance(other.aggregation, DifferentialPrivacy):
            allowed = f"given in '{other.name}', from which the phase starts, too"
            because = "its model tells about clients' data"
    if because:
        raise InvalidArgumentError(str(phase), "aggregation", aggregation, allowed, because)


def check_secure_aggregation(run: Run, phase: Phase, module: LightningModule, cohort: Cohort) -> None:
    """Refuses secure aggregation where the server needs more than a sum, or where it would hide nothing."""
    secure, aggregation, algorithm = phase.secure, phase.aggregation, phase.algorithm
    if secure is None or phase.ckpt_path is not None:
        return
    name, because = type(algorithm).__name__, ""
    server = algorithm.server_init(module) if algorithm.federated else {}
    if not averages(algorithm):
        because = f"the server of {name} needs each client's update" if algorithm.federated else f"{name} sends nothing"
    elif hooks := sends_more(algorithm, server):
        because = f"clients of {name} send more than their updates ({', '.join(hooks)})"
    elif wrong := [each for each, tensor in shared_by(algorithm, server).items() if not _is_summable(tensor)]:
        because = f"the shared '{wrong[0]}' is no mean, or not finite; use FedBN, GroupNorm, or another `shared`"
    elif not _receives_all(algorithm, server, cohort):
        because = f"clients of {name} receive tensors other than the server's shared ones, and send their changes"
    if because:
        raise InvalidArgumentError(str(phase), "secure_aggregation", phase.secure_aggregation, "left out", because)
    if aggregation is not None and not aggregation.averages_changes:
        allowed, because = "left out", "it needs each client's update, which secure_aggregation hides"
        raise InvalidArgumentError(str(phase), "aggregation", aggregation, allowed, because)
    size, needed = cohort.size, secure.needed(cohort.size)
    if aggregation is not None and aggregation.poisson_sampling and size < len(cohort.participants):
        because = "with secure_aggregation, cohorts of different sizes may be too small to be unmasked"
        raise InvalidArgumentError(str(phase), "clients_per_round", phase.clients_per_round, "left out", because)
    if needed <= size / 2:
        allowed = f"more than half of the cohort of {size}"
        raise InvalidArgumentError(str(phase), "secure_aggregation.threshold", secure.threshold, allowed)
    if (least := run.failures.min_clients) is not None and least > needed:
        because = f"the server of '{phase.name}' would see sums that it discards; raise secure_aggregation.threshold"
        raise InvalidArgumentError(run.failures, "min_clients", least, f"at most {needed}", because)


def _is_summable(tensor: Tensor) -> bool:
    """Whether the server averages clients' tensors and integers can express their changes."""
    return tensor.is_floating_point() and bool(tensor.isfinite().all())


def _receives_all(algorithm: Algorithm, server: Tree, cohort: Cohort) -> bool:
    """Whether clients receive the server's shared tensors unchanged."""
    sent, shared = algorithm.server_send(server, cohort.participants[0], {}), shared_by(algorithm, server)
    return all(name in sent and same_memory(sent[name], tensor) for name, tensor in shared.items())


def check_sample_privacy(run: Run, phase: Phase, module: LightningModule, trains: bool) -> None:
    """Refuses DP-SGD where epsilon would not hold; the backend refuses what it cannot train.

    A phase with DP-SGD must not start from one without, even if only clients kept what the earlier phase trained: one
    sample more or less there would change all gradients of a client here, not just one.
    """
    privacy, algorithm, name = phase.sample_privacy, phase.algorithm, type(phase.algorithm).__name__
    if privacy is None:
        return
    refused, because = (str(phase), "sample_privacy", privacy, "left out"), ""
    if not sees_losses_only(algorithm):
        because = f"{name} is not known to use samples in the gradients of its loss only (samples_in_loss_only)"
    elif algorithm.client_batches:
        because = f"client_batches of {name} would be ignored: epsilon is computed for Poisson batches"
    elif has_batch_norm(module):
        because = f"batch normalization in {type(module).__name__} mixes the samples of a batch; GroupNorm does not"
    elif isinstance(getattr(module, "gate", None), SimilarityGate):
        because = "a SimilarityGate keeps features of samples as they are"
    elif phase.monitor is not None:
        because = "a select by clients' data is not in epsilon"
    elif is_distributed(run.trainer):
        because = "trainer.strategy divides the batches of clients"
    if because and trains:
        raise InvalidArgumentError(*refused, because)
    sizes = algorithm.opt_out.opted_in_of_all(run.datamodule.train_samples, run.seed).sizes
    if trains and privacy.delta * (most := int(sizes.max())) >= 1:
        because = f"a client has {most} samples, and delta allows publishing each with this probability"
        raise InvalidArgumentError(str(phase), "sample_privacy.delta", privacy.delta, f"below {1 / most:.3g}", because)
    for other in run.phases_before(phase):
        if other.sample_privacy is None:
            allowed = f"given in '{other.name}', from which the phase starts, too"
            because = "what it trained tells about clients' samples, and changes all gradients of this phase"
            raise InvalidArgumentError(str(phase), "sample_privacy", privacy, allowed, because)
        if privacy.target_epsilon is not None and other.ckpt_path is not None:
            because = f"'{other.name}' takes its result from a checkpoint"
            argument = "sample_privacy.target_epsilon"
            raise InvalidArgumentError(
                str(phase), argument, privacy.target_epsilon, "left out, with a noise_multiplier in its place", because
            )
    privacy.epsilon([[1.0, privacy.noise_multiplier or 1.0, 1]])  # raises if Opacus is not installed
