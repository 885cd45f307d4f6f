"""Callbacks of a federation, called between the rounds, and of a client's training."""

from fedmoe_pl.backends.best_epoch import BestEpoch
from fedmoe_pl.callbacks.accuracy_monitor import AccuracyMonitor
from fedmoe_pl.callbacks.client_checkpoint import ClientCheckpoint
from fedmoe_pl.callbacks.cluster_monitor import ClusterMonitor
from fedmoe_pl.callbacks.cost_to_target import CostToTarget
from fedmoe_pl.callbacks.expert_monitor import ExpertMonitor
from fedmoe_pl.callbacks.gate_monitor import GateMonitor, TokenGateMonitor
from fedmoe_pl.callbacks.progress_bar import ProgressBar
from fedmoe_pl.callbacks.representation_monitor import RepresentationMonitor
from fedmoe_pl.callbacks.result_files import PartitionMonitor, ResultFiles
from fedmoe_pl.callbacks.sample_monitor import SampleMonitor
from fedmoe_pl.callbacks.traffic_ledger import TrafficLedger
from fedmoe_pl.rounds.run import FederationCallback

__all__ = [
    "AccuracyMonitor",
    "BestEpoch",
    "ClientCheckpoint",
    "ClusterMonitor",
    "CostToTarget",
    "ExpertMonitor",
    "FederationCallback",
    "GateMonitor",
    "PartitionMonitor",
    "ProgressBar",
    "RepresentationMonitor",
    "ResultFiles",
    "SampleMonitor",
    "TokenGateMonitor",
    "TrafficLedger",
]


def with_defaults(callbacks: list[FederationCallback], enable_progress_bar: bool) -> list[FederationCallback]:
    """The default callbacks, then the user's, each of which replaces a default of the same class."""
    monitors = PartitionMonitor, AccuracyMonitor, GateMonitor, TokenGateMonitor, ExpertMonitor, ClusterMonitor
    kinds = [*([ProgressBar] if enable_progress_bar else []), *monitors, ResultFiles]
    replaced = {type(callback) for callback in callbacks}
    return [*(kind() for kind in kinds if kind not in replaced), *callbacks]
