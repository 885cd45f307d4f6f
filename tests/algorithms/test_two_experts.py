"""FML, FedAPEN and FedKD, with a shared and a private model of each client, against plain PyTorch and numpy."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, mixture, phase, run, tensors
from helpers.architectures import SIZES, bare_experts, pair, train_bare
from torch import nn

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FML, FedAPEN, FedAvg, FedKD
from fedmoe_pl.algorithms.fedkd import compressed, expanded
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.models import GlobalOnly, LocalOnly, MixtureWeights, PersonalizedMoE, SmallMLP
from fedmoe_pl.seeds import derive_seed

ALPHA, BETA = 0.3, 0.8
FRACTION, WEIGHT_LR, EPOCHS = 0.4, 0.1, 3
START, END = 0.6, 0.9


def kl(student, teacher):
    """Summed over classes in plain arithmetic, with the teacher as a constant."""
    p, q = teacher.detach().softmax(1), student.softmax(1)
    return (p * (p.log() - q.log())).sum(1).mean()


# FML


def mutual(meme, private, x, y):
    z, m = private(x), meme(x)
    return ALPHA * F.cross_entropy(z, y) + (1 - ALPHA) * kl(z, m) + BETA * F.cross_entropy(m, y) + (1 - BETA) * kl(m, z)


def equal_weights(global_expert, local_expert, x, y):
    return F.cross_entropy((global_expert(x) + local_expert(x)) / 2, y)


AVERAGED = {  # the shared expert is averaged; a client trains and keeps its own one of the architectures
    "FML, two architectures": (FML(ALPHA, BETA), mutual, (4, 7), (1, 1, 1)),
    "FedAvg, two architectures": (FedAvg("global_expert.*"), equal_weights, (4, 7), SIZES),
    "FML by samples": (FML(ALPHA, BETA, weighting="samples"), mutual, (4, 7), SIZES),
    "FML": (FML(ALPHA, BETA), mutual, (6,), (1, 1, 1)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", AVERAGED)
def test_two_rounds_are_those_of_plain_pytorch(name, tmp_path):
    algorithm, loss, hidden, weights = AVERAGED[name]
    data, start = blobs(SIZES), pair(hidden=hidden).state_dict()
    fed = run([phase("it", algorithm, rounds=2)], pair(hidden=hidden), data, tmp_path, backend=TrainerBackend())
    server, kept = tensors(pair(hidden=hidden), "global_expert."), [start] * 3
    for round in range(2):
        received = [{**own, **server} for own in kept]
        kept = [train_bare(client, round, received[client], data, loss, epochs=2, hidden=hidden) for client in range(3)]
        server = {
            each: sum(w * own[each] for w, own in zip(weights, kept, strict=True)) / sum(weights) for each in server
        }
    state = fed.run.states["it"]
    torch.testing.assert_close(state.server, server, rtol=0, atol=1e-12)
    for client in range(3):
        own = {each: tensor for each, tensor in kept[client].items() if each not in server}
        torch.testing.assert_close(dict(state.clients[client]), own, rtol=0, atol=1e-12)
        assert own.keys() == tensors(fed.client_module("it", client), "local_expert.").keys()
        assert not any(torch.equal(own[each], start[each]) for each in own)


# FedAPEN


def ensemble_loss(w, shared, private, x, y):
    """Both models' losses, each with the other's output as a constant."""
    s, p = shared(x), private(x)
    private_loss = F.cross_entropy(p, y) + kl(p, s) + F.cross_entropy(w * p + (1 - w) * s.detach(), y)
    return private_loss + F.cross_entropy(s, y) + kl(s, p) + F.cross_entropy(w * p.detach() + (1 - w) * s, y)


def split_by_hand(data, client):
    """The adaptability set, of which there is at least one sample, and the others."""
    samples = data.train_samples[client]
    generator = torch.Generator().manual_seed(derive_seed(0, 2, client, 8))
    shuffled = samples[torch.randperm(len(samples), generator=generator)]
    size = max(1, int(FRACTION * len(samples)))
    return shuffled[:size], shuffled[size:]


def learned_by_hand(client, tensors, w, samples, data, hidden, loss=F.cross_entropy):
    """The ensemble's weight after SGD of autograd on the adaptability set."""
    shared, private = bare_experts(client, tensors, hidden).values()
    w = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=WEIGHT_LR)
    for _ in range(EPOCHS):
        for batch in samples.split(4):
            optimizer.zero_grad()
            x, y = data.x[batch], data.y[batch]
            loss(w * private(x).detach() + (1 - w) * shared(x).detach(), y).backward()
            optimizer.step()
            w.data.clamp_(0, 1)
    return w.item()


def used_weight(federation, client):
    """The ensemble's weight in the model that a client would use now."""
    return federation.client_module("it", client).gate.weights[1].item()


@pytest.mark.few(1)
@pytest.mark.parametrize("hidden", [(4, 7), (6,)])
def test_two_rounds_of_fedapen_are_those_of_plain_pytorch_and_the_ensembles_are_evaluated(tmp_path, hidden):
    data = blobs(SIZES)
    it = Phase("it", FedAPEN(FRACTION, WEIGHT_LR, EPOCHS), rounds=2, gate=MixtureWeights())
    fed = run([it], pair(hidden=hidden), data, tmp_path)
    start, weights = pair(hidden=hidden).state_dict(), [0.5] * 3
    server, kept = tensors(pair(hidden=hidden), "global_expert."), [start] * 3
    parts = [split_by_hand(data, client) for client in range(3)]
    for round in range(2):
        kept = [
            train_bare(
                *(client, round, {**kept[client], **server}, data, partial(ensemble_loss, weights[client])),
                samples=parts[client][1],
                epochs=2,
                hidden=hidden,
            )
            for client in range(3)
        ]
        server = {name: sum(one[name] for one in kept) / 3 for name in server}
        trained_with = weights
        weights = [
            learned_by_hand(client, {**kept[client], **server}, weights[client], parts[client][0], data, hidden)
            for client in range(3)
        ]
    state, result = fed.run.states["it"], fed.results["it"]
    assert len({0.5, 0.0, 1.0, *weights}) > 4, "several weights inside of the interval"
    assert result.model == "mixture"
    torch.testing.assert_close(state.server, server, rtol=0, atol=1e-11)
    for client in range(3):
        own = {name: tensor for name, tensor in kept[client].items() if name not in server}
        own["gate.weights"] = torch.tensor([1 - trained_with[client], trained_with[client]], dtype=torch.float64)
        torch.testing.assert_close(dict(state.clients[client]), own, rtol=0, atol=1e-11)
        shared, private = bare_experts(client, {**own, **server}, hidden).values()
        logits = weights[client] * private(data.x) + (1 - weights[client]) * shared(data.x)
        torch.testing.assert_close(fed.client_module("it", client)(data.x), logits, rtol=0, atol=1e-10)
        right = (logits.argmax(1) == data.y)[data.global_test].double().mean().item()
        assert result.clients[client].global_test == pytest.approx(right, abs=1e-6)
        assert result.clients[client].mean_gate_weight == pytest.approx(1 - weights[client], abs=1e-6)


def test_the_weight_is_learned_with_the_loss_of_the_model(tmp_path):
    loss, data = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 25.0], dtype=torch.float64)), blobs(SIZES)
    module = pair(gate=MixtureWeights(), loss=loss)
    fed = run([phase("it", FedAPEN(FRACTION, WEIGHT_LR, EPOCHS))], module, data, tmp_path)
    state = fed.run.states["it"]
    for client in range(3):
        tensors, (samples, _) = {**state.clients[client], **state.server}, split_by_hand(data, client)
        w = learned_by_hand(client, tensors, 0.5, samples, data, (4, 7), loss)
        assert used_weight(fed, client) == pytest.approx(w, abs=1e-12)


@pytest.mark.parametrize(("weight_lr", "possible"), [(1e4, {0.0, 1.0}), (0.0, {0.5})])
def test_the_weight_stays_within_0_and_1_and_where_it_is_without_a_learning_rate(weight_lr, possible, tmp_path):
    module = pair(gate=MixtureWeights())
    fed = run([phase("it", FedAPEN(FRACTION, weight_lr, 1), rounds=2)], module, blobs(SIZES), tmp_path)
    assert {used_weight(fed, client) for client in range(3)} <= possible


# FedKD


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
def test_two_rounds_of_fedkd_are_those_of_plain_pytorch_and_count_the_bytes_of_the_factors(tmp_path, by_hand, backend):
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


def matrix(values, m=7, n=5):
    """A matrix with these singular values."""
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    s = torch.tensor(values, dtype=torch.float64)
    return (u[:, : len(s)] * s) @ v[:, : len(s)].T


@pytest.mark.parametrize(("energy", "rank"), [(0.01, 1), (0.63, 1), (0.65, 2), (0.79, 2), (0.81, 3)])
def test_the_smallest_rank_that_reaches_the_energy_is_kept(energy, rank):
    """The squares of 8, 4, 4, 2 are 64, 16, 16, 4: together 100; 3 * (20 + 20 + 1) is less than 400 values."""
    tree = compressed({"w": matrix([8, 4, 4, 2], 20, 20)}, energy)
    assert [tuple(tree[f"w/{factor}"].shape) for factor in "usv"] == [(20, rank), (rank,), (rank, 20)]
    torch.testing.assert_close(tree["w/s"], torch.tensor([8.0, 4, 4][:rank]).double())
    lost = (expanded(tree)["w"] - matrix([8, 4, 4, 2], 20, 20)).square().sum()
    torch.testing.assert_close(lost, torch.tensor([36.0, 20, 4][rank - 1]).double())


def test_kernels_are_matrices_with_a_row_per_output_channel_and_factors_hold_no_more_memory_than_their_values():
    kernels = matrix([3.0], 7, 18).reshape(7, 2, 3, 3)
    tree = compressed({"conv": kernels}, 0.95)
    assert [tuple(tree[f"conv/{factor}"].shape) for factor in "usv"] == [(7, 1), (1,), (1, 18)]
    assert all(factor.untyped_storage().nbytes() == factor.nbytes for factor in tree.values())
    torch.testing.assert_close(expanded(tree)["conv"].reshape(7, 2, 3, 3), kernels)


def test_an_update_of_0_has_rank_1_and_one_that_is_not_finite_stays_whole():
    zeros = compressed({"w": torch.zeros(7, 5)}, 0.95)
    assert zeros["w/s"].tolist() == [0] and not expanded(zeros)["w"].any()
    assert compressed({"w": torch.full((7, 5), torch.nan)}, 0.95).keys() == {"w"}
