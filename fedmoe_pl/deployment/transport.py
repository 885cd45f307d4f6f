"""How messages reach clients: which node of a network is which client, and which nodes still owe an answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fedmoe_pl.deployment.messages import Message, problem_of_answer

LOOK = 0.1
"""Seconds between two looks for messages."""
_DESCRIBED_WITHIN = 300.0  # with the commands of Flower, each message starts a process that imports PyTorch
_NOTED_WITHIN = 20.0  # seconds that the server waits until a client has shown a note


class Transport(ABC):
    """Carries messages to clients, and their answers back."""

    @abstractmethod
    def ask(self, messages: Mapping[int, Message], seconds: float | None) -> Mapping[int, Message | None]:
        """Sends each client its message, and waits for the answers; without ``seconds``, as long as it is connected.

        The answer is None of a client that did not answer in time; there is none of one to which nothing was sent.
        """

    def why_absent(self, client: int) -> str:
        """Why no message was sent to a client."""
        return "it is not connected"

    def away(self) -> list[int]:
        """The clients that would get no message now."""
        return []

    def tell(self, texts: Mapping[int, str]) -> None:
        """Has clients show a text to whoever runs them; texts by client."""
        self.ask({client: Message("note", {"text": text}) for client, text in texts.items()}, _NOTED_WITHIN)


class NodesTransport(Transport):
    """Carries messages to nodes, each of which is one of the clients.

    A node works on one message at a time. One that has not answered in time owes an answer, and gets no other message
    until that has come, or cannot come any more.
    """

    def __init__(self, num_clients: int, owners: Mapping[int, int] | None = None) -> None:
        self.num_clients = num_clients
        self.owners = owners or {}
        self.nodes: dict[int, int] = {}  # by client
        self._refused: dict[int, int | None] = {}  # the connected client that a node says it is; None if it is none
        self._owed: dict[int, str] = {}  # the messages to which nodes owe an answer

    @abstractmethod
    def online(self) -> set[int]:
        """Ids of the nodes that are connected."""

    @abstractmethod
    def send(self, messages: Mapping[int, Message], seconds: float | None) -> dict[str, int]:
        """Sends nodes their messages; other arguments as in :meth:`ask`."""

    @abstractmethod
    def receive(self, ids: Sequence[str]) -> dict[str, Message | str]:
        """The answers to messages that have come, by id; a text says why none will come."""

    def ask(self, messages: Mapping[int, Message], seconds: float | None) -> dict[int, Message | None]:
        """Sends each client its message; looks for new nodes before."""
        self._find()
        of_nodes = {self.nodes[client]: message for client, message in messages.items() if client in self.nodes}
        answers = self._ask_nodes(of_nodes, seconds)
        return {client: answers[node] for client, node in self.nodes.items() if node in answers}

    def why_absent(self, client: int) -> str:
        """Why no message was sent to a client."""
        if self.owners and client not in self.owners.values():
            return "its key is not among the clients' keys"
        return "it still works on an earlier message" if client in self.nodes else super().why_absent(client)

    def away(self) -> list[int]:
        """The clients that are not connected, and those that still owe an answer; looks for new nodes before."""
        self._find()
        self._collect_owed()
        return [each for each in range(self.num_clients) if self.nodes.get(each) in (None, *self._owed)]

    def _find(self) -> None:
        """Asks new nodes which clients they are, and forgets those that are gone."""
        online = self.online()
        self.nodes = {client: node for client, node in self.nodes.items() if node in online}
        self._owed = {node: id for node, id in self._owed.items() if node in online}
        # one that is another node's client is asked again when that node has gone
        self._refused = {
            node: client
            for node, client in self._refused.items()
            if node in online and (client is None or client in self.nodes)
        }
        new = sorted(online - {*self.nodes.values(), *self._refused})
        if strangers := [node for node in new if self.owners and node not in self.owners]:
            rank_zero_warn("a machine that connected is left out: its key is not among the clients' keys.")
            self._refused |= dict.fromkeys(strangers)
            new = [node for node in new if node in self.owners]
        message, notes = Message("describe", {"num_clients": self.num_clients}), dict[int, Message]()
        for node, answer in self._ask_nodes(dict.fromkeys(new, message), _DESCRIBED_WITHIN).items():
            if answer is None:
                continue
            client = answer.values.get("client", self.num_clients)
            problem = problem_of_answer("describe", answer)
            if problem or client >= self.num_clients:
                problem = problem or f"it says that it is client {client}"
                rank_zero_warn(f"a machine that connected is left out, because it is no client: {problem}.")
                self._refused[node] = None
            elif (owner := self.owners.get(node, client)) != client:
                rank_zero_warn(f"a client is left out: it says that it is client {client}, with client {owner}'s key.")
                self._refused[node] = None
                text = f"this key is client {owner}'s, but --client is {client}; end this command with Ctrl-C"
                notes[node] = Message("note", {"text": text})
            elif client in self.nodes:
                rank_zero_warn(f"a client is left out: it says that it is client {client}, which is connected.")
                self._refused[node] = client
                text = f"another process takes part as client {client}; this one waits until that has ended"
                notes[node] = Message("note", {"text": text})
            else:
                self.nodes[client] = node
        self._ask_nodes(notes, _NOTED_WITHIN)

    def _ask_nodes(self, messages: Mapping[int, Message], seconds: float | None) -> dict[int, Message | None]:
        """Sends each node that owes none its message, and collects the answers; None of those that do not come."""
        self._collect_owed()
        waiting = self.send({node: each for node, each in messages.items() if node not in self._owed}, seconds)
        answers, nodes = dict[int, Message | None](), [*waiting.values()]
        end = None if seconds is None else time.monotonic() + seconds
        while waiting and (end is None or time.monotonic() < end):
            for id, answer in self.receive([*waiting]).items():
                node = waiting.pop(id)
                if isinstance(answer, Message):
                    answers[node] = answer
                elif messages[node].kind != "end":  # after which a node need not answer
                    client = next((client for client, of_client in self.nodes.items() if of_client == node), None)
                    rank_zero_info(f"serve: client {client} does not answer any more ({answer}).")
            if waiting:
                time.sleep(LOOK)
        self._owed |= {node: id for id, node in waiting.items()}
        return answers | {node: None for node in nodes if node not in answers}

    def _collect_owed(self) -> None:
        """Drops answers that have come too late, and forgets those that cannot come any more."""
        if self._owed:
            come = self.receive([*self._owed.values()])
            self._owed = {node: id for node, id in self._owed.items() if id not in come}
