"""PFL-MoE against bare loops: splits, stages, schedules and frozen parts."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, client_generator, mixture, momentum_sgd, phase, run, train_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.pfl_moe import _mean_loss
from fedmoe_pl.algorithms.shared.parts import summed_loss
from fedmoe_pl.models import ConstantGate, FeatureGate, LinearGate
from fedmoe_pl.phases.phase import Train
from fedmoe_pl.rounds.begin import phase_module
from fedmoe_pl.seeds import derive_seed


def hand_split(datamodule, client, seed, gate_fraction=0.25):
    """The gate's samples and the expert's: the first quarter of one shuffle of the client's samples, and the rest."""
    samples = datamodule.train_samples[client]
    generator = torch.Generator().manual_seed(derive_seed(seed, 2, client, 1))
    samples = samples[torch.randperm(len(samples), generator=generator)]
    return samples.split([int(gate_fraction * len(samples)), len(samples) - int(gate_fraction * len(samples))])


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02, weight_decay=5e-4)


def begun(federation, model, client):
    """A client's model, and the loss of its local expert, after FedAvg and before its personalization."""
    module = phase_module(federation.client_module("FedAvg", client), phase("copy", FedAvg(), gate=model.gate))
    module.local_expert = copy.deepcopy(module.global_expert)
    return module, lambda x, y: F.cross_entropy(module.local_expert(x), y)


@pytest.mark.few(1)
@pytest.mark.parametrize("gate", [FeatureGate(6), LinearGate(5)])
def test_expert_and_gate_phases_of_pfl_moe_equal_a_bare_loop(tmp_path, gate):
    """PFL-MFE in the official code's schedule, on a federated model that every client has trained once."""
    datamodule, model = blobs((13, 22)), mixture(gate)
    phases = [
        phase("FedAvg", FedAvg(), gate=ConstantGate(1)),
        phase("PFL-FB", FineTuning("local_expert.classifier.*", 0.25), train=Train(max_epochs=3, batch_size=3)),
        phase("PFL-MFE", PFLMoE(0.25), train=Train(max_epochs=4, batch_size=2, optimizer=adam)),
    ]
    federation = run(phases, model, datamodule, tmp_path, seed=7)
    for client in range(2):
        gate_samples, expert_samples = hand_split(datamodule, client, 7)
        module, expert_loss = begun(federation, model, client)  # whatever the gate, stage 2 trains the expert alone
        batches = datamodule.batches(expert_samples, 3, client_generator(7, client, 1))
        train_by_hand(module, "local_expert.classifier.", batches, momentum_sgd, max_epochs=3, loss=expert_loss)
        stage_2 = federation.client_module("PFL-FB", client)
        torch.testing.assert_close(stage_2.state_dict(), module.state_dict(), rtol=1e-11, atol=1e-13)

        generator = client_generator(7, client, 2)  # also seeds what the gate draws from
        module.gate.reset_parameters()
        train_by_hand(module, "gate.", datamodule.batches(gate_samples, 2, generator), adam, max_epochs=4)
        stage_3 = federation.client_module("PFL-MFE", client)
        torch.testing.assert_close(stage_3.state_dict(), module.state_dict(), rtol=1e-9, atol=1e-12)


def validation_loss(expert, datamodule, client) -> float:
    samples = datamodule.validation_samples[client]
    return F.cross_entropy(expert(datamodule.x[samples]), datamodule.y[samples]).item()


@pytest.mark.slow
def test_the_better_of_the_global_and_the_fine_tuned_expert_is_kept_where_asked_for(tmp_path):
    datamodule, model = blobs((10, 12, 30, 25), validation_fraction=0.4), mixture(ConstantGate(0.5))
    phases = [
        phase("FedAvg", FedAvg(shared="global_expert.*"), rounds=2, gate=ConstantGate(1), train=Train(max_epochs=10)),
        phase("always", FineTuning(), train=Train(max_epochs=20)),
        phase("better", FineTuning(keep_better=True), train=Train(max_epochs=20)),
    ]
    federation = run(phases, model, datamodule, tmp_path)
    kept_global = []
    for client in range(4):
        tuned = federation.client_module("always", client)
        losses = [validation_loss(expert, datamodule, client) for expert in (tuned.global_expert, tuned.local_expert)]
        kept_global.append(losses[0] <= losses[1])
        better = tuned.global_expert if kept_global[-1] else tuned.local_expert
        actual = federation.client_module("better", client)
        assert_same_bits(actual.local_expert.state_dict(), better.state_dict())
        assert_same_bits(actual.global_expert.state_dict(), tuned.global_expert.state_dict())
    assert set(kept_global) == {True, False}, "the test could not tell the option from its absence"


class OnTheCPU(list):
    device = torch.device("cpu")


def test_a_batch_of_which_nothing_counts_leaves_mean_and_sum_as_they_are():
    module = mixture(ConstantGate(0.5))
    module.criterion = torch.nn.CrossEntropyLoss(ignore_index=0)
    datamodule, y = blobs((6, 6)), torch.tensor([0, 0, 1, 2])
    samples = OnTheCPU([(datamodule.x[:2], y[:2]), (datamodule.x[2:4], y[2:])])
    expected = module.criterion(module.local_expert(datamodule.x[2:4]), y[2:])
    client = SimpleNamespace(module=module, datamodule=datamodule)
    torch.testing.assert_close(_mean_loss(client, "local_expert", samples), expected.item())  # pyright: ignore
    sums = [summed_loss(module, module.local_expert(x), labels) for x, labels in samples]
    torch.testing.assert_close(torch.stack(sums), torch.stack([torch.zeros_like(expected), 2 * expected]))


@pytest.mark.few("0.7")
@pytest.mark.parametrize("gate_lr", [None, 0.7])
def test_the_interleaved_schedule_equals_a_bare_loop_of_expert_and_gate_rounds(tmp_path, gate_lr):
    datamodule, model = blobs((13, 22)), mixture(FeatureGate(6))
    model.gate_lr = gate_lr

    def optimizer(parameters):  # of the expert in even and of the gate in odd rounds
        return torch.optim.SGD(parameters, lr=gate_lr if gate_lr and round % 2 else 0.1, momentum=0.9)

    phases = [
        phase("FedAvg", FedAvg(), gate=ConstantGate(1)),
        phase("PFL-MFE", PFLMoE(0.25, interleaved=True), rounds=4, train=Train(max_epochs=1)),
    ]
    federation = run(phases, model, datamodule, tmp_path, seed=7)
    for client in range(2):
        gate_samples, expert_samples = hand_split(datamodule, client, 7)
        module, expert_loss = begun(federation, model, client)
        client_generator(7, client, 1)
        module.gate.reset_parameters()
        for round in range(4):
            samples = gate_samples if round % 2 else expert_samples
            batches = datamodule.batches(samples, generator=client_generator(7, client, 1 + round))
            names = "gate." if round % 2 else "local_expert.classifier."
            train_by_hand(module, names, batches, optimizer, 1, loss=None if round % 2 else expert_loss)
        actual = federation.client_module("PFL-MFE", client).state_dict()
        torch.testing.assert_close(actual, module.state_dict(), rtol=1e-11, atol=1e-13)


@pytest.mark.few(1)
@pytest.mark.parametrize("gate", [LinearGate, FeatureGate])
def test_a_gate_without_a_width_is_federated_with_an_expert_that_does_not_tell_its_input(gate, tmp_path):
    datamodule = blobs(dtype=torch.float32)
    phases = [
        phase("FedAvg", FedAvg(), gate=ConstantGate(1)),
        phase("Expert", FineTuning(gate_fraction=0.25)),
        phase("Gate", PFLMoE(), gate=gate()),
    ]
    federation = run(phases, mixture(gate(), dtype=torch.float32), datamodule, tmp_path)
    assert federation.client_module("Gate", 0).gate.in_features == (5 if gate is LinearGate else 6)


@given(st.integers(1, 200), st.sampled_from([0.1, 0.25, 0.5, 0.9]), st.integers(0, 5), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_gate_and_expert_samples_are_disjoint_complete_and_the_same_in_every_round(n, gate_fraction, client, seed):
    samples = torch.arange(100, 100 + n)
    at = [Client(client, round, seed, LightningModule(), samples, {}, None) for round in (0, 1, 5)]
    expert = [FineTuning(gate_fraction=gate_fraction).client_samples(c).tolist() for c in at]
    gate = [PFLMoE(gate_fraction).client_samples(c).tolist() for c in at]
    assert len(gate[0]) == max(math.floor(round(n * gate_fraction, 6)), 1 if n > 1 else 0)
    assert sorted(gate[0] + expert[0]) == samples.tolist()
    assert gate[0] == gate[1] == gate[2] and expert[0] == expert[1] == expert[2]
    by_turns = [PFLMoE(gate_fraction, interleaved=True).client_samples(c).tolist() for c in at]
    assert by_turns == [expert[0], gate[0], gate[0]]


@pytest.mark.parametrize("given", [FeatureGate(6).double(), LinearGate(5).double()])
def test_a_phase_with_a_gate_of_its_own_starts_with_it_and_one_without_with_the_trained_gate(tmp_path, given):
    phases = [
        phase("FedAvg", FedAvg()),
        phase("Inherited", FineTuning(), train=Train(max_epochs=0)),
        phase("Given", FineTuning(), gate=given, train=Train(max_epochs=0)),
    ]
    federation = run(phases, mixture(FeatureGate(6)), blobs(), tmp_path)
    trained = federation.client_module("FedAvg", 0).gate.state_dict()
    assert_same_bits(federation.client_module("Inherited", 0).gate.state_dict(), trained)
    assert_same_bits(federation.client_module("Given", 0).gate.state_dict(), given.state_dict())


def test_a_gate_without_samples_of_its_own_trains_on_all_of_them():
    algorithm, client = PFLMoE(0), Client(0, 0, 0, LightningModule(), torch.arange(40), {}, None)
    assert algorithm.client_samples(client) is client.samples
