"""FedRep against a bare rewrite, FedAvg and Local."""

import pytest
from helpers import blobs, phase, run
from helpers.bare import COHORTS, SEED, assert_near, gradient, mean, of_tree, round_batches, step, two_experts, values
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms import FedRep, Local
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.phases.phase import Phase, Train

SIZES, HEAD = [13, 8, 11], "global_expert.classifier."


def simulate(data, start, cohorts, weights):
    """Algorithm 1 with two epochs of the head (W2, b2), then one of the body (W1, b1)."""
    body, heads = start[:2], {}
    for round, cohort in enumerate(cohorts):
        of_clients = []
        for client in cohort:
            own, head = body, heads.get(client, start[2:])
            batches = round_batches(data, client, round, 3)
            each = len(batches) // 3
            for index, (x, y) in enumerate(batches):
                slopes = gradient([*own, *head], x, y)
                if index < 2 * each:
                    head = step(head, slopes[2:])
                else:
                    own = step(own, slopes[:2])
            heads[client] = head
            of_clients.append(own)
        body = mean(of_clients, weights and [weights[client] for client in cohort])
    return body, heads


@pytest.mark.few("samples")
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedrep_trains_heads_first_then_the_body_also_for_clients_that_come_late(weighting, tmp_path):
    data, model = blobs(), two_experts()
    fedrep = phase("FedRep", FedRep(head_epochs=2, weighting=weighting), rounds=3, clients_per_round=2)
    state = run([fedrep], model, data, tmp_path, 3, seed=SEED).run.states["FedRep"]
    body, heads = simulate(data, values(model), COHORTS, SIZES if weighting == "samples" else None)
    assert_near(of_tree(state.server), body)
    for client in range(3):
        assert_near(of_tree(state.clients[client], HEAD), heads[client])


def test_the_last_extra_round_is_a_phase_of_local_that_trains_the_heads(tmp_path):
    phases = [
        phase("FedRep", FedRep(head_epochs=1), rounds=2, clients_per_round=2),
        Phase(
            "heads", Local("global_expert.classifier.*"), start="FedRep", gate=GlobalOnly(), train=Train(max_epochs=3)
        ),
    ]
    data = blobs()
    federation = run(phases, two_experts(), data, tmp_path, 2, seed=SEED)
    states = federation.run.states
    start = values(two_experts())
    for client in range(3):
        head = of_tree(states["FedRep"].clients.get(client, {}), HEAD) or start[2:]
        body = of_tree(states["FedRep"].server)
        for x, y in round_batches(data, client, 2, 3):
            head = step(head, gradient([*body, *head], x, y)[2:])
        assert_near(values(federation.client_module("heads", client)), [*body, *head])


def test_epochs_that_never_reach_the_body_are_refused_before_any_training(tmp_path):
    with pytest.raises(MisconfigurationException) as error:
        run([phase("it", FedRep(head_epochs=2))], two_experts(), blobs(), tmp_path, max_epochs=2)
    assert error.value.argument == "train.max_epochs" and "global_expert.extractor.1." in str(error.value)
