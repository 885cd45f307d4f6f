"""A federation over a network: a server, and clients whose data stay on their own machines."""

from fedmoe_pl.deployment.messages import BadMessageError, Message
from fedmoe_pl.deployment.participant import Participant
from fedmoe_pl.deployment.remote_clients import Clients
from fedmoe_pl.deployment.server import serve
from fedmoe_pl.deployment.transport import Transport

__all__ = ["BadMessageError", "Clients", "Message", "Participant", "Transport", "serve"]
