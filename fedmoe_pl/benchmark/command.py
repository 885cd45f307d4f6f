"""The command ``fedmoe benchmark``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedmoe_pl.federation import Federation


def benchmark(arguments: Sequence[str], configured: Callable[[Sequence[str], bool], Federation]) -> int:
    """Runs a grid.

    Args:
        arguments: the arguments of the command.
        configured: makes the federation of the arguments of ``fedmoe fit``; see ``fedmoe_pl.cli.cli.configured``.

    Returns:
        The exit code.
    """
    return 0
