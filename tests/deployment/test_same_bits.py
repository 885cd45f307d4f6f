"""A deployed federation ends with the bits of a simulation, for every method that can be deployed."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from helpers.deployed import Passing, assert_ends_as, deploy, federation, participants
from helpers.methods import METHODS, data, ledger

from fedmoe_pl import Reports
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.callbacks import TrafficLedger
from fedmoe_pl.deployment import Participant
from fedmoe_pl.deployment.secure.masked_round import CODES, KEYS, SHARES
from fedmoe_pl.evaluation.evaluation import METRICS as METRICS_OF_CLIENTS

REFUSED = ("PMMoE",)
OF_ROUNDS = ("request", "train", "exchange", "train masked", "mask")
OF_PROTOCOL = {KEYS, SHARES, CODES}  # of secure aggregation: as headers, they are in no ledger
WAYS = {"down": "down", "between_clients": "down", "requests": "up", "up": "up"}
"""Through the server of a deployment, by the directions of the ledger."""
SPLIT = {"validation_fraction": 0.2, "test_fraction": 0.2}
EVERYTHING = Reports([*METRICS_OF_CLIENTS, "validation_loss", "gate_weights"])


def evaluated(method):
    """The method with every phase evaluated."""
    return replace(method, phases=lambda: [replace(phase, evaluate=True) for phase in method.phases()])


def near(a, b) -> bool:
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))
    return a == b


def _sent(transport):
    """The tensors on the wire in rounds, without what the protocol of secure aggregation adds."""
    return Counter({key: n for key, n in transport.sent(OF_ROUNDS).items() if key[4] not in OF_PROTOCOL})


def assert_sends_what_the_ledger_has(transport, simulated):
    """In every round, each client's tensors on the wire are those of the simulation's ledger, in both directions.

    What clients send each other, the server receives once, and sends everyone who needs it. That the ledger is what the
    audit says, commands/test_audit.py tests.
    """
    rows = [row for row in ledger(simulated) if row["tensor"] != "(weight)"]
    expected, between = Counter(), set()
    for row in rows:
        phase, round, size = row["phase"], int(row["round"]), int(row["bytes"])
        expected[phase, round, WAYS[row["direction"]], int(row["client"]), row["tensor"], size] += 1
        if row["direction"] == "between_clients":
            sender, _, name = row["tensor"].partition(".")
            between.add((phase, round, "up", int(sender), name, size))
    assert _sent(transport) == expected
    assert transport.sent(["read"]) == Counter(between)
    assert {name for *_, way, _, name, _ in transport.sent(["evaluate"]) if way == "up"} <= {"gate_weights"}
    assert not [way for *_, way, _, _, _ in transport.sent(["finish"]) if way == "up"]


@pytest.mark.few("FedPer")
@pytest.mark.parametrize("name", [name for name in METHODS if name not in REFUSED])
def test_every_method(name, tmp_path):
    method, datamodule = evaluated(METHODS[name]), data(**SPLIT)
    simulated = federation(
        method.phases(), tmp_path / "simulation", backend=TrainerBackend(), callbacks=[TrafficLedger()]
    )
    simulated.fit(method.model(), datamodule)
    settings = {"backend": TrainerBackend(), "reports": EVERYTHING}
    transport = Passing(participants(method, data(**SPLIT), tmp_path, **settings))
    deployed = deploy(method, data(**SPLIT), tmp_path, transport, **settings)
    assert_sends_what_the_ledger_has(transport, simulated)

    assert_ends_as(simulated, deployed, tmp_path)
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
