"""FedEx-LoRA against closed forms, plain tensors, and FedAvg of the adapters."""

import pytest
import torch
from helpers import blobs, phase, run
from helpers.adapted import LAYERS, A, B, adapted, factors, of_client, trained, weights_of
from helpers.bare import COHORTS, SEED
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg, FedExLoRA
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.shared.low_rank import mean_of_products, product
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.models import AdapterMoE, GlobalOnly, LoRA

SIZES = [13, 8, 11]
W = "base.first.weight"


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
@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend()])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_three_rounds_are_those_of_plain_tensors(weighting, backend, tmp_path):
    data, module = blobs(SIZES), adapted()
    weights, means = weights_of(module), factors(module.state_dict())
    for round, cohort in enumerate(COHORTS):
        sent = [trained(weights, means, data, client, round) for client in cohort]
        p = torch.tensor([SIZES[client] if weighting == "samples" else 1 for client in cohort]).double()
        p = p / p.sum()
        means = [
            tuple(sum(share * own[layer][factor] for share, own in zip(p, sent, strict=True)) for factor in range(2))
            for layer in range(2)
        ]
        exact = [sum(share * own[i][1] @ own[i][0] for share, own in zip(p, sent, strict=True)) for i in range(2)]
        weights = [
            (weight + 2 * (exact[i] - means[i][1] @ means[i][0]), bias) for i, (weight, bias) in enumerate(weights)
        ]
    fedex = phase("it", FedExLoRA(weighting=weighting), rounds=3, clients_per_round=2)
    server = run([fedex], adapted(), data, tmp_path, seed=SEED, backend=backend).run.states["it"].server
    for i, layer in enumerate(LAYERS):
        torch.testing.assert_close(server[A(layer)], means[i][0], rtol=0, atol=1e-12)
        torch.testing.assert_close(server[B(layer)], means[i][1], rtol=0, atol=1e-12)
        torch.testing.assert_close(server[f"base.{layer}.weight"], weights[i][0], rtol=0, atol=1e-12)
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


def quantized(model):
    model.base.first.weight = nn.Parameter(torch.zeros(6, 5, dtype=torch.int8), requires_grad=False)


def tied(model):
    model.base.output = nn.Linear(5, 6, bias=False)
    model.base.output.weight = model.base.first.weight


def without_adapters(model):
    model.global_expert = nn.ModuleDict({"first": nn.Linear(5, 6)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (quantized, "must be without quantized weights, because FedExLoRA adds to base.first.weight"),
        (tied, "must be without tied weights, because .* base.first.weight, which is also base.output.weight"),
        (without_adapters, "must be an AdapterMoE with adapters"),
    ],
)
def test_what_has_no_weights_of_its_own_to_change_is_refused(change, words):
    model = adapted()
    change(model)
    with pytest.raises(MisconfigurationException, match=words):
        FedExLoRA().server_init(model)


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
