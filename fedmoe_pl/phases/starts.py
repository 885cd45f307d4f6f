"""Which phase each phase, or each part of its model, starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.phases.phase import INITIAL, Phase

Start = str | Mapping[str, str]
"""The name of a phase, or ``initial``; or such a name for each part that does not start from the initial model."""


def find_starts(phases: Sequence[Phase]) -> dict[str, Start]:
    """What each phase starts from, by the phase's name."""
    starts: dict[str, Start] = {}
    for index, phase in enumerate(phases):
        starts[phase.name] = _find_start(phase, phases[:index], starts)
        if len(owners := _owners(phases, starts, phase.name)) > 1:
            because = f"these are phases with different models ({', '.join(owners)}), and the phase has none of its own"
            raise InvalidArgumentError(str(phase), "start", phase.start, "phases with the same model", because)
    return starts


def sources(start: Start) -> list[tuple[str, str]]:
    """The parts that start from a phase, each with the phase's name; the part "" is the whole model.

    Example:
        >>> sources("FedAvg"), sources("initial"), sources({"gate": "initial", "local_expert": "Local"})
        ([('', 'FedAvg')], [], [('local_expert', 'Local')])
    """
    parts = {"": start} if isinstance(start, str) else start
    return [(part, name) for part, name in parts.items() if name != INITIAL]


def in_part(name: str, part: str) -> bool:
    """Whether a tensor belongs to a part of the model; all belong to the part ""."""
    return not part or name == part or name.startswith(f"{part}.")


def chain_of_starts(phases: Sequence[Phase], starts: Mapping[str, Start], name: str, part: str = "") -> list[Phase]:
    """The phases whose training is in a phase's result, or in one part of it, the last one first."""
    by_name = {phase.name: phase for phase in phases}
    chain, names = [], [name]
    while names:
        name = names.pop(0)
        if name != INITIAL and by_name[name] not in chain:
            chain.append(by_name[name])
            names += [source for other, source in sources(starts[name]) if not part or other in ("", part)]
    return chain


def model_of(phases: Sequence[Phase], starts: Mapping[str, Start], name: str) -> str:
    """The phase whose ``model`` a phase uses, or ``initial`` for the federation's."""
    return next(iter(_owners(phases, starts, name)), INITIAL)


def check_start(
    phase: Phase, start: Start, module: LightningModule, module_of: Callable[[str], LightningModule]
) -> None:
    """Refuses a start whose tensors do not fit the phase's model: those of each part that it takes must be the same."""
    shapes = _shapes(module)
    for part in [] if isinstance(start, str) else start:
        if part not in shapes:
            allowed = f"a dict of parts of the {type(module).__name__} ({', '.join(shapes)})"
            raise InvalidArgumentError(str(phase), "start", start, allowed)
        if part in phase.algorithm.parts.copied:
            because = f"{type(phase.algorithm).__name__} starts it as a copy of another part"
            raise InvalidArgumentError(str(phase), "start", start, f"without '{part}'", because)
    for part in [] if isinstance(start, str) else phase.algorithm.parts.needed:
        if part not in start:
            because = f"{type(phase.algorithm).__name__} builds on it"
            raise InvalidArgumentError(str(phase), "start", start, f"one that also names '{part}'", because)
    if isinstance(start, str) and phase.model is None:
        return  # the same model
    for part, name in sources(start):
        before = _shapes(module_of(name))
        parts = [part] if part else [other for other in shapes if other in before and other != "gate"]
        wrong = [other for other in parts if before.get(other) != _taken(module, other, shapes[other], before)]
        if wrong or not parts:
            difference = f"differs from the phase's own in '{wrong[0]}'" if wrong else "has no part of the phase's own"
            allowed = f"'{INITIAL}' or a phase with the same tensors in each part that both models have"
            raise InvalidArgumentError(str(phase), "start", start, allowed, f"the model of '{name}' {difference}")


def warn_of_computed_parts(phase: Phase, start: Start, by_name: Mapping[str, Phase]) -> None:
    """Warns of parts of a start that its clients were evaluated with, but that the phase does not get."""
    for part, name in sources(start):
        algorithm = by_name[name].algorithm
        for computed in algorithm.parts.computed:
            if not part or computed in ("", part):
                rank_zero_warn(
                    f"{phase}: start takes {part or computed or 'the model'} from '{name}' as the server and the "
                    f"clients hold it, and not as it was evaluated: {type(algorithm).__name__} computes that one for "
                    "predictions only."
                )


def _taken(
    module: LightningModule, part: str, own: dict[str, tuple[int, ...]], before: dict[str, dict[str, tuple[int, ...]]]
) -> dict[str, tuple[int, ...]]:
    """The tensors that a phase takes of a part: of a list of modules, which may have grown, those of the old ones."""
    if not isinstance(getattr(module, part, None), nn.ModuleList):
        return own
    old = {name.split(".")[1] for name in before.get(part, ())}
    return {name: shape for name, shape in own.items() if name.split(".")[1] in old}


def _shapes(module: LightningModule) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shape of each tensor by its name, for each part of the module."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in module.state_dict().items():
        shapes.setdefault(name.split(".")[0], {})[name] = tuple(tensor.shape)
    return shapes


def _owners(phases: Sequence[Phase], starts: Mapping[str, Start], name: str) -> list[str]:
    """The phases whose ``model`` a phase could use, or ``initial``: several if its starts have different models."""
    if next(phase for phase in phases if phase.name == name).model is not None:
        return [name]
    return list(dict.fromkeys(model_of(phases, starts, source) for _, source in sources(starts[name])))


def _find_start(phase: Phase, earlier: Sequence[Phase], starts: Mapping[str, Start]) -> Start:
    names = [other.name for other in earlier]
    if phase.start is not None:
        for name in [phase.start] if isinstance(phase.start, str) else phase.start.values():
            if name not in (INITIAL, *names):
                allowed = f"'{INITIAL}' or an earlier phase ({', '.join(names) or 'there is none'})"
                raise InvalidArgumentError(str(phase), "start", phase.start, allowed)
        _check_needed(phase, phase.start, earlier, starts)
        return phase.start
    if not phase.algorithm.parts.needed:
        return INITIAL
    followed = [other.name for other in earlier if not phase.algorithm.missing_start([other.algorithm])]
    if not followed:
        needed = phase.algorithm.missing_start([]) or "one"
        because = (
            f"{type(phase.algorithm).__name__} starts from an earlier phase, and none of [{', '.join(names)}] fits"
        )
        raise InvalidArgumentError(str(phase), "start", None, f"{needed} before this phase", because)
    return followed[-1]


def _check_needed(phase: Phase, start: Start, earlier: Sequence[Phase], starts: Mapping[str, Start]) -> None:
    """Refuses a start without the training that the algorithm builds on."""
    algorithm = phase.algorithm
    for part in algorithm.parts.needed:
        name = start if isinstance(start, str) else start.get(part, INITIAL)
        chain = [other.algorithm for other in chain_of_starts(earlier, starts, name, part)]
        if chain and (needed := algorithm.missing_start(chain, "" if isinstance(start, str) else part)):
            of_part = "" if isinstance(start, str) else f" for '{part}'"
            allowed = f"{needed}, or a phase that goes back to one,{of_part}"
            raise InvalidArgumentError(str(phase), "start", start, allowed.rstrip(","))
