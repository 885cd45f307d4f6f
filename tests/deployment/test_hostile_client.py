"""A server takes nothing from a client that it cannot use, and goes on with the others, whatever a client answers."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from helpers import blobs, sparse_mixture
from helpers.deployed import FOUR, HOSTILE, Deployment, tensors, with_hostile, with_values, without
from helpers.methods import METHODS, Method, everything, one

from fedmoe_pl.algorithms import FedLEASE, FedMoEDA
from fedmoe_pl.deployment import Message


def changed(start, change):
    """A change of the first tensor whose name starts so."""

    def change_one(tree):
        name = next(name for name in tree if name.startswith(start))
        return {**tree, name: change(tree[name])}

    return tensors(change_one)


def added(name, tensor):
    return tensors(lambda tree: {**tree, name: tensor})


def renamed(old, new):
    return tensors(lambda tree: {name.replace(old, new): tensor for name, tensor in tree.items()})


def of_another_cluster(tree):
    model = {name: tensor for name, tensor in tree.items() if "/" not in name}
    (cluster,) = {name.split(".")[1] for name in model}
    other = str((int(cluster) + 1) % 3)
    return {**tree, **{name.replace(f".{cluster}.", f".{other}.", 1): tensor for name, tensor in model.items()}}


def without_weights(tree):
    return {name: tensor for name, tensor in tree.items() if not name.startswith("experts/weight/")}


def with_proxies(tree):
    return {"proxies/1": torch.zeros(2, 4), **tree}


CHECK = torch.tensor([0.0, 0.0, 0.5, 1.0], dtype=torch.float64)  # a validation, for which no round asks
HUGE = torch.tensor(1e30, dtype=torch.float64)
UPDATES = [  # the hostile client has 8 samples
    ("FedAvg", lambda answer: Message("kept", {"keeps": 1}), "its answer to 'train' is 'kept'"),
    ("FedAvg", lambda answer: Message("failed"), "its failure is None, which no 'failed' has"),
    ("FedAvg", with_values(weight=True), "its weight is True, which no 'update' has"),
    ("FedAvg", with_values(weight=1e30), r"its weight is 1e\+30, but must be 8, as its samples say"),
    ("FedAvg", with_values(weight=math.nan), "its weight is nan, but must be 8"),
    ("Scaffold", with_values(weight=8), "its weight is 8, but must be 1"),
    ("TrimmedMean", with_values(weight=8), "its weight is 8, but must be 1"),
    ("SpecialistMixture", with_values(weight=8), "its weight is 8, but must be 6"),  # 8 - floor(0.3 * 8) opt in
    ("FedAvg", tensors(lambda tree: dict([*tree.items()][1:])), "its update has no global_expert"),
    ("FedAvg", added("own/x", torch.zeros(10)), "its update has own/x, which no client sends"),
    ("FedAvg", added("local_expert.x", torch.zeros(1)), "its local_expert.x is not as in the server's model"),
    ("FedAvg", changed("global", lambda tensor: tensor[:1]), "its global_expert.* is not as in the server's model"),
    ("FedAvg", changed("global", lambda tensor: tensor.float()), "its global_expert.* is not as in the server's"),
    ("FedAvg", changed("global", lambda tensor: tensor * math.inf), "its global_expert.* is not finite"),
    ("FedMix", changed("experts/weight/", lambda _: HUGE), "its update has the weights of other samples"),
    ("FedMix", tensors(without_weights), r"its update has no experts/weight/\d"),
    ("FedPAC", changed("prototypes/count", lambda counts: -counts), "its update has the counts of other samples"),
    ("FedPAC", renamed("features/1", "features/0"), "its update has no features/1"),
    ("FedProto", changed("prototypes/count", lambda counts: 5 * counts), "its update has the counts of other samples"),
    ("FD", changed("outputs/count", lambda counts: 5 * counts), "its update has the counts of other samples"),
    ("FD", renamed("senders/1", "senders/0"), "its update has no senders/1"),
    ("IFCA", changed("clusters/tally/", lambda tally: 1e30 * tally), "its update has the tally of other samples"),
    ("IFCA", changed("clusters/tally/", lambda tally: tally + CHECK), "its update has the tally of other samples"),
    ("IFCA", tensors(of_another_cluster), r"its update has (no )?(global_experts|clusters/tally)"),
    ("FedMoEDA", renamed("proxies/1", "proxies/99"), "its update has no proxies/1"),
    ("FedMoEDA", changed("proxies/1", lambda rows: torch.zeros(50_000, 1)), r"its update has a proxies/1 of shape"),
    ("DifferentialPrivacy", changed("aggregation/", lambda _: HUGE), r"its update cannot be used \(ValueError"),
    ("Scaffold", added("control/x", torch.zeros(10)), "its update has control/x, which no client sends"),
    ("FedKD", tensors(lambda tree: {}), "its update has no global_expert"),
    ("HetLoRA", changed("cut/", lambda factor: factor[:1, :1]), "its update has a cut/global_expert.* of shape"),
]
OF_FEDAVG = [update for update in UPDATES if update[0] == "FedAvg"]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "change", "reason"),
    UPDATES,
    ids=lambda value: value if type(value) is str else "",
)
def test_an_update_that_the_client_cannot_have_made(name, change, reason, tmp_path):
    with pytest.warns(UserWarning) as warned:
        with_hostile(name, tmp_path, "train", change, clients_per_round=1.0, rounds=1, evaluate=False)
    (warning,) = (str(each.message) for each in warned if "round 1: client" in str(each.message))
    assert re.search(f"client {HOSTILE} is left out: {reason}", warning), warning


@pytest.mark.parametrize(
    ("algorithm", "model", "change", "number", "reason"),
    [
        (partial(FedMoEDA, interval=2), sparse_mixture, tensors(with_proxies), 2, "has proxies/1, which"),
        (
            partial(FedLEASE, 2),
            METHODS["FedLEASE"].model,
            added("uploads/ids", torch.ones(1)),
            1,
            "has uploads/ids, which",
        ),
        (partial(FedLEASE, 2), METHODS["FedLEASE"].model, tensors(lambda _: {}), 2, "has no uploads/tensors/"),
    ],
    ids=["proxies", "warm-up", "after the warm-up"],
)
def test_an_update_of_another_round(algorithm, model, change, number, reason, tmp_path):
    method = Method(one(algorithm, None, **everything()), model)
    deployed = Deployment(method, tmp_path, datamodule=blobs(FOUR))
    deployed.change(HOSTILE, "train", change)
    with pytest.warns(UserWarning) as warned:
        deployed.run()
    (warning,) = (str(each.message) for each in warned if f"client {HOSTILE} is left out" in str(each.message))
    assert f"round {number}: client {HOSTILE} is left out: its update {reason}" in warning


@pytest.mark.parametrize("client", [0, 3])
def test_an_update_with_which_the_algorithm_cannot_compute_is_the_failure_of_who_sent_it(client, tmp_path):
    narrow = changed("features/", lambda features: features[:, :1])
    with pytest.warns(UserWarning) as warned:
        with_hostile("FedPAC", tmp_path, "train", narrow, client, clients_per_round=1.0, rounds=1)
    (warning,) = (str(each.message) for each in warned)
    assert f"round 1: client {client} is left out: its update cannot be used" in warning


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda answer: Message("kept", {"keeps": 1}), "its answer to 'evaluate' is 'kept'"),
        (without("global_test"), "its global_test is None, which no 'evaluation' has"),
        (with_values(metrics={"f1": 1.0}), "its metrics must be none"),
        (tensors(lambda _: {"gate_weights": torch.zeros(3)}), "its gate_weights are none of its model's gate"),
    ],
)
def test_an_evaluation_that_is_none(change, reason, tmp_path):
    with pytest.warns(UserWarning, match=f"client {HOSTILE} is not evaluated: {reason}"):
        federation = with_hostile("FedAvg", tmp_path, "evaluate", change, rounds=1)
    ((evaluation,),) = (state.evaluations for state in federation.run.states.values())
    assert [np.isnan(each.global_test) for each in evaluation.clients] == [each == HOSTILE for each in range(4)]
    assert all(each.n_train for each in evaluation.clients)


def test_a_request_that_cannot_be_met_asks_for_nothing(tmp_path):
    request = Message("requested", tensors={"experts/asked": torch.tensor(1)})  # no list of experts
    with pytest.warns(UserWarning, match=f"client {HOSTILE}: its request cannot be used"):
        with_hostile("FedMix", tmp_path, "request", lambda answer: request)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (tensors(lambda tree: {name: tensor[:1] for name, tensor in tree.items()}), "is not as in the server's model"),
        (tensors(lambda tree: {}), "its tensors are not those of its parts"),
        (tensors(lambda tree: {**tree, "gate.proxies.0": torch.zeros(1)}), "its tensors are not those of its parts"),
    ],
)
def test_what_a_client_gives_to_others_is_what_was_asked_for(change, warning, tmp_path):
    with pytest.warns(UserWarning, match=f"client {HOSTILE} is left out of the exchange: .*{warning}"):
        with_hostile("FedMoEDA", tmp_path, "read", change)


def test_a_client_that_does_not_say_what_it_keeps_of_an_exchange_keeps_what_it_kept(tmp_path):
    with_hostile("FedMoEDA", tmp_path, "exchange", without("keeps"))
