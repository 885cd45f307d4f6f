"""Ditto against a bare rewrite, its minimum in closed form, Local and FedAvg."""

import torch
from helpers import blobs, phase, run
from helpers.bare import COHORTS, SEED, assert_near, gradient, mean, of_tree, round_batches, step, two_experts, values

from fedmoe_pl.algorithms import Ditto, FedAvg, Local
from fedmoe_pl.models import GlobalOnly, LocalOnly
from fedmoe_pl.phases.phase import Phase, Train

EPOCHS = 2


def simulate(data, w, cohorts, weight):
    """Algorithm 1, with one step of v and of w for every batch."""
    start, v = w, {}
    for round, cohort in enumerate(cohorts):
        of_clients = []
        for client in cohort:
            own, personal = w, v.get(client, start)
            for x, y in round_batches(data, client, round, EPOCHS):
                pulled = [g + weight * (a - b) for g, a, b in zip(gradient(personal, x, y), personal, w, strict=True)]
                personal, own = step(personal, pulled), step(own, gradient(own, x, y))
            v[client] = personal
            of_clients.append(own)
        w = mean(of_clients)
    return w, v


def test_ditto_takes_the_steps_of_its_algorithm_also_for_clients_that_come_late(tmp_path):
    data, model = blobs(), two_experts()
    ditto = phase("Ditto", Ditto(0.7), rounds=3, clients_per_round=2)
    state = run([ditto], model, data, tmp_path, EPOCHS, seed=SEED).run.states["Ditto"]
    w, v = simulate(data, values(model), COHORTS, 0.7)
    assert_near(of_tree(state.server), w)
    for client in range(3):
        assert_near(of_tree(state.clients[client], "local_expert."), v[client])


def test_a_client_that_never_took_part_uses_the_first_w_also_in_later_phases(tmp_path):
    phases = [
        phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly()),
        Phase("Ditto", Ditto(), clients_per_round=1, gate=LocalOnly(), start="FedAvg"),
        phase("Local", Local(), train=Train(max_epochs=0), start="Ditto"),
    ]
    federation = run(phases, two_experts(), blobs(), tmp_path, EPOCHS)
    (trained,) = federation.run.states["Ditto"].clients
    start = of_tree(federation.run.states["FedAvg"].server)
    for client in range(3):
        for name in ("Ditto", "Local"):
            v = values(federation.client_module(name, client), "local_expert.")
            assert all(map(torch.equal, v, start)) == (client != trained)
