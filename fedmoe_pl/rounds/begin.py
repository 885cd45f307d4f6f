"""How a phase begins: from the initial model, or from earlier phases."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn.parameter import is_lazy

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends import LocalTraining, begin_client, client_of, trains_by_loss
from fedmoe_pl.backends.training import epochs_to_try
from fedmoe_pl.checkpoints.client_state import joined, only
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.checks import InvalidArgumentError, naming, with_article
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation.outputs import labelled_batches, mixture_of, outputs_of
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.layers import evaluating
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import in_part
from fedmoe_pl.seeds import seed_all
from fedmoe_pl.trees import Tree, borrow, copies_of_parts, copy_module, is_interchangeable, load_tree, same_bits


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
        if key in module.hparams:  # a gate or mixing that a subclass has saved, and checkpoints therefore have
            module.hparams[key] = getattr(module, key)
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
    state = state_from_start(phase, module, before, copies=result is None)
    if result is None:
        return state
    client_states = state.clients
    if result.clients:  # a ChainMap, because one dict of both could be too large, and it is only read
        client_states = ChainMap(result.clients, state.clients)  # pyright: ignore[reportArgumentType]
    counted = {
        "counted_rounds": {**state.counted_rounds, **result.counted_rounds},
        "counted_steps": {**state.counted_steps, **result.counted_steps},
    }
    # what clients neither receive nor keep is as it was when the result was made; what is the same stays in one place
    initial, saved = state.initial, result.initial
    names = [name for name in saved if name in initial and saved[name].shape == initial[name].shape]
    other = {name: saved[name].to(initial[name].dtype) for name in names if not same_bits(saved[name], initial[name])}
    return replace(result, initial={**initial, **other}, clients=client_states, **counted)


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


def evaluates_trained(phase: Phase) -> bool:
    """Whether the phase aggregates and is evaluated after local training."""
    return phase.evaluate and phase.aggregates and "local_training" in phase.evaluation_points


def state_from_start(
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
        if phase.gate or not same_gate(initial, tensors):
            names = [name for name in names if not name.startswith("gate.")]
        inherited.append((names, state))
        initial |= {name: tensors[name] for name in names if name in tensors}
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


def same_gate(tree: Tree, other: Tree) -> bool:
    """Whether the gates of two models have tensors of the same names and shapes."""
    shapes = [{name: t.shape for name, t in one.items() if name.startswith("gate.")} for one in (tree, other)]
    return shapes[0] == shapes[1]
