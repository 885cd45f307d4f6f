"""FedMix, FedJETs, FedEM and pFedMM, whose clients share experts, against rounds in bare PyTorch, and their limits."""

import copy
from collections import defaultdict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    assert_same_bits,
    blobs,
    client_generator,
    mixtures_of_learners,
    momentum_sgd,
    phase,
    run,
    sparse_mixture,
    tensors,
)
from helpers.backends import local_training
from helpers.mixtures_of_learners import RATE, backbone, learners
from helpers.runs import federation
from lightning.pytorch import Callback
from torch import Tensor, nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, FedEM, FedJETs, FedMix, PFedMM
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.fedjets import most_distant
from fedmoe_pl.backends.local_client import begin_client
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.phases.participation import sample_cohort

FOUR = (13, 8, 11, 9)


@torch.no_grad()
def choosy():
    """Four experts, of which the clients of ``blobs(FOUR)`` prefer 0 and 3, 2 and 3, 0 and 3, 0 and 2."""
    module, data = sparse_mixture(4), blobs(FOUR)
    mean = module.embedding(data.x[: sum(FOUR)]).mean(0)
    proxies = 3 * torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    proxies -= (proxies @ mean)[:, None] * mean / mean.square().sum()  # no expert is best for the mean
    for proxy, row in zip(module.gate.proxies, proxies, strict=True):
        proxy.weight.copy_(row[None])
    return module


def logits_of_gate(module, z) -> Tensor:
    return z @ torch.cat([proxy.weight for proxy in module.gate.proxies]).T


@torch.no_grad()
def loss_of_likelihood(module, x, y, experts=range(4)) -> float:
    """The mean of ``-log sum_k p(k|x) p(y|x, k)`` over some experts k."""
    z, experts = module.embedding(x), [*experts]
    p = logits_of_gate(module, z)[:, experts].softmax(1)
    right = torch.stack([module.experts[expert](z).softmax(1)[range(len(y)), y] for expert in experts], 1)
    return -(p * right).sum(1).log().mean().item()


def rounds_by_hand(
    model, data, cohorts, epochs, expert_weights, entropy_weight=0.0, anchors=None, frozen=(), rounds_before=0
):
    """Rounds with two experts per client.

    Args:
        model: the model before the first round.
        data: the clients' data.
        cohorts: the clients of each round.
        epochs: local epochs.
        expert_weights: from the numbers of two trained experts, the module and a client's samples, their weights.
        entropy_weight: weight of the entropy of a batch's mean gate weights.
        anchors: the expert of each client that is an anchor.
        frozen: prefixes of the parameters that are not trained.
        rounds_before: number of rounds of the phase that these start from.

    Returns:
        The parameters, the experts that each client trained in each round, and those that it asks for next.
    """
    anchors = anchors or {}
    server = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trained, asked = [], {}
    for round, cohort in enumerate(cohorts):
        sums, totals = defaultdict(float), defaultdict(float)
        trained.append({})
        for client in cohort:
            module = copy.deepcopy(model)
            module.load_state_dict(server)
            samples = data.train_samples[client]
            x, y = data.x[samples], data.y[samples]
            with torch.no_grad():
                scores = logits_of_gate(module, module.embedding(x)).softmax(1).mean(0).tolist()
            if client in anchors:
                scores[anchors[client]] = 2.0
            best = sorted(sorted(range(len(scores)), key=lambda expert: -scores[expert])[:2])
            pair = trained[-1][client] = asked.get(client, best)
            asked[client] = best
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen))
            optimizer = momentum_sgd([parameter for parameter in module.parameters() if parameter.requires_grad])
            batches = data.batches(samples, generator=client_generator(0, client, rounds_before + round))
            for _ in range(epochs):
                for batch_x, batch_y in batches:
                    optimizer.zero_grad()
                    z = module.embedding(batch_x)
                    logits = logits_of_gate(module, z)
                    p = logits[:, pair].softmax(1)
                    right = [module.experts[expert](z).softmax(1)[range(len(batch_y)), batch_y] for expert in pair]
                    loss = -(p[:, 0] * right[0] + p[:, 1] * right[1]).log().mean()
                    mean = p.mean(0)
                    loss = loss - entropy_weight * -(mean * mean.log()).sum()
                    if client in anchors:
                        loss = loss - logits.log_softmax(1)[:, anchors[client]].mean()
                    loss.backward()
                    optimizer.step()
            weights = dict(zip(pair, expert_weights(module, pair, x, y), strict=True))
            for name, parameter in module.named_parameters():
                part, number = name.split(".")[:2]
                weight = weights.get(int(number), 0) if part == "experts" else len(samples)
                sums[name] = sums[name] + weight * parameter.detach()
                totals[name] += weight
        server = {name: sums[name] / totals[name] if totals[name] else tensor for name, tensor in server.items()}
    return server, trained, asked


# FedMix


@torch.no_grad()
def responsibilities(module, pair, x, y):
    """Their sums over a client's samples."""
    z = module.embedding(x)
    p = logits_of_gate(module, z)[:, pair].softmax(1)
    joint = p * torch.stack([module.experts[expert](z).softmax(1)[range(len(y)), y] for expert in pair], 1)
    return (joint / joint.sum(1, keepdim=True)).sum(0).tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
@pytest.mark.parametrize("clients_per_round", [None, 2])
def test_three_rounds_are_those_of_bare_pytorch(tmp_path, clients_per_round, entropy_weight):
    data, model = blobs(FOUR), choosy()
    algorithm = FedMix(entropy_weight=entropy_weight)
    mix = phase("FedMix", algorithm, rounds=3, clients_per_round=clients_per_round)
    state = run([mix], model, data, tmp_path).run.states["FedMix"]
    cohorts = [sample_cohort(range(4), clients_per_round or 4, 0, round) for round in range(3)]
    server, trained, asked = rounds_by_hand(model, data, cohorts, 2, responsibilities, entropy_weight)
    torch.testing.assert_close(state.server, server, rtol=0, atol=1e-10)
    assert {client: tree["experts/asked"].tolist() for client, tree in state.clients.items()} == asked
    assert all(tree.keys() == {"experts/asked"} for tree in state.clients.values())
    updates = sum(map(len, cohorts))
    parameters = updates * (5 * 6 + 6 + 4 * 6 + 2 * 43)  # embedding, proxies, and the two experts that are trained
    assert state.traffic["parameters_up"] == parameters
    requests = updates - len({client for cohort in cohorts for client in cohort})  # none in a client's first round
    assert state.traffic["bytes_up"] == 8 * (parameters + 2 * updates + 2 * requests), "of two numbers each"
    if clients_per_round is None:
        assert trained[0] == {0: [0, 3], 1: [2, 3], 2: [0, 3], 3: [0, 2]}, "clients differ, and an expert is left"


def test_where_the_gate_s_weights_underflow_the_losses_share_a_sample_out():
    data, model = blobs(FOUR), choosy()
    with torch.no_grad():
        for proxy, far in zip(model.gate.proxies, (0.0, 0.0, 1e6, 0.0), strict=True):
            proxy.weight.fill_(far)  # embeddings are above 0: the weights of all but expert 2 are 0
    samples = data.train_samples[0]
    weights = FedMix().expert_weights(Client(0, 0, 0, model, samples, {}, data), [0, 3])
    z, y = model.embedding(data.x[samples]), data.y[samples]
    right = torch.stack([model.experts[expert](z).softmax(1)[range(len(y)), y] for expert in (0, 3)], 1)
    torch.testing.assert_close(weights, (right / right.sum(1, keepdim=True)).sum(0).detach())


def test_responsibilities_are_computed_without_dropout():
    data, model = blobs(FOUR), choosy()
    samples, before = data.train_samples[0], model.embedding
    weights = []
    for model.embedding in (before, torch.nn.Sequential(before, torch.nn.Dropout(0.5))):
        weights.append(FedMix().expert_weights(Client(0, 0, 0, model.train(), samples, {}, data), [0, 3]))
    assert torch.equal(*weights)


@pytest.mark.slow
def test_clients_and_newcomers_are_evaluated_with_the_best_expert_of_all_for_each_sample(tmp_path):
    first, later = (federation(tmp_path, [Phase("FedMix", FedMix(), rounds=2)]) for _ in range(2))
    first.fit(choosy(), blobs(FOUR))
    later.personalize(choosy(), blobs((9, 6)), str(first.run_dir / "checkpoints/last.ckpt"), rounds=3)
    for one, client in ((first, 3), (later, 1)):
        assert_same_bits(tensors(one.client_module("FedMix", client)), first.run.states["FedMix"].server)
        data = one.run.datamodule
        module, x, y = one.client_module("FedMix", client).eval(), data.x[data.global_test], data.y[data.global_test]
        z = module.embedding(x)
        chosen = logits_of_gate(module, z).argmax(1)
        outputs = torch.stack([expert(z) for expert in module.experts])[chosen, range(len(x))]
        accuracy = (outputs.argmax(1) == y).double().mean().item()
        assert one.results["FedMix"].clients[client].global_test == pytest.approx(accuracy)


@pytest.mark.slow
def test_the_validation_loss_is_that_of_the_likelihood_with_which_clients_train(tmp_path):
    data, seen = blobs((20, 13, 16, 15), validation_fraction=0.3), []

    class Seen(Callback):
        def on_validation_end(self, trainer, pl_module):
            ((x, y),) = trainer.val_dataloaders
            of_own_experts = loss_of_likelihood(pl_module, x, y, pl_module.training_step.__self__.constants["experts"])
            seen.append((trainer.callback_metrics["validation_loss"].item(), of_own_experts))

    mix = phase(
        "it", FedMix(), rounds=2, evaluate=True, train=Train(callbacks=[Seen()], trainer={"limit_val_batches": 1.0})
    )
    federation = run([mix], choosy(), data, tmp_path)
    for client in range(4):
        samples = data.validation_samples[client]
        loss = loss_of_likelihood(federation.client_module("it", client).eval(), data.x[samples], data.y[samples])
        assert federation.results["it"].clients[client].validation_loss == pytest.approx(loss, abs=1e-10)
    assert len(seen) == 2 * 4 * 2  # rounds, clients, epochs
    for logged, expected in seen:
        assert logged == pytest.approx(expected, abs=1e-6)


# FedJETs


@pytest.mark.few(1)
@pytest.mark.parametrize("anchors", [False, True])
def test_two_rounds_are_those_of_bare_pytorch(tmp_path, anchors):
    """The validation loss is that of the likelihood, without the anchors' term."""
    data, model = blobs((20, 13, 16, 15), validation_fraction=0.3), choosy()
    names = ["embedding.*", "experts.0.*"]
    before = Phase("common", FedAvg(names, names), rounds=2, gate=GlobalOnly())
    jets = Phase("FedJETs", FedJETs(anchors=anchors), rounds=2)
    federation = run([before, jets], model, data, tmp_path)
    states = federation.run.states
    common = copy.deepcopy(model)
    common.load_state_dict({**common.state_dict(), **states["common"].server})
    for expert in common.experts:
        expert.load_state_dict(common.experts[0].state_dict())
    expert_of = {}
    if anchors:
        expert_of = {client: expert for expert, client in enumerate(most_distant(data.class_shares, 4).tolist())}
        assert expert_of.keys() == {0, 1, 2, 3}

    def by_samples(module, pair, x, y):
        return [len(x)] * 2

    server, trained, asked = rounds_by_hand(
        common, data, [range(4)] * 2, 2, by_samples, anchors=expert_of, frozen=("embedding.",), rounds_before=2
    )
    state = states["FedJETs"]
    own = {name: tensor for name, tensor in state.server.items() if "/" not in name}
    assert own.keys() == {name for name in server if not name.startswith("embedding.")}
    torch.testing.assert_close(own, {name: server[name] for name in own}, rtol=0, atol=1e-10)
    assert {client: tree["experts/asked"].tolist() for client, tree in state.clients.items()} == asked
    for client, expert in expert_of.items():
        assert all(expert in pairs[client] for pairs in trained)
    if not anchors:
        assert len({tuple(pair) for pair in trained[0].values()}) > 1
    for client in range(4):
        samples = data.validation_samples[client]
        module = federation.client_module("FedJETs", client).eval()
        loss = loss_of_likelihood(module, data.x[samples], data.y[samples])
        assert federation.results["FedJETs"].clients[client].validation_loss == pytest.approx(loss, abs=1e-10)


def test_anchors_are_the_clients_with_the_most_distant_labels():
    shares = torch.tensor([[0.3, 0.3, 0.4], [1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    assert sorted(most_distant(shares, 3).tolist()) == [1, 3, 4]
    assert sorted(most_distant(shares, 9).tolist()) == [0, 1, 2, 3, 4], "there are no more clients"
    assert len({*most_distant(torch.ones(4, 3) / 3, 3).tolist()}) == 3, "no client is anchor of two experts"


def test_anchors_are_among_the_clients_that_take_part(tmp_path):
    data, names = blobs(FOUR), ["embedding.*", "experts.0.*"]
    before = phase("common", FedAvg(names, names), gate=GlobalOnly())
    jets = phase("FedJETs", FedJETs(), clients=[3, 0, 2], clients_per_round=1)
    anchors = run([before, jets], choosy(), data, tmp_path).run.states["FedJETs"].server["anchors/clients"]
    expected = [[0, 2, 3][row] for row in most_distant(data.class_shares[[0, 2, 3]], 4).tolist()]
    assert anchors.tolist() == expected and len(expected) == 3


def test_an_anchor_s_loss_makes_the_gate_choose_its_expert_and_pads_do_not_count():
    module, x, y = choosy(), torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
    constants = {"experts": [0, 2], "anchor": -1}
    plain = FedJETs().client_loss(module, (x, y), constants)
    anchored = FedJETs().client_loss(module, (x, y), {**constants, "anchor": 2})
    chosen = F.cross_entropy(module.gate(module.embedding(x)).log(), torch.full((6,), 2))
    torch.testing.assert_close(anchored, plain + chosen)
    expected = FedJETs().client_loss(module, (x[:4], y[:4]), {**constants, "anchor": 2})
    y[4:] = -100
    torch.testing.assert_close(FedJETs().client_loss(module, (x, y), {**constants, "anchor": 2}), expected)


# FedEM and pFedMM, mixtures of shared learners


momentum = partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=0.01)


def of_learners(module):
    """An optimizer for each learner."""
    return [momentum(expert.parameters()) for expert in module.experts]


def of_backbone(module):
    """Three times the rate for the backbone of three learners, with the same decay in a step."""
    of_embedding = momentum(module.embedding.parameters(), lr=3 * RATE, weight_decay=0.01 / 3)
    return [momentum(module.experts.parameters()), of_embedding]


@pytest.mark.few("2", "pFedMM")
@pytest.mark.parametrize(
    ("algorithm", "backbone", "optimizers", "clients_per_round"),
    [(FedEM(), None, of_learners, None), (FedEM(), None, of_learners, 2), (PFedMM(), backbone(), of_backbone, None)],
    ids=["all", "2", "pFedMM"],
)
def test_two_rounds_of_learners_are_those_of_bare_pytorch(algorithm, backbone, optimizers, clients_per_round, tmp_path):
    data, model = blobs(), learners(embedding=backbone, optimizer=momentum)
    it = phase("it", algorithm, rounds=2, clients_per_round=clients_per_round)
    state = run([it], model, data, tmp_path).run.states["it"]
    cohorts = [sample_cohort(range(3), clients_per_round or 3, 0, round) for round in range(2)]
    server, weights = mixtures_of_learners.rounds_by_hand(model, data, cohorts, 2, optimizers)
    torch.testing.assert_close(state.server, server, rtol=0, atol=1e-10)
    assert state.clients.keys() == weights.keys()
    for client, expected in weights.items():
        assert state.clients[client].keys() == {"gate.weights"}
        torch.testing.assert_close(state.clients[client]["gate.weights"], expected, rtol=0, atol=1e-10)
        assert (expected - 1 / 3).abs().max() > 1e-3


def test_a_client_predicts_with_its_mixture_of_probabilities_and_sends_the_learners_only(tmp_path):
    data = blobs()
    federation = run([Phase("FedEM", FedEM(), rounds=3)], learners(), data, tmp_path)
    state, x = federation.run.states["FedEM"], data.x[data.global_test]
    for client in range(3):
        pi = state.clients[client]["gate.weights"]
        assert abs(pi.sum().item() - 1) < 1e-12
        module = federation.client_module("FedEM", client).eval()
        expected = sum(weight * expert(x).softmax(1) for weight, expert in zip(pi, module.experts, strict=True))
        torch.testing.assert_close(module(x).exp(), expected)
        shown = federation.results["FedEM"].clients[client].gate_weights
        torch.testing.assert_close(shown, pi.expand_as(shown))
    size = sum(tensor.nbytes for name, tensor in tensors(learners()).items() if name.startswith("experts."))
    assert state.traffic["bytes_up"] == state.traffic["bytes_down"] == 3 * 3 * size
    assert all(name.startswith("experts.") for name in state.server)


def test_dropout_is_active_in_the_m_step_only():
    """The responsibilities are those of the E step, and every call of the loss draws other masks."""
    expert = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3))
    training, data = local_training(learners(expert=expert), FedEM(), blobs()), blobs()
    client, constants, samples = begin_client(
        training, copy.deepcopy(training.module), FedEM().server_init(training.module), 0, {}, 0
    )
    (batch,) = data.batches(samples, batch_size=100)
    losses = [FedEM().client_loss(client.module.train(), batch, constants).item() for _ in range(2)]
    assert losses[0] != losses[1] and client.module.training and client.module.experts[0][0].training
    for layer in client.module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    before = FedEM().client_loss(client.module, batch, constants)
    again = copy.deepcopy(client.module).eval()
    torch.testing.assert_close(FedEM().client_loss(again, batch, constants), before)


def test_learners_with_batch_normalization_change_their_statistics_in_the_m_step_only(tmp_path):
    expert = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    federation = run([phase("FedEM", FedEM(), rounds=2)], learners(expert=expert), blobs((16, 8)), tmp_path)
    batches = federation.run.states["FedEM"].server["experts.1.1.num_batches_tracked"].item()
    assert batches == 2 * 2 * 16 / 4, "two rounds of two epochs of the larger client"


@pytest.mark.slow
def test_a_newcomer_estimates_its_weights_and_leaves_the_learners_as_they_are(tmp_path):
    data, (first, later) = blobs((9, 6)), [federation(tmp_path, [Phase("FedEM", FedEM(), rounds=3)]) for _ in range(2)]
    first.fit(learners(), blobs())
    later.personalize(learners(), data, str(first.run_dir / "checkpoints/last.ckpt"), rounds=10)
    for client in (0, 1):
        module = later.client_module("FedEM", client).eval()
        assert_same_bits(tensors(module, "experts."), first.run.states["FedEM"].server)
        x, y = data.x[data.train_samples[client]], data.y[data.train_samples[client]]
        likelihood = torch.stack([expert(x).softmax(1)[range(len(y)), y] for expert in module.experts], 1).detach()
        pi = torch.full((3,), 1 / 3, dtype=torch.float64)
        for _ in range(10):
            pi = (pi * likelihood / (likelihood @ pi)[:, None]).mean(0)
        torch.testing.assert_close(module.gate.weights, pi, rtol=0, atol=1e-10)
