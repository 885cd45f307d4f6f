"""How a phase begins: from the initial model, from an earlier phase, or with a result from a checkpoint."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn.parameter import is_lazy

from fedmoe_pl.algorithms.algorithm import overrides
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends import TRAINED, LocalTraining, begin_client, client_of, trains_by_loss
from fedmoe_pl.backends.training import epochs_to_try
from fedmoe_pl.checkpoints.checkpoint import FILE, load_checkpoint
from fedmoe_pl.checkpoints.client_state import RemoteStates, Renumbered, check_states, joined, only, without
from fedmoe_pl.checkpoints.phase_state import EVERYONE, NOT_PRIVATE, PhaseState
from fedmoe_pl.checks import InvalidArgumentError, naming, with_article
from fedmoe_pl.data import ClientNames, FederatedDataModule
from fedmoe_pl.evaluation.outputs import labelled_batches, mixture_of, outputs_of
from fedmoe_pl.models import AdapterMoE, MixtureOfExperts, MixtureWeights
from fedmoe_pl.models.adapter_files import read_adapter
from fedmoe_pl.models.layers import evaluating
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import in_part
from fedmoe_pl.seeds import seed_all
from fedmoe_pl.trees import Tree, borrow, copies_of_parts, copy_module, is_interchangeable, load_tree, of_algorithm

ReadResult = Callable[[Phase, LightningModule, Mapping[str, Any]], PhaseState]
"""Reads a phase's result from its ``ckpt_path``, given the phase's module and the identity of the run."""
_TRAINED = "after local training"  # a value of Evaluation.evaluation_point


def phase_module(model: LightningModule, phase: Phase) -> LightningModule:
    """A copy of the model, with the phase's gate, mixing, optimizer and scheduler."""
    module = copy_module(model)
    train = {"train.optimizer": phase.train.optimizer, "train.lr_scheduler": phase.train.lr_scheduler}
    for key, replacement in {"gate": phase.gate, "mixing": phase.mixing, **train}.items():
        part = key.removeprefix("train.")
        if replacement is None:
            continue
        kind = type(module).__name__
        if not isinstance(module, MixtureOfExperts):
            given = with_article(kind)
            because = f"only a MixtureOfExperts lets a phase replace it, and the model is {given}"
            raise InvalidArgumentError(str(phase), key, "given", "left out", because)
        setattr(module, part, copy_module(replacement).to(_dtype(model)) if part == "gate" else replacement)
        if part == "optimizer":
            module.lr = None
        if key in train and not _uses(module, part):
            because = f"configure_optimizers of {kind} does not call self.{part}"
            raise InvalidArgumentError(str(phase), key, "given", "left out", because)
        with naming(phase):
            module.check_parts()
    return module


def _uses(module: MixtureOfExperts, part: str) -> bool:
    """Whether ``configure_optimizers``, which a subclass may override, calls the factory of optimizer or scheduler."""
    if type(module).configure_optimizers is MixtureOfExperts.configure_optimizers:
        return True
    make: Any = getattr(module, part)
    calls = list[Any]()
    setattr(module, part, lambda argument: calls.append(argument) or make(argument))
    try:
        module.configure_optimizers()
    except Exception:  # the method may need its Trainer
        return True
    finally:
        setattr(module, part, make)
    return bool(calls)


def sized(module: LightningModule, datamodule: FederatedDataModule, seed: int) -> LightningModule:
    """The module, with lazy layers, such as a gate of unknown input width, sized by a sample."""
    if any(is_lazy(parameter) for parameter in module.parameters()):
        seed_all(seed)
        ((batch, _),) = labelled_batches(datamodule, datamodule.train_samples.indices[:1], mixture_of(module))
        others = [part for part in module.modules() if not any(map(is_lazy, part.parameters(recurse=False)))]
        before = [(part, {**vars(part)}) for part in others]
        with torch.no_grad(), evaluating(module):  # torch cannot export parameters that were made in inference mode
            outputs_of(module, batch, datamodule.has_pairs)
        for part, attributes in before:  # drops what the prediction has left in the part
            vars(part).clear()
            vars(part).update(attributes)
        if isinstance(module, MixtureOfExperts):
            module.check_parts()  # also sets the memory format of the sized layers
    return module


def _dtype(module: LightningModule) -> torch.dtype:
    """The floating-point type of the module's parameters."""
    dtypes = (parameter.dtype for parameter in module.parameters())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.get_default_dtype())


def freeze_shared(training: LocalTraining, state: PhaseState | None) -> None:
    """Freezes what clients share once the server no longer learns, because whatever they trained of it would be lost.

    If the loss then depends on no trainable parameter, for example because the gate leaves out the clients' own expert,
    nothing is trained. If the phase is evaluated after local training, nothing is frozen, since all parameters count.
    """
    if state is None or state.server_learns or training.keep_trained:
        return
    module, is_shared = training.module, training.algorithm.is_shared
    for name, parameter in module.named_parameters():
        if is_shared(name):
            parameter.requires_grad_(False)
    for name, part in module.named_modules():  # including parts without parameters, such as batch normalization
        tensors = part.state_dict(prefix=f"{name}." if name else "")
        if tensors and all(map(is_shared, tensors)):
            part.eval()
    if idle := _idles_before_training(training):
        name = type(training.algorithm).__name__
        because = f"{name} trains none of what they keep in some epochs before others of the same round"
        rank_zero_warn(f"Phase '{training.phase_name}': newcomers train nothing, because {because}.")
    if idle or not _has_gradient(training, state):
        module.requires_grad_(False)


def share_memory(training: LocalTraining, model: LightningModule) -> None:
    """Has a phase's module and initial tensors share the memory of frozen parameters of the run's model.

    From here on, only copies of the phase's module may be called, because a call may change parameters.
    """
    initial, parameters = training.initial, dict(training.module.named_parameters())
    for name, parameter in model.named_parameters():
        own = parameters.get(name)
        frozen = own is not None and not (own.requires_grad or parameter.requires_grad) and name in initial
        if frozen and is_interchangeable(initial[name], parameter):
            initial[name] = parameter.data
            borrow(parameters[name], parameter.data)


def _idles_before_training(training: LocalTraining) -> bool:
    """Whether an epoch that trains nothing comes right before one that trains; its loss would have no gradient.

    Final epochs of a round that train nothing do not matter, because they are skipped.
    """
    names = [name for name, parameter in training.module.named_parameters() if parameter.requires_grad]
    pairs = epochs_to_try(training.algorithm, range(training.rounds), training.max_epochs)[0]
    trains = {pair for pair in pairs if any(training.algorithm.is_trainable(name, *pair) for name in names)}
    return any(epoch and (round, epoch - 1) not in trains for round, epoch in trains)


def _has_gradient(training: LocalTraining, state: PhaseState) -> bool:
    """Whether the loss of a batch depends on a parameter that is not frozen; True if that cannot be tried."""
    samples_of = training.datamodule.train_samples
    client_id = max(range(training.datamodule.num_clients), key=lambda client: len(samples_of[client]))
    training = replace(training).of(client_id)  # a copy, because `of` remembers modules, which may still be frozen
    if not trains_by_loss(training):
        return True
    try:
        for names, (round, _) in training.trainable.items():
            module = copy_module(training.module)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name in names)
            _, constants, samples = begin_client(training, module, state.server, client_id, {}, round)
            (batch,) = training.datamodule.batches(samples[:1], device=torch.device("cpu"))
            with evaluating(module):
                if training.algorithm.client_loss(module, batch, constants).requires_grad:
                    return True
        return not training.trainable  # without epochs, nothing needs freezing
    except Exception:  # a loss may need its Trainer; training reports other errors
        return True


def begin_phase(
    phase: Phase, module: LightningModule, before: Sequence[tuple[str, PhaseState]], result: PhaseState | None
) -> PhaseState:
    """The phase's state before its first round, or its result from a checkpoint; loads the module's initial tensors."""
    state = _from_start(phase, module, before, copies=result is None)
    if result is None:
        return state
    client_states = state.clients
    if result.clients:  # a ChainMap, because one dict of both could be too large, and it is only read
        client_states = ChainMap(result.clients, state.clients)  # pyright: ignore[reportArgumentType]
    counted = {
        "counted_rounds": {**state.counted_rounds, **result.counted_rounds},
        "counted_steps": {**state.counted_steps, **result.counted_steps},
    }
    return replace(result, initial=state.initial, clients=client_states, **counted)


def first_clients(
    training: LocalTraining, cohort: Sequence[int], client_states: Mapping[int, Tree]
) -> Iterator[Client]:
    """The clients of a phase's first round, as ``Algorithm.server_begin`` sees them before anything is sent to them."""
    modules: dict[int, LightningModule] = {}
    for client_id in cohort:
        own_training, architecture = training.of(client_id), training.architecture(client_id)
        if architecture not in modules:
            modules[architecture] = copy_module(own_training.module)
        yield client_of(own_training, modules[architecture], client_id, client_states.get(client_id, {}), round=0)


def read_result(phase: Phase, module: LightningModule, identity: Mapping[str, Any]) -> PhaseState:
    """Reads the phase's result from ``phase.ckpt_path`` and checks that it fits the phase and the run's data."""
    saved = _read(phase, module, identity)
    check_evaluation_points(phase, saved)
    state = PhaseState({}, saved.server, saved.clients, round=phase.rounds, given_round=saved.best_round or saved.round)
    return _with_privacy(state, phase, saved)


def read_result_for_new_clients(phase: Phase, module: LightningModule, identity: Mapping[str, Any]) -> PhaseState:
    """Reads the phase's result for clients that were not in the federation, without what other clients kept.

    New clients have local rounds, which leave the server's state unchanged, if they keep, predict with, or are
    evaluated with anything that is not shared.
    """
    saved = _read(phase, module)
    has_predictor = phase.algorithm.predictor is not None
    trains = has_predictor or _keeps_tensors(phase, module) or evaluates_trained(phase)
    round = 0 if trains else phase.rounds
    per_client = phase.algorithm.messages.per_client
    server = {name: tensor for name, tensor in saved.server.items() if not name.startswith(per_client)}
    state = PhaseState({}, server, round=round, given_round=saved.best_round or saved.round)
    others = {  # renamed, because a new client may have the id of an old one whose steps do not count for it
        name: {client if client == EVERYONE else f"{phase.ckpt_path}/{client}": steps for client, steps in each.items()}
        for name, each in saved.counted_steps.items()
    }
    return _with_privacy(state, phase, replace(saved, counted_steps=others))


def _with_privacy(state: PhaseState, phase: Phase, saved: PhaseState) -> PhaseState:
    """The state with the result's privacy costs; a result counts as not private if its rounds are unknown."""
    unknown = {phase.name: [[*NOT_PRIVATE, 1]]} if phase.algorithm.federated else {}
    rounds = saved.counted_rounds or unknown
    steps = saved.counted_steps or {phase.name: {EVERYONE: [[*NOT_PRIVATE, 1]]}}
    # prefixed with the path, because phases of another run may have the same names
    counted = {
        "counted_rounds": {f"{phase.ckpt_path}/{name}": of_phase for name, of_phase in rounds.items()},
        "counted_steps": {f"{phase.ckpt_path}/{name}": of_phase for name, of_phase in steps.items()},
    }
    of_samples = {"sample_epsilon": saved.sample_epsilon, "sample_delta": saved.sample_delta}
    return replace(state, **counted, epsilon=saved.epsilon, delta=saved.delta, **of_samples)


def check_evaluation_points(phase: Phase, result: PhaseState) -> None:
    """Refuses a result that lacks the locally trained models, if the phase is evaluated after local training."""
    if evaluates_trained(phase) and all(evaluation.evaluation_point != _TRAINED for evaluation in result.evaluations):
        because = "the checkpoint has no models as they were after local training"
        raise InvalidArgumentError(str(phase), "evaluate.after", phase.evaluation.after, "aggregation", because)


def with_gate_of(phase: Phase, module: LightningModule, state: PhaseState) -> PhaseState:
    """The result of a phase, without its trained gate if the module's gate has no tensors."""
    if _same_gate(state.initial, tree := module.state_dict()):
        return state
    if any(name.startswith("gate.") for name in tree):
        allowed = "the gate of the checkpoint, or one that has no tensors, such as EqualWeights"
        raise InvalidArgumentError(str(phase), "gate", getattr(module, "gate", None), allowed, "no gate is trained now")
    prefixes = "gate.", f"{TRAINED}gate."
    initial, server = (
        {name: tensor for name, tensor in given.items() if not name.startswith(prefixes)}
        for given in (state.initial, state.server)
    )
    return replace(state, initial=initial, server=server, clients=without(state.clients, prefixes))


def evaluates_trained(phase: Phase) -> bool:
    """Whether the phase aggregates and is evaluated after local training."""
    return phase.evaluate and phase.aggregates and "local_training" in phase.evaluation_points


def _read(phase: Phase, module: LightningModule, identity: Mapping[str, Any] | None = None) -> PhaseState:
    """The phase's saved state or, from a Lightning checkpoint, its first state with the checkpoint's parameters.

    If the ``identity`` of a run is given, clients take what they kept: in another run's data, those of the same names.
    """
    state, path = _from_start(phase, module, []), Path(phase.ckpt_path or "")
    refused = (str(phase), "ckpt_path", phase.ckpt_path)
    is_of_peft = path.is_dir()
    content: Any = {"state_dict": _read_adapter(phase, module, state.server)} if is_of_peft else load_checkpoint(path)
    if "phases" not in content:
        parameters = [name for name in state.server if name in state.initial]  # not the algorithm's own tensors
        missing = [name for name in parameters if name not in content["state_dict"]]
        if missing:
            because = f"this one has no '{missing[0]}'"
            raise InvalidArgumentError(*refused, "a checkpoint with all shared parameters", because)
        given = _selected(parameters, content["state_dict"])
        load_tree(module, given)
        return PhaseState({}, {**state.server, **given})
    finished = [name for name, other in content["phases"].items() if other.finished]
    if phase.name not in finished:
        allowed = f"a checkpoint in which '{phase.name}' has finished"
        raise InvalidArgumentError(*refused, allowed, f"only {finished} have in this one")
    saved = content["phases"][phase.name]
    load_tree(module, _selected(state.initial, saved.server))
    missing = [name for name in state.server if name not in saved.server]
    surplus = [name for name in saved.server if name in state.initial and name not in state.server]
    if overrides(phase.algorithm, "server_begin"):  # may add copies, or any tensors that the server only passes on
        is_of_user = not type(phase.algorithm).server_begin.__module__.startswith("fedmoe_pl.")
        added = [""] if is_of_user or not phase.algorithm.messages.combined else phase.algorithm.parts.copied
        surplus = [name for name in surplus if not any(in_part(name, part) for part in added)]
    if missing or surplus:
        verb, name = ("lacks", missing[0]) if missing else ("also has", surplus[0])
        because = f"the server's state of '{phase.name}' {verb} '{name}' in this one"
        raise InvalidArgumentError(*refused, "a checkpoint of the same method and model", because)
    if identity is None:
        return saved
    check_states(saved.clients)
    if all(content[key] == identity[key] for key in ("partition", "client_names")):
        return saved
    before, now = (ClientNames(each["client_names"] or []) for each in (content, identity))
    of_name = {name: client for client, name in enumerate(before)}
    old = {client: of_name[name] for client, name in enumerate(now) if name in of_name}
    saved = _renumbered(phase, module, saved, before, old)
    new = [client for client in range(len(now)) if client not in old]
    moved = [client for client in old if old[client] != client]
    anew = f"; {now.text(new)} begin{'s' * (len(new) == 1)} anew" if new else ""
    anew += f"; {now.text(moved)} may hold out other samples, which follow from a client's number" if moved else ""
    rank_zero_warn(
        f"{phase}: ckpt_path is '{path}', a run with other clients or samples{anew}; clients may be tested on samples "
        "that its result was trained on."
    )
    return saved


def _renumbered(
    phase: Phase, module: LightningModule, saved: PhaseState, before: Sequence[str], old: Mapping[int, int]
) -> PhaseState:
    """A result for other data, whose clients take what those of the same names kept; ``old`` has their old numbers."""
    architecture = module.client_architecture if isinstance(module, MixtureOfExperts) else lambda client: 0
    keeps, counted, per_client = bool(saved.clients), saved.counted_steps, phase.algorithm.messages.per_client
    counts = phase.sample_privacy is not None and any(of_phase.keys() != {EVERYONE} for of_phase in counted.values())
    for because, is_so in {
        "clients would get what others have kept, as these have no names in the data by which to tell them": (
            keeps and not old
        ),
        "its server holds tensors of single clients": any(  # parts of the module are the same for all
            name.startswith(per_client) for name in of_algorithm(saved.server)
        ),
        "what clients keep is on their own machines": keeps and isinstance(saved.clients, RemoteStates),
        "a client's number chooses its architecture": (
            keeps and any(architecture(new) != architecture(old[new]) for new in old)
        ),
        "epsilon counts the steps of each of its clients, which have no names in the data": counts and not before,
    }.items():
        if is_so:
            allowed = "the checkpoint of a run with the same clients and samples"
            raise InvalidArgumentError(str(phase), "ckpt_path", phase.ckpt_path, allowed, because)
    texts = {str(client): f"{phase.ckpt_path}/{name}" for client, name in enumerate(before)}
    texts |= {str(client): str(new) for new, client in old.items()}
    counted = {
        name: {texts.get(client, client): steps for client, steps in of_phase.items()}
        for name, of_phase in counted.items()
    }
    kept = Renumbered(saved.clients, {new: client for new, client in old.items() if client in saved.clients})
    return replace(saved, clients=kept, counted_steps=counted)


def _read_adapter(phase: Phase, module: LightningModule, server: Tree) -> Tree:
    """The global expert's tensors from a folder of peft; the phase's algorithm must share all of them."""
    refused = (str(phase), "ckpt_path", phase.ckpt_path)
    if not isinstance(module, AdapterMoE):
        last = Path(phase.ckpt_path or "") / FILE
        allowed = f"the file '{last}' in it" if last.is_file() else "a file, because the model is no AdapterMoE"
        raise InvalidArgumentError(*refused, allowed)
    with naming(phase):
        tensors = read_adapter(Path(phase.ckpt_path or ""), module)
    if lost := [name for name in tensors if name not in server]:
        because = f"its {type(phase.algorithm).__name__} does not share {lost[0]}"
        raise InvalidArgumentError(*refused, "left out", because)
    return tensors


def _from_start(
    phase: Phase, module: LightningModule, before: Sequence[tuple[str, PhaseState]], copies: bool = False
) -> PhaseState:
    """The phase's state before its first round, from the phases that it starts from or the initial model.

    With ``copies``, clients make the copies that ``parts.copied`` declares; a given result has its copies already.
    """
    initial = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    inherited: list[tuple[list[str], PhaseState]] = []
    for part, state in before:
        tensors = {**state.initial, **state.server}
        names = [name for name in initial if in_part(name, part)]
        if phase.gate or not _same_gate(initial, tensors):
            names = [name for name in names if not name.startswith("gate.")]
        inherited.append((names, state))
        initial |= _selected(names, tensors)
    load_tree(module, initial)
    with naming(phase):
        server = phase.algorithm.server_init(module)
    client_states = []
    for names, state in inherited:
        # tensors that clients kept under a name that the server now sends are dropped
        private = {name: name for name in names if name not in server}
        if phase.algorithm.parts.new_gate:  # a client without a gate draws a new one
            private = {name: name for name in private if not name.startswith("gate.")}
        copied = copies_of_parts({name: name for name in names}, phase.algorithm.parts.copied) if copies else {}
        if copied.keys() & private.keys():  # only a client without a part of its own takes the copy
            client_states.append(only(state.clients, copied))
            copied = {}
        client_states.append(only(state.clients, copied | private))
    aggregation = {} if phase.aggregation is None else phase.aggregation.begin()
    counted = {
        "counted_rounds": {name: rounds for _, state in before for name, rounds in state.counted_rounds.items()},
        "counted_steps": {name: steps for _, state in before for name, steps in state.counted_steps.items()},
    }
    return PhaseState(initial, server, joined(client_states), aggregation=aggregation, **counted)


def _same_gate(tree: Tree, other: Tree) -> bool:
    """Whether the gates of two models have tensors of the same names and shapes."""
    shapes = [{name: t.shape for name, t in one.items() if name.startswith("gate.")} for one in (tree, other)]
    return shapes[0] == shapes[1]


def _keeps_tensors(phase: Phase, module: LightningModule) -> bool:
    """Whether clients of this phase train parameters, or estimate weights, that they do not share."""
    algorithm = phase.algorithm
    at_times = overrides(algorithm, "is_trainable")  # perhaps trains later; `freeze_shared` looks at all epochs
    estimated = isinstance(getattr(module, "gate", None), MixtureWeights) and not algorithm.is_shared("gate.weights")
    return estimated or any(
        parameter.requires_grad and (at_times or algorithm.is_trainable(name, 0, 0)) and not algorithm.is_shared(name)
        for name, parameter in module.named_parameters()
    )


def _selected(names: Iterable[str], tree: Tree) -> Tree:
    return {name: tree[name] for name in names if name in tree}
