"""What a client's failure means to algorithms that need all clients, and to others with a state of each client."""

from functools import partial

import pytest
import torch
from helpers import assert_same_bits, blobs, sparse_mixture
from helpers.architectures import pair
from helpers.backends import exchanged
from helpers.runs import federation

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedKD, FedMoEDA, Scaffold
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.models import LocalOnly, PersonalizedMoE, SmallMLP
from fedmoe_pl.trees import subtree


def failing(algorithm, rounds):
    """The algorithm, whose clients fail at the end of their training in some rounds."""

    class Failing(type(algorithm)):
        def client_final(self, client, constants):
            if client.id in rounds.get(client.round, ()):
                raise ValueError("no answer")
            return super().client_final(client, constants)

    algorithm.__class__ = Failing
    return algorithm


def fitted(path, algorithm, rounds, module, number=4, **kwargs):
    fed = federation(path, [Phase("it", failing(algorithm, rounds), number, **kwargs)], backend=TrainerBackend())
    with pytest.warns(UserWarning, match="left out: ValueError: no answer"):
        fed.fit(module, blobs(dtype=torch.float32))
    return fed.run.states["it"]


def test_fedkd_sends_the_student_to_a_client_that_has_missed_an_update(tmp_path):
    module = pair(torch.float32, (6,))
    state = fitted(tmp_path, FedKD(1, 1), {0: [2], 1: [1], 2: [1]}, module, gate=LocalOnly())
    assert state.failed == 3
    for client in (1, 2):  # the student before the last round's training
        assert_same_bits(subtree(state.clients[client], "student/"), subtree(state.clients[0], "student/"))
    assert not any(name == "senders/1" for name in state.server)


def test_fedmoe_da_averages_the_experts_of_the_clients_that_are_left(tmp_path):
    algorithm = FedMoEDA("all", interval=1)
    rows = torch.arange(3)
    matrix = {
        "neighbours": torch.stack([rows.roll(-shift) for shift in range(3)]),
        "weights": torch.tensor([[0.5, 0.25, 0.25]] * 3),
        "owners": torch.stack([rows, torch.zeros_like(rows)], dim=1),
    }
    server = {f"aggregation/{name}": tensor for name, tensor in matrix.items()}
    kept = {client: {"experts.0.w": torch.tensor([float(client)])} for client in (0, 2)}
    after = exchanged(algorithm, server, kept, 1)
    means = {client: own["experts.0.w"].item() for client, (own, _) in after.items()}
    assert means == {0: pytest.approx(2 / 3), 2: pytest.approx(4 / 3)} and len(after[0][1]) == 1
    state = fitted(
        tmp_path, FedMoEDA(2, interval=2), {0: [0], 1: [1], 2: [1]}, sparse_mixture([3, 2], dtype=torch.float32)
    )
    assert state.failed == 3 and state.clients.keys() == {0, 1, 2}
    assert all(tensor.isfinite().all() for tree in (state.server, *state.clients.values()) for tensor in tree.values())


def test_scaffold_keeps_the_mean_of_the_control_variates(tmp_path):
    expert = SmallMLP(in_features=5, num_classes=3)
    module = PersonalizedMoE(expert, optimizer=partial(torch.optim.SGD, lr=0.1))
    state = fitted(tmp_path, Scaffold("global_expert.*"), {0: [2], 1: [1], 2: [0, 1]}, module)
    for name, control in subtree(state.server, "control/").items():
        own = [state.clients[client].get(f"control/{name}", torch.zeros_like(control)) for client in range(3)]
        torch.testing.assert_close(control, sum(own) / 3)
