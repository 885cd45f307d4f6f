"""APFL against a bare rewrite, FedAvg and Local."""

import pytest
from helpers import blobs, phase, run
from helpers.bare import (
    COHORTS,
    SEED,
    assert_near,
    gradient,
    loss,
    mean,
    mixed,
    of_tree,
    round_batches,
    step,
    two_experts,
    values,
)

from fedmoe_pl.algorithms import APFL
from fedmoe_pl.models import LocalOnly
from fedmoe_pl.phases.phase import Phase

EPOCHS, ALPHA = 2, "mixture/alpha"


def slope(data, client, v, w, alpha):
    """The derivative of the client's mean loss by alpha, from the difference of two losses."""
    samples = data.train_samples[client]
    x, y = data.x[samples], data.y[samples]
    high, low = (loss(mixed(v, w, alpha + shift), x, y) for shift in (1e-5, -1e-5))
    return (high - low).item() / 2e-5


def simulate(data, w, cohorts, alpha_lr, weights):
    """Algorithm 1: both steps of a batch from the values before it, v along the mixture's gradient times alpha."""
    start, v, alpha = w, {}, {}
    for round, cohort in enumerate(cohorts):
        of_clients = []
        for client in cohort:
            own, personal, share = w, v.get(client, start), alpha.get(client, 0.3)
            share = min(max(share - alpha_lr * slope(data, client, personal, w, share), 0.0), 1.0)
            for x, y in round_batches(data, client, round, EPOCHS):
                of_mixture = [share * g for g in gradient(mixed(personal, own, share), x, y)]
                personal, own = step(personal, of_mixture), step(own, gradient(own, x, y))
            v[client], alpha[client] = personal, share
            of_clients.append(own)
        w = mean(of_clients, weights and [weights[client] for client in cohort])
    return w, v, alpha


@pytest.mark.parametrize(("alpha_lr", "weighting"), [(0.0, "uniform"), (0.2, "samples")])
@pytest.mark.few(1)
def test_apfl_takes_the_steps_of_its_algorithm_and_is_evaluated_with_the_mixture(alpha_lr, weighting, tmp_path):
    data, model = blobs(), two_experts()
    apfl = Phase("APFL", APFL(0.3, alpha_lr, weighting), rounds=3, clients_per_round=2, gate=LocalOnly())
    federation = run([apfl], model, data, tmp_path, EPOCHS, seed=SEED)
    state = federation.run.states["APFL"]
    weights = [13, 8, 11] if weighting == "samples" else None
    w, v, alpha = simulate(data, values(model), COHORTS, alpha_lr, weights)
    tolerance = 1e-10 if alpha_lr == 0 else 1e-8  # that of a difference of losses
    assert_near(of_tree(state.server), w, tolerance)
    for client in range(3):
        assert_near(of_tree(state.clients[client], "local_expert."), v[client], tolerance)
        assert state.clients[client][ALPHA].item() == pytest.approx(alpha[client], abs=tolerance)
        mixture = values(federation.client_module("APFL", client), "local_expert.")
        assert_near(mixture, mixed(v[client], w, alpha[client]), tolerance)
    assert len({*alpha.values()}) == (1 if alpha_lr == 0 else 3)


def test_alpha_stays_between_0_and_1(tmp_path):
    phases = [phase("APFL", APFL(0.5, 1e6), rounds=2)]
    kept = run(phases, two_experts(), blobs(), tmp_path, EPOCHS).run.states["APFL"].clients
    assert all(tree[ALPHA].item() in (0, 1) for tree in kept.values())
