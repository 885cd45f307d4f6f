"""The default callbacks of a federation."""

from __future__ import annotations

from fedmoe_pl.callbacks.accuracies import AccuracyMonitor
from fedmoe_pl.callbacks.clusters import ClusterMonitor
from fedmoe_pl.callbacks.experts import ExpertMonitor
from fedmoe_pl.callbacks.files import ClientCheckpoint, ResultFiles
from fedmoe_pl.callbacks.gates import GateMonitor
from fedmoe_pl.callbacks.partition import PartitionMonitor
from fedmoe_pl.callbacks.progress_bar import ProgressBar
from fedmoe_pl.checks import check_kind
from fedmoe_pl.rounds.run import FederationCallback


def with_defaults(
    callbacks: list[FederationCallback], enable_progress_bar: bool, enable_checkpointing: bool
) -> list[FederationCallback]:
    """The default callbacks, then the user's, each of which replaces a default of the same class."""
    for callback in callbacks:
        hint = "; a Callback of Lightning belongs in trainer or in the callbacks of a phase"
        check_kind("Federation", "each of callbacks", callback, FederationCallback, hint)
    defaults = [
        *([ProgressBar()] if enable_progress_bar else []),
        *(PartitionMonitor(), AccuracyMonitor(), GateMonitor(), ExpertMonitor(), ClusterMonitor(), ResultFiles()),
        *([ClientCheckpoint()] if enable_checkpointing else []),
    ]
    replaced = {type(callback) for callback in callbacks}
    return [*(callback for callback in defaults if type(callback) not in replaced), *callbacks]
