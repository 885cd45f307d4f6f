"""A deployed federation ends with the bits of a simulation, for every method that can be deployed."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.deployed import deploy, federation, kept_by
from helpers.methods import METHODS, data

from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.deployment import Participant

REFUSED = ("FedJETs", "PMMoE")
SPLIT = {"validation_fraction": 0.2, "test_fraction": 0.2}


def evaluated(method):
    """The method with every phase evaluated."""
    return replace(method, phases=lambda: [replace(phase, evaluate=True) for phase in method.phases()])


def near(a, b) -> bool:
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))
    return a == b


@pytest.mark.parametrize("name", [name for name in METHODS if name not in REFUSED])
def test_every_method(name, tmp_path):
    method, datamodule = evaluated(METHODS[name]), data(**SPLIT)
    simulated = federation(method.phases(), tmp_path / "simulation", backend=TrainerBackend())
    simulated.fit(method.model(), datamodule)
    deployed = deploy(method, data(**SPLIT), tmp_path, backend=TrainerBackend())

    for phase, state in simulated.run.states.items():
        other = deployed.run.states[phase]
        assert state.server.keys() == other.server.keys()
        for tensor in state.server:
            assert torch.equal(state.server[tensor], other.server[tensor]), (phase, tensor)
        for client in range(datamodule.num_clients):
            kept, there = state.kept.get(client, {}), kept_by(tmp_path, deployed, phase, client)
            assert kept.keys() == there.keys(), (phase, client)
            assert all(torch.equal(kept[tensor], there[tensor]) for tensor in kept), (phase, client)
    assert len(simulated.run.rows) == len(deployed.run.rows)
    for row, other in zip(simulated.run.rows, deployed.run.rows, strict=True):
        # a simulation computes some means over other batches
        different = {key: (row[key], other[key]) for key in row if not near(row[key], other[key])}
        assert not different or (name == "FedKD" and [*different] == ["flops"])  # it counts with what clients keep


def test_a_client_sends_its_request_once_per_round(tmp_path, monkeypatch):
    answer, asked = Participant._request, []

    def request(self, message):
        asked.append((self.client, message.values["round"]))
        return answer(self, message)

    monkeypatch.setattr(Participant, "_request", request)
    method = replace(METHODS["FedMix"], phases=lambda: [replace(METHODS["FedMix"].phases()[0], clients_per_round=1.0)])
    deploy(method, data(), tmp_path, backend=TrainerBackend())
    assert sorted(asked) == [(client, round) for client in range(5) for round in range(2)]
