"""Per-FedAvg against a bare rewrite, the gradient of a quadratic in closed form, and FedAvg."""

import pytest
import torch
from helpers import blobs, mixture, phase, run
from helpers.backends import WithBatchNorm
from helpers.bare import (
    COHORTS,
    SEED,
    assert_near,
    gradient,
    loss,
    mean,
    of_tree,
    round_batches,
    sgd,
    step,
    two_experts,
    values,
)

from fedmoe_pl.algorithms import PerFedAvg
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.phases.phase import Phase

SIZES, INNER = [13, 8, 11], 0.3


def meta_gradient(w, x, y, second_order):
    half = len(y) // 2
    if not half:
        return gradient(w, x, y)
    leaves = [tensor.detach().requires_grad_() for tensor in w]
    inner = torch.autograd.grad(loss(leaves, x[:half], y[:half]), leaves, create_graph=second_order)
    of_step = loss(step(leaves, inner, INNER), x[half:], y[half:])
    return [*torch.autograd.grad(of_step, leaves)]


@pytest.mark.few("False-None")
@pytest.mark.parametrize("weighting", [None, "samples"])
@pytest.mark.parametrize("second_order", [False, True])
def test_per_fedavg_takes_the_steps_of_its_algorithm_and_is_evaluated_after_one_more(second_order, weighting, tmp_path):
    data, model = blobs(), two_experts()
    algorithm = PerFedAvg(INNER, second_order, **({"weighting": weighting} if weighting else {}))
    it = Phase("it", algorithm, rounds=3, clients_per_round=2, gate=GlobalOnly())
    federation = run([it], model, data, tmp_path, 2, seed=SEED)
    w = values(model)
    for round, cohort in enumerate(COHORTS):
        of_clients = []
        for client in cohort:
            own = w
            for x, y in round_batches(data, client, round, 2):
                own = step(own, meta_gradient(own, x, y, second_order))
            of_clients.append(own)
        w = mean(of_clients, [SIZES[client] if weighting else 1 for client in cohort])
    assert_near(of_tree(federation.run.states["it"].server), w)
    for client in range(3):
        samples = data.train_samples[client]
        adapted = step(w, gradient(w, data.x[samples], data.y[samples]), INNER)
        assert_near(values(federation.client_module("it", client)), adapted)
    assert not any(federation.run.states["it"].clients.values())


def test_batch_normalization_needs_two_samples_in_both_halves(tmp_path):
    """Of batches of 4 and 3, only the larger ones are halved; statistics are those of all forward passes."""
    model = mixture(GlobalOnly(), WithBatchNorm(), optimizer=sgd)
    data = blobs(sizes=(7, 7))
    state = run([phase("it", PerFedAvg(INNER))], model, data, tmp_path, 1).run.states["it"]
    assert state.server["global_expert.extractor.1.num_batches_tracked"] == 3
    assert all(tensor.isfinite().all() for tensor in state.server.values())


def test_the_whole_module_can_be_the_expert(tmp_path):
    """With one expert at work, the mixture's step is the expert's."""
    phases = [phase("all", PerFedAvg(INNER, expert=""), rounds=2), phase("one", PerFedAvg(INNER), rounds=2)]
    states = run(phases, two_experts(), blobs(), tmp_path, 2).run.states
    assert_near(of_tree(states["all"].server), of_tree(states["one"].server), 1e-14)
