"""What a client weighs follows from the samples that it has described; nothing else of an update can outweigh it."""

import re

import pytest
import torch
from helpers.deployed import HOSTILE, tensors, with_hostile, with_values


def changed(start, change):
    """A change of the first tensor whose name starts so."""

    def change_one(tree):
        name = next(name for name in tree if name.startswith(start))
        return {**tree, name: change(tree[name])}

    return tensors(change_one)


def added(**tree):
    return tensors(lambda sent: {**sent, **{name.replace("__", "/"): tensor for name, tensor in tree.items()}})


def renamed(old, new):
    return tensors(lambda tree: {name.replace(old, new): tensor for name, tensor in tree.items()})


def of_another_cluster(tree):
    model = {name: tensor for name, tensor in tree.items() if "/" not in name}
    (cluster,) = {name.split(".")[1] for name in model}
    other = str((int(cluster) + 1) % 3)
    return {**tree, **{name.replace(f".{cluster}.", f".{other}.", 1): tensor for name, tensor in model.items()}}


def without_weights(tree):
    return {name: tensor for name, tensor in tree.items() if not name.startswith("experts/weight/")}


HUGE = torch.tensor(1e30, dtype=torch.float64)
ATTACKS = [  # the hostile client has 8 samples
    ("FedAvg", with_values(weight=1e30), r"weight is 1e\+30, but must be 8, as its samples say"),
    ("FedAvg", with_values(weight=0), "weight is 0, but must be 8"),
    ("FedRep", with_values(weight=8.5), r"weight is 8\.5, but must be 8"),
    ("Scaffold", with_values(weight=8), "weight is 8, but must be 1"),
    ("FedMoEDA", with_values(weight=8), "weight is 8, but must be 1"),
    ("TrimmedMean", with_values(weight=8), "weight is 8, but must be 1"),
    ("DifferentialPrivacy", with_values(weight=8), "weight is 8, but must be 1"),
    ("SpecialistMixture", with_values(weight=8), "weight is 8, but must be 6"),  # 8 - floor(0.3 * 8) opt in
    ("FedMix", changed("experts/weight/", lambda _: HUGE), "update has the weights of other samples"),
    ("FedMix", changed("experts/weight/", lambda _: -HUGE), "update has the weights of other samples"),
    ("FedMix", tensors(without_weights), r"update has no experts/weight/\d"),
    ("FedPAC", changed("prototypes/count", lambda counts: counts + 10**15), "update has the counts of other samples"),
    ("FedPAC", changed("prototypes/count", lambda counts: -counts), "update has the counts of other samples"),
    ("FedProto", changed("prototypes/count", lambda counts: 5 * counts), "update has the counts of other samples"),
    ("FD", changed("outputs/count", lambda counts: 5 * counts), "update has the counts of other samples"),
    ("IFCA", changed("clusters/tally/", lambda tally: 1e30 * tally), "update has the tally of other samples"),
    ("IFCA", tensors(of_another_cluster), r"update has (no )?(global_experts|clusters/tally)"),
    ("FedPAC", renamed("features/1", "features/0"), "update has no features/1"),
    ("FD", renamed("senders/1", "senders/0"), "update has no senders/1"),
    ("FedMoEDA", renamed("proxies/1", "proxies/99"), "update has proxies/99, which no client sends"),
    ("FedMoEDA", changed("proxies/1", lambda rows: torch.zeros(50_000, 1)), r"update has a proxies/1 of shape"),
    ("DifferentialPrivacy", changed("aggregation/", lambda _: HUGE), r"update cannot be used \(ValueError"),
    ("FedAvg", added(own__x=torch.zeros(10)), "update has own/x, which no client sends"),
    ("Scaffold", added(control__x=torch.zeros(10)), "update has control/x, which no client sends"),
    ("FedKD", tensors(lambda tree: {}), "update has no global_expert"),
]


@pytest.mark.parametrize(("name", "change", "reason"), ATTACKS, ids=lambda value: value if type(value) is str else "")
def test_an_update_that_the_client_cannot_have_made(name, change, reason, tmp_path):
    with pytest.warns(UserWarning) as warned:
        with_hostile(name, tmp_path, "train", change, clients_per_round=1.0, rounds=1, evaluate=False)
    (warning,) = (str(each.message) for each in warned if "round 1: client" in str(each.message))
    assert re.search(f"client {HOSTILE} is left out: its {reason}", warning), warning


@pytest.mark.parametrize("client", [0, 4])
def test_an_update_with_which_the_algorithm_cannot_compute_is_the_failure_of_who_sent_it(client, tmp_path):
    narrow = changed("features/", lambda features: features[:, :1])
    with pytest.warns(UserWarning) as warned:
        with_hostile("FedPAC", tmp_path, "train", narrow, client, clients_per_round=1.0, rounds=1)
    (warning,) = (str(each.message) for each in warned)
    assert f"round 1: client {client} is left out: its update cannot be used" in warning
