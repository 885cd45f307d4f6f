"""A client whose update is out of proportion is left out of its round, by its name; nobody else is."""

import math

import pytest
import torch
from helpers.deployed import HOSTILE, tensors, with_hostile

from fedmoe_pl import ClientFailures
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.deployment.answers import out_of_proportion

ZERO = {"w": torch.zeros(2)}


def left_out(changes, received=ZERO, most=10.0):
    sent = {
        client: {"w": received["w"] + torch.tensor(change, dtype=received["w"].dtype)}
        for client, change in enumerate(changes)
    }
    return [*out_of_proportion(sent, dict.fromkeys(sent, received), most)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([(3.0, 4.0), (4.0, 3.0), (30.0, 40.0)], []),  # 5, 5 and 50: ten times the median, 5
        ([(3.0, 4.0), (4.0, 3.0), (30.0, 40.1)], [2]),
        ([(0.0, 0.0), (0.0, 0.0), (3.0, 4.0)], []),  # those that have not changed do not count
        ([(3.0, 4.0), (300.0, 400.0)], [1]),
        ([(300.0, 400.0), (3.0, 4.0), (3.0, 4.0)], [0]),
        ([(3e38, 3e38), (3.0, 4.0)], [0]),
        ([(0.0, 0.0)], []),
        ([(3e38, 3e38)], []),  # nothing to compare with
        ([], []),
    ],
)
def test_the_median_of_the_round_is_usual(changes, expected):
    assert left_out(changes) == expected


def test_a_change_as_long_as_what_was_received_is_usual():
    received = {"w": torch.tensor([30.0, 40.0], dtype=torch.float64)}
    assert left_out([(1e-9, 0.0), (0.0, 1e-9), (300.0, 400.0)], received) == []
    assert left_out([(1e-9, 0.0), (0.0, 1e-9), (300.0, 401.0)], received) == [2]
    assert left_out([(3e38, 3e38)], received) == [0]


def test_values_near_the_largest_of_64_bits():
    assert left_out([(1.7e308, 1.7e308), (1.0, 1.0)], {"w": torch.zeros(2, dtype=torch.float64)}) == [0]


def test_a_mask_with_infinite_values_is_no_change():
    mask = {"w": torch.tensor([1.0, -math.inf])}
    assert left_out([(0.0, 0.0), (1.0, 0.0), (11.0, 0.0)], mask) == [2]


def huge(tree):
    return {
        name: torch.full_like(tensor, 3e38) if tensor.is_floating_point() else tensor for name, tensor in tree.items()
    }


METHODS_AND_CLIENTS = [
    *(("FedAvg", 0), ("FedPAC", 0)),
    *((name, HOSTILE) for name in ("FedAvg", "FedPer", "Scaffold", "FedProto")),
    *((name, HOSTILE) for name in ("FedPAC", "FedKD", "FedMoEDA", "PFedMoE")),
]


@pytest.mark.few(f"FedMoEDA-{HOSTILE}")
@pytest.mark.parametrize(("name", "client"), METHODS_AND_CLIENTS)
def test_huge_values_cost_their_sender_its_round_and_nobody_else(name, client, tmp_path):
    with pytest.warns(UserWarning) as warned:
        deployed = with_hostile(name, tmp_path, "train", tensors(huge), client, clients_per_round=1.0, rounds=2)
    assert [str(each.message).partition(" is left out: its change is ")[0] for each in warned] == [
        f"Phase '{state}', round {round}: client {client}" for state in deployed.run.states for round in (1, 2)
    ]
    (state,) = deployed.run.states.values()
    assert all(tensor.double().abs().max() < 1e6 for tensor in state.server.values() if tensor.numel())


def test_huge_experts_are_left_out_of_an_exchange(tmp_path):
    with pytest.warns(UserWarning, match=f"client {HOSTILE} is left out of the exchange: its change is"):
        with_hostile("FedMoEDA", tmp_path, "read", tensors(huge), rounds=2)


@pytest.mark.parametrize("value", [1.0, -1.0, math.nan])
def test_a_bound_that_would_leave_out_honest_clients_is_refused(value):
    with pytest.raises(InvalidArgumentError, match=rf"max_change is {value}, but must be a number above 1"):
        ClientFailures(max_change=value)
