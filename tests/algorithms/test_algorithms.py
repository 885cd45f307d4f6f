"""FedAvg, Local and PFL-MoE against closed forms and bare loops, through the federation and its Trainers."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Expert,
    OneWeight,
    PureOneWeight,
    assert_same_bits,
    blobs,
    client_generator,
    mixture,
    momentum_sgd,
    phase,
    quadratic,
    run,
    tensors,
    train_by_hand,
    two_quadratics,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl.algorithms import FedAvg, Local, PersonalizedExpert, PFLMoE
from fedmoe_pl.algorithms.algorithm import Client
from fedmoe_pl.backends import LEAN_TRAINER, LocalTraining, TrainerBackend
from fedmoe_pl.models import ConstantGate, FeatureGate, LinearGate
from fedmoe_pl.rounds.begin import phase_module
from fedmoe_pl.rounds.cohort import sample_cohort
from fedmoe_pl.seeds import derive_seed
from fedmoe_pl.trees import load_tree

A, B = torch.tensor([1.0, 4.0]).double(), torch.tensor([0.0, 5.0]).double()  # losses a/2 (w - b)^2
STEPS, RATE = 10, 0.05
REMAINS = (1 - RATE * A) ** STEPS  # of the distance to b after a client's local steps


def fixed_point(shares):
    """Where w = sum_i p_i (b_i + r_i (w - b_i)), and what remains of the distance to it after a round."""
    away = shares * (1 - REMAINS)
    return (away * B).sum() / away.sum(), (shares * REMAINS).sum()


@pytest.mark.parametrize("module", [PureOneWeight, OneWeight])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 1)])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedavg_on_two_quadratics_is_at_the_closed_form_after_any_number_of_rounds(module, sizes, weighting, tmp_path):
    samples = torch.tensor(sizes).double()
    shares = samples / samples.sum() if weighting == "samples" else torch.tensor([0.5, 0.5]).double()
    limit, remains = fixed_point(shares)
    for rounds in (1, 16):
        algorithm = FedAvg(weighting=weighting)
        federation = run([phase("FedAvg", algorithm, rounds=rounds)], module(), two_quadratics(sizes), tmp_path, STEPS)
        weight = federation.client_module("FedAvg", 0).weight.detach()
        torch.testing.assert_close(weight, limit + remains**rounds * (0 - limit), rtol=1e-13, atol=0)
        assert torch.equal(weight, federation.client_module("FedAvg", 1).weight)


def test_fedavg_on_two_quadratics_ends_at_the_fixed_point_and_not_at_the_optimum(tmp_path):
    federation = run([phase("FedAvg", FedAvg(), rounds=40)], PureOneWeight(), two_quadratics(), tmp_path, STEPS)
    limit, _ = fixed_point(torch.tensor([0.5, 0.5]).double())
    assert round(limit.item(), 3) == 3.449  # DESIGN section 6; the optimum is 4
    torch.testing.assert_close(federation.client_module("FedAvg", 0).weight.detach(), limit, rtol=1e-14, atol=0)


def test_fedavg_averages_over_the_cohort_of_each_round_alone(tmp_path):
    phases = [phase("FedAvg", FedAvg(), rounds=6, clients_per_round=1)]
    federation = run(phases, PureOneWeight(), two_quadratics(), tmp_path, STEPS, seed=3)
    cohorts = [sample_cohort(range(2), 1, seed=3, round=round)[0] for round in range(6)]
    assert set(cohorts) == {0, 1}
    expected = 0.0
    for client in cohorts:
        expected = B[client] + REMAINS[client] * (expected - B[client])
    torch.testing.assert_close(federation.client_module("FedAvg", 0).weight.detach(), expected, rtol=1e-13, atol=0)


def test_local_clients_each_reach_their_own_closed_form_from_the_same_start(tmp_path):
    federation = run([phase("Local", Local(), rounds=3)], PureOneWeight(start=2.0), two_quadratics(), tmp_path, STEPS)
    for client in (0, 1):
        expected = B[client] + REMAINS[client] ** 3 * (2.0 - B[client])
        weight = federation.client_module("Local", client).weight.detach()
        torch.testing.assert_close(weight, expected, rtol=1e-13, atol=0)


def test_a_client_that_trains_back_to_the_initial_model_keeps_no_older_one(tmp_path):
    # With rate 2 a step from w mirrors it at b: 2 -> 4 -> 2 where b = 3 and a = 1.
    datamodule = two_quadratics()
    datamodule.setup()
    datamodule.x = torch.tensor([[1.0, 3.0]] * 4).double()
    for rounds, expected in ((1, 4.0), (2, 2.0), (3, 4.0)):
        model = PureOneWeight(lr=2.0, start=2.0)
        federation = run([phase("Local", Local(), rounds=rounds)], model, datamodule, tmp_path, 1)
        assert federation.client_module("Local", 0).weight.item() == expected


def test_what_a_user_froze_in_a_module_of_their_own_stays_frozen(tmp_path):
    class WithBackbone(OneWeight):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

        def training_step(self, batch, batch_idx):
            return quadratic(self.weight * self.backbone, batch[0])

    federation = run([phase("FedAvg", FedAvg(), rounds=2)], WithBackbone(), two_quadratics(), tmp_path, STEPS)
    assert federation.client_module("FedAvg", 0).backbone.item() == 1.0
    limit, remains = fixed_point(torch.tensor([0.5, 0.5]).double())
    expected = limit - remains**2 * limit
    torch.testing.assert_close(federation.client_module("FedAvg", 0).weight.detach(), expected, rtol=1e-13, atol=0)


def test_a_method_that_a_users_module_holds_as_an_attribute_is_that_of_the_clients_own_copy(tmp_path):
    class WithMethod(OneWeight):
        def __init__(self):
            super().__init__()
            self.criterion = self.own_loss

        def own_loss(self, x):
            return quadratic(self.weight, x)

        def training_step(self, batch, batch_idx):
            return self.criterion(batch[0])

    federation = run([phase("Local", Local())], WithMethod(), two_quadratics(), tmp_path, STEPS)
    weight = federation.client_module("Local", 1).weight.detach()
    torch.testing.assert_close(weight, B[1] - REMAINS[1] * B[1], rtol=1e-13, atol=0)


SHARED = "global_expert."


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_partial_sharing_equals_a_bare_loop_that_averages_the_shared_part_and_keeps_the_rest(tmp_path, weighting):
    datamodule, model = blobs(), mixture(FeatureGate(6))
    algorithm = FedAvg(shared="global_expert.*", weighting=weighting)
    federation = run([phase("FedAvg", algorithm, rounds=2)], model, datamodule, tmp_path, seed=5)

    clients = [copy.deepcopy(model) for _ in range(3)]
    weights = [len(samples) if weighting == "samples" else 1 for samples in datamodule.train_samples]
    server = copy.deepcopy(tensors(model, SHARED))
    for round in range(2):
        for client, module in enumerate(clients):
            load_tree(module, server)
            generator = client_generator(5, client, round)
            batches = datamodule.batches(datamodule.train_samples[client], generator=generator)
            train_by_hand(module, "", batches, momentum_sgd, max_epochs=2)
        server = {
            name: sum(w * tensors(module)[name] for w, module in zip(weights, clients, strict=True)) / sum(weights)
            for name in server
        }
    for client, module in enumerate(clients):
        expected = {**module.state_dict(), **server}
        actual = federation.client_module("FedAvg", client).state_dict()
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)
    private = [federation.client_module("FedAvg", client).local_expert.classifier[1].weight for client in range(3)]
    assert not torch.equal(private[0], private[1]) and not torch.equal(private[1], private[2])
    assert set(federation.states["FedAvg"].server) == set(server)
    kept = federation.states["FedAvg"].kept
    assert {name for tree in kept.values() for name in tree} == set(model.state_dict()) - set(server)


def test_a_client_outside_the_cohort_keeps_its_private_part_of_its_last_round(tmp_path):
    datamodule, model = blobs(), mixture(FeatureGate(6))
    algorithm = FedAvg(shared="global_expert.*")
    states = [
        run([phase("A", algorithm, rounds=rounds, clients_per_round=1)], model, datamodule, tmp_path)
        for rounds in range(1, 7)
    ]
    cohorts = [sample_cohort(range(3), 1, seed=0, round=round) for round in range(6)]
    assert len({client for (client,) in cohorts}) > 1
    for round in range(1, 6):
        for client in range(3):
            before, after = (tensors(states[i].client_module("A", client), "local_expert.") for i in (round - 1, round))
            same = all(torch.equal(before[name], after[name]) for name in before)
            assert same == (client not in cohorts[round])


def test_a_federated_phase_that_starts_from_personal_models_shares_one_model_again(tmp_path):
    datamodule, model = blobs(), mixture(ConstantGate(0.5))
    phases = [phase("Local", Local()), phase("FedAvg", FedAvg(), rounds=2, start="Local")]
    federation = run(phases, model, datamodule, tmp_path)
    first, second = (federation.client_module("FedAvg", client).state_dict() for client in (0, 1))
    assert_same_bits(first, second)


def test_the_personal_expert_starts_as_the_global_one_even_where_a_client_had_one_of_its_own(tmp_path):
    datamodule, model = blobs(), mixture(ConstantGate(0.5))
    for algorithm in (PersonalizedExpert(), PFLMoE(interleaved=True)):
        phases = [phase("FedAvg", FedAvg(shared="global_expert.*")), phase("Stage 2", algorithm, max_epochs=0)]
        federation = run(phases, model, datamodule, tmp_path)
        module = federation.client_module("Stage 2", 1)
        assert_same_bits(module.local_expert.state_dict(), module.global_expert.state_dict())


@pytest.mark.parametrize("gate", [LinearGate, FeatureGate])
def test_a_gate_without_a_width_is_federated_with_an_expert_that_does_not_tell_its_input(gate, tmp_path):
    datamodule = blobs(dtype=torch.float32)
    phases = [
        phase("FedAvg", FedAvg(), gate=ConstantGate(1)),
        phase("Expert", PersonalizedExpert(gate_fraction=0.25)),
        phase("Gate", PFLMoE(), gate=gate()),
    ]
    federation = run(phases, mixture(gate(), dtype=torch.float32), datamodule, tmp_path)
    assert federation.client_module("Gate", 0).gate.in_features == (5 if gate is LinearGate else 6)


# PFL-MoE


def hand_split(datamodule, client, seed, gate_fraction=0.25):
    """The gate's samples and the expert's: the first quarter of one shuffle of the client's samples, and the rest."""
    samples = datamodule.train_samples[client]
    generator = torch.Generator().manual_seed(derive_seed(seed, 2, client))
    samples = samples[torch.randperm(len(samples), generator=generator)]
    return samples.split([int(gate_fraction * len(samples)), len(samples) - int(gate_fraction * len(samples))])


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02, weight_decay=5e-4)


def personalization(gate=None, **stage_3):
    """PFL-MFE in the official code's schedule, on a federated model that every client has trained once."""
    return [
        phase("FedAvg", FedAvg(), gate=ConstantGate(1)),
        phase("PFL-FB", PersonalizedExpert("local_expert.classifier.*", 0.25), max_epochs=3, batch_size=3),
        phase("PFL-MFE", PFLMoE(0.25), gate=gate, max_epochs=4, batch_size=2, optimizer=adam, **stage_3),
    ]


@pytest.mark.parametrize("gate", [FeatureGate(6), LinearGate(5)])
def test_expert_and_gate_phases_of_pfl_moe_equal_a_bare_loop(tmp_path, gate):
    datamodule, model = blobs((13, 22)), mixture(gate)
    federation = run(personalization(), model, datamodule, tmp_path, seed=7)
    for client in range(2):
        gate_samples, expert_samples = hand_split(datamodule, client, 7)
        module = phase_module(federation.client_module("FedAvg", client), phase("copy", FedAvg(), gate=model.gate))
        module.local_expert = copy.deepcopy(module.global_expert)

        batches = datamodule.batches(expert_samples, 3, client_generator(7, client, 0))
        expert = module.local_expert

        def expert_loss(x, y, expert=expert):  # whatever the gate, stage 2 trains the expert alone
            return F.cross_entropy(expert(x), y)

        train_by_hand(module, "local_expert.classifier.", batches, momentum_sgd, max_epochs=3, loss=expert_loss)
        stage_2 = federation.client_module("PFL-FB", client)
        torch.testing.assert_close(stage_2.state_dict(), module.state_dict(), rtol=1e-11, atol=1e-13)

        generator = client_generator(7, client, 0)  # also seeds what the gate draws from
        module.gate.reset_parameters()
        train_by_hand(module, "gate.", datamodule.batches(gate_samples, 2, generator), adam, max_epochs=4)
        stage_3 = federation.client_module("PFL-MFE", client)
        torch.testing.assert_close(stage_3.state_dict(), module.state_dict(), rtol=1e-9, atol=1e-12)


def test_a_local_expert_phase_with_the_constant_gate_0_trains_the_local_expert_alone(tmp_path):
    datamodule, model = blobs((13, 22)), mixture(FeatureGate(6))
    phases = [
        phase("FedAvg", FedAvg(), gate=ConstantGate(1)),
        phase("PFL-FT", PersonalizedExpert(), gate=ConstantGate(0)),
    ]
    federation = run(phases, model, datamodule, tmp_path)
    for client in range(2):
        module = federation.client_module("FedAvg", client).train()
        module.local_expert = copy.deepcopy(module.global_expert)
        batches = datamodule.batches(datamodule.train_samples[client], generator=client_generator(0, client, 0))

        def loss(x, y, expert=module.local_expert):
            return F.cross_entropy(expert(x), y)

        train_by_hand(module, "local_expert.", batches, momentum_sgd, max_epochs=2, loss=loss)
        actual = federation.client_module("PFL-FT", client).state_dict()
        torch.testing.assert_close(actual, module.state_dict(), rtol=1e-11, atol=1e-13)


def test_the_interleaved_schedule_equals_a_bare_loop_of_expert_and_gate_rounds(tmp_path):
    datamodule, model = blobs((13, 22)), mixture(FeatureGate(6))
    interleaved = PFLMoE(0.25, interleaved=True)
    phases = [phase("FedAvg", FedAvg(), gate=ConstantGate(1)), phase("PFL-MFE", interleaved, rounds=4, max_epochs=1)]
    federation = run(phases, model, datamodule, tmp_path, seed=7)
    for client in range(2):
        gate_samples, expert_samples = hand_split(datamodule, client, 7)
        module = phase_module(federation.client_module("FedAvg", client), phase("copy", FedAvg(), gate=model.gate))
        module.local_expert = copy.deepcopy(module.global_expert)
        client_generator(7, client, 0)
        module.gate.reset_parameters()

        def expert_loss(x, y, expert=module.local_expert):
            return F.cross_entropy(expert(x), y)

        for round in range(4):
            samples = gate_samples if round % 2 else expert_samples
            batches = datamodule.batches(samples, generator=client_generator(7, client, round))
            names = "gate." if round % 2 else "local_expert.classifier."
            train_by_hand(module, names, batches, momentum_sgd, 1, loss=None if round % 2 else expert_loss)
        actual = federation.client_module("PFL-MFE", client).state_dict()
        torch.testing.assert_close(actual, module.state_dict(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("stage", "trained"),
    [
        (PersonalizedExpert("local_expert.classifier.*", 0.25), "local_expert.classifier."),
        (PersonalizedExpert(), "local_expert."),
        (PFLMoE(), "gate."),
        (FedAvg(trainable="global_expert.*"), "global_expert."),
        (Local(trainable=["local_expert.extractor.*", "gate.*"]), ("local_expert.extractor.", "gate.")),
    ],
)
def test_only_what_is_trainable_changes_and_the_rest_is_the_same_to_the_bit(tmp_path, stage, trained):
    datamodule, model = blobs(), mixture(FeatureGate(6))
    phases = [phase("FedAvg", FedAvg()), phase("Before", PersonalizedExpert(gate_fraction=0.25), max_epochs=0)]
    decaying = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)  # would change frozen parameters, too
    federation = run([*phases, phase("After", stage, start="Before", optimizer=decaying)], model, datamodule, tmp_path)
    for client in range(3):
        before = federation.client_module("Before", client).state_dict()
        after = federation.client_module("After", client).state_dict()
        assert {name for name in after if not torch.equal(after[name], before[name])} == {
            name for name in after if name.startswith(trained)
        }


@pytest.mark.parametrize("before", [[], [phase("FedAvg", FedAvg(), rounds=2)]])
def test_local_starts_all_clients_from_the_initial_model_whatever_was_federated_before(tmp_path, before):
    datamodule, model = blobs(), mixture(ConstantGate(0))
    untrained = run([*before, phase("Local", Local(), max_epochs=0)], model, datamodule, tmp_path)
    trained = run([*before, phase("Local", Local())], model, datamodule, tmp_path)
    alone = run([phase("Local", Local())], model, datamodule, tmp_path)
    for client in range(3):
        assert_same_bits(untrained.client_module("Local", client).state_dict(), model.state_dict())
        after = trained.client_module("Local", client)
        assert_same_bits(after.state_dict(), alone.client_module("Local", client).state_dict())
        assert not torch.equal(after.local_expert.classifier[1].weight, model.local_expert.classifier[1].weight)


@given(st.integers(1, 200), st.sampled_from([0.1, 0.25, 0.5, 0.9]), st.integers(0, 5), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_gate_and_expert_samples_are_disjoint_complete_and_the_same_in_every_round(n, gate_fraction, client, seed):
    samples = torch.arange(100, 100 + n)
    at = [Client(client, round, seed, LightningModule(), samples, {}, None) for round in (0, 1, 5)]
    expert = [PersonalizedExpert(gate_fraction=gate_fraction).client_samples(c).tolist() for c in at]
    gate = [PFLMoE(gate_fraction).client_samples(c).tolist() for c in at]
    assert len(gate[0]) == max(math.floor(round(n * gate_fraction, 6)), 1 if n > 1 else 0)
    assert sorted(gate[0] + expert[0]) == samples.tolist()
    assert gate[0] == gate[1] == gate[2] and expert[0] == expert[1] == expert[2]
    by_turns = [PFLMoE(gate_fraction, interleaved=True).client_samples(c).tolist() for c in at]
    assert by_turns == [expert[0], gate[0], gate[0]]


def test_the_split_is_shuffled_and_differs_between_clients_and_seeds():
    def split(client, seed):
        return PFLMoE().client_samples(Client(client, 0, seed, LightningModule(), torch.arange(40), {}, None)).tolist()

    assert split(0, 0) != list(range(10))
    assert len({tuple(split(client, seed)) for client in range(3) for seed in range(3)}) == 9


def test_both_phases_train_on_the_two_parts_of_one_split(tmp_path, monkeypatch):
    datamodule = blobs()
    trained = []
    batches = datamodule.batches

    def recorded(samples, *args, augment=False, **kwargs):
        if augment:  # only batches for training are augmented
            trained.append(set(samples.tolist()))
        return batches(samples, *args, augment=augment, **kwargs)

    monkeypatch.setattr(datamodule, "batches", recorded)
    run(personalization(), mixture(FeatureGate(6)), datamodule, tmp_path, backend=TrainerBackend())
    own = [set(samples.tolist()) for samples in datamodule.train_samples]
    federated, expert, gate = trained[:3], trained[3:6], trained[6:]
    assert federated == own
    for client in range(3):
        assert len(gate[client]) == len(own[client]) // 4
        assert gate[client] == own[client] - expert[client] and expert[client] < own[client]


def test_every_clients_gate_starts_anew_and_forgets_a_gate_trained_before(tmp_path):
    datamodule, model = blobs(), mixture(FeatureGate(6))

    def gates(max_epochs):
        phases = [
            phase("FedAvg", FedAvg(), max_epochs=max_epochs),
            phase("Expert", PersonalizedExpert(["local_expert.*", "gate.*"], 0.25), max_epochs=max_epochs),
            phase("Gate", PFLMoE(), max_epochs=0),
        ]
        federation = run(phases, model, datamodule, tmp_path)
        return [federation.client_module("Gate", client).gate.state_dict() for client in range(3)]

    after_training = gates(max_epochs=2)
    for client, gate in enumerate(gates(max_epochs=0)):
        assert_same_bits(gate, after_training[client])
        client_generator(0, client, 0)
        torch.testing.assert_close(gate, nn.ModuleDict({"linear": nn.Linear(6, 1, dtype=torch.float64)}).state_dict())
    assert len({gate["linear.weight"][0, 0].item() for gate in after_training}) == 3


@pytest.mark.parametrize("given", [FeatureGate(6).double(), LinearGate(5).double()])
def test_a_phase_with_a_gate_of_its_own_starts_with_it_and_one_without_with_the_trained_gate(tmp_path, given):
    phases = [
        phase("FedAvg", FedAvg()),
        phase("Inherited", PersonalizedExpert(), max_epochs=0),
        phase("Given", PersonalizedExpert(), gate=given, max_epochs=0),
    ]
    federation = run(phases, mixture(FeatureGate(6)), blobs(), tmp_path)
    trained = federation.client_module("FedAvg", 0).gate.state_dict()
    assert_same_bits(federation.client_module("Inherited", 0).gate.state_dict(), trained)
    assert_same_bits(federation.client_module("Given", 0).gate.state_dict(), given.state_dict())


class Recorder(nn.Module):
    """Remembers in which mode it was called; without parameters, as dropout."""

    def __init__(self, name, seen):
        super().__init__()
        self.name, self.seen = name, seen

    def __deepcopy__(self, memo):
        return Recorder(self.name, self.seen)  # of what copies see, too

    def forward(self, x):
        if len(x) > 1 or self.training:  # not the sample that checks the model's outputs
            self.seen.setdefault(self.name, set()).add(self.training)
        return x


@pytest.mark.parametrize("frozen_train_mode", [False, True])
@pytest.mark.parametrize(
    ("stage", "trained"),
    [
        (partial(PersonalizedExpert, "local_expert.classifier.*", 0.25), {"local_expert.classifier"}),
        (partial(PersonalizedExpert, gate_fraction=0.25), {"local_expert.extractor", "local_expert.classifier"}),
        (PFLMoE, set()),
        (partial(PFLMoE, interleaved=True), {"local_expert.classifier"}),
    ],
)
def test_frozen_modules_are_in_eval_mode_unless_the_official_codes_way_is_asked_for(
    tmp_path, stage, trained, frozen_train_mode
):
    seen: dict[str, set[bool]] = {}
    datamodule, model = blobs(), mixture(LinearGate(5))
    for expert in ("global_expert", "local_expert"):
        for part in ("extractor", "classifier"):
            getattr(getattr(model, expert), part).append(Recorder(f"{expert}.{part}", seen))
    algorithm = stage(frozen_train_mode=frozen_train_mode)
    run([phase("After", algorithm, start="initial")], model, datamodule, tmp_path, every_batch=True)
    parts = [f"{expert}.{part}" for expert in ("global_expert", "local_expert") for part in ("extractor", "classifier")]
    expected = {part: {frozen_train_mode or part in trained} for part in parts}
    if isinstance(algorithm, PersonalizedExpert) or algorithm.interleaved:  # the local expert is trained alone
        expected = {part: modes for part, modes in expected.items() if part.startswith("local_expert.")}
    assert seen == expected


def test_a_part_that_was_frozen_in_one_epoch_is_back_in_train_mode_when_it_is_trained(tmp_path):
    class ByTurns(Local):
        def is_trainable(self, name, round, epoch):
            return name.startswith("local_expert.extractor." if epoch % 2 == 0 else "local_expert.classifier.")

    modes = []

    class Watched(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            if torch.is_grad_enabled():
                modes.append((self.name, self.training))
            return x

    model, datamodule = mixture(ConstantGate(0)), blobs((4, 4))
    model.local_expert.extractor.append(Watched("extractor"))
    model.local_expert.classifier.append(Watched("classifier"))
    run([phase("A", ByTurns(), clients_per_round=1)], model, datamodule, tmp_path, 3, every_batch=True)
    assert modes[-6:] == [  # before them, a batch of each kind had its operations counted
        *(("extractor", True), ("classifier", False)),
        *(("extractor", False), ("classifier", True)),
        *(("extractor", True), ("classifier", False)),
    ]


def test_dropout_of_the_trained_part_is_active_and_that_of_the_frozen_part_as_asked(tmp_path):
    datamodule = blobs()
    results = {}
    for dropout, frozen_train_mode in ((0.0, False), (0.5, False), (0.5, True)):
        model = mixture(LinearGate(5), Expert(dropout=dropout))
        phases = [
            phase("Expert", PersonalizedExpert(gate_fraction=0.25), start="initial", max_epochs=0),
            phase("Gate", PFLMoE(frozen_train_mode=frozen_train_mode)),
            phase("FB", PersonalizedExpert("local_expert.classifier.*"), start="initial"),
        ]
        federation = run(phases, model, datamodule, tmp_path)
        results[dropout, frozen_train_mode] = [
            federation.client_module("Gate", 0).gate.linear.weight,
            federation.client_module("FB", 0).local_expert.classifier[1].weight,
        ]
    without, frozen_eval, frozen_train = results.values()
    assert torch.equal(without[0], frozen_eval[0])  # the gate's phase freezes both experts, so none drops anything
    assert not torch.equal(without[0], frozen_train[0])
    assert not torch.equal(without[1], frozen_eval[1])  # the classifier is trained, with dropout


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PersonalizedExpert(gate_fraction=1), "gate_fraction is 1, but must be at least 0 and below 1"),
        (lambda: PersonalizedExpert(gate_fraction=-0.1), "gate_fraction is -0.1, but must be at least 0 and below 1"),
        (lambda: PFLMoE(0), "gate_fraction is 0, but must be above 0 and below 1"),
        (lambda: PFLMoE(1.0), "gate_fraction is 1.0, but must be above 0 and below 1"),
    ],
)
def test_a_gate_fraction_outside_its_range_is_refused(make, message):
    with pytest.raises(MisconfigurationException, match=message):
        make()


@pytest.mark.parametrize("algorithm", [PersonalizedExpert(), PFLMoE(), PFLMoE(interleaved=True)])
def test_experts_of_different_architectures_are_refused_by_pfl_moe(algorithm):
    model = mixture(LinearGate(5))
    algorithm.check(model)
    for other in (Expert(hidden=7), nn.Linear(5, 3)):
        model.local_expert = other
        with pytest.raises(MisconfigurationException, match="but must have the architecture of"):
            algorithm.check(model)


@pytest.mark.parametrize(
    ("algorithm", "key", "pattern"),
    [
        (FedAvg(shared="global_exprt.*"), "shared", "global_exprt.*"),
        (FedAvg(trainable=["global_expert.*", "heads.*"]), "trainable", "heads.*"),
        (Local(trainable="classifier.*"), "trainable", "classifier.*"),
        (PersonalizedExpert("local_expert.clasifier.*"), "trainable", "local_expert.clasifier.*"),
        (PFLMoE(interleaved=True, trainable="local.*"), "trainable", "local.*"),
    ],
)
def test_a_misspelt_pattern_is_refused_before_training_with_what_the_model_has(algorithm, key, pattern, tmp_path):
    with pytest.raises(MisconfigurationException) as error:
        run([phase("A", algorithm, start="initial")], mixture(LinearGate(5)), blobs(), tmp_path)
    assert str(error.value) == (
        f"{type(algorithm).__name__}: {key} is '{pattern}', which matches no parameter of the model; it has gate.*, "
        "global_expert.*, local_expert.*."
    )


def test_personalization_follows_the_federated_phase_and_the_gate_the_expert_of_its_own_split():
    expert = PersonalizedExpert(gate_fraction=0.25)
    assert expert.follows(FedAvg()) and not expert.follows(Local()) and not expert.follows(expert)
    assert PFLMoE(0.25).follows(expert)
    assert not PFLMoE(0.25).follows(PersonalizedExpert()) and not PFLMoE(0.25).follows(FedAvg())
    assert PFLMoE(interleaved=True).follows(FedAvg()) and not PFLMoE(interleaved=True).follows(expert)
    assert not FedAvg().follows(FedAvg()) and not Local().follows(FedAvg())


# A client's result depends on the seed, the client and the round alone


def client_results(cohort, seed=0, round=0, max_epochs=2):
    """What each client of the cohort sends and keeps, by client; with dropout, so that all randomness is at work."""
    model = mixture(FeatureGate(6), Expert(dropout=0.5))
    training = LocalTraining(
        module=model,
        initial=copy.deepcopy(model.state_dict()),
        algorithm=FedAvg(shared="global_expert.*"),
        datamodule=blobs((9, 9, 9)),
        trainer={**LEAN_TRAINER, "max_epochs": max_epochs},
        batch_size=None,
        seed=seed,
    )
    before = copy.deepcopy(model.state_dict())
    server = training.algorithm.server_init(model)
    groups = list(TrainerBackend().plan(training).train(server, cohort, {}, round))
    assert_same_bits(model.state_dict(), before)  # the template is never trained
    assert [list(group.kept) for group in groups] == [[client] for client in cohort]
    return {client: {**group.update.sent, **group.update.kept} for group in groups for client in group.kept}


def test_training_clients_in_another_order_or_subset_gives_the_same_bits():
    everybody = client_results([0, 1, 2])
    for cohort in ([2, 0, 1], [1], [2, 1]):
        torch.manual_seed(123)  # what ran before is of no consequence
        torch.rand(7)
        for client, result in client_results(cohort).items():
            assert_same_bits(result, everybody[client])


def test_another_seed_round_or_client_shuffles_and_drops_differently(tmp_path):
    weights = [
        client_results([1], seed=seed, round=round)[1]["local_expert.classifier.1.weight"]
        for seed, round in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert len({weight[0, 0].item() for weight in weights}) == 4
    model, datamodule = mixture(FeatureGate(6), Expert(dropout=0.5)), blobs((9, 9))
    datamodule.train_samples = datamodule.train_samples.select(torch.tensor([0, 0]))  # the same for both clients
    federation = run([phase("Local", Local())], model, datamodule, tmp_path)
    first, second = (federation.client_module("Local", client).state_dict() for client in (0, 1))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_the_same_seed_gives_a_whole_run_of_the_same_bits_and_another_seed_another_run(tmp_path):
    def whole(seed):
        model, datamodule = mixture(FeatureGate(6), Expert(dropout=0.5)), blobs((9, 12, 7, 8))
        phases = [
            phase("FedAvg", FedAvg(), rounds=3, clients_per_round=2, gate=ConstantGate(1)),
            phase("Expert", PersonalizedExpert(gate_fraction=0.25)),
            phase("Gate", PFLMoE()),
        ]
        federation = run(phases, model, datamodule, tmp_path, seed=seed)
        return [federation.client_module("Gate", client).state_dict() for client in range(4)]

    first = whole(0)
    torch.manual_seed(99)  # what ran before is of no consequence
    for client, (again, other) in enumerate(zip(whole(0), whole(1), strict=True)):
        assert_same_bits(again, first[client])
        for part in ("global_expert.extractor.1", "local_expert.classifier.1", "gate.linear"):
            assert not torch.equal(other[f"{part}.weight"], first[client][f"{part}.weight"])
