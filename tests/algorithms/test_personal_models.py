"""Methods with a model of each client's own, against bare rewrites: late and new clients, and what they are refused."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, blobs, mixture, phase, run, tensors
from helpers.backends import UNEQUAL, WithBatchNorm, assert_agree, local_training
from helpers.bare import COHORTS, RATE, SEED, round_batches, sgd
from helpers.runs import Kill, assert_same, federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Algorithm, Phase, Train
from fedmoe_pl.algorithms import APFL, FML, Ditto, FedAvg, FedBN, FedKD, FedRep, Local, PerFedAvg, PFedMe
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.shared.parts import warn_of_mixture
from fedmoe_pl.backends import StackedBackend
from fedmoe_pl.models import ConstantGate, EqualWeights, GlobalOnly, LocalOnly
from fedmoe_pl.trees import of_module, subtree

SIZES, INNER = [13, 8, 11], 0.3
EXPERT, LOCAL = "global_expert.", "local_expert."
HEAD, NORM = EXPERT + "classifier.", EXPERT + "extractor.1."
GIVEN = {"weight": 3.0, "inner_steps": 4, "inner_lr": 0.05}


def two_experts(optimizer=sgd, gate=None):
    """Two experts of different parameters."""
    return mixture(gate or GlobalOnly(), optimizer=optimizer)


def values(module, expert="global_expert.") -> list:
    """The parameters of an expert, in order: W1, b1, W2, b2."""
    return [*tensors(module, expert).values()]


def of_tree(tree, expert="global_expert.") -> list:
    """The same from a tree of tensors by name."""
    return [tensor for name, tensor in tree.items() if name.startswith(expert)]


def loss(parameters, x, y):
    w1, b1, w2, b2 = parameters
    return F.cross_entropy(torch.tanh(x @ w1.T + b1) @ w2.T + b2, y)


def gradient(parameters, x, y, of=loss) -> list:
    leaves = [tensor.detach().requires_grad_() for tensor in parameters]
    return [*torch.autograd.grad(of(leaves, x, y), leaves)]


def step(parameters, gradient, rate=RATE) -> list:
    return [tensor - rate * slope for tensor, slope in zip(parameters, gradient, strict=True)]


def mixed(a, b, share) -> list:
    """share * a + (1 - share) * b."""
    return [share * one + (1 - share) * other for one, other in zip(a, b, strict=True)]


def mean(lists, weights=None) -> list:
    weights = weights or [1] * len(lists)
    of_each = zip(*lists, strict=True)
    return [sum(w * t for w, t in zip(weights, each, strict=True)) / sum(weights) for each in of_each]


def assert_near(actual, expected, tolerance=1e-10):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def batch_normalized():
    return mixture(GlobalOnly(), WithBatchNorm(), optimizer=sgd)


# What a client does in a round, from what it received and kept, its batches and all its samples: it sends, and keeps


def of_ditto(w, v, batches, samples):
    """Algorithm 1, with one step of v and of w for every batch."""
    own = w
    for x, y in batches:
        pulled = [g + 0.7 * (a - b) for g, a, b in zip(gradient(v, x, y), v, w, strict=True)]
        v, own = step(v, pulled), step(own, gradient(own, x, y))
    return own, v


def of_apfl(w, kept, batches, samples, alpha_lr):
    """Algorithm 1: both steps of a batch from the values before it, v along the mixture's gradient times alpha.

    The derivative of the client's mean loss by alpha is that of the difference of two losses.
    """
    *v, alpha = kept
    high, low = (loss(mixed(v, w, alpha + shift), *samples) for shift in (1e-5, -1e-5))
    alpha = (alpha - alpha_lr * (high - low) / 2e-5).clamp(0, 1)
    own = w
    for x, y in batches:
        of_mixture = [alpha * g for g in gradient(mixed(v, own, alpha), x, y)]
        v, own = step(v, of_mixture), step(own, gradient(own, x, y))
    return own, [*v, alpha]


def of_fedrep(body, head, batches, samples):
    """Algorithm 1 with two epochs of the head (W2, b2), then one of the body (W1, b1)."""
    for index, (x, y) in enumerate(batches):
        slopes = gradient([*body, *head], x, y)
        if index < len(batches) * 2 // 3:
            head = step(head, slopes[2:])
        else:
            body = step(body, slopes[:2])
    return body, head


def of_per_fedavg(w, kept, batches, samples, second_order):
    for x, y in batches:
        half = len(y) // 2
        if not half:
            w = step(w, gradient(w, x, y))
            continue
        leaves = [tensor.detach().requires_grad_() for tensor in w]
        inner = torch.autograd.grad(loss(leaves, x[:half], y[:half]), leaves, create_graph=second_order)
        w = step(w, torch.autograd.grad(loss(step(leaves, inner, INNER), x[half:], y[half:]), leaves))
    return w, kept


def of_pfedme(w, kept, batches, samples, decay):
    """Algorithm 1, with one local iteration for every batch."""
    theta = w
    for x, y in batches:
        for _ in range(4):
            pulled = [g + 3.0 * (t - a) + decay * t for t, g, a in zip(theta, gradient(theta, x, y), w, strict=True)]
            theta = step(theta, pulled, 0.05)
        w = [a - RATE * 3.0 * (a - t) for a, t in zip(w, theta, strict=True)]
    return w, theta


def of_fedbn(w, own, batches, samples):
    """Algorithm 1: all tensors of the layer stay with their client."""
    expert = batch_normalized().global_expert
    names = sorted(expert.state_dict(), key=lambda name: name.startswith("extractor.1."))
    expert.load_state_dict(dict(zip(names, [*w, *own], strict=True)))
    for x, y in batches:
        if len(y) > 1:  # others are left out with batch normalization
            slopes = torch.autograd.grad(F.cross_entropy(expert(x), y), [*expert.parameters()])
            with torch.no_grad():
                for parameter, slope in zip(expert.parameters(), slopes, strict=True):
                    parameter -= RATE * slope
    state = [expert.state_dict()[name] for name in names]
    return state[: len(w)], state[len(w) :]


@dataclass
class Rewrite:
    """A method, and what it gives.

    Attributes:
        algorithm: the method.
        client: what a client does in a round.
        start: from the expert's parameters, those of the server, and what a client has kept before its first round.
        kept: prefixes of what a client keeps.
        used: the part that it uses, and from what the server has, it kept and its samples, the parameters of that.
    """

    algorithm: Algorithm
    client: Callable
    start: Callable = lambda w: (w, w)
    kept: tuple[str, ...] = (LOCAL,)
    used: tuple[str, Callable] = (LOCAL, lambda w, kept, samples: kept)
    model: Callable = two_experts
    by_samples: bool = False
    epochs: int = 2
    server_lr: float = 1.0
    tolerance: float = 1e-10


def apfl(alpha_lr, weighting, **kwargs) -> Rewrite:
    return Rewrite(
        APFL(0.3, alpha_lr, weighting),
        partial(of_apfl, alpha_lr=alpha_lr),
        lambda w: (w, [*w, torch.tensor(0.3, dtype=torch.float64)]),
        (LOCAL, "mixture/alpha"),
        (LOCAL, lambda w, kept, samples: mixed(kept[:-1], w, kept[-1])),
        **kwargs,
    )


def fedrep(weighting, **kwargs) -> Rewrite:
    start, used = (lambda w: (w[:2], w[2:])), (EXPERT, lambda body, head, samples: [*body, *head])
    return Rewrite(FedRep(head_epochs=2, weighting=weighting), of_fedrep, start, (HEAD,), used, epochs=3, **kwargs)


def per_fedavg(second_order=False, arguments=None, **kwargs) -> Rewrite:
    return Rewrite(
        PerFedAvg(INNER, second_order, **(arguments or {})),
        partial(of_per_fedavg, second_order=second_order),
        lambda w: (w, []),
        ("",),
        (EXPERT, lambda w, kept, samples: step(w, gradient(w, *samples), INNER)),
        **kwargs,
    )


def pfedme(weighting, decay=0.0, server_lr=1.0, **kwargs) -> Rewrite:
    algorithm = PFedMe(**GIVEN, decay=decay, server_lr=server_lr, weighting=weighting)
    return Rewrite(algorithm, partial(of_pfedme, decay=decay), server_lr=server_lr, **kwargs)


def fedbn(arguments, **kwargs) -> Rewrite:
    return Rewrite(
        FedBN(EXPERT + "*", **arguments),
        of_fedbn,
        lambda w: ([*w[:2], *w[7:]], w[2:7]),
        (NORM,),
        (EXPERT, lambda w, kept, samples: [*w[:2], *kept, *w[2:]]),
        batch_normalized,
        **kwargs,
    )


REWRITES = {
    "Ditto": Rewrite(Ditto(0.7), of_ditto),
    "APFL": apfl(0.0, "uniform"),
    "FedRep": fedrep("samples", by_samples=True),
    "Per-FedAvg": per_fedavg(),
    "pFedMe": pfedme("uniform", 0.2, 0.5),
    "FedBN": fedbn({"weighting": "samples"}, by_samples=True),
    "APFL by samples": apfl(0.2, "samples", by_samples=True, tolerance=1e-8),  # that of a difference of losses
    "FedRep, uniform": fedrep("uniform"),
    "Per-FedAvg by samples": per_fedavg(arguments={"weighting": "samples"}, by_samples=True),
    "Per-FedAvg, second order": per_fedavg(second_order=True),
    "Per-FedAvg, second order by samples": per_fedavg(True, {"weighting": "samples"}, by_samples=True),
    "pFedMe by samples": pfedme("samples", by_samples=True),
    "pFedMe beyond the mean": pfedme("samples", server_lr=1.5, by_samples=True),
    "FedBN, uniform by default": fedbn({}),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", REWRITES)
def test_three_rounds_are_those_of_a_bare_rewrite_also_for_clients_that_come_late(name, tmp_path):
    rewrite, data, kept = REWRITES[name], blobs(), {}
    gate = LocalOnly() if rewrite.used[0] == LOCAL else GlobalOnly()
    it = Phase("it", rewrite.algorithm, rounds=3, clients_per_round=2, gate=gate)
    fed = run([it], rewrite.model(), data, tmp_path, rewrite.epochs, seed=SEED)
    w, first = rewrite.start(values(rewrite.model()))
    samples = [(data.x[samples], data.y[samples]) for samples in data.train_samples]
    for round, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            batches = round_batches(data, client, round, rewrite.epochs)
            own, kept[client] = rewrite.client(w, kept.get(client, first), batches, samples[client])
            sent.append(own)
        of_round = mean(sent, [SIZES[client] for client in cohort] if rewrite.by_samples else None)
        w = mixed(of_round, w, rewrite.server_lr)
    state = fed.run.states["it"]
    assert_near(of_tree(state.server), w, rewrite.tolerance)
    for client in range(3):
        own = [tensor for prefix in rewrite.kept for tensor in of_tree(state.clients.get(client, {}), prefix)]
        assert_near(own, kept[client], rewrite.tolerance)
        part, used = rewrite.used
        actual = values(fed.client_module("it", client), part)
        assert_near(actual, used(w, kept[client], samples[client]), rewrite.tolerance)


def test_alpha_of_apfl_stays_between_0_and_1(tmp_path):
    phases = [phase("APFL", APFL(0.5, 1e6), rounds=2)]
    kept = run(phases, two_experts(), blobs(), tmp_path).run.states["APFL"].clients
    assert all(tree["mixture/alpha"].item() in (0, 1) for tree in kept.values())


def test_with_ditto_a_client_that_never_took_part_uses_the_first_w_also_in_later_phases(tmp_path):
    phases = [
        phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly()),
        Phase("Ditto", Ditto(), clients_per_round=1, gate=LocalOnly(), start="FedAvg"),
        phase("Local", Local(), train=Train(max_epochs=0), start="Ditto"),
    ]
    federation = run(phases, two_experts(), blobs(), tmp_path)
    (trained,) = federation.run.states["Ditto"].clients
    start = of_tree(federation.run.states["FedAvg"].server)
    for client in range(3):
        for name in ("Ditto", "Local"):
            v = values(federation.client_module(name, client), LOCAL)
            assert all(map(torch.equal, v, start)) == (client != trained)


def test_the_last_extra_round_of_fedrep_is_a_phase_of_local_that_trains_the_heads(tmp_path):
    phases = [
        phase("FedRep", FedRep(head_epochs=1), rounds=2, clients_per_round=2),
        phase("heads", Local(HEAD + "*"), start="FedRep", gate=GlobalOnly(), train=Train(max_epochs=3)),
    ]
    data = blobs()
    federation = run(phases, two_experts(), data, tmp_path, seed=SEED)
    before = federation.run.states["FedRep"]
    for client in range(3):
        head = of_tree(before.clients.get(client, {}), HEAD) or values(two_experts())[2:]
        body = of_tree(before.server)
        for x, y in round_batches(data, client, 2, 3):
            head = step(head, gradient([*body, *head], x, y)[2:])
        assert_near(values(federation.client_module("heads", client)), [*body, *head])


def test_in_per_fedavg_batch_normalization_needs_two_samples_in_both_halves(tmp_path):
    """Of batches of 4 and 3, only the larger ones are halved; statistics are those of all forward passes."""
    its_phase = phase("it", PerFedAvg(INNER))
    state = run([its_phase], batch_normalized(), blobs(sizes=(7, 7)), tmp_path, 1).run.states["it"]
    assert state.server[NORM + "num_batches_tracked"] == 3
    assert all(tensor.isfinite().all() for tensor in state.server.values())


@pytest.mark.slow
def test_the_whole_module_can_be_the_expert_of_per_fedavg(tmp_path):
    """With one expert at work, the mixture's step is the expert's."""
    phases = [phase("all", PerFedAvg(INNER, expert=""), rounds=2), phase("one", PerFedAvg(INNER), rounds=2)]
    states = run(phases, two_experts(), blobs(), tmp_path).run.states
    assert_near(of_tree(states["all"].server), of_tree(states["one"].server), 1e-14)


def test_pfedme_takes_counts_and_masks_from_its_clients():
    names = ("global_expert.count", "global_expert.mask")
    server, sent = (
        dict(zip(names, (torch.tensor(count), torch.tensor(allowed)), strict=True))
        for count, allowed in ((5, [True, True]), (3, [True, False]))
    )
    new = PFedMe(server_lr=0.5).server_update(server, Update(sent, 1.0))
    assert_same({name: new[name] for name in names}, sent)


def test_a_round_of_pfedme_with_a_learning_rate_of_0_changes_nothing_of_w(tmp_path):
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda round: 0.0)
    it = phase("it", PFedMe(**GIVEN), rounds=2, train=Train(round_lr_scheduler=schedule))
    state = run([it], two_experts(), blobs(), tmp_path, 1).run.states["it"]
    assert_near(of_tree(state.server), values(two_experts()), 0)


def test_fedbn_finds_layers_by_type_and_shares_those_that_are_not_batch_normalization():
    class Odd(Expert):
        """Batch normalization without a telling name, a layer with one, and layer normalization."""

        def __init__(self):
            super().__init__()
            self.downsample = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
            self.bn = nn.Linear(5, 5)
            self.norm = nn.LayerNorm(5)

    module, fedbn = mixture(GlobalOnly(), Odd(), optimizer=sgd), FedBN(EXPERT + "*")
    fedbn.server_init(module)
    private = {name for name in tensors(module, EXPERT) if not fedbn.is_shared(name)}
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert private == {f"{EXPERT}downsample.1.{name}" for name in names}


@pytest.mark.slow
def test_one_fedbn_finds_the_layers_of_phases_with_different_models_also_when_one_is_resumed(tmp_path):
    def fitted(path, ckpt_path=None, **kwargs):
        other, fedbn = WithBatchNorm(), FedBN(EXPERT + "*")
        other.extractor = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 6), nn.Tanh())
        of_other = mixture(GlobalOnly(), other, optimizer=sgd)
        phases = [phase("one", fedbn, rounds=2), phase("two", fedbn, model=of_other, start="initial")]
        run = federation(path, phases, **kwargs)
        run.fit(batch_normalized(), blobs(), ckpt_path=ckpt_path)
        return [state.server for state in run.run.states.values()]

    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, callbacks=[Kill("on_round_end", 1)])
    whole = fitted(tmp_path / "whole")
    assert_same(fitted(tmp_path, "last"), whole)
    layers = [{name.split(".")[2] for name in server if ".extractor." in name} for server in whole]
    assert layers == [{"0"}, {"1"}]


# Stacks, newcomers and gates

CASES = {
    "Ditto": (lambda: Ditto(0.7), LocalOnly),
    "FedRep": (lambda: FedRep(head_epochs=1), GlobalOnly),
    "FedBN": (lambda: FedBN("global_expert.*"), GlobalOnly),
    "APFL": (lambda: APFL(0.3, 0.1), LocalOnly),
    "pFedMe": (lambda: PFedMe(3.0, inner_lr=0.05), LocalOnly),
    "Per-FedAvg": (lambda: PerFedAvg(0.1), GlobalOnly),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "FedBN"])
def test_stacks_have_the_statistics_of_batch_normalization_of_clients_alone(name):
    assert_agree(local_training(batch_normalized(), CASES[name][0](), blobs(UNEQUAL, batch_size=10)), 1e-10)


def test_second_order_through_batch_normalization_is_not_stacked():
    training = local_training(batch_normalized(), PerFedAvg(0.1, second_order=True), blobs(UNEQUAL, batch_size=10))
    with pytest.raises(MisconfigurationException, match="stacking changes the gradient of 'global_expert"):
        StackedBackend().plan(training)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_newcomer_has_a_model_of_its_own_around_what_the_server_sends(name, tmp_path):
    algorithm, gate = CASES[name]
    model = batch_normalized if name == "FedBN" else two_experts
    settings = {"trainer": {"max_epochs": 2, "accelerator": "cpu"}, "seed": 3}
    first = federation(tmp_path, [Phase(name, algorithm(), rounds=3, clients_per_round=2, gate=gate())], **settings)
    first.fit(model(), blobs())
    data = blobs(sizes=(9, 8))
    data.x = data.x + 0.5
    later = federation(tmp_path / "later", [Phase(name, algorithm(), gate=gate())], **settings)
    later.personalize(model(), data, str(first.run_dir / "checkpoints/last.ckpt"), rounds=3)
    server = of_module(first.run.states[name].server)
    received = {tensor_name: tensor for tensor_name, tensor in server.items() if tensor_name.startswith(EXPERT)}
    for client in range(2):
        samples = data.train_samples[client]
        batch = data.x[samples], data.y[samples]
        module, start = later.client_module(name, client), model()
        start.load_state_dict(server, strict=False)
        start.local_expert.load_state_dict(subtree(server, EXPERT), strict=False)
        start.gate = gate()
        start.check_parts()
        with torch.no_grad():
            assert module.loss(batch)[0] < start.eval().loss(batch)[0]
        state = module.state_dict()
        assert all(torch.equal(state[each], received[each]) for each in received) == (name != "Per-FedAvg")
        assert not torch.equal(module(batch[0]), start(batch[0]))


MIXED = "gate is {}, so that a mixture of both experts is evaluated; with LocalOnly it is the personal model"


@pytest.mark.parametrize("algorithm", [Ditto(), APFL(), PFedMe(), FML(), FedKD()])
def test_a_gate_that_would_evaluate_a_mixture_is_warned_of(algorithm):
    with pytest.warns(match=f"{type(algorithm).__name__}: {MIXED.format('EqualWeights')}"):
        warn_of_mixture(algorithm, mixture(EqualWeights()))
    with pytest.warns(match=MIXED.format("ConstantGate")):
        warn_of_mixture(algorithm, mixture(ConstantGate(0.3)))
    for gate in (LocalOnly(), GlobalOnly(), ConstantGate(0.0)):
        warn_of_mixture(algorithm, mixture(gate))
