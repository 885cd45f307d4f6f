"""Ditto against a bare rewrite, its minimum in closed form, Local and FedAvg."""

import torch
from helpers import TensorData, assert_same_bits, blobs, momentum_sgd, phase, run
from helpers.bare import (
    COHORTS,
    SEED,
    assert_near,
    gradient,
    mean,
    of_tree,
    quadratic,
    round_batches,
    step,
    two_experts,
    values,
)

from fedmoe_pl.algorithms import Ditto, FedAvg, Local
from fedmoe_pl.models import GlobalOnly, LocalOnly
from fedmoe_pl.phases.phase import Phase, Train
from fedmoe_pl.trees import subtree

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


def test_v_ends_between_the_client_s_minimum_and_w(tmp_path):
    """The minimum of 1/2 ||v - c||^2 + lambda/2 ||v - w||^2 is (c + lambda w) / (1 + lambda)."""
    data = TensorData(torch.zeros(2, 1), torch.tensor([1, 3]), [[0], [1]], dtype=torch.float64)
    federation = run([phase("Ditto", Ditto(2.0))], quadratic(0.1), data, tmp_path, max_epochs=200)
    for client, label in enumerate((1.0, 3.0)):
        center, w = torch.tensor([label, -label]).double(), torch.tensor([2.0, 5.0]).double()
        (v,) = of_tree(federation.run.states["Ditto"].clients[client], "local_expert.")
        torch.testing.assert_close(v, (center + 2 * w) / 3, rtol=0, atol=1e-12)


def test_without_the_term_v_is_local_s_and_w_is_fedavg_s_with_any_weight(tmp_path):
    phases = [
        phase("Local", Local(), rounds=3),
        phase("FedAvg", FedAvg("global_expert.*", weighting="uniform"), rounds=3),
        phase("Ditto", Ditto(0), rounds=3),
        phase("heavy", Ditto(3.0), rounds=3),
        phase("by samples", Ditto(weighting="samples"), rounds=3),
        phase("FedAvg by samples", FedAvg("global_expert.*"), rounds=3),
    ]
    states = run(phases, two_experts(momentum_sgd), blobs(), tmp_path, EPOCHS).run.states
    for client in range(3):
        local, v = states["Local"].clients[client], states["Ditto"].clients[client]
        assert_same_bits(subtree(v, "local_expert."), subtree(local, "global_expert."))
        assert not torch.equal(*(of_tree(states[name].clients[client], "local_")[0] for name in ("Ditto", "heavy")))
    for ditto, fedavg in (("Ditto", "FedAvg"), ("heavy", "FedAvg"), ("by samples", "FedAvg by samples")):
        w = subtree(states[ditto].server, "global_expert.")
        assert_same_bits(w, subtree(states[fedavg].server, "global_expert."))


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
