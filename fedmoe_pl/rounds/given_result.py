"""The result of a phase from a checkpoint, which ``Phase.ckpt_path`` gives, in place of its rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.algorithms.algorithm import overrides
from fedmoe_pl.backends import TRAINED
from fedmoe_pl.checkpoints.checkpoint import FILE, load_checkpoint
from fedmoe_pl.checkpoints.client_state import RemoteStates, Renumbered, check_states, without
from fedmoe_pl.checkpoints.phase_state import EVERYONE, NOT_PRIVATE, PhaseState
from fedmoe_pl.checks import InvalidArgumentError, naming
from fedmoe_pl.data import ClientNames
from fedmoe_pl.models import AdapterMoE, MixtureOfExperts, MixtureWeights
from fedmoe_pl.models.adapter_files import read_adapter
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import in_part
from fedmoe_pl.rounds.begin import evaluates_trained, same_gate, state_from_start
from fedmoe_pl.trees import Tree, load_tree, of_algorithm

ReadResult = Callable[[Phase, LightningModule, Mapping[str, Any]], PhaseState]
"""Reads a phase's result from its ``ckpt_path``, given the phase's module and the identity of the run."""
_TRAINED = "after local training"  # a value of Evaluation.evaluation_point


def read_result(phase: Phase, module: LightningModule, identity: Mapping[str, Any]) -> PhaseState:
    """Reads the phase's result from ``phase.ckpt_path`` and checks that it fits the phase and the run's data."""
    saved = _read(phase, module, identity)
    check_evaluation_points(phase, saved)
    state = PhaseState(saved.initial, saved.server, saved.clients, round=phase.rounds, given_round=_round_of(saved))
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
    state = PhaseState(saved.initial, server, round=round, given_round=_round_of(saved))
    others = {  # renamed, because a new client may have the id of an old one whose steps do not count for it
        name: {client if client == EVERYONE else f"{phase.ckpt_path}/{client}": steps for client, steps in each.items()}
        for name, each in saved.counted_steps.items()
    }
    return _with_privacy(state, phase, replace(saved, counted_steps=others))


def _round_of(saved: PhaseState) -> int:
    """The round of a saved result; 0 if it is unknown."""
    return saved.best_round or (saved.round if saved.given_round is None else saved.given_round)


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
    if same_gate(state.initial, tree := module.state_dict()):
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


def _read(phase: Phase, module: LightningModule, identity: Mapping[str, Any] | None = None) -> PhaseState:
    """The phase's saved state or, from a Lightning checkpoint, its first state with the checkpoint's parameters.

    If the ``identity`` of a run is given, clients take what they kept: in another run's data, those of the same names.
    """
    state, path = state_from_start(phase, module, []), Path(phase.ckpt_path or "")
    refused = (str(phase), "ckpt_path", phase.ckpt_path)
    is_of_peft = path.is_dir()
    content: Any = {"state_dict": _read_adapter(phase, module, state.server)} if is_of_peft else load_checkpoint(path)
    if "phases" not in content:
        parameters = [name for name in state.server if name in state.initial]  # not the algorithm's own tensors
        missing = [name for name in parameters if name not in content["state_dict"]]
        if missing:
            because = f"this one has no '{missing[0]}'"
            raise InvalidArgumentError(*refused, "a checkpoint with all shared parameters", because)
        given = {name: content["state_dict"][name] for name in parameters}
        load_tree(module, given)
        return PhaseState(content["state_dict"], {**state.server, **given})
    finished = [name for name, other in content["phases"].items() if other.finished]
    if phase.name not in finished:
        allowed = f"a checkpoint in which '{phase.name}' has finished"
        raise InvalidArgumentError(*refused, allowed, f"only {finished} have in this one")
    saved = content["phases"][phase.name]
    load_tree(module, {name: saved.server[name] for name in state.initial if name in saved.server})
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
    if saved.clients and content["seed"] != identity["seed"] and getattr(phase.algorithm, "gate_fraction", 0):
        allowed = f"a checkpoint of a run with seed {identity['seed']}"
        because = f"samples for the gate are set aside by the seed, which is {content['seed']} in this one"
        raise InvalidArgumentError(*refused, allowed, because)
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


def _keeps_tensors(phase: Phase, module: LightningModule) -> bool:
    """Whether clients of this phase train parameters, or estimate weights, that they do not share."""
    algorithm = phase.algorithm
    at_times = overrides(algorithm, "is_trainable")  # perhaps trains later; `freeze_shared` looks at all epochs
    estimated = isinstance(getattr(module, "gate", None), MixtureWeights) and not algorithm.is_shared("gate.weights")
    return estimated or any(
        parameter.requires_grad and (at_times or algorithm.is_trainable(name, 0, 0)) and not algorithm.is_shared(name)
        for name, parameter in module.named_parameters()
    )
