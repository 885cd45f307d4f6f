"""Federated distillation against a bare loop of PyTorch, and its limits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import TensorData, assert_same_bits, client_generator, mixture, momentum_sgd, phase, run, tensors
from helpers.prototypes import SIZES, without_a_class

from fedmoe_pl.algorithms import FD, Local
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.phases.participation import sample_cohort

MEAN, COUNT = "outputs/mean", "outputs/count"


def distill(model, batches, targets, weight, outputs):
    """Trains a client's model, sample by sample in the distance."""
    optimizer = momentum_sgd(model.parameters())
    for _ in range(2):
        for x, y in batches:
            logits = model(x)
            distance = 0.0
            for row, label in zip(logits, y.tolist(), strict=True):
                if label not in targets:
                    continue
                if outputs == "probabilities":
                    distance = distance - (targets[label] * (row.exp() / row.exp().sum()).log()).sum() / len(y)
                else:
                    distance = distance + F.mse_loss(row, targets[label]) / len(y)
            optimizer.zero_grad()
            (F.cross_entropy(logits, y) + weight * distance).backward()
            optimizer.step()


def mean_outputs(model, x, y, outputs):
    with torch.no_grad():
        scores = model(x).softmax(1) if outputs == "probabilities" else model(x)
        return {label: scores[y == label].mean(0) for label in y.unique().tolist()}


def of_others(sent, client):
    """Mean outputs per class of the clients other than this one, by class."""
    others = [means for sender, means in sent.items() if sender != client]
    having = {label: [means[label] for means in others if label in means] for label in range(3)}
    return {label: sum(means) / len(means) for label, means in having.items() if means}


@pytest.mark.few(1)
@pytest.mark.parametrize("outputs", ["probabilities", "logits"])
@pytest.mark.parametrize("clients_per_round", [None, 2])
def test_rounds_equal_a_loop_in_which_the_server_knows_every_client_s_outputs(outputs, clients_per_round, tmp_path):
    data, weight, rounds = without_a_class(), 0.7, 5
    it = phase("it", FD("global_expert", weight, outputs), rounds=rounds, clients_per_round=clients_per_round)
    fed = run([it], mixture(), data, tmp_path, seed=4)
    models = [copy.deepcopy(mixture().global_expert) for _ in SIZES]
    sent, cohorts = {}, []
    for round in range(rounds):
        cohort = sample_cohort(range(3), clients_per_round or 3, 4, round)
        of_round = {}
        for client in cohort:
            samples = data.train_samples[client]
            batches = data.batches(samples, generator=client_generator(4, client, round))
            distill(models[client], batches, of_others(sent, client), weight, outputs)
            of_round[client] = mean_outputs(models[client], data.x[samples], data.y[samples], outputs)
        sent = of_round
        cohorts.append(tuple(cohort))
    returning = [c for r in range(2, rounds) for c in cohorts[r] if c not in cohorts[r - 1] and c in cohorts[r - 2]]
    assert clients_per_round is None or returning, "a client comes back after a round without it"
    server = fed.run.states["it"].server
    for label, mean in of_others(sent, None).items():
        torch.testing.assert_close(server[MEAN][label], mean, rtol=1e-10, atol=1e-10)
    for client, model in enumerate(models):
        trained = fed.client_module("it", client).global_expert
        torch.testing.assert_close(tensors(trained), tensors(model), rtol=1e-10, atol=1e-10)


def test_a_class_that_no_other_client_has_is_skipped_and_a_client_never_learns_from_itself(tmp_path):
    """Two clients: only class 2 is both's. Without it, each of them trains alone."""
    both = without_a_class((13, 8))
    parts = [part[both.y[part] != 2] for part in both.train_samples]
    kept = {}
    for name, algorithm in (("FD", FD(weight=0.9)), ("Local", Local("global_expert.*"))):
        data = TensorData(both.x[:21], both.y[:21], parts, dtype=torch.float64, batch_size=4)
        it = phase("it", algorithm, rounds=3)
        kept[name] = run([it], mixture(gate=GlobalOnly()), data, tmp_path / name).run.states["it"].clients
    for client in (0, 1):
        expected = kept["Local"][client]
        assert_same_bits({name: kept["FD"][client][name] for name in expected}, expected)
