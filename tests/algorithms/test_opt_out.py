"""Federated learning using a mixture of experts (Listo Zec et al. 2020), against bare loops and sums by hand."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    OneWeight,
    TensorData,
    assert_same_bits,
    blobs,
    client_generator,
    mixture,
    momentum_sgd,
    phase,
    run,
    tensors,
    train_by_hand,
)
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl.algorithms import FineTuning, OptInFedAvg, SpecialistMixture
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.models import ConstantGate, NetworkGate, PersonalizedMoE
from fedmoe_pl.phases.phase import Phase, Train


def a_client(samples, id=0, seed=0, round=0):
    return Client(id, round, seed, LightningModule(), torch.as_tensor(samples), {}, None)


# Who takes part


def test_floor_of_the_share_of_clients_opts_out_whatever_the_round_and_other_seeds_choose_others():
    algorithm = OptInFedAvg(opt_out_clients=0.29)
    chosen = [tuple(algorithm.opt_out.participants(range(100), seed)) for seed in range(20)]
    assert {len(set(ids)) for ids in chosen} == {71}, "0.29 * 100 is 28.999999999999996, but 29 of 100 opt out"
    assert len(set(chosen)) == 20
    assert list(chosen[3]) == sorted(chosen[3]) == list(algorithm.opt_out.participants(range(100), 3))
    assert len(OptInFedAvg(opt_out_clients=0.39).opt_out.participants(range(10), 0)) == 7, "floor(3.9) opt out"
    out = torch.zeros(10)
    for seed in range(500):
        out += torch.ones(10).index_fill(
            0, torch.tensor(OptInFedAvg(opt_out_clients=0.3).opt_out.participants(range(10), seed)), 0
        )
    assert out.sum() == 1500 and (out - 150).abs().max() < 5 * (500 * 0.3 * 0.7) ** 0.5, "every client as likely"


def test_the_mean_of_three_clients_is_weighted_by_opt_in_samples(tmp_path):
    """Client i has a_i / 2 (w - b_i)^2 for all its samples: a step from 0 gives rate * a_i * b_i."""
    a, b, n = torch.tensor([1.0, 4.0, 2.0]), torch.tensor([1.0, 5.0, -3.0]), (4, 7, 10)
    owner = torch.arange(3).repeat_interleave(torch.tensor(n))
    x = torch.stack((a, b), dim=1)[owner]
    data = TensorData(x, owner, torch.arange(21).split(n), dtype=torch.float64, batch_size=100)
    federation = run([phase("FedAvg", OptInFedAvg(opt_out_data=0.3))], OneWeight(), data, tmp_path, max_epochs=1)
    weights = torch.tensor([4 - 1, 7 - 2, 10 - 3]).double()  # floor(1.2), floor(2.1) and 3 samples are out
    expected = (weights * 0.05 * (a * b).double()).sum() / weights.sum()
    assert federation.run.states["FedAvg"].server["weight"].item() == pytest.approx(expected.item(), rel=1e-14)


@pytest.mark.parametrize("n", [1, 2, 10, 33])
def test_a_clients_opt_in_samples_are_the_rest_of_a_split_by_seed_and_client_alone(n):
    algorithm = OptInFedAvg(opt_out_data=0.4)
    samples = torch.arange(100, 100 + n)
    chosen = algorithm.client_samples(a_client(samples, id=3, seed=5))
    assert len(chosen.unique()) == len(chosen) == n - int(0.4 * n) and set(chosen.tolist()) <= set(samples.tolist())
    again = OptInFedAvg(opt_out_data=0.4).client_samples(a_client(samples, id=3, seed=5, round=9))
    assert torch.equal(chosen, again)
    if n == 33:
        others = [
            algorithm.client_samples(a_client(samples, **other))
            for other in ({"id": 4, "seed": 5}, {"id": 3, "seed": 6})
        ]
        assert all(set(other.tolist()) != set(chosen.tolist()) for other in others)


def test_training_and_validation_samples_opt_out_by_draws_of_their_own():
    algorithm, samples = OptInFedAvg(opt_out_data=0.29), torch.arange(100)
    training, validation = (algorithm.opt_out.opted_in(3, samples, 5, validation) for validation in (False, True))
    assert torch.equal(training, algorithm.client_samples(a_client(samples, id=3, seed=5)))
    for chosen in (training, validation):
        assert len(chosen.unique()) == len(chosen) == 71, "0.29 * 100 is 28.999999999999996, but 29 of 100 opt out"
    both = len(set(training.tolist()) & set(validation.tolist()))
    assert abs(both - 71 * 71 / 100) < 5 * (71 * 71 * 29 * 29 / 100**2 / 99) ** 0.5, "as independent draws"
    assert algorithm.opt_out.opted_in(3, samples[:0], 5, validation=True).tolist() == []


class Seen(nn.Module):
    """An expert that reads one feature, which tells the sample, and remembers whom it has seen while training."""

    ids: set[int] = set()  # noqa: RUF012  (shared by all copies on purpose)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, x):
        if torch.is_grad_enabled():
            Seen.ids.update(x.flatten().int().tolist())
        return self.linear(x / 100)


def test_no_opted_out_sample_is_seen_before_personalization_which_sees_all(tmp_path):
    sizes = (10, 20, 15, 5)
    x = torch.arange(50.0)[:, None]

    def seen(phases, folder):
        Seen.ids = set()
        data = TensorData(x, torch.arange(50) % 2, torch.arange(50).split(sizes), batch_size=4)
        module = PersonalizedMoE(Seen(), optimizer=partial(torch.optim.SGD, lr=0.1))
        federation = run(phases, module, data, tmp_path / folder, backend=TrainerBackend(), seed=2)
        return Seen.ids, federation

    algorithm = OptInFedAvg("global_expert.*", opt_out_clients=0.25, opt_out_data=0.4)
    federated = phase("FedAvg", algorithm, gate=ConstantGate(1), rounds=3)
    ids, federation = seen([federated], "federated")
    (out,) = set(range(4)) - set(algorithm.opt_out.participants(range(4), 2))
    samples = federation.run.datamodule.train_samples
    for client in range(4):
        own = set(samples[client].tolist())
        assert len(ids & own) == (0 if client == out else len(own) - int(0.4 * len(own)))
    assert federation.run.states["FedAvg"].clients.keys() <= set(range(4)) - {out}

    personal = [phase("Fine-tuned", FineTuning(), gate=ConstantGate(0)), phase("Mixture", SpecialistMixture())]
    for number in (1, 2):
        ids, federation = seen([federated, *personal[:number]], str(number))
        assert ids == set(range(50)), "specialists are trained on all samples, those of opted-out clients included"
        assert set(federation.run.states[personal[number - 1].name].clients) == set(range(4))


# Specialist and gate


@pytest.mark.few("logits", "probabilities_without_log")
@pytest.mark.parametrize("mixing", ["logits", "probabilities", "log_probabilities", "probabilities_without_log"])
def test_fine_tuning_and_the_joint_training_of_specialist_and_gate_equal_a_bare_loop_in_every_space(mixing, tmp_path):
    """So does the loss on validation samples."""
    datamodule, model = blobs((11, 8), validation_fraction=0.4), mixture(NetworkGate(nn.Linear(5, 1).double()))
    phases = [
        phase("FedAvg", OptInFedAvg("global_expert.*"), gate=ConstantGate(1), rounds=3),
        phase("Fine-tuned", FineTuning(), gate=ConstantGate(0), mixing=mixing),
        Phase("Mixture", SpecialistMixture(), mixing=mixing, train=Train(optimizer=adam)),
    ]
    federation = run(phases, model, datamodule, tmp_path, seed=4)

    def alone(x, y):
        if mixing == "probabilities_without_log":
            return -module.local_expert(x).softmax(1)[torch.arange(len(y)), y].mean()
        return F.cross_entropy(module.local_expert(x), y)

    for client in range(2):
        before = federation.client_module("FedAvg", client)
        module = copy.deepcopy(before)
        module.gate, module.local_expert = copy.deepcopy(model.gate), copy.deepcopy(module.global_expert)
        samples = datamodule.train_samples[client]
        batches = datamodule.batches(samples, generator=client_generator(4, client, 3))
        train_by_hand(module, "local_expert.", batches, momentum_sgd, max_epochs=2, loss=alone)
        stage = federation.client_module("Fine-tuned", client)
        torch.testing.assert_close(tensors(stage, "local_"), tensors(module, "local_"), rtol=1e-12, atol=1e-12)

        generator = client_generator(4, client, 4)  # also seeds what the gate draws from
        module.gate.reset_parameters()
        batches, by_hand = datamodule.batches(samples, generator=generator), partial(loss_by_hand, module, mixing)
        train_by_hand(module, ("local_expert.", "gate."), batches, adam, max_epochs=2, loss=by_hand)
        actual = federation.client_module("Mixture", client)
        torch.testing.assert_close(actual.state_dict(), module.state_dict(), rtol=1e-12, atol=1e-12)
        assert_same_bits(tensors(actual, "global_"), tensors(before, "global_"))
        validation = datamodule.validation_samples[client]
        expected = loss_by_hand(actual, mixing, datamodule.x[validation], datamodule.y[validation]).item()
        assert federation.results["Mixture"].clients[client].validation_loss == pytest.approx(expected, rel=1e-10)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def loss_by_hand(module, mixing, x, y):
    """h weighs the specialist, 1 - h the global expert; sample by sample."""
    losses = []
    for sample, label in zip(x, y, strict=True):
        h = 1 / (1 + torch.exp(-(module.gate.network.weight[0] @ sample + module.gate.network.bias[0])))
        specialist, federated = module.local_expert(sample[None])[0], module.global_expert(sample[None])[0]
        p, q = specialist.exp() / specialist.exp().sum(), federated.exp() / federated.exp().sum()
        if mixing == "logits":
            mixed = (h * specialist + (1 - h) * federated).exp()
            losses.append(-torch.log(mixed[label] / mixed.sum()))
        elif mixing == "probabilities":
            losses.append(-torch.log(h * p[label] + (1 - h) * q[label]))
        elif mixing == "log_probabilities":
            losses.append(-(h * torch.log(p[label]) + (1 - h) * torch.log(q[label])))
        else:
            losses.append(-(h * p[label] + (1 - h) * q[label]))
    return torch.stack(losses).mean()
