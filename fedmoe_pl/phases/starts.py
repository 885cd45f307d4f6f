"""Which phase each phase, or each part of its model, starts from."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.phases.phase import INITIAL, Phase

Start = str | Mapping[str, str]
"""The name of a phase, or ``initial``; or such a name for each part that does not start from the initial model."""


def find_starts(phases: Sequence[Phase]) -> dict[str, Start]:
    """What each phase starts from, by the phase's name.

    Args:
        phases: all phases, whose names differ.

    Raises:
        MisconfigurationException: if ``start`` is not an earlier phase, or one whose result lacks what the algorithm
            needs, if it names phases with different models and the phase has none of its own, or if the algorithm
            needs an earlier phase and none fits.
    """
    starts: dict[str, Start] = {}
    for index, phase in enumerate(phases):
        starts[phase.name] = _find_start(phase, phases[:index], starts)
        if len(owners := _owners(phases, starts, phase.name)) > 1:
            raise MisconfigurationException(
                f"{phase}: start is {phase.start}, phases with different models ({', '.join(owners)}), but must name "
                "phases with the same model, unless the phase has a `model` of its own."
            )
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
    """The phases whose training is in a phase's result, the last one first.

    Args:
        phases: all phases, or those up to this one.
        starts: what each of them starts from, see :func:`find_starts`.
        name: the phase's name, or ``initial``.
        part: part of the model whose origin is followed where a phase has several starts; "" follows all of them.

    Returns:
        The phase itself, those that it starts from, and so on; nothing for ``initial``.
    """
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
    """Refuses a start whose tensors do not fit the phase's model.

    A part, such as ``local_expert``, that is taken from a phase must have the same tensors in both models. With a
    ``model`` of its own, a phase takes the parts that both models have; there must be one besides the gate.

    Args:
        phase: the phase.
        start: what it starts from.
        module: the phase's module.
        module_of: makes the module of an earlier phase, by its name.

    Raises:
        MisconfigurationException: if a part does not exist, is replaced by the algorithm or missing although it builds
            on it, differs between the models, or none is in both.
    """
    shapes = _shapes(module)
    for part in [] if isinstance(start, str) else start:
        if part not in shapes:
            similar = difflib.get_close_matches(part, shapes, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else f": {', '.join(shapes)}."
            raise MisconfigurationException(
                f"{phase}: start is {start}, whose '{part}' must be a part of the {type(module).__name__}{hint}"
            )
        if part in phase.algorithm.copied_parts:
            raise MisconfigurationException(
                f"{phase}: start is {start}, but must leave out '{part}', which {type(phase.algorithm).__name__} "
                "starts as a copy of another part."
            )
    for part in [] if isinstance(start, str) else phase.algorithm.needed_parts:
        if part not in start:
            raise MisconfigurationException(
                f"{phase}: start is {start}, but must also name what '{part}' starts from, on which "
                f"{type(phase.algorithm).__name__} builds."
            )
    if isinstance(start, str) and phase.model is None:
        return  # the same model
    for part, name in sources(start):
        before = _shapes(module_of(name))
        parts = [part] if part else [other for other in shapes if other in before and other != "gate"]
        wrong = [other for other in parts if shapes[other] != before.get(other)]
        if wrong or not parts:
            difference = f"differs from the phase's own in '{wrong[0]}'" if wrong else "has no part of the phase's own"
            raise MisconfigurationException(
                f"{phase}: start is {_shown(start)}, but the model of '{name}' {difference}; it must be '{INITIAL}' or "
                "a phase with the same tensors in each part that both models have."
            )


def warn_of_computed_parts(phase: Phase, start: Start, by_name: Mapping[str, Phase]) -> None:
    """Warns of parts of a start that its clients were evaluated with, but that the phase does not get.

    Args:
        phase: the phase.
        start: what it starts from.
        by_name: all phases, by name.
    """
    for part, name in sources(start):
        algorithm = by_name[name].algorithm
        for computed in algorithm.computed_parts:
            if not part or computed in ("", part):
                rank_zero_warn(
                    f"{phase}: start takes {part or computed or 'the model'} from '{name}' as the server and the "
                    f"clients hold it, and not as it was evaluated: {type(algorithm).__name__} computes that one for "
                    "predictions only."
                )


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
                which = "start is" if isinstance(phase.start, str) else f"start is {phase.start}, which names"
                raise MisconfigurationException(
                    f"{phase}: {which} '{name}', but must be '{INITIAL}' or an earlier "
                    f"phase{': ' + ', '.join(names) if names else ', and there is none'}."
                )
        _check_needed(phase, phase.start, earlier, starts)
        return phase.start
    followed = [other.name for other in earlier if phase.algorithm.follows(other.algorithm)]
    if not followed and phase.algorithm.needed_parts:
        needed = phase.algorithm.missing_start([]) or "one"
        raise MisconfigurationException(
            f"{phase}: {type(phase.algorithm).__name__} starts from an earlier phase, but none of [{', '.join(names)}] "
            f"fits; add {needed} before it or name one with `start`."
        )
    return followed[-1] if followed else INITIAL


def _check_needed(phase: Phase, start: Start, earlier: Sequence[Phase], starts: Mapping[str, Start]) -> None:
    """Refuses a start without the training that the algorithm builds on."""
    algorithm = phase.algorithm
    for part in algorithm.needed_parts:
        name = start if isinstance(start, str) else start.get(part, INITIAL)
        chain = [other.algorithm for other in chain_of_starts(earlier, starts, name, part)]
        if chain and (needed := algorithm.missing_start(chain, "" if isinstance(start, str) else part)):
            which = "start is" if isinstance(start, str) else f"start is {start}, whose '{part}' is from"
            raise MisconfigurationException(
                f"{phase}: {which} '{name}', but must be {needed}, or a phase that goes back to one."
            )


def _shown(start: Start) -> str:
    return f"'{start}'" if isinstance(start, str) else str(start)
