"""What the server of a deployed federation shows, which has no client's data."""

from fedmoe_pl.callbacks import ClusterMonitor, GateMonitor, PartitionMonitor, ResultFiles
from fedmoe_pl.deployment.server import callbacks_of_server


def test_the_server_draws_nothing_that_it_would_compute_from_clients_data():
    """Its stand-in for the data is zeros, with which it would choose a cluster for each client."""
    gates = GateMonitor()
    files, clusters, other = callbacks_of_server([PartitionMonitor(), ResultFiles(), ClusterMonitor(), gates])
    assert (files.partition, files.gate_weights) == (False, True)
    assert isinstance(clusters, ClusterMonitor) and not clusters.by_client
    assert other is gates
