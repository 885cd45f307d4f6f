"""A deployed federation ends with the bits of a simulation, for every method that can be deployed."""

import math
from collections import Counter
from functools import partial

import pytest
from helpers import blobs
from helpers.deployed import Deployment, method_of, simulated
from helpers.methods import METHODS, Method, alone, data, fedavg, ledger

from fedmoe_pl import Reports, Select
from fedmoe_pl.algorithms import LabelPrior
from fedmoe_pl.callbacks import TrafficLedger
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.deployment.secure.masked_round import CODES, KEYS, SHARES
from fedmoe_pl.evaluation.results import ACCURACIES
from fedmoe_pl.models import GlobalOnly

REFUSED = ("PMMoE",)
OF_ROUNDS = ("request", "train", "exchange", "train masked", "mask")
OF_PROTOCOL = {KEYS, SHARES, CODES}  # of secure aggregation: as headers, they are in no ledger
WAYS = {"down": "down", "between_clients": "down", "requests": "up", "up": "up"}
"""Through the server of a deployment, by the directions of the ledger."""
SPLIT = {"validation_fraction": 0.2, "test_fraction": 0.2}
EVERYTHING = Reports([*ACCURACIES, "validation_loss", "gate_weights"])


def near(a, b) -> bool:
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))
    return a == b


def assert_sends_what_the_ledger_has(transport, simulation):
    """In every round, each client's tensors on the wire are those of the simulation's ledger, in both directions.

    What clients send each other, the server receives once, and sends everyone who needs it. That the ledger is what the
    audit says, commands/test_audit.py tests.
    """
    expected, between = Counter(), set()
    for row in ledger(simulation):
        if row["tensor"] == "(weight)":
            continue
        phase, round, size = row["phase"], int(row["round"]), int(row["bytes"])
        expected[phase, round, WAYS[row["direction"]], int(row["client"]), row["tensor"], size] += 1
        if row["direction"] == "between_clients":
            sender, _, name = row["tensor"].partition(".")
            between.add((phase, round, "up", int(sender), name, size))
    sent = transport.sent(OF_ROUNDS)
    assert Counter({key: n for key, n in sent.items() if key[4] not in OF_PROTOCOL}) == expected
    assert transport.sent(["read"]) == Counter(between)
    assert {name for *_, way, _, name, _ in transport.sent(["evaluate"]) if way == "up"} <= {"gate_weights"}
    assert not [way for *_, way, _, _, _ in transport.sent(["finish"]) if way == "up"]


@pytest.mark.few("FedPer")
@pytest.mark.parametrize("name", [name for name in METHODS if name not in REFUSED])
def test_every_method(name, tmp_path, monkeypatch):
    # cohorts with differential privacy follow from a secret of the server, in place of the seed
    monkeypatch.setattr("fedmoe_pl.deployment.server._secret_of", lambda *_: None)
    method = method_of(name, evaluate=True)
    simulation = simulated(method, tmp_path, data(**SPLIT), callbacks=[TrafficLedger()])
    deployed = Deployment(method, tmp_path, datamodule=data(**SPLIT), reports=EVERYTHING)
    deployed.run()
    assert_sends_what_the_ledger_has(deployed, simulation)
    deployed.assert_ends_as(simulation)
    for row, other in zip(simulation.run.rows, deployed.server.run.rows, strict=True):
        # a simulation computes some means over other batches
        different = {key: (row[key], other[key]) for key in row if not near(row[key], other[key])}
        assert not different or (name == "FedKD" and [*different] == ["flops"])  # it counts with what clients keep


@pytest.mark.few("validation")
@pytest.mark.parametrize(
    "phases",
    [
        pytest.param(lambda: [fedavg(evaluate=True, select=Select("validation"))], id="validation"),
        pytest.param(lambda: [fedavg(evaluate=True, select=Select("local_test"))], id="local_test"),
        pytest.param(lambda: [fedavg(), alone("prior", LabelPrior("auto"), gate=GlobalOnly())], id="prior"),
    ],
)
def test_a_client_without_held_out_samples_takes_part(phases, tmp_path):
    """The checks of its own machine know no other client's samples."""
    method, three = Method(phases), partial(blobs, (13, 2, 11), **SPLIT)
    assert not len(three().validation_samples[1]) and not len(three().test_samples[1])
    simulation, deployed = simulated(method, tmp_path, three()), Deployment(method, tmp_path, datamodule=three())
    deployed.run()
    assert not any(state.failed for state in deployed.server.run.states.values())
    deployed.assert_ends_as(simulation)


def test_a_client_knows_how_many_take_part(tmp_path):
    """SCAFFOLD's clients divide by their number."""
    method = method_of("Scaffold", clients=[0, 2])
    simulation, deployed = simulated(method, tmp_path), Deployment(method, tmp_path)
    deployed.run()
    deployed.assert_ends_as(simulation)


def test_the_server_refuses_what_no_client_has_samples_for(tmp_path):
    deployed = Deployment(method_of("FedAvg", evaluate=True, select=Select("validation")), tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"select\.monitor is 'validation', but must be a validation metric"):
        deployed.run()


@pytest.mark.slow
def test_a_client_sends_its_request_once_per_round(tmp_path):
    deployed = Deployment(method_of("FedMix", clients_per_round=1.0), tmp_path)
    deployed.run()
    answers = zip(deployed.heard, deployed.answers, strict=True)
    asked = [(client, message.values["round"]) for (client, message), answer in answers if answer.kind == "requested"]
    assert sorted(asked) == [(client, round) for client in range(5) for round in range(2)]
