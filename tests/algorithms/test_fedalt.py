"""FedALT against closed forms, a bare rewrite and local training."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import blobs, mixture, phase, run
from helpers.adapters import adapters, logits, own_of, routed, stepped
from helpers.bare import round_batches
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms import FedALT
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.shared import uploads
from fedmoe_pl.backends.backend import fold
from fedmoe_pl.models import TokenGate

pytest.importorskip("peft")
OWN = ("local_expert.", "gate.")


def upload(client, a, b):
    """What a client sends of an expert of two numbers."""
    tensors = {"uploads/tensors/A": torch.tensor([[a]]), "uploads/tensors/B": torch.tensor([[b]])}
    return Update({**tensors, "uploads/ids": torch.tensor([client])}, 1)


def server_of(*updates, server=None):
    algorithm = FedALT()
    return algorithm.server_update(server or {}, fold(algorithm, [*updates]))


def received(server, client):
    sent = FedALT().server_send(server, client, {})
    return {name.removeprefix("global_expert."): tensor.item() for name, tensor in sent.items()}


def test_the_rest_of_the_world_is_the_mean_of_the_others_factors_apart():
    server = server_of(upload(0, 1.0, 1.0), upload(2, 4.0, 3.0), upload(1, 2.0, 0.0))
    assert received(server, 0) == {"A": 3.0, "B": 1.5}
    assert received(server, 1) == {"A": 2.5, "B": 2.0}


def test_the_last_upload_of_a_client_that_does_not_train_counts():
    server = server_of(upload(0, 1.0, 1.0), upload(1, 2.0, 0.0), upload(2, 4.0, 3.0))
    server = server_of(upload(1, 6.0, 5.0), server=server)
    assert received(server, 0) == {"A": 5.0, "B": 4.0}
    assert received(server, 1) == {"A": 2.5, "B": 2.0}


def test_a_newcomer_gets_the_mean_of_all_and_a_single_client_nothing():
    server = server_of(upload(0, 1.0, 1.0), upload(1, 3.0, 0.0))
    of_all = {name: tensor for name, tensor in server.items() if not name.startswith(FedALT.messages.per_client)}
    assert received(of_all, 7) == received(server, 7) == {"A": 2.0, "B": 0.5}
    assert received(server_of(upload(0, 1.0, 1.0)), 0) == {}


def test_an_upload_does_not_change_with_the_module_that_trains_the_next_client():
    weight = torch.ones(2, requires_grad=True)
    sent = uploads.upload(3, {"A": weight})
    weight.data.fill_(2.0)
    assert sent["uploads/tensors/A"].tolist() == [[1, 1]] and sent["uploads/ids"].tolist() == [3]


def test_it_takes_the_steps_of_a_bare_rewrite(tmp_path):
    data, module = blobs(), adapters(TokenGate())
    state = run([phase("FedALT", FedALT(), rounds=3)], module, data, tmp_path, 1, seed=3).run.states["FedALT"]
    start = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    own = [start] * 3
    for round in range(3):
        for client in range(3):
            for x, y in round_batches(data, client, round, 1):
                own[client] = stepped(own[client], OWN, lambda s, x=x, y=y: F.cross_entropy(logits(s, x, routed(s)), y))
        experts = [own_of(each, "local_expert.") for each in own]
        for client in range(3):
            others = [experts[other] for other in range(3) if other != client]
            rest = {f"global_expert.{name}": (others[0][name] + others[1][name]) / 2 for name in others[0]}
            own[client] = {**own[client], **rest}
    for client in range(3):
        actual = {**start, **state.clients[client], **FedALT().server_send(state.server, client, {})}
        for name, tensor in own[client].items():
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-10)


def test_what_a_client_cannot_have_made_is_named():
    algorithm, initial = FedALT(), {"local_expert.A": torch.zeros(1), "global_expert.A": torch.zeros(1)}
    sent = {"uploads/tensors/A": torch.zeros(1, 1), "uploads/ids": torch.tensor([2])}
    assert algorithm.problem_of_update(2, Update(sent, 1), initial, SimpleNamespace()) == ""
    assert "another client" in algorithm.problem_of_update(1, Update(sent, 1), initial, SimpleNamespace())
    wrong = {**sent, "uploads/tensors/A": torch.zeros(2, 1)}
    assert "shape (2, 1)" in algorithm.problem_of_update(2, Update(wrong, 1), initial, SimpleNamespace())


def test_experts_of_different_shapes_are_refused():
    module = mixture()
    module.local_expert.classifier = torch.nn.Linear(6, 4)
    with pytest.raises(MisconfigurationException, match="global_expert"):
        FedALT().server_init(module)
