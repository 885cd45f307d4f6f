"""FedKD against plain PyTorch and numpy."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, mixture, phase, run, tensors
from helpers.architectures import SIZES, pair, train_bare
from torch import nn

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedKD
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.models import GlobalOnly, LocalOnly, PersonalizedMoE, SmallMLP

START, END = 0.6, 0.9


def kl(student, teacher):
    p, q = teacher.detach().softmax(1), student.softmax(1)
    return (p * (p.log() - q.log())).sum(1).mean()


def distillation(hidden_states, student, teacher, x, y):
    """Both models' losses, each with the other's outputs as constants."""
    h_s, h_t = student.extractor(x), teacher.extractor(x)
    s, t = student.classifier(h_s), teacher.classifier(h_t)
    teacher_term, student_term = kl(t, s), kl(s, t)
    if hidden_states:
        teacher_term = teacher_term + F.mse_loss(h_t, h_s.detach())
        student_term = student_term + F.mse_loss(h_s, h_t.detach())
    divisor = (F.cross_entropy(t, y) + F.cross_entropy(s, y)).item()
    return F.cross_entropy(t, y) + teacher_term / divisor + F.cross_entropy(s, y) + student_term / divisor


def sent_by_hand(update, energy):
    """What arrives of an update by numpy, and how many numbers travel."""
    arrived, numbers = {}, 0
    for name, tensor in update.items():
        if tensor.ndim < 2:
            arrived[name], numbers = tensor, numbers + tensor.numel()
            continue
        u, s, v = np.linalg.svd(tensor.numpy(), full_matrices=False)
        rank = next(r for r in range(1, len(s) + 1) if (s[:r] ** 2).sum() >= energy * (s**2).sum())
        (m, n), factors = tensor.shape, rank * (sum(tensor.shape) + 1)
        low_rank = torch.from_numpy(u[:, :rank] @ np.diag(s[:rank]) @ v[:rank])
        arrived[name] = low_rank if factors < m * n else tensor
        numbers += min(factors, m * n)
    return arrived, numbers


@pytest.fixture(scope="module", params=[((6,), True), ((4, 7), False)], ids=["one architecture", "two"])
def by_hand(request):
    """Two rounds in plain PyTorch: what the server holds, clients keep, and numbers are sent up and down."""
    hidden, hidden_states = request.param
    data, start = blobs(SIZES), pair(hidden=hidden).state_dict()
    server, kept = tensors(pair(hidden=hidden), "global_expert."), [start] * 3
    up, down = [], [3 * sum(tensor.numel() for tensor in server.values())]
    for round in range(2):
        energy, updates, count = START + (round + 1) / 2 * (END - START), [], 0
        loss = partial(distillation, hidden_states)
        kept = [
            train_bare(client, round, {**kept[client], **server}, data, loss, epochs=2, hidden=hidden)
            for client in range(3)
        ]
        for one in kept:
            update, numbers = sent_by_hand({name: one[name] - server[name] for name in server}, energy)
            updates, count = [*updates, update], count + numbers
        change, numbers = sent_by_hand({name: sum(one[name] for one in updates) / 3 for name in server}, energy)
        server = {name: server[name] + change[name] for name in server}
        up, down = [*up, count], [*down, 3 * numbers]
    return hidden, hidden_states, server, kept, up, down


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend(), StackedBackend(1)])
def test_two_rounds_are_those_of_plain_pytorch_and_count_the_bytes_of_the_factors(tmp_path, by_hand, backend):
    hidden, hidden_states, server, kept, up, down = by_hand
    algorithm, module = FedKD(START, END, hidden_states), pair(hidden=hidden)
    fed = run([Phase("it", algorithm, rounds=2, gate=LocalOnly())], module, blobs(SIZES), tmp_path, backend=backend)
    state = fed.run.states["it"]
    torch.testing.assert_close(state.server, server, rtol=0, atol=1e-11)
    for client in range(3):
        own = {name: tensor for name, tensor in state.clients[client].items() if "/" not in name}
        local = {name: tensor for name, tensor in kept[client].items() if name not in server}
        torch.testing.assert_close(own, local, rtol=0, atol=1e-11)
    assert [row["bytes_up"] for row in fed.run.rows] == [8 * up[0], 8 * sum(up[:2])]
    assert [row["bytes_down"] for row in fed.run.rows] == [8 * down[0], 8 * sum(down[:2])]
    whole = 3 * sum(tensor.numel() for tensor in server.values())
    assert max(up) < whole and down[1] < whole, "something was compressed"


def test_all_clients_begin_a_round_with_the_same_student_of_which_only_updates_are_sent(tmp_path):
    seen = []

    class Watched(FedKD):
        def client_init(self, client, sent):
            constants = super().client_init(client, sent)
            student = {name: tensor.clone() for name, tensor in tensors(client.module, "global_expert.").items()}
            seen.append((client.round, student, {*sent}))
            return constants

    algorithm = Watched(START, START)
    fed = run([phase("it", algorithm, rounds=2)], pair(hidden=(6,)), blobs(SIZES), tmp_path, backend=TrainerBackend())
    assert not any(name.startswith("update/") for name in fed.run.states["it"].server)
    for round, student, sent in seen:
        assert {name.startswith("update/") for name in sent} == {round > 0}
        assert round == 0 or any(name.endswith("/s") for name in sent)
        first = next(other for number, other, _ in seen if number == round)
        assert_same_bits(student, first)


def test_a_round_before_the_last_one_is_evaluated_with_its_student(tmp_path):
    accuracies = []
    for rounds in (1, 2):
        fedkd = Phase("it", FedKD(START, START), rounds=rounds, gate=GlobalOnly())
        fed = run([fedkd], pair(hidden=(6,)), blobs(SIZES), tmp_path, backend=TrainerBackend())
        accuracies.append([row["global_test_mean"] for row in fed.run.rows])
    data = fed.run.datamodule
    untrained = pair(hidden=(6,)).global_expert(data.x[data.global_test]).argmax(1) == data.y[data.global_test]
    assert accuracies[1][0] == accuracies[0][0] != pytest.approx(untrained.double().mean().item())


def test_predictions_without_an_error_do_not_divide_by_0():
    module = mixture(dtype=torch.float32)
    for part in (module.global_expert, module.local_expert):
        nn.init.zeros_(part.classifier[1].weight)
        part.classifier[1].bias.data = torch.tensor([500.0, 0, 0])
    assert FedKD(hidden_states=False).client_loss(module, (torch.zeros(2, 5), torch.zeros(2).long()), {}) == 0


def test_experts_of_other_widths_and_without_parts_are_trained_without_hidden_states():
    for module in (PersonalizedMoE(nn.Linear(5, 3)), PersonalizedMoE(SmallMLP(), SmallMLP(hidden_features=7))):
        server = FedKD(hidden_states=False).server_init(module)
        assert_same_bits(server, tensors(module, "global_expert."))
