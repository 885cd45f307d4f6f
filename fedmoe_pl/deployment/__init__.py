"""A federation over a network: a server, and clients whose data stay on their own machines."""

from fedmoe_pl.deployment.clients import Clients, Transport
from fedmoe_pl.deployment.messages import BadMessageError, Message
from fedmoe_pl.deployment.participant import Participant
from fedmoe_pl.deployment.server import serve

__all__ = ["BadMessageError", "Clients", "Message", "Participant", "Transport", "serve"]
