"""HetLoRA and FlexLoRA against closed forms, plain tensors, and adapters of one rank."""

from functools import partial

import pytest
import torch
from helpers import assert_same_bits, blobs, phase, run
from helpers.adapted import A, B, adapted, factors, of_client, products, trained, weights_of
from helpers.backends import begin, local_training
from helpers.bare import COHORTS, SEED
from helpers.methods import ledger
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, FedExLoRA, FlexLoRA, HetLoRA
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.shared.low_rank import mean_of_products
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.callbacks import TrafficLedger
from fedmoe_pl.federation import Federation
from fedmoe_pl.trees import of_module

SIZES, RANKS = [13, 8, 11], [3, 1, 2]
adamw = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def of_rank(rank):
    """The server's state of one layer of two inputs and outputs."""
    return {A("first"): torch.zeros(rank, 2).double(), B("first"): torch.zeros(2, rank).double()}


def cut(a, b, weight=1.0):
    return of_client(a, b, weight, prefix="cut/")


def combined(algorithm, server, *updates):
    folded = updates[0]
    for update in updates[1:]:
        folded = algorithm.combine(folded, update)
    return algorithm.server_update(server, folded)


def product(tree):
    return tree[B("first")] @ tree[A("first")]


def near(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, torch.as_tensor(expected).to(actual), rtol=0, atol=tolerance)


def test_hetlora_weighs_by_the_norm_of_the_product():
    """The norms of B A are 1 and sqrt(11), so that the weights are 1 and sqrt(11) over their sum."""
    one, other = cut([[1, 0]], [[1], [0]]), cut([[0, 1], [1, 1]], [[1, 0], [2, 1]])
    for updates in ((one, other), (other, one)):
        new = combined(HetLoRA([1, 2]), of_rank(2), *updates)
        near(new[A("first")], [[0.231662, 0.768338], [0.768338, 0.768338]])
        near(new[B("first")], [[1, 0], [1.536675, 0.768338]])


def test_hetlora_gives_clients_without_a_product_no_weight_and_without_any_product_equal_weights():
    zero, other = cut([[4, 4]], [[0], [0]], 1), cut([[0, 2]], [[1], [2]], 1)
    new = combined(HetLoRA([1]), of_rank(1), zero, other)
    assert new[A("first")].tolist() == [[0, 2]] and new[B("first")].tolist() == [[1], [2]]
    new = combined(HetLoRA([1]), of_rank(1), zero, zero, cut([[1, -2]], [[0], [0]]))
    near(new[A("first")], [[3, 2]], 1e-12)


def test_hetlora_keeps_the_rows_that_no_client_of_a_round_has():
    server = {A("first"): torch.tensor([[1.0, 2], [3, 4], [5, 6]]).double(), B("first"): torch.ones(2, 3).double()}
    new = combined(HetLoRA([1, 2, 3]), server, cut([[1, 0]], [[1], [0]]), cut([[0, 1], [1, 1]], [[1, 0], [2, 1]]))
    assert new[A("first")][2].tolist() == [5, 6] and new[B("first")][:, 2].tolist() == [1, 1]
    assert server[A("first")][0].tolist() == [1, 2], "the state before the round is as it was"
    near(new[A("first")][:2], [[0.231662, 0.768338], [0.768338, 0.768338]])


@pytest.mark.parametrize(
    ("rank", "expected", "error"),
    [(1, [[0.276393, 1.170820], [0.447214, 1.894427]], 0.874032), (2, [[1, 1], [0, 2]], 0)],
)
def test_flexlora_approximates_the_mean_of_products(rank, expected, error):
    """2 B A with A1 = (1, 0), B1 = (1, 0)', A2 = (0, 1), B2 = (1, 2)'; the exact mean is [[1, 1], [0, 2]]."""
    new = combined(FlexLoRA([1]), of_rank(rank), cut([[1, 0]], [[1], [0]]), cut([[0, 1]], [[1], [2]]))
    near(2 * product(new), expected)
    assert (2 * product(new) - torch.tensor([[1, 1], [0, 2]])).norm().item() == pytest.approx(error, abs=1e-6)


def test_flexlora_sends_a_client_of_lower_rank_the_best_approximation_of_that_rank():
    server = combined(FlexLoRA([2, 1]), of_rank(2), cut([[1, 0]], [[1], [0]]), cut([[0, 1]], [[1], [2]]))
    sent = FlexLoRA([2, 1]).server_send(server, 1, {})
    assert [*map(tuple, (sent[f"cut/{A('first')}"].shape, sent[f"cut/{B('first')}"].shape))] == [(1, 2), (2, 1)]
    near(2 * product({name.removeprefix("cut/"): tensor for name, tensor in sent.items()})[0], [0.276393, 1.170820])


def test_flexlora_averages_other_tensors_with_the_weights_of_products():
    updates = [cut([[1, 0]], [[1], [0]], 3), cut([[0, 1]], [[1], [2]], 1)]
    for update, value in zip(updates, (0.0, 4.0), strict=True):
        update.sent["global_expert.bias"] = torch.tensor(value)
    assert combined(FlexLoRA([1]), of_rank(1), *updates)["global_expert.bias"].item() == 1


def test_flexlora_leaves_rows_as_they_are_for_which_there_is_no_singular_value():
    old = {A("first"): torch.tensor([[1.0, 2], [3, 4], [5, 6]]).double(), B("first"): torch.ones(2, 3).double()}
    new = combined(FlexLoRA([1]), old, cut([[0, 2]], [[1], [2]], 3), cut([[0, 1]], [[1], [2]], 1))
    near(product(new), [[0, 1.75], [0, 3.5]], 1e-12)
    near(new[A("first")], [[0, 1], [3, 4], [5, 6]], 1e-12)
    unchanged = combined(FlexLoRA([1]), old, cut([[0, 2]], [[0], [0]]), cut([[3, 1]], [[0], [0]]))
    assert_same_bits(unchanged, old | {B("first"): torch.zeros(2, 3).double()})


def mean_of_round(algorithm, sent, sizes):
    """The factors of a layer that follow from those of the round's clients, at the rank that these determine."""
    if algorithm is FlexLoRA:
        mean = sum(n * b @ a for n, (a, b) in zip(sizes, sent, strict=True)) / sum(sizes)
        rank = min(3, int(torch.linalg.matrix_rank(mean)))
        u, s, v = torch.linalg.svd(mean)
        return v[:rank], u[:, :rank] * s[:rank]
    rank = max(len(a) for a, _ in sent)
    norms = [(b @ a).square().sum().sqrt() for a, b in sent]
    mean_a, mean_b = torch.zeros(rank, sent[0][0].shape[1]).double(), torch.zeros(len(sent[0][1]), rank).double()
    for norm, (a, b) in zip(norms, sent, strict=True):
        mean_a[: len(a)] += norm / sum(norms) * a
        mean_b[:, : len(a)] += norm / sum(norms) * b
    return mean_a, mean_b


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend()])
@pytest.mark.parametrize("algorithm", [HetLoRA, FlexLoRA])
@pytest.mark.few(1)
def test_three_rounds_are_those_of_plain_tensors_with_adapters_of_the_clients_ranks(algorithm, backend, tmp_path):
    """Clients 1 and 2, whose ranks are 1 and 2, do two rounds; then client 0 with the highest rank begins."""
    data, module = blobs(SIZES), adapted(3)
    means = factors(module.state_dict())
    for round, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            start = [(a[: RANKS[client]], b[:, : RANKS[client]]) for a, b in means]
            sent.append(trained(weights_of(module), start, data, client, round))
        new = [mean_of_round(algorithm, [own[i] for own in sent], [SIZES[c] for c in cohort]) for i in range(2)]
        means = [
            (torch.cat([a, old_a[len(a) :]]), torch.cat([b, torch.zeros_like(old_b[:, len(a) :])], 1))
            for (a, b), (old_a, old_b) in zip(new, means, strict=True)
        ]
    it = phase("it", algorithm(RANKS), rounds=3, clients_per_round=2)
    server = run([it], adapted(3), data, tmp_path, seed=SEED, backend=backend).run.states["it"].server
    for actual, (a, b) in zip(products(server), means, strict=True):
        near(actual, b @ a, 1e-10)
    if algorithm is HetLoRA:
        for (actual_a, actual_b), (a, b) in zip(factors(server), means, strict=True):
            near(actual_a, a, 1e-12)
            near(actual_b, b, 1e-12)


@pytest.mark.parametrize("optimizer", [adamw, momentum])
def test_an_adapter_that_is_padded_with_zeros_trains_like_one_of_the_lower_rank(optimizer, tmp_path):
    """One client: the mean is what it sent, so that HetLoRA must be FedAvg of the smaller network."""
    start = adapted(3, optimizer=optimizer)
    small = adapted(2, optimizer=optimizer)
    small.base.load_state_dict(start.base.state_dict())
    for layer in ("first", "second"):
        small.global_expert[layer].lora_A.weight = nn.Parameter(start.global_expert[layer].lora_A.weight[:2].detach())
    keep = {"rounds": 2, "train": Train(keep_optimizer=True)}
    expected, actual = (
        run([phase("it", algorithm, **keep)], model, blobs([9]), tmp_path, 3).run.states["it"].server
        for algorithm, model in ((FedAvg("global_expert.*"), small), (HetLoRA([2]), start))
    )
    for (a, b), (of_small_a, of_small_b) in zip(factors(actual, 2), factors(expected), strict=True):
        near(a, of_small_a, 1e-12)
        near(b, of_small_b, 1e-12)
        assert b.abs().max() > 0.01, "something was trained"


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", [HetLoRA(RANKS), FlexLoRA(RANKS)])
def test_clients_send_and_receive_their_own_ranks_and_predict_with_them(algorithm, tmp_path):
    phases = [Phase("it", algorithm, rounds=2)]
    federation = run(phases, adapted(3), blobs(SIZES), tmp_path, logger=True, callbacks=[TrafficLedger()])
    rows = ledger(federation)
    for client, rank in enumerate(RANKS):
        for direction in ("up", "down"):
            sent = sum(
                int(row["bytes"]) for row in rows if (row["client"], row["direction"]) == (str(client), direction)
            )
            assert sent == 2 * 8 * rank * (5 + 6 + 6 + 3)
        module = federation.client_module("it", client)
        assert module.global_expert["first"].lora_A.weight[:rank].all()
        assert not module.global_expert["first"].lora_A.weight[rank:].any()
    assert federation.run.rows[-1]["bytes_up"] == 2 * 8 * sum(RANKS) * 20


def test_a_mean_of_products_in_half_precision_is_computed_in_float32():
    """In bfloat16, a third and two thirds are 1.002 together."""
    ones = {A("first"): torch.ones(1, 1, dtype=torch.bfloat16), B("first"): torch.ones(1, 1, dtype=torch.bfloat16)}
    mean = mean_of_products(ones, 1, ones, 2)
    assert product(mean).item() == pytest.approx(1, abs=1e-6)


def test_convolutions_and_embeddings_of_lower_ranks_are_padded_and_decomposed():
    model, generator = adapted(3), torch.Generator().manual_seed(0)
    model.global_expert["first"].lora_A = nn.Conv2d(3, 3, 2, bias=False).double()
    model.global_expert["first"].lora_B = nn.Conv2d(3, 6, 1, bias=False).double()
    del model.global_expert["second"].lora_A, model.global_expert["second"].lora_B
    model.global_expert["second"].lora_embedding_A = nn.Parameter(torch.randn(3, 7).double())
    model.global_expert["second"].lora_embedding_B = nn.Parameter(torch.randn(4, 3).double())
    algorithm = FlexLoRA([2], weighting="uniform")
    server = algorithm.server_init(model)
    shapes = {name: tensor.shape for name, tensor in algorithm.server_send(server, 0, {}).items()}
    assert sorted(map(tuple, shapes.values())) == [(2, 3, 2, 2), (2, 7), (4, 2), (6, 2, 1, 1)]
    updates = [
        Update({name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}, 1.0)
        for _ in range(2)
    ]
    new = combined(algorithm, server, *updates)
    for layer, names in (("first", "lora_{}.weight"), ("second", "lora_embedding_{}")):
        a, b = (f"global_expert.{layer}.{names.format(factor)}" for factor in "AB")
        mean = sum(u.sent[f"cut/{b}"].flatten(1) @ u.sent[f"cut/{a}"].flatten(1) for u in updates) / 2
        u, s, v = torch.linalg.svd(mean, full_matrices=False)
        assert new[a].shape == server[a].shape and new[b].shape == server[b].shape
        near(new[b].flatten(1) @ new[a].flatten(1), (u[:, :3] * s[:3]) @ v[:3], 1e-12)


@pytest.mark.parametrize("kind", [HetLoRA, FlexLoRA])
def test_ranks_that_the_module_does_not_have_are_refused(kind):
    for ranks, words in (([], "one rank at least"), ([2, 0], "from 1 to"), ([1.5], "an integer")):
        with pytest.raises(MisconfigurationException, match=words):
            kind(ranks)
    with pytest.raises(MisconfigurationException, match=r"ranks is \[2, 4\], but must be at most 3"):
        kind([2, 4]).server_init(adapted(3))
    without = adapted(3)
    without.global_expert = nn.ModuleDict({"first": nn.Linear(5, 6)}).double()
    with pytest.raises(MisconfigurationException, match="must be an AdapterMoE with adapters"):
        kind([1]).server_init(without)


def test_an_update_of_another_rank_is_not_one_that_the_client_can_have_made():
    algorithm = HetLoRA(RANKS)
    plan = begin(TrainerBackend(), local_training(adapted(3), algorithm, blobs(SIZES)))
    initial, data = plan.training.initial, plan.training.datamodule
    groups = [*plan.train(algorithm.server_init(plan.training.module), range(3), {}, 0)]
    updates = [group.update for group in groups]
    assert [update.weight for update in updates] == [1, 1, 1], "what is no factor is averaged uniformly"
    for client, update in enumerate(updates):
        assert algorithm.problem_of_update(client, update, initial, data) == ""
        assert "of shape" in algorithm.problem_of_update((client + 1) % 3, update, initial, data)


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", [FedExLoRA(), HetLoRA([2, 3]), FlexLoRA([2, 3])])
def test_newcomers_have_the_server_s_adapters_at_their_ranks_and_its_weights(algorithm, tmp_path):
    phases = [Phase("it", algorithm, evaluate=False)]
    quiet = {"backend": TrainerBackend(), "logger": False, "enable_progress_bar": False}
    before = run(phases, adapted(3), blobs(SIZES), tmp_path, enable_checkpointing=True, **quiet)
    after = Federation(phases, {"max_epochs": 2}, default_root_dir=str(tmp_path / "new"), **quiet)
    after.personalize(adapted(3), blobs([10, 6]), str(before.run_dir / "checkpoints/last.ckpt"), 1)
    server = of_module(before.run.states["it"].server)
    for client in range(2):
        expected = {name: tensor.clone() for name, tensor in server.items()}
        if client == 0 and not isinstance(algorithm, FedExLoRA):
            for layer in ("first", "second"):
                expected[A(layer)][2:] = expected[B(layer)][:, 2:] = 0
        module = after.client_module("it", client).state_dict()
        assert_same_bits({name: module[name] for name in server}, expected)
