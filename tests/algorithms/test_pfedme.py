"""pFedMe against a bare rewrite, its inner minimum in closed form, and FedAvg."""

from functools import partial

import pytest
import torch
from helpers import blobs, phase, run
from helpers.bare import (
    COHORTS,
    RATE,
    SEED,
    assert_near,
    gradient,
    mean,
    mixed,
    of_tree,
    round_batches,
    two_experts,
    values,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms import PFedMe
from fedmoe_pl.models import LocalOnly
from fedmoe_pl.phases.phase import Phase, Train

EPOCHS, SIZES = 2, [13, 8, 11]
GIVEN = {"weight": 3.0, "inner_steps": 4, "inner_lr": 0.05}


def simulate(data, w, cohorts, decay, server_lr, weights):
    """Algorithm 1, with one local iteration for every batch."""
    kept = {}
    for round, cohort in enumerate(cohorts):
        of_clients = []
        for client in cohort:
            own, theta = w, w
            for x, y in round_batches(data, client, round, EPOCHS):
                for _ in range(4):
                    slopes = gradient(theta, x, y)
                    theta = [
                        t - 0.05 * (g + 3.0 * (t - a) + decay * t) for t, g, a in zip(theta, slopes, own, strict=True)
                    ]
                own = [a - RATE * 3.0 * (a - t) for a, t in zip(own, theta, strict=True)]
            kept[client] = theta
            of_clients.append(own)
        w = mixed(mean(of_clients, weights and [weights[client] for client in cohort]), w, server_lr)
    return w, kept


@pytest.mark.few("0.2-0.5-uniform")
@pytest.mark.parametrize(
    ("decay", "server_lr", "weighting"), [(0.0, 1.0, "samples"), (0.2, 0.5, "uniform"), (0.0, 1.5, "samples")]
)
def test_pfedme_takes_the_steps_of_its_algorithm_and_keeps_theta(decay, server_lr, weighting, tmp_path):
    data, model = blobs(), two_experts()
    pfedme = PFedMe(**GIVEN, decay=decay, server_lr=server_lr, weighting=weighting)
    phases = [phase("it", pfedme, rounds=3, clients_per_round=2)]
    state = run(phases, model, data, tmp_path, EPOCHS, seed=SEED).run.states["it"]
    weights = SIZES if weighting == "samples" else None
    w, theta = simulate(data, values(model), COHORTS, decay, server_lr, weights)
    assert_near(of_tree(state.server), w)
    for client in range(3):
        assert_near(of_tree(state.clients[client], "local_expert."), theta[client])


def test_accumulated_gradients_are_refused(tmp_path):
    """Theta would move a part of the way to its last inner step."""
    pfedme = phase("it", PFedMe(), train=Train(trainer={"accumulate_grad_batches": 2}))
    with pytest.raises(MisconfigurationException, match="accumulate_grad_batches is 2"):
        run([pfedme], two_experts(), blobs(), tmp_path)


def test_theta_is_evaluated_and_a_client_that_never_took_part_uses_the_server_s_w(tmp_path):
    pfedme = Phase("it", PFedMe(**GIVEN), rounds=2, clients_per_round=1, gate=LocalOnly())
    federation = run([pfedme], two_experts(), blobs(), tmp_path, EPOCHS)
    state = federation.run.states["it"]
    assert len(state.clients) < 3
    for client in range(3):
        used = values(federation.client_module("it", client), "local_expert.")
        expected = of_tree(state.clients[client], "local_") if client in state.clients else of_tree(state.server)
        assert all(map(torch.equal, used, expected))


def test_a_round_with_a_learning_rate_of_0_changes_nothing_of_w(tmp_path):
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda round: 0.0)
    it = phase("it", PFedMe(**GIVEN), rounds=2, train=Train(round_lr_scheduler=schedule))
    model = two_experts()
    assert_near(of_tree(run([it], model, blobs(), tmp_path, 1).run.states["it"].server), values(model), 0)
