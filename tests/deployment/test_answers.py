"""A server takes nothing from a client that it cannot use, and goes on with the others, whatever a client answers."""

import numpy as np
import pytest
import torch
from helpers.deployed import HOSTILE as CLIENT
from helpers.deployed import tensors, with_hostile, with_values, without

from fedmoe_pl.deployment import Message


def state_of(federation):
    (state,) = federation.run.states.values()
    return state


NO_EVALUATION = [
    lambda answer: Message("kept", answer.values),
    lambda answer: Message(answer.kind),
    with_values(unknown=1),
    without("global_test"),
    with_values(reweighted_test="high"),
    with_values(global_test=1.5),
    with_values(local_test=True),
    with_values(metrics={"f1": 1.0}),
    with_values(metrics=[]),
    with_values(has_global_expert=None),
    tensors(lambda _: {"gate_weights": torch.zeros(3)}),
]


@pytest.mark.parametrize("change", NO_EVALUATION)
def test_an_evaluation_that_is_none(change, tmp_path):
    with pytest.warns(
        UserWarning, match=f"client {CLIENT} is not evaluated: its .*(is no evaluation|which no|which is odd)"
    ):
        federation = with_hostile("FedAvg", tmp_path, "evaluate", change)
    (evaluation,) = state_of(federation).evaluations
    assert [np.isnan(each.global_test) for each in evaluation.clients] == [each == CLIENT for each in range(5)]
    assert all(each.n_train for each in evaluation.clients)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_values(weight=-1.0), r"its weight is -1\.0"),
        (with_values(weight=True), "its weight is True, which no 'update' has"),
        (with_values(unknown=1), "its unknown is 1, which no 'update' has"),
        (tensors(lambda tree: dict([*tree.items()][1:])), "its update has no global_expert"),
        (tensors(lambda tree: {**tree, "local_expert.unknown": torch.zeros(1)}), "its local_expert.unknown is not as"),
        (lambda answer: Message("failed", {"reason": ["no", {"text": 1}]}), r"its reason is \['no', .*, which no"),
        (lambda answer: Message("odd"), "its part is of the kind 'odd', which is odd"),
        (lambda answer: Message("failed"), "it gives no reason"),
    ],
)
def test_an_update_that_is_none(change, reason, tmp_path):
    with pytest.warns(UserWarning, match=f"clients? {CLIENT} is left out: {reason}"):
        federation = with_hostile("FedAvg of everything", tmp_path, "train", change)
    assert state_of(federation).failed


def test_a_request_that_cannot_be_met_asks_for_nothing(tmp_path):
    request = Message("requested", tensors={"experts/asked": torch.tensor(1)})  # no list of experts
    with pytest.warns(UserWarning, match=f"client {CLIENT}: its request cannot be used"):
        with_hostile("FedMix", tmp_path, "request", lambda answer: request)


@pytest.mark.parametrize(
    ("kind", "change", "warning"),
    [
        ("read", tensors(lambda tree: {name: tensor[:1] for name, tensor in tree.items()}), "left out of the exchange"),
        ("read", lambda answer: Message("given"), "its tensors are not those of its parts"),
        ("read", tensors(lambda tree: {**tree, "gate.proxies.0": torch.zeros(1)}), "are not those of its parts"),
        ("exchange", without("keeps"), None),
    ],
)
def test_an_exchange_with_a_client_that_answers_nonsense(kind, change, warning, tmp_path):
    if warning is None:
        with_hostile("FedMoEDA", tmp_path, kind, change)
        return
    with pytest.warns(UserWarning, match=warning):
        with_hostile("FedMoEDA", tmp_path, kind, change)
