"""Clients that were not in the federation get their models from its checkpoint and their own data alone."""

from functools import partial

import pytest
import torch
from helpers import TensorData, assert_same_bits, blobs, client_generator, mixture, tensors, train_by_hand
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Generator

from fedmoe_pl.algorithms import FedAvg, Local, PersonalizedExpert
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import ConstantGate
from fedmoe_pl.phase import Phase

sgd = partial(torch.optim.SGD, lr=0.1)
FEDPER = "global_expert.extractor.*"


def federation(path, phases, **kwargs):
    defaults = {"trainer": {"max_epochs": 2, "accelerator": "cpu"}, "logger": False, "enable_progress_bar": False}
    return Federation(phases, default_root_dir=str(path), **{**defaults, **kwargs})


def fedavg(shared="global_expert.*", **kwargs):
    return Phase("FedAvg", FedAvg(shared, "global_expert.*"), gate=ConstantGate(1.0), **kwargs)


def trained(path, *phases):
    run = federation(path, [*phases])
    run.fit(mixture(optimizer=sgd), blobs())
    return run, run.run_dir / "checkpoints/last.ckpt"


def new_data(**kwargs):
    """Two clients, whose samples are none of the federation's."""
    data = blobs(sizes=(9, 6), **kwargs)
    data.x = data.x + 0.5
    return data


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_newcomer_fine_tunes_the_federation_s_model_on_its_own_data(tmp_path, rounds):
    fine_tuned = Phase("Fine-tuned", PersonalizedExpert(), gate=ConstantGate(0.0))
    run, checkpoint = trained(tmp_path, fedavg(rounds=3, clients_per_round=2, monitor="global_test"), fine_tuned)
    content = checkpoint.read_bytes()

    later = federation(tmp_path / "later", [fedavg(rounds=3), fine_tuned])
    data = new_data()
    results = later.personalize(mixture(optimizer=sgd), data, str(checkpoint), rounds)
    assert set(results) == {"FedAvg", "Fine-tuned"} and len(results["Fine-tuned"].clients) == 2
    assert results["FedAvg"].selection == "given checkpoint"
    for client in (0, 1):
        module = mixture(ConstantGate(0.0), optimizer=sgd)
        known = run.client_module("FedAvg", 0).global_expert.state_dict()
        module.global_expert.load_state_dict(known)
        module.local_expert.load_state_dict(known)
        batches = data.batches(data.train_samples[client], generator=client_generator(0, client, 0))
        train_by_hand(module, "local_expert.", batches, sgd, 2)
        actual = later.client_module("Fine-tuned", client).state_dict()
        torch.testing.assert_close(dict(actual), dict(module.state_dict()), rtol=0, atol=1e-12)
    assert checkpoint.read_bytes() == content


def test_a_newcomer_trains_what_clients_keep_and_leaves_the_server_as_it_is(tmp_path):
    run, checkpoint = trained(tmp_path, fedavg(FEDPER, rounds=3))
    later = federation(tmp_path / "later", [fedavg(FEDPER, rounds=3)])
    data, start = new_data(), mixture(optimizer=sgd)
    later.personalize(start, data, str(checkpoint), rounds=2)

    assert_same_bits(later.states["FedAvg"].server, run.states["FedAvg"].server)
    for client in (0, 1):
        module = mixture(ConstantGate(1.0), optimizer=sgd)
        shared = run.states["FedAvg"].server
        for round in range(2):  # the extractor of every round is the federation's, the classifier goes on
            module.load_state_dict({**module.state_dict(), **shared})
            batches = data.batches(data.train_samples[client], generator=client_generator(0, client, round))
            train_by_hand(module, "global_expert.", batches, sgd, 2)
        module.load_state_dict({**module.state_dict(), **shared})
        actual = tensors(later.client_module("FedAvg", client))
        torch.testing.assert_close(actual, tensors(module), rtol=0, atol=1e-12)


def test_what_old_clients_kept_reaches_no_newcomer(tmp_path):
    _, checkpoint = trained(tmp_path, Phase("Local", Local(), max_epochs=3), fedavg(FEDPER, rounds=2))
    later = federation(tmp_path / "later", [Phase("Local", Local(), max_epochs=0), fedavg(FEDPER, max_epochs=0)])
    later.personalize(mixture(optimizer=sgd), new_data(), str(checkpoint), rounds=1)
    assert not any(later.states[name].kept for name in ("Local", "FedAvg"))


def test_images_of_newcomers_are_normalized_as_the_federation_s(tmp_path):
    def images(low, high):
        generator = Generator().manual_seed(low)
        x = torch.randint(low, high, (12, 1, 2, 2), generator=generator, dtype=torch.uint8)
        return TensorData(x, torch.arange(12) % 3, [range(6), range(6, 12)], batch_size=4)

    class Flat(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Flatten(), torch.nn.Linear(4, 3))

    first, second = images(0, 100), images(100, 256)
    run = federation(tmp_path, [fedavg(rounds=1)])
    run.fit(mixture(expert=Flat(), dtype=torch.float32), first)
    later = federation(tmp_path / "later", [fedavg(rounds=1)])
    later.personalize(mixture(expert=Flat(), dtype=torch.float32), second, str(run.run_dir / "checkpoints/last.ckpt"))
    pixels = first.arrays.x_train.double() / 255
    mean, std = pixels.mean(), pixels.std(correction=0)
    expected = (second.arrays.x_train.double() / 255 - mean) / std
    torch.testing.assert_close(second.x[:12].double(), expected, rtol=0, atol=1e-5)
    assert abs(second.x.mean()) > 1, "with a normalization of its own it would be 0"


def test_newcomers_are_refused_without_what_they_need(tmp_path):
    run, checkpoint = trained(tmp_path, fedavg(rounds=1))
    later = federation(tmp_path / "later", [fedavg(rounds=1)])
    with pytest.raises(MisconfigurationException, match="rounds is 0, but must be at least 1"):
        later.personalize(mixture(), new_data(), str(checkpoint), rounds=0)
    with pytest.raises(MisconfigurationException, match=r"'last', but no run in .* has a checkpoint"):
        later.personalize(mixture(), new_data())
    with pytest.raises(MisconfigurationException, match="must be the checkpoint of a federation"):
        later.personalize(mixture(), new_data(), str(run.run_dir / "clients/FedAvg/all_clients.ckpt"))
    other = federation(tmp_path / "other", [Phase("FedProx", FedAvg("global_expert.*"))])
    with pytest.raises(
        MisconfigurationException, match=r"whose finished phases are \['FedAvg'\]; 'FedProx' must be one"
    ):
        other.personalize(mixture(), new_data(), str(checkpoint))
    local = federation(tmp_path / "local", [Phase("Local", Local())])
    with pytest.raises(MisconfigurationException, match=r"none of federation\.phases is federated"):
        local.personalize(mixture(), new_data(), str(checkpoint))
    assert not (tmp_path / "other").exists()


def test_newcomers_train_nothing_twice_that_they_do_not_keep(tmp_path):
    everything_trainable = Phase("FedAvg", FedAvg("global_expert.*"), gate=ConstantGate(1.0), rounds=2)
    _, checkpoint = trained(tmp_path, everything_trainable)
    later = federation(tmp_path / "later", [everything_trainable])
    later.personalize(mixture(optimizer=sgd), new_data(), str(checkpoint), rounds=50)
    assert later.states["FedAvg"].round == 1 and not later.states["FedAvg"].kept
