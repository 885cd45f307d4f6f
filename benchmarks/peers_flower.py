"""Flower's simulation (FedAvg, Ray) as a harness of ``peers.py``: one simulation of all rounds, held up between them.

A client's training is that of the bare loop, so what comes on top is Flower's own. Ray gets as many CPUs as there are
workers and a client takes one, so that it runs as many actors. A client evaluates the model that it has trained in the
same call, as its own model does not outlive it.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peers_harness import Turns, load_task
from plain import accuracy, train_client

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train a client in an actor."""
    config = message.content["config"]
    client = int(context.node_config["partition-id"])
    task = load_task(config["task"])
    model = copy.deepcopy(task.model)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train_client(model, task.work, client, task.seeds[config["server-round"] - 1][client])
    metrics = MetricRecord({"num-examples": len(task.work.samples[client]), "client": client})
    if task.test:
        metrics["accuracy"] = accuracy(model, *task.test)
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class Held(FedAvg):
    """Starts a round when the driver asks for it."""

    def __init__(self, turns: Turns, clients: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_available_nodes=clients)
        self.turns = turns

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Wait for the driver."""
        self.turns.wait()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Tell the driver."""
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        found = [reply.content["metrics"] for reply in replies]
        found.sort(key=lambda record: record["client"])
        accuracies = [record["accuracy"] for record in found if "accuracy" in record]
        self.turns.answer(arrays.to_torch_state_dict(), accuracies)
        return arrays, metrics


def main(path: str) -> None:
    """Run the simulation."""
    turns = Turns(path, "flwr", "ray")
    task = load_task(path)
    clients = len(task.work.samples)
    server_app = ServerApp()

    @server_app.main()
    def run(grid: Grid, context: Context) -> None:
        Held(turns, clients).start(
            grid=grid,
            initial_arrays=ArrayRecord(task.model.state_dict()),
            num_rounds=len(task.seeds),
            train_config=ConfigRecord({"task": path}),
        )

    resources = {"init_args": {"num_cpus": task.workers}, "client_resources": {"num_cpus": 1}}
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=resources)


if __name__ == "__main__":
    main(sys.argv[1])
