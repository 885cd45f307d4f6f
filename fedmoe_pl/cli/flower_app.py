"""The app for Flower's own commands, ``flwr run`` and ``flower-supernode``, which start it for every message."""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Flower is not installed where types are checked: it cannot be together with other extras.
import functools
import shlex
import traceback
from collections.abc import Sequence

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.cli.command_line import objects_of
from fedmoe_pl.deployment.flower import TYPE, FlowerTransport, packed, unpacked
from fedmoe_pl.deployment.messages import FAILED, Message
from fedmoe_pl.deployment.participant import Participant
from fedmoe_pl.deployment.serve_and_join import own_folder, private
from fedmoe_pl.deployment.server import serve
from fedmoe_pl.phases.phase import Phase

server = ServerApp()
client = ClientApp()


@server.main()
def run_server(grid: Grid, context: Context) -> None:
    """Runs the server.

    Its configuration has ``arguments``, those of ``fedmoe fit`` such as ``--config run.yaml``; ``num-clients``; and
    perhaps ``ckpt-path``, the checkpoint of a run to continue.
    """
    values = context.run_config
    federation, model, datamodule = objects_of(shlex.split(str(values["arguments"])))
    _check_phases(federation.phases)
    ckpt_path = str(values.get("ckpt-path", "")) or None
    num_clients = int(values["num-clients"])
    serve(federation, model, datamodule, FlowerTransport(grid, num_clients), num_clients, ckpt_path)


@client.train(TYPE.removeprefix("train."))
def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
    """Answers a message; the node's configuration has ``arguments``, as above, and ``client``, the client's id."""
    values = context.node_config
    try:
        participant = _participant(str(values["arguments"]), int(values["client"]))
        with private(participant.folder), own_folder(participant.folder / "flower"):
            answer = participant.answer(unpacked(message.content))
    except (Exception, SystemExit):  # Flower would send its text to the server
        traceback.print_exc()
        answer = Message(FAILED, {"failure": "configuration"})
    return FlowerMessage(packed(answer), reply_to=message)


@functools.cache
def _participant(arguments: str, client: int) -> Participant:
    federation, model, datamodule = objects_of(shlex.split(arguments))
    _check_phases(federation.phases)
    return Participant(federation, model, datamodule, client, federation.runs / f"client_{client}")


def _check_phases(phases: Sequence[Phase]) -> None:
    """Refuses phases whose clients must be one process for a whole round."""
    for phase in phases:
        if phase.secure is not None:
            because = (
                "Flower's own commands start a client anew for every message, and what it masks is in its memory only; "
                "use 'fedmoe serve' and 'fedmoe join'"
            )
            raise InvalidArgumentError(str(phase), "secure_aggregation", phase.secure_aggregation, "left out", because)
