"""FedIT, FFA-LoRA, FedSA-LoRA, FedEx-LoRA, HetLoRA and FlexLoRA against closed forms, plain tensors and FedAvg."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, phase, run, tensors
from helpers.adapted import LAYERS, A, B, adapted, factors, of_client, products, trained, weights_of
from helpers.backends import begin, local_training
from helpers.bare import COHORTS, SEED
from helpers.methods import ledger
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, FedExLoRA, FlexLoRA, HetLoRA
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.shared.low_rank import mean_of_products, product
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.callbacks import TrafficLedger
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import AdapterMoE, GlobalOnly, LoRA
from fedmoe_pl.trees import of_module

SIZES, RANKS = [13, 8, 11], [3, 1, 2]
OF_A, OF_B = "global_expert.*lora_A*", "global_expert.*lora_B*"
W = "base.first.weight"
adamw = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def near(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, torch.as_tensor(expected).to(actual), rtol=0, atol=tolerance)


def weighted(weights, tensors):
    return sum(weight * tensor for weight, tensor in zip(weights, tensors, strict=True)) / sum(weights)


# FedAvg with patterns


def test_ffa_trains_and_shares_b_alone_whose_mean_is_exact_for_the_product(tmp_path):
    data, start = blobs(SIZES), adapted()
    state = run([phase("it", FedAvg(OF_B, OF_B))], adapted(), data, tmp_path, seed=SEED).run.states["it"]
    assert {*state.server} == {B(layer) for layer in LAYERS} and not any(map(dict, state.clients.values()))
    weights, frozen = weights_of(start), factors(start.state_dict())
    sent = [trained(weights, frozen, data, client, 0, frozen_a=True) for client in range(3)]
    for layer, mean in enumerate(products({**start.state_dict(), **state.server})):
        exact = weighted(SIZES, [own[layer][1] @ own[layer][0] for own in sent])
        near(mean, exact, 1e-12)
        assert exact.abs().max() > 0.01


def test_fedsa_averages_a_and_every_client_keeps_the_b_that_it_trained(tmp_path):
    data, start = blobs(SIZES), adapted()
    means, first_b = ([factor[i] for factor in factors(start.state_dict())] for i in (0, 1))
    kept = {}
    for round, cohort in enumerate(COHORTS):
        sent = {}
        for client in cohort:
            pairs = [*zip(means, kept.get(client, first_b), strict=True)]
            sent[client] = trained(weights_of(start), pairs, data, client, round)
            kept[client] = [b for _, b in sent[client]]
        means = [weighted([SIZES[c] for c in cohort], [sent[c][i][0] for c in cohort]) for i in range(2)]
    fedsa = phase("it", FedAvg(OF_A, "global_expert.*"), rounds=3, clients_per_round=2)
    federation = run([fedsa], adapted(), data, tmp_path, seed=SEED)
    state = federation.run.states["it"]
    assert {*state.server} == {A(layer) for layer in LAYERS}
    for i, layer in enumerate(LAYERS):
        near(state.server[A(layer)], means[i], 1e-12)
        for client in range(3):
            near(state.clients[client][B(layer)], kept[client][i], 1e-12)
    own = [tensors(federation.client_module("it", client), B("second"))[B("second")] for client in range(3)]
    assert not torch.equal(own[0], own[1]) and not torch.equal(own[1], own[2])


# FedEx-LoRA


def of_two(transposed=False):
    """The server's state of one layer with two inputs and outputs, whose scaling is 2."""
    name = "global_expert.first.lora_{{}}.weight".format
    server = {name("A"): torch.zeros(1, 2), name("B"): torch.zeros(2, 1), W: torch.zeros(2, 2)}
    server = {name: tensor.double() for name, tensor in server.items()}
    server["adapters/scaling"] = torch.tensor(2.0, dtype=torch.float64)
    return server | ({f"transposed/{W}": torch.empty(0)} if transposed else {})


@pytest.mark.parametrize(
    ("weights", "of_means", "exact"),
    [((1, 1), [[1, 1], [1, 1]], [[1, 1], [0, 2]]), ((1, 3), [[0.5, 1.5], [0.75, 2.25]], [[0.5, 1.5], [0, 3]])],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_residual_of_two_clients_of_rank_1(weights, of_means, exact, transposed):
    """A1 = (1, 0), B1 = (1, 0)', A2 = (0, 1), B2 = (1, 2)', s = 2: both sides by hand."""
    algorithm, exact = FedExLoRA(), torch.tensor(exact).double()
    of_means = torch.tensor(of_means).double()
    one, other = of_client([[1, 0]], [[1], [0]], weights[0]), of_client([[0, 1]], [[1], [2]], weights[1])
    new = algorithm.server_update(of_two(transposed), algorithm.combine(one, other))
    of_factors = 2 * new[B("first")] @ new[A("first")]
    torch.testing.assert_close(of_factors, of_means, rtol=0, atol=1e-15)
    residual = new[W].T if transposed else new[W]
    torch.testing.assert_close(residual, exact - of_means, rtol=0, atol=1e-15)


@pytest.mark.few(1)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_three_rounds_of_fedex_are_those_of_plain_tensors(weighting, tmp_path):
    data, module = blobs(SIZES), adapted()
    weights, means = weights_of(module), factors(module.state_dict())
    for round, cohort in enumerate(COHORTS):
        sent = [trained(weights, means, data, client, round) for client in cohort]
        p = [SIZES[client] if weighting == "samples" else 1 for client in cohort]
        means = [tuple(weighted(p, [own[i][factor] for own in sent]) for factor in range(2)) for i in range(2)]
        exact = [weighted(p, [own[i][1] @ own[i][0] for own in sent]) for i in range(2)]
        residuals = [exact[i] - b @ a for i, (a, b) in enumerate(means)]
        weights = [(weight + 2 * residuals[i], bias) for i, (weight, bias) in enumerate(weights)]
    fedex = phase("it", FedExLoRA(weighting=weighting), rounds=3, clients_per_round=2)
    server = run([fedex], adapted(), data, tmp_path, seed=SEED).run.states["it"].server
    for i, layer in enumerate(LAYERS):
        near(server[A(layer)], means[i][0], 1e-12)
        near(server[B(layer)], means[i][1], 1e-12)
        near(server[f"base.{layer}.weight"], weights[i][0], 1e-12)
        assert not torch.allclose(weights[i][0], module.state_dict()[f"base.{layer}.weight"], rtol=0, atol=1e-4)


def test_clients_that_never_trained_and_later_phases_have_the_changed_weights(tmp_path):
    phases = [
        phase("exact", FedExLoRA(), rounds=1, clients_per_round=2),
        phase("on", FedAvg("global_expert.*"), start="exact"),
    ]
    federation = run(phases, adapted(), blobs(SIZES), tmp_path)
    changed = federation.run.states["exact"].server[W]
    assert not torch.equal(changed, adapted().state_dict()[W])
    for name in ("exact", "on"):
        for client in range(3):
            assert torch.equal(federation.client_module(name, client).state_dict()[W], changed)


def test_clients_send_adapters_only(tmp_path):
    federation = run([Phase("it", FedExLoRA(), rounds=1)], adapted(), blobs(SIZES), tmp_path)
    assert federation.run.rows[0]["bytes_up"] == 3 * 8 * 2 * (5 + 6 + 6 + 3)
    assert federation.run.rows[0]["bytes_down"] == 3 * 8 * (2 * (5 + 6 + 6 + 3) + 5 * 6 + 6 * 3)


def test_a_stack_never_takes_more_than_two_matrices_of_the_products_size():
    generator = torch.Generator().manual_seed(0)
    names = A("first"), B("first")
    trees = [
        {names[0]: torch.randn(2, 5, generator=generator), names[1]: torch.randn(4, 2, generator=generator)}
        for _ in range(20)
    ]
    folded = trees[0]
    for count, tree in enumerate(trees[1:], start=1):
        folded = mean_of_products(folded, count, tree, 1)
        assert len(folded[names[0]]) <= 4 and sum(tensor.numel() for tensor in folded.values()) <= 2 * 4 * 5
    exact = sum(product(tree[names[0]], tree[names[1]]) for tree in trees) / 20
    torch.testing.assert_close(product(folded[names[0]], folded[names[1]]), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_rounded_once_however_many_rounds_there_are(dtype):
    """Clients go apart by the same small steps in each round, whose residual is less than a step of the weights."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 12)).to(dtype)
    module = AdapterMoE(base, LoRA(["0"], r=2, lora_alpha=2), GlobalOnly())
    algorithm, size = FedExLoRA(), 1e-2 if dtype is torch.bfloat16 else 3e-3
    server, exact = algorithm.server_init(module), base[0].weight.detach().double()
    a, b = ({name: t for name, t in server.items() if f"lora_{factor}" in name} for factor in "AB")
    steps = {name: size * torch.randn_like(tensor) for name, tensor in {**a, **b}.items()}
    for _ in range(40):
        updates = [Update({name: server[name] + sign * step for name, step in steps.items()}, 1) for sign in (1, -1)]
        new = algorithm.server_update(server, algorithm.combine(*updates))
        products = [b.double() @ a.double() for a, b in (update.sent.values() for update in updates)]
        means = [new[name].double() for name in steps]
        exact += sum(products) / 2 - means[1] @ means[0]
        assert not any(name.startswith("lost/") for name in algorithm.server_send(new, 0, {}))
        server = new
    weight = server["base.0.weight"]
    assert weight.dtype == dtype
    assert (weight != base[0].weight).double().mean() > 0.5
    # float32's rounding of what is left may be the other way, just between two values
    assert (weight != exact.to(dtype)).double().mean() < 0.01


# HetLoRA and FlexLoRA


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


def of_first(tree):
    return tree[B("first")] @ tree[A("first")]


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
    near(2 * of_first(new), expected)
    assert (2 * of_first(new) - torch.tensor([[1, 1], [0, 2]])).norm().item() == pytest.approx(error, abs=1e-6)


def test_flexlora_sends_a_client_of_lower_rank_the_best_approximation_of_that_rank():
    server = combined(FlexLoRA([2, 1]), of_rank(2), cut([[1, 0]], [[1], [0]]), cut([[0, 1]], [[1], [2]]))
    sent = FlexLoRA([2, 1]).server_send(server, 1, {})
    assert [*map(tuple, (sent[f"cut/{A('first')}"].shape, sent[f"cut/{B('first')}"].shape))] == [(1, 2), (2, 1)]
    near(2 * of_first({name.removeprefix("cut/"): tensor for name, tensor in sent.items()})[0], [0.276393, 1.170820])


def test_flexlora_averages_other_tensors_with_the_weights_of_products():
    updates = [cut([[1, 0]], [[1], [0]], 3), cut([[0, 1]], [[1], [2]], 1)]
    for update, value in zip(updates, (0.0, 4.0), strict=True):
        update.sent["global_expert.bias"] = torch.tensor(value)
    assert combined(FlexLoRA([1]), of_rank(1), *updates)["global_expert.bias"].item() == 1


def test_flexlora_leaves_rows_as_they_are_for_which_there_is_no_singular_value():
    old = {A("first"): torch.tensor([[1.0, 2], [3, 4], [5, 6]]).double(), B("first"): torch.ones(2, 3).double()}
    new = combined(FlexLoRA([1]), old, cut([[0, 2]], [[1], [2]], 3), cut([[0, 1]], [[1], [2]], 1))
    near(of_first(new), [[0, 1.75], [0, 3.5]], 1e-12)
    near(new[A("first")], [[0, 1], [3, 4], [5, 6]], 1e-12)
    unchanged = combined(FlexLoRA([1]), old, cut([[0, 2]], [[0], [0]]), cut([[3, 1]], [[0], [0]]))
    assert_same_bits(unchanged, old | {B("first"): torch.zeros(2, 3).double()})


def mean_of_round(algorithm, sent, sizes):
    """The factors of a layer that follow from those of the round's clients, at the rank that these determine."""
    if algorithm is FlexLoRA:
        mean = weighted(sizes, [b @ a for a, b in sent])
        rank = min(3, int(torch.linalg.matrix_rank(mean)))
        u, s, v = torch.linalg.svd(mean)
        return v[:rank], u[:, :rank] * s[:rank]
    rank = max(len(a) for a, _ in sent)
    norms = [(b @ a).norm() for a, b in sent]
    padded = [(F.pad(a, (0, 0, 0, rank - len(a))), F.pad(b, (0, rank - len(a)))) for a, b in sent]
    return tuple(weighted(norms, [pair[factor] for pair in padded]) for factor in range(2))


@pytest.mark.parametrize("algorithm", [HetLoRA, FlexLoRA])
@pytest.mark.few(1)
def test_three_rounds_are_those_of_plain_tensors_with_adapters_of_the_clients_ranks(algorithm, tmp_path):
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
    server = run([it], adapted(3), data, tmp_path, seed=SEED).run.states["it"].server
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
    assert of_first(mean).item() == pytest.approx(1, abs=1e-6)


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


def test_an_update_of_another_rank_is_not_one_that_the_client_can_have_made():
    algorithm = HetLoRA(RANKS)
    plan = begin(TrainerBackend(), local_training(adapted(3), algorithm, blobs(SIZES)))
    initial, data = plan.training.initial, plan.training.datamodule
    groups = [*plan.train(algorithm.server_init(plan.training.module), plan.groups(range(3)), {}, 0)]
    updates = [group.update for group in groups]
    assert [update.weight for update in updates] == [1, 1, 1], "what is no factor is averaged uniformly"
    for client, update in enumerate(updates):
        assert algorithm.problem_of_update(client, update, initial, data, 0) == ""
        assert "of shape" in algorithm.problem_of_update((client + 1) % 3, update, initial, data, 0)


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
