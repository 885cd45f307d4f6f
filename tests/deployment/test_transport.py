"""Nodes of a network that come, go, come again as others, answer late or not at all."""

import pytest

from fedmoe_pl.deployment import Message, transport
from fedmoe_pl.deployment.transport import NodesTransport


class Network(NodesTransport):
    """Nodes that answer at once with the client that they are.

    Attributes:
        clients: the client that each connected node says it is.
        silent: nodes that do not answer.
        sent: node and kind of each message, in order.
        late: what has come, by id.
    """

    def __init__(self, clients, owners=None):
        super().__init__(2, owners)
        self.clients = clients
        self.silent = set()
        self.sent = []
        self.late = {}

    def online(self):
        return {*self.clients}

    def send(self, messages, seconds):
        ids = {}
        for node, message in messages.items():
            id = f"{len(self.sent)}"
            self.sent.append((node, message.kind))
            ids[id] = node
            if node not in self.silent:
                self.late[id] = Message("description", {"client": self.clients[node]})
        return ids

    def receive(self, ids):
        return {id: self.late.pop(id) for id in ids if id in self.late}


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(transport, "LOOK", 0)
    monkeypatch.setattr(transport, "_DESCRIBED_WITHIN", 0.05)


def ask(network, client=0):
    return network.ask({client: Message("train")}, 0.05).get(client)


def test_a_second_node_of_a_client_takes_its_place_when_the_first_goes():
    network = Network({10: 0})
    assert ask(network)
    network.clients[20] = 0
    with pytest.warns(UserWarning, match="a client is left out: it says that it is client 0, which is connected"):
        assert ask(network)
    assert network.sent.count((20, "note")) == 1
    assert ask(network) and network.sent[-1] == (10, "train")
    del network.clients[10]
    assert ask(network) and network.sent[-1] == (20, "train")


def test_a_node_that_is_no_client_is_asked_again_when_it_comes_again():
    network = Network({10: 2})
    with pytest.warns(UserWarning, match="a machine that connected is left out, because it is no client"):
        assert ask(network) is None
    assert ask(network) is None and len(network.sent) == 1
    network.clients = {}
    ask(network)
    network.clients = {10: 0}
    assert ask(network)


def test_a_node_that_owes_an_answer_gets_no_other_message_until_it_has_come():
    network = Network({10: 0})
    assert ask(network)
    network.silent = {10}
    assert ask(network) is None
    before = len(network.sent)
    assert ask(network) is None and len(network.sent) == before
    network.silent = set()
    network.late[f"{before - 1}"] = Message("late")
    assert ask(network).kind == "description"  # not the late one


@pytest.mark.parametrize("reason", ["Message expired", "Node unavailable", "it went and came again"])
def test_a_node_whose_answer_cannot_come_any_more_gets_messages_again(reason):
    network = Network({10: 0})
    network.ask({}, None)
    network.silent = {10}
    ask(network)
    network.silent = set()
    if "came again" in reason:
        network.clients = {}
        assert ask(network) is None
        network.clients = {10: 0}
    else:
        network.late[f"{len(network.sent) - 1}"] = reason
    assert ask(network)


def test_a_client_that_got_a_message_has_an_entry_whether_it_answers_or_not():
    network = Network({10: 0, 20: 1})
    network.ask({}, None)
    network.silent = {10}
    network.late[f"{len(network.sent)}"] = "Node unavailable"  # which ends the wait
    answers = network.ask({0: Message("train"), 1: Message("train")}, None)
    assert answers[0] is None and answers[1].kind == "description"
    assert network.ask({0: Message("train")}, 0) == {0: None}
    assert network.ask({0: Message("train")}, 0) == {}  # it still owes an answer, so that it gets no message


def test_a_client_without_a_key_is_away_for_that_reason():
    network = Network({10: 0}, owners={10: 0})
    assert network.why_absent(0) == "it is not connected"
    assert network.why_absent(1) == "its key is not among the clients' keys"


def test_a_silent_stranger_does_not_stop_the_others():
    network = Network({10: 0, 20: 1})
    network.silent = {20}
    assert ask(network)
    assert ask(network) and network.sent.count((20, "describe")) == 1


def test_a_client_with_another_ones_key_is_told_so_and_does_not_take_its_place():
    network = Network({10: 0}, owners={10: 1, 20: 0})
    with pytest.warns(UserWarning, match="a client is left out: it says that it is client 0, with client 1's key"):
        assert ask(network) is None
    assert network.sent == [(10, "describe"), (10, "note")]
    network.clients[20] = 0
    assert ask(network) and network.sent[-1] == (20, "train")


def test_a_node_whose_key_is_none_of_the_clients_is_asked_nothing():
    network = Network({10: 0}, owners={20: 0})
    with pytest.warns(UserWarning, match="a machine that connected is left out: its key is not among the clients'"):
        assert ask(network) is None
    assert ask(network) is None and network.sent == []
    network.clients[20] = 0
    assert ask(network) and network.sent == [(20, "describe"), (20, "train")]


def test_clients_that_would_get_no_message_are_away():
    network = Network({10: 0})
    assert network.away() == [1]
    network.clients[20] = 1
    assert network.away() == []
    network.silent = {20}
    ask(network, 1)
    assert network.away() == [1], "it owes an answer"
    network.silent = set()
    network.late["2"] = "Message expired"
    assert network.away() == []
    del network.clients[10]
    assert network.away() == [0]
