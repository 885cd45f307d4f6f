"""FedALA against a bare rewrite in PyTorch, its limits, and what clients keep."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, client_generator, mixture, run, tensors
from helpers.ingredients import Own
from torch import Generator

from fedmoe_pl import Phase, Select
from fedmoe_pl.algorithms import FedALA
from fedmoe_pl.algorithms.fedala import _have_settled
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.phases.participation import sample_cohort
from fedmoe_pl.seeds import derive_seed
from fedmoe_pl.trees import with_prefix

SIZES, BATCH, RATE, ROUNDS, SEED = (23, 18, 31), 4, 0.5, 4, 5
model = partial(mixture, optimizer=partial(torch.optim.SGD, lr=RATE))


def data():
    return blobs(sizes=SIZES, batch_size=BATCH)


def ala(**kwargs) -> Phase:
    given = {"rounds": ROUNDS, "clients_per_round": 2, "gate": GlobalOnly(), **kwargs.pop("phase", {})}
    return Phase("FedALA", FedALA(**kwargs), **given)


def mixed_by_hand(received, local, weights, samples, client, round, datamodule, last, eta, share, max_passes, size):
    """Algorithm 1, lines 6 to 16, on copies of whole experts; the received one if there is no local one."""
    if local is None:
        return copy.deepcopy(received), None
    parameters, of_local = list(received.parameters())[-last:], list(local.parameters())[-last:]
    number = int(share * len(samples))
    generator = Generator().manual_seed(derive_seed(SEED, 75, client, round))
    start = int(torch.randint(len(samples) - number + 1, (), generator=generator))
    chosen = samples[start : start + number]
    first, weights = weights is None, weights or [torch.ones_like(p) for p in parameters]
    mixture = copy.deepcopy(received)
    places, losses = list(mixture.parameters())[-last:], []

    def blend():
        for place, theta_g, theta_l, w in zip(places, parameters, of_local, weights, strict=True):
            place.data = theta_l.data + (theta_g.data - theta_l.data) * w

    blend()
    while True:
        for batch in chosen.split(size):
            mixture.zero_grad()
            loss = F.cross_entropy(mixture(datamodule.x[batch]), datamodule.y[batch])
            loss.backward()
            weights = [
                torch.clamp(w - eta * place.grad * (theta_g.data - theta_l.data), 0, 1)
                for w, place, theta_g, theta_l in zip(weights, places, parameters, of_local, strict=True)
            ]
            blend()
        losses.append(loss.item())
        if not first or len(losses) == max_passes or (len(losses) > 10 and np.std(losses[-10:]) < 0.1):
            return mixture, weights


def by_hand(last, eta, share, max_passes, size=BATCH):
    """All rounds: the server's expert, the expert that each client would use next, and its weights."""
    datamodule, expert = data(), model(GlobalOnly()).global_expert
    locals_, weights = [None] * 3, [None] * 3

    def mixed(client, round):
        samples = datamodule.train_samples[client]
        arguments = datamodule, last, eta, share, max_passes, size
        return mixed_by_hand(expert, locals_[client], weights[client], samples, client, round, *arguments)

    for round in range(ROUNDS):
        cohort, trained = sample_cohort(range(3), 2, SEED, round), {}
        for client in cohort:
            trained[client], weights[client] = mixed(client, round)
            samples, generator = datamodule.train_samples[client], client_generator(SEED, client, round)
            optimizer = torch.optim.SGD(trained[client].parameters(), lr=RATE)
            for _ in range(2):
                for batch in samples[torch.randperm(len(samples), generator=generator)].split(BATCH):
                    optimizer.zero_grad()
                    F.cross_entropy(trained[client](datamodule.x[batch]), datamodule.y[batch]).backward()
                    optimizer.step()
        total, expert = sum(SIZES[client] for client in cohort), copy.deepcopy(expert)
        for name, parameter in expert.named_parameters():
            values = (SIZES[client] / total * dict(trained[client].named_parameters())[name] for client in cohort)
            parameter.data = sum(value.detach() for value in values)
        locals_ = [trained.get(client, locals_[client]) for client in range(3)]
    return expert, [mixed(client, ROUNDS)[0] for client in range(3)], weights


SETTINGS = {
    "defaults": {"last_parameters": 2, "eta": 1.0, "sample_share": 0.8, "max_passes": 100},
    "all parameters": {"last_parameters": 0, "eta": 3.0, "sample_share": 0.8, "max_passes": 100},
    "few passes": {"last_parameters": 3, "eta": 1.0, "sample_share": 0.5, "max_passes": 3, "batch_size": 7},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_rounds_are_those_of_a_bare_rewrite(name, tmp_path):
    settings = SETTINGS[name]
    federation = run([ala(**settings)], model(), data(), tmp_path, seed=SEED)
    expert, experts, weights = by_hand(*settings.values())
    state = federation.run.states["FedALA"]
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    close(state.server, with_prefix(dict(expert.state_dict()), "global_expert."))
    inner = 0
    for client in range(3):
        close(dict(federation.client_module("FedALA", client).global_expert.state_dict()), experts[client].state_dict())
        kept = [tensor for key, tensor in state.clients[client].items() if key.startswith("ala/weights/")]
        assert len(kept) == len(weights[client] or [])
        for actual, expected in zip(kept, weights[client] or [], strict=True):
            close(actual, expected)
            inner += ((actual > 0) & (actual < 1)).sum().item()
    assert inner, "or the weights say nothing"


def test_first_passes_end_once_the_last_ten_of_more_losses_deviate_by_less_than_a_tenth():
    """The standard deviation of as many of a as of b is half their distance."""
    assert _have_settled([9.0, *[1.0, 1.19] * 5])
    assert not _have_settled([9.0, *[1.0, 1.21] * 5])
    assert not _have_settled([1.0, 1.19] * 5)


@pytest.mark.slow
def test_the_module_itself_may_be_the_expert(tmp_path):
    of_user = Own(model().global_expert, partial(torch.optim.SGD, lr=RATE))
    part = ala(phase={"rounds": 2, "clients_per_round": None})
    one, other = (
        run([its_phase], module, data(), tmp_path, backend=TrainerBackend())
        for its_phase, module in ((Phase("FedALA", FedALA(expert=""), 2), of_user), (part, model()))
    )
    for client in range(3):
        itself, expert = one.client_module("FedALA", client).net, other.client_module("FedALA", client).global_expert
        assert_same_bits(tensors(itself), tensors(expert))


@pytest.mark.slow
def test_a_selected_round_is_evaluated_once_more_as_it_was(tmp_path):
    """With the slice of its own round, not of the last one."""
    it = ala(eta=20.0, phase={"select": Select("global_test"), "clients_per_round": None})
    federation = run([it], model(), data(), tmp_path)
    state, result = federation.run.states["FedALA"], federation.results["FedALA"]
    assert state.best_round < state.round
    (row,) = (row for row in federation.run.rows if row["round"] == state.best_round)
    for metric in ("reweighted_test", "global_test"):
        assert result.spread(metric).mean == row[f"{metric}_mean"]
