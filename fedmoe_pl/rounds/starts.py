"""Which phase each phase starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.rounds.phase import INITIAL, Phase


def find_starts(phases: Sequence[Phase]) -> dict[str, str]:
    """The name of the phase that each phase starts from, or ``initial``, by the phase's name.

    Args:
        phases: all phases, whose names differ.

    Raises:
        MisconfigurationException: if ``start`` is not an earlier phase, or one whose result lacks what the algorithm
            needs, or if the algorithm needs an earlier phase and none fits.
    """
    starts: dict[str, str] = {}
    for index, phase in enumerate(phases):
        starts[phase.name] = _find_start(phase, phases[:index], starts)
    return starts


def chain_of_starts(phases: Sequence[Phase], starts: Mapping[str, str], name: str) -> list[Phase]:
    """The phases whose training is in a phase's result, the last one first.

    Args:
        phases: all phases, or those up to this one.
        starts: what each of them starts from, see :func:`find_starts`.
        name: the phase's name, or ``initial``.

    Returns:
        The phase itself, the one that it starts from, and so on; nothing for ``initial``.
    """
    by_name = {phase.name: phase for phase in phases}
    chain = []
    while name != INITIAL:
        chain.append(by_name[name])
        name = starts[name]
    return chain


def _find_start(phase: Phase, earlier: Sequence[Phase], starts: Mapping[str, str]) -> str:
    names = [other.name for other in earlier]
    if phase.start is not None:
        if phase.start not in (INITIAL, *names):
            raise MisconfigurationException(
                f"{phase}: start is '{phase.start}', but must be '{INITIAL}' or an earlier "
                f"phase{': ' + ', '.join(names) if names else ', and there is none'}."
            )
        chain = [other.algorithm for other in chain_of_starts(earlier, starts, phase.start)]
        if chain and (needed := phase.algorithm.missing_start(chain)):
            raise MisconfigurationException(
                f"{phase}: start is '{phase.start}', but must be {needed}, or a phase that goes back to one."
            )
        return phase.start
    followed = [other.name for other in earlier if phase.algorithm.follows(other.algorithm)]
    if not followed and type(phase.algorithm).follows is not Algorithm.follows:
        raise MisconfigurationException(
            f"{phase}: {type(phase.algorithm).__name__} starts from an earlier phase, but "
            f"none of [{', '.join(names)}] fits; add one before it or name one with `start`."
        )
    return followed[-1] if followed else INITIAL
