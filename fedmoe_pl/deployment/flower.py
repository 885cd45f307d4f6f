"""Messages between server and clients over Flower's grid.

The modules of this part whose names begin with ``flower`` use what Flower does not document, for two reasons. Flower
would start a new Python for every message, and import PyTorch in it; here, server and clients are one process each. So
no code that a server sends is executed at a client, either.
"""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Flower is not installed where types are checked: it cannot be together with other extras.
import time
from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fedmoe_pl.deployment.clients import Transport
from fedmoe_pl.deployment.messages import FAILED, BadMessageError, Message

TYPE = "train.fedmoe_pl"
"""Flower's name for all messages between server and clients."""
LOOK = 0.1
"""Seconds between two looks for messages."""
_RECORD, _ARRAY, _STYPE = "message", "content", "fedmoe_pl"


def packed(message: Message) -> RecordDict:
    """A message as Flower carries it: one array of bytes, because Flower sends each object by itself."""
    content = message.to_bytes()
    array = Array(dtype="uint8", shape=(len(content),), stype=_STYPE, data=content)
    return RecordDict({_RECORD: ArrayRecord({_ARRAY: array})})


def unpacked(content: RecordDict) -> Message:
    """The message in what Flower carried.

    Raises:
        BadMessageError: if there is none.
    """
    try:
        record = content[_RECORD]
        assert isinstance(record, ArrayRecord)
        return Message.from_bytes(record[_ARRAY].data)
    except (KeyError, AssertionError, TypeError) as error:
        raise BadMessageError("it has no message of fedmoe_pl") from error


class FlowerTransport(Transport):
    """Carries messages over a grid of Flower.

    Which node is which client, a node says itself when it is asked for its description.

    Args:
        grid: the grid of a run.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.nodes: dict[int, int] = {}  # by client
        self._refused: set[int] = set()  # nodes that say they are a client which another node is
        self._owed: dict[int, str] = {}  # the messages that nodes work on although nobody waits for the answer

    def ask(self, messages: Mapping[int, Message], seconds: float | None) -> dict[int, Message]:
        """Sends each client its message; looks for new nodes before."""
        self._find()
        of_nodes = {self.nodes[client]: message for client, message in messages.items() if client in self.nodes}
        answers = self._ask_nodes(of_nodes, seconds)
        return {client: answers[node] for client, node in self.nodes.items() if node in answers}

    def _find(self) -> None:
        """Asks new nodes which clients they are, and forgets those that are gone."""
        online = {*self.grid.get_node_ids()}
        self.nodes = {client: node for client, node in self.nodes.items() if node in online}
        new = online - {*self.nodes.values()} - self._refused
        for node, answer in self._ask_nodes(dict.fromkeys(new, Message("describe")), None).items():
            client = answer.values.get("client")
            if not isinstance(client, int):
                rank_zero_warn(f"node {node} is left out: {answer.values.get('reason', 'it is no client')}")
                self._refused.add(node)
            elif client in self.nodes:
                rank_zero_warn(f"node {node} is left out: it says that it is client {client}, which is connected.")
                self._refused.add(node)
            else:
                self.nodes[client] = node

    def _ask_nodes(self, messages: Mapping[int, Message], seconds: float | None) -> dict[int, Message]:
        """Sends each node its message, and collects the answers that come in time."""
        self._collect_owed()
        free = [node for node in messages if node not in self._owed]
        life = {} if seconds is None else {"ttl": seconds}
        sent = [
            FlowerMessage(packed(messages[node]), dst_node_id=node, message_type=TYPE, group_id="", **life)
            for node in free
        ]
        ids = [*self.grid.push_messages(sent)] if sent else []
        waiting = {id: node for id, node in zip(ids, free, strict=True) if id}
        answers: dict[int, Message] = {}
        end = None if seconds is None else time.monotonic() + seconds
        while waiting and (end is None or time.monotonic() < end):
            for reply in self.grid.pull_messages([*waiting]):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    rank_zero_info(f"node {node}: {reply.error.reason}")
                    continue
                try:
                    answers[node] = unpacked(reply.content)
                except BadMessageError as error:
                    answers[node] = Message(FAILED, {"reason": f"BadMessageError: {error}"})
            time.sleep(LOOK)
        self._owed |= {node: id for id, node in waiting.items()}
        return answers

    def _collect_owed(self) -> None:
        """Drops answers that came too late: a node works on one message at a time."""
        if self._owed:
            for reply in self.grid.pull_messages([*self._owed.values()]):
                id = reply.metadata.reply_to_message_id
                self._owed = {node: owed for node, owed in self._owed.items() if owed != id}
