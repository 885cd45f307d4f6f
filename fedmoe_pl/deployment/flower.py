"""Messages between server and clients in Flower's grid."""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Flower is not installed where types are checked: it cannot be together with other extras.
from collections.abc import Mapping, Sequence

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedmoe_pl.deployment.messages import UNREADABLE, BadMessageError, Message
from fedmoe_pl.deployment.transport import NodesTransport

TYPE = "train.fedmoe_pl"
"""Flower's name for all messages between server and clients."""
_RECORD, _CONTENT, _STYPE = "message", "content", "fedmoe_pl"
_LARGE = 2**20  # bytes


def packed(message: Message) -> RecordDict:
    """A message as Flower carries it: in few objects, each of which it sends by itself, or as an array, in chunks."""
    content = message.to_bytes()
    if len(content) < _LARGE:
        return RecordDict({_RECORD: ConfigRecord({_CONTENT: content})})
    array = Array(dtype="uint8", shape=(len(content),), stype=_STYPE, data=content)
    return RecordDict({_RECORD: ArrayRecord({_CONTENT: array})})


def unpacked(content: RecordDict) -> Message:
    """The message in what Flower carried."""
    try:
        found = content[_RECORD][_CONTENT]
        return Message.from_bytes(found if isinstance(found, bytes) else found.data)
    except (KeyError, AttributeError, TypeError) as error:
        raise BadMessageError("it has no message of fedmoe_pl") from error


class FlowerTransport(NodesTransport):
    """Carries messages over a grid of Flower."""

    def __init__(self, grid: Grid, num_clients: int, owners: Mapping[int, int] | None = None) -> None:
        super().__init__(num_clients, owners)
        self.grid = grid

    def online(self) -> set[int]:
        """Ids of the nodes that are connected."""
        return {*self.grid.get_node_ids()}

    def send(self, messages: Mapping[int, Message], seconds: float | None) -> dict[str, int]:
        """Sends nodes their messages; Flower drops those that are not answered in time."""
        life = {} if seconds is None else {"ttl": seconds}
        sent = [
            FlowerMessage(packed(message), dst_node_id=node, message_type=TYPE, group_id="", **life)
            for node, message in messages.items()
        ]
        ids = [*self.grid.push_messages(sent)] if sent else []
        return {id: node for id, node in zip(ids, messages, strict=True) if id}

    def receive(self, ids: Sequence[str]) -> dict[str, Message | str]:
        """The answers that have come; Flower also tells of nodes that have gone, and of messages that it dropped."""
        replies = {reply.metadata.reply_to_message_id: reply for reply in self.grid.pull_messages(ids)}
        return {id: _answer(replies[id]) for id in ids if id in replies}


def _answer(reply: FlowerMessage) -> Message | str:
    """The answer in a reply; a text if it is an error of Flower."""
    if reply.has_error():
        return str(reply.error.reason)
    try:
        return unpacked(reply.content)
    except BadMessageError as error:
        return Message(UNREADABLE, {"reason": str(error)})
