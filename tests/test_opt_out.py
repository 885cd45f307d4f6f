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
    two_quadratics,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl.algorithm import Client
from fedmoe_pl.algorithms import FedAvg, Local, OptInFedAvg, PersonalizedExpert, PFLMoE, SpecialistMixture
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.callbacks import BestEpoch, FederationCallback
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import BiLSTM, ConstantGate, LinearGate, NetworkGate, PersonalizedMoE
from fedmoe_pl.phase import Phase, phase_cohort

MIXINGS = ("logits", "probabilities", "log_probabilities", "probabilities_without_log")
SIZES = (9, 4, 12, 7, 5, 8, 6, 10, 11, 4)


def a_client(samples, id=0, seed=0, round=0):
    return Client(id, round, seed, LightningModule(), torch.as_tensor(samples), {})


def gate(dtype=torch.float64):
    return NetworkGate(nn.Linear(5, 1).to(dtype))


def three_phases(out=0.3, clients_per_round: float | None = 4, epochs=2) -> list[Phase]:
    federated = OptInFedAvg("global_expert.*", out)
    return [
        phase("FedAvg", federated, gate=ConstantGate(1), rounds=3, clients_per_round=clients_per_round),
        phase("Fine-tuned", PersonalizedExpert(), gate=ConstantGate(0), max_epochs=epochs),
        phase("Mixture", SpecialistMixture(), max_epochs=epochs),
    ]


# Who takes part


def test_floor_of_the_share_of_clients_opts_out_whatever_the_round_and_other_seeds_choose_others():
    algorithm = OptInFedAvg(opt_out_clients=0.29)
    chosen = [tuple(algorithm.participants(range(100), seed)) for seed in range(20)]
    assert {len(set(ids)) for ids in chosen} == {71}, "0.29 * 100 is 28.999999999999996, but 29 of 100 opt out"
    assert len(set(chosen)) == 20
    assert list(chosen[3]) == sorted(chosen[3]) == list(algorithm.participants(range(100), 3))
    assert len(OptInFedAvg(opt_out_clients=0.39).participants(range(10), 0)) == 7, "floor(3.9) opt out"
    out = torch.zeros(10)
    for seed in range(500):
        out += torch.ones(10).index_fill(
            0, torch.tensor(OptInFedAvg(opt_out_clients=0.3).participants(range(10), seed)), 0
        )
    assert out.sum() == 1500 and (out - 150).abs().max() < 5 * (500 * 0.3 * 0.7) ** 0.5, "every client as likely"


def test_a_round_has_as_many_clients_as_if_all_took_part_and_none_that_opts_out():
    federated = phase("FedAvg", OptInFedAvg(opt_out_clients=0.5), clients_per_round=0.4)
    opted_in = set(federated.algorithm.participants(range(10), 7))
    cohorts = [phase_cohort(federated, 10, 7, round) for round in range(40)]
    assert {len(cohort) for cohort in cohorts} == {4}, "0.4 of ten clients, not of the five that take part"
    assert set().union(*cohorts) == opted_in and len(opted_in) == 5
    federated.clients_per_round = None
    assert set(phase_cohort(federated, 10, 7, 0)) == opted_in


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"opt_out_clients": 1.0}, "opt_out_clients is 1.0, but must be at least 0 and below 1"),
        ({"opt_out_data": 1.0}, "opt_out_data is 1.0, but must be at least 0 and below 1"),
        ({"opt_out_clients": -0.1}, "opt_out_clients is -0.1, but"),
        ({"opt_out_data": float("nan")}, "opt_out_data is nan, but"),
    ],
)
def test_opting_out_of_everybody_is_refused(arguments, sentence):
    with pytest.raises(MisconfigurationException, match=f"algorithm.init_args.{sentence}"):
        OptInFedAvg(**arguments)


def test_more_clients_per_round_than_take_part_are_refused_before_training(tmp_path):
    phases = [phase("FedAvg", OptInFedAvg(opt_out_clients=0.5), clients_per_round=6)]
    with pytest.raises(MisconfigurationException, match="number of clients that take part, 5"):
        run(phases, mixture(), blobs(SIZES), tmp_path)


def test_a_misspelt_pattern_and_a_model_without_parts_are_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"algorithm.init_args.shared is 'global.\*', which matches no"):
        run([phase("FedAvg", OptInFedAvg("global.*"))], mixture(), blobs(), tmp_path)
    phases = [phase("Mixture", SpecialistMixture(), start="initial")]
    with pytest.raises(MisconfigurationException, match="model is a OneWeight, but SpecialistMixture trains"):
        run(phases, OneWeight(), two_quadratics(), tmp_path)


def test_with_nobody_out_it_is_fedavg_to_the_bit(tmp_path):
    def phases(algorithm):
        federated = Phase("FedAvg", algorithm, rounds=4, clients_per_round=4, gate=ConstantGate(1))
        return [federated, phase("Fine-tuned", PersonalizedExpert())]

    runs = [
        run(phases(kind("global_expert.*")), mixture(LinearGate(5)), blobs(SIZES), tmp_path / kind.__name__)
        for kind in (FedAvg, OptInFedAvg)
    ]
    for name in ("FedAvg", "Fine-tuned"):
        states = [federation.states[name] for federation in runs]
        assert_same_bits(states[1].server, states[0].server)
        assert states[1].kept.keys() == states[0].kept.keys()
        for client in states[0].kept:
            assert_same_bits(states[1].kept[client], states[0].kept[client])
    other = run(phases(OptInFedAvg("global_expert.*", 0.3)), mixture(LinearGate(5)), blobs(SIZES), tmp_path / "other")
    assert not torch.equal(
        *(one.states["FedAvg"].server["global_expert.classifier.1.weight"] for one in (runs[0], other))
    )


def test_the_mean_of_three_clients_is_weighted_by_opt_in_samples(tmp_path):
    """Client i has a_i / 2 (w - b_i)^2 for all its samples: a step from 0 gives rate * a_i * b_i."""
    a, b, n = torch.tensor([1.0, 4.0, 2.0]), torch.tensor([1.0, 5.0, -3.0]), (4, 7, 10)
    owner = torch.arange(3).repeat_interleave(torch.tensor(n))
    x = torch.stack((a, b), dim=1)[owner]
    data = TensorData(x, owner, torch.arange(21).split(n), dtype=torch.float64, batch_size=100)
    federation = run([phase("FedAvg", OptInFedAvg(opt_out_data=0.3))], OneWeight(), data, tmp_path, max_epochs=1)
    weights = torch.tensor([4 - 1, 7 - 2, 10 - 3]).double()  # floor(1.2), floor(2.1) and 3 samples are out
    expected = (weights * 0.05 * (a * b).double()).sum() / weights.sum()
    assert federation.states["FedAvg"].server["weight"].item() == pytest.approx(expected.item(), rel=1e-14)


@pytest.mark.parametrize("n", [1, 2, 10, 33])
def test_a_clients_opt_in_samples_are_the_rest_of_a_split_by_seed_and_client_alone(n):
    algorithm = OptInFedAvg(opt_out_data=0.4)
    samples = torch.arange(100, 100 + n)
    chosen = algorithm.client_samples(a_client(samples, id=3, seed=5))
    assert len(chosen.unique()) == len(chosen) == n - int(0.4 * n) and set(chosen.tolist()) <= set(samples.tolist())
    again = OptInFedAvg(opt_out_data=0.4).client_samples(a_client(samples, id=3, seed=5, round=9))
    assert torch.equal(chosen, again)
    if n == 33:
        others = [algorithm.client_samples(a_client(samples, **other)) for other in ({"id": 4}, {"id": 3, "seed": 6})]
        assert all(set(other.tolist()) != set(chosen.tolist()) for other in others)


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
    (out,) = set(range(4)) - set(algorithm.participants(range(4), 2))
    samples = federation.datamodule.train_samples
    for client in range(4):
        own = set(samples[client].tolist())
        assert len(ids & own) == (0 if client == out else len(own) - int(0.4 * len(own)))
    assert federation.states["FedAvg"].kept.keys() <= set(range(4)) - {out}

    personal = [phase("Fine-tuned", PersonalizedExpert(), gate=ConstantGate(0)), phase("Mixture", SpecialistMixture())]
    for number in (1, 2):
        ids, federation = seen([federated, *personal[:number]], str(number))
        assert ids == set(range(50)), "specialists are trained on all samples, those of opted-out clients included"
        assert set(federation.states[personal[number - 1].name].kept) == set(range(4))


# Specialist and gate


def test_fine_tuning_and_the_joint_training_of_specialist_and_gate_equal_a_bare_loop_in_every_space(tmp_path):
    phases = three_phases(0.4, clients_per_round=None, epochs=3)
    phases[2].optimizer = adam
    for mixing in MIXINGS:
        datamodule, model = blobs((13, 9, 8)), mixture(gate())
        model.mixing = mixing
        federation = run(phases, model, datamodule, tmp_path / mixing, seed=4)
        for client in range(3):
            module = copy.deepcopy(federation.client_module("FedAvg", client))
            module.gate, module.local_expert = copy.deepcopy(model.gate), copy.deepcopy(module.global_expert)
            samples = datamodule.train_samples[client]
            batches = datamodule.batches(samples, generator=client_generator(4, client, 0))
            specialist = module.local_expert

            def alone(x, y, expert=specialist, mixing=mixing):
                if mixing == "probabilities_without_log":
                    return -expert(x).softmax(1)[torch.arange(len(y)), y].mean()
                return F.cross_entropy(expert(x), y)

            train_by_hand(module, "local_expert.", batches, momentum_sgd, max_epochs=3, loss=alone)
            stage = federation.client_module("Fine-tuned", client)
            torch.testing.assert_close(tensors(stage, "local_"), tensors(module, "local_"), rtol=1e-12, atol=1e-12)

            generator = client_generator(4, client, 0)  # also seeds what the gate draws from
            module.gate.reset_parameters()
            batches = datamodule.batches(samples, generator=generator)
            by_hand = partial(loss_by_hand, module, mixing)
            train_by_hand(module, ("local_expert.", "gate."), batches, adam, max_epochs=3, loss=by_hand)
            actual = federation.client_module("Mixture", client).state_dict()
            torch.testing.assert_close(actual, module.state_dict(), rtol=1e-12, atol=1e-12)
            assert_same_bits(
                tensors(federation.client_module("Mixture", client), "global_"),
                tensors(federation.client_module("FedAvg", client), "global_"),
            )


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def loss_by_hand(module, mixing, x, y):
    """METHODS 7.4: h weighs the specialist, 1 - h the global expert; sample by sample."""
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


def test_every_clients_gate_starts_anew_and_only_before_the_first_round(tmp_path):
    gates = []
    for rounds, epochs in ((1, 0), (2, 0), (2, 1)):
        phases = [*three_phases()[:2], phase("Mixture", SpecialistMixture(), rounds=rounds, max_epochs=epochs)]
        federation = run(phases, mixture(gate()), blobs(SIZES), tmp_path / f"{rounds}{epochs}")
        gates.append([tensors(federation.client_module("Mixture", client), "gate.") for client in range(10)])
    assert len({own["gate.network.weight"].sum().item() for own in gates[0]}) == 10
    for client in range(10):
        assert_same_bits(gates[1][client], gates[0][client])
        fresh = gate()
        client_generator(0, client, 0)  # seeds what the gate draws from
        fresh.reset_parameters()
        assert_same_bits(gates[0][client], {f"gate.{name}": tensor for name, tensor in fresh.state_dict().items()})
    assert not torch.equal(gates[2][0]["gate.network.weight"], gates[1][0]["gate.network.weight"])


@pytest.mark.parametrize(("weight", "expert"), [(1.0, "global_expert"), (0.0, "local_expert")])
@pytest.mark.parametrize("mixing", MIXINGS)
def test_a_gate_held_at_one_expert_gives_exactly_this_expert(tmp_path, weight, expert, mixing):
    phases = [
        *three_phases()[:2],
        Phase("held", SpecialistMixture(), gate=ConstantGate(weight), mixing=mixing, max_epochs=0),
        Phase("the expert", SpecialistMixture(), max_epochs=0, mixing="logits"),
    ]
    datamodule = blobs(SIZES, validation_fraction=0.3)
    federation = run(phases, mixture(gate()), datamodule, tmp_path)
    x = datamodule.x
    for client, evaluated in enumerate(federation.results["held"].clients):
        alone = getattr(federation.client_module("the expert", client), expert)
        scores = federation.client_module("held", client)(x)
        expected = alone(x) if mixing == "logits" else alone(x).log_softmax(1)
        assert torch.equal(scores, expected)
        right = alone(x)[datamodule.global_test].argmax(1) == datamodule.y[datamodule.global_test]
        assert evaluated.global_test == pytest.approx(right.double().mean().item(), abs=1e-6)


def test_the_mixture_follows_specialists_on_all_samples_and_not_those_of_a_part():
    assert SpecialistMixture().follows(PersonalizedExpert())
    assert not SpecialistMixture().follows(PersonalizedExpert(gate_fraction=0.25))
    assert not any(SpecialistMixture().follows(other) for other in (FedAvg(), OptInFedAvg(), Local(), PFLMoE()))
    assert PersonalizedExpert().follows(OptInFedAvg())


# Texts


class LastToken(TensorData):
    """Two classes of texts of five tokens, told apart by the last one."""

    def __init__(self, **kwargs):
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(2, 20, (60, 5), generator=generator)
        super().__init__(x, x[:, -1] % 2, torch.arange(60).split([25, 20, 15]), dtype=torch.int64, **kwargs)


def bilstm_mixture(dtype=torch.float64):
    torch.manual_seed(3)
    network = BiLSTM(vocabulary_size=20, embedding_dim=6, hidden=4, num_classes=1)
    expert = BiLSTM(vocabulary_size=20, embedding_dim=6, hidden=4, num_classes=2)
    optimizer = partial(torch.optim.Adam, lr=0.02)
    return PersonalizedMoE(expert, gate=NetworkGate(network), optimizer=optimizer, mixing="probabilities").to(dtype)


def test_bilstms_are_experts_and_gate_of_texts_and_their_results_are_those_of_a_bare_loop(tmp_path):
    datamodule = LastToken(batch_size=5)
    phases = [
        Phase("FedAvg", OptInFedAvg("global_expert.*", 0.34), rounds=2, gate=ConstantGate(1)),
        Phase("Fine-tuned", PersonalizedExpert(), gate=ConstantGate(0)),
        Phase("Mixture", SpecialistMixture()),
        Phase("gate alone", PFLMoE(0.5), start="Fine-tuned"),  # with both experts frozen, these are looked up
    ]
    model = bilstm_mixture()
    federation = run(phases, model, datamodule, tmp_path)
    for client in range(3):
        module = copy.deepcopy(federation.client_module("Fine-tuned", client))
        module.gate = copy.deepcopy(model.gate)
        generator = client_generator(0, client, 0)
        module.gate.reset_parameters()
        batches = datamodule.batches(datamodule.train_samples[client], generator=generator)
        names = ("local_expert.", "gate.")
        train_by_hand(module, names, batches, model.optimizer, 2, lambda x, y, m=module: m.loss((x, y))[0])
        actual = federation.client_module("Mixture", client)
        torch.testing.assert_close(actual.state_dict(), module.state_dict(), rtol=1e-10, atol=1e-12)
        evaluated = federation.results["Mixture"].clients[client]
        weights = actual.mix(datamodule.x[datamodule.train_samples[client]])[1][:, 0]
        assert evaluated.mean_gate_weight == pytest.approx(weights.mean().item(), abs=1e-12)

    every = run(phases, model, LastToken(batch_size=5), tmp_path / "every", every_batch=True)
    for client in range(3):  # a Trainer that sees every batch looks nothing up
        for name in ("Mixture", "gate alone"):
            actual, expected = (one.client_module(name, client).state_dict() for one in (federation, every))
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


# Early stopping of clients and of a phase


def validated_losses(module, datamodule, client, seed, names, optimizer, epochs, every, loss):
    """Parameters and validation loss after every so many epochs of a bare loop."""
    generator = client_generator(seed, client, 0)
    batches = datamodule.batches(datamodule.train_samples[client], generator=generator)
    parameters = [parameter for name, parameter in module.named_parameters() if name.startswith(names)]
    optimizer = optimizer(parameters)
    validation = datamodule.validation_samples[client]
    x, y = datamodule.x[validation], datamodule.y[validation]
    checks = []
    for epoch in range(1, epochs + 1):
        for batch in batches:
            optimizer.zero_grad()
            loss(module, *batch).backward()
            optimizer.step()
        if epoch % every == 0 and len(y):
            with torch.no_grad():
                checks.append((loss(module, x, y).item(), copy.deepcopy(module.state_dict())))
    return checks


def stopped_by_hand(checks, patience, min_delta):
    """The best check, by rule: only a loss lower by more than ``min_delta`` counts; and how many checks there were."""
    best, waited = 0, 0
    for number in range(1, len(checks)):
        better = checks[number][0] < checks[best][0] - min_delta
        best, waited = (number, 0) if better else (best, waited + 1)
        if waited == patience:
            return best, number + 1
    return best, len(checks)


@pytest.mark.parametrize("stage", ["Fine-tuned", "Mixture"])
def test_a_client_keeps_its_best_validated_epoch_and_one_without_validation_samples_trains_to_the_end(tmp_path, stage):
    patience, min_delta, every, epochs = 2, 0.02, 2, 40
    sizes = (40, 30, 1, 36)  # one sample of a client stays for training, so that client 2 has none to validate
    datamodule = blobs(sizes, validation_fraction=0.4)
    phases = three_phases(0.0, clients_per_round=None)
    for personal in phases[1:]:
        personal.max_epochs = epochs if personal.name == stage else 1
    stopping = next(personal for personal in phases if personal.name == stage)
    stopping.callbacks = [BestEpoch(min_delta=min_delta, patience=patience)]
    stopping.trainer = {"limit_val_batches": 1.0, "check_val_every_n_epoch": every}
    federation = run(phases, mixture(gate()), datamodule, tmp_path)
    kinds = set()
    for client in range(4):
        module = federation.client_module("FedAvg" if stage == "Fine-tuned" else "Fine-tuned", client)
        loss = lambda module, x, y: F.cross_entropy(module(x), y)  # noqa: E731
        names = ("local_expert.", "gate.")
        if stage == "Fine-tuned":
            module.local_expert = copy.deepcopy(module.global_expert)
            names = ("local_expert.",)
            loss = lambda module, x, y: F.cross_entropy(module.local_expert(x), y)  # noqa: E731
        else:
            module.gate = gate()
            client_generator(0, client, 0)
            module.gate.reset_parameters()
        checks = validated_losses(module, datamodule, client, 0, names, momentum_sgd, epochs, every, loss)
        actual = tensors(federation.client_module(stage, client), names)
        if not checks:
            torch.testing.assert_close(actual, tensors(module, names), rtol=1e-9, atol=1e-12)
            kinds.add("none")
            continue
        best, number = stopped_by_hand(checks, patience, min_delta)
        kinds |= {"stopped"} if number < len(checks) else set()
        kinds |= {"earlier"} if best < number - 1 else set()
        expected = {name: tensor for name, tensor in checks[best][1].items() if name.startswith(names)}
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert kinds == {"none", "stopped", "earlier"}, "the test would show nothing"


def losses_by_hand(datamodule, expert, clients):
    """Mean over clients of the mean negative log-likelihood of their validation samples."""
    means = []
    for client in clients:
        samples = datamodule.validation_samples[client]
        terms = [-torch.log(expert(datamodule.x[i][None]).softmax(1)[0, datamodule.y[i]]) for i in samples.tolist()]
        means.append(sum(terms) / len(terms))
    return (sum(means) / len(means)).item()


def stopping_phase(**kwargs) -> Phase:
    defaults = {"rounds": 40, "monitor": "validation_loss", "patience": 2, "evaluate_every_n_rounds": 3}
    algorithm = OptInFedAvg("global_expert.*", 0.4)
    return Phase("FedAvg", algorithm, gate=ConstantGate(1), clients_per_round=3, **{**defaults, **kwargs})


def test_patience_ends_a_phase_whose_result_is_the_best_validated_round_of_the_participants(tmp_path):
    datamodule, min_delta = blobs(SIZES, validation_fraction=0.4), 0.002
    federation = run([stopping_phase(min_delta=min_delta)], mixture(), datamodule, tmp_path, seed=1)
    clients = OptInFedAvg(opt_out_clients=0.4).participants(range(10), 1)
    losses, everybody, servers = [], [], []
    for rounds in range(3, 41, 3):
        alone = run(
            [phase("FedAvg", stopping_phase().algorithm, gate=ConstantGate(1), clients_per_round=3, rounds=rounds)],
            *(mixture(), datamodule, tmp_path / str(rounds)),
            seed=1,
        )
        module = alone.client_module("FedAvg", 0)
        losses.append(losses_by_hand(datamodule, module.global_expert, clients))
        everybody.append(losses_by_hand(datamodule, module.global_expert, range(10)))
        servers.append(alone.states["FedAvg"].server)
    checks = [(loss, None) for loss in losses]
    last_improvement, number = stopped_by_hand(checks, patience=2, min_delta=min_delta)
    assert 2 < number < len(losses), "the test would show nothing if the phase ran to its end"
    rounds = [row["round"] for row in federation.rows]
    assert rounds == list(range(3, 3 * number + 1, 3))
    best = losses.index(min(losses[:number]))
    assert best < number - 1 and last_improvement <= best
    assert losses != pytest.approx(everybody, abs=1e-3), "those who opt out must not count"
    assert federation.results["FedAvg"].round == 3 * (best + 1)
    assert federation.results["FedAvg"].selection == "best round by validation_loss"
    assert_same_bits(federation.states["FedAvg"].server, servers[best])
    measured = federation.results["FedAvg"].spread("validation_loss", set(clients)).mean
    assert measured == pytest.approx(losses[best], rel=1e-12)


def test_the_best_round_is_a_copy_and_personalization_starts_from_it(tmp_path):
    datamodule = blobs(SIZES, validation_fraction=0.4)
    phases = [stopping_phase(), phase("Fine-tuned", PersonalizedExpert(), max_epochs=0)]
    federation = run(phases, mixture(), datamodule, tmp_path, seed=1)
    assert federation.results["FedAvg"].round < federation.rows[-1]["round"]
    server = federation.states["FedAvg"].server
    for client in range(10):
        module = federation.client_module("Fine-tuned", client)
        for name, tensor in server.items():
            for expert in ("global_expert.", "local_expert."):
                assert torch.equal(module.state_dict()[name.replace("global_expert.", expert)], tensor)


@pytest.mark.parametrize("mixing", MIXINGS)
def test_validation_loss_is_the_mean_loss_of_the_mixture_by_hand(tmp_path, mixing):
    datamodule = blobs(SIZES[:4], validation_fraction=0.4)
    model = mixture(gate())
    model.mixing = mixing
    phases = three_phases(0.0)
    phases[2].evaluate = True
    federation = run(phases, model, datamodule, tmp_path)
    for client, evaluated in enumerate(federation.results["Mixture"].clients):
        samples = datamodule.validation_samples[client]
        module = federation.client_module("Mixture", client)
        expected = loss_by_hand(module, mixing, datamodule.x[samples], datamodule.y[samples])
        assert evaluated.validation_loss == pytest.approx(expected.item(), rel=1e-10)


class Stop(FederationCallback):
    """Stops the run behind the n-th round."""

    def __init__(self, n):
        self.n = n

    def on_round_end(self, *arguments):
        self.n -= 1
        if not self.n:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [2, 4, 7])
def test_a_run_stopped_within_a_phase_that_ends_early_and_resumed_gives_the_same_bits(tmp_path, after):
    datamodule = blobs(SIZES, validation_fraction=0.4)
    personal = Phase("Mixture", SpecialistMixture(), max_epochs=4)
    personal.callbacks = [BestEpoch(patience=1)]
    personal.trainer = {"limit_val_batches": 1.0}

    def phases():
        return [stopping_phase(), phase("Fine-tuned", PersonalizedExpert(), max_epochs=1), copy.deepcopy(personal)]

    kwargs = {"enable_checkpointing": True, "seed": 1}
    whole = run(phases(), mixture(gate()), datamodule, tmp_path / "whole", **kwargs)
    assert 7 < whole.rows[-2]["round"] < 40, "the federated phase ends early, after the stops of this test"
    with pytest.raises(KeyboardInterrupt):
        run(phases(), mixture(gate()), datamodule, tmp_path / "stopped", callbacks=[Stop(after)], **kwargs)
    settings = {"default_root_dir": str(tmp_path / "stopped"), "enable_progress_bar": False, "logger": False}
    resumed = Federation(phases(), {"max_epochs": 2}, seed=1, **settings)
    resumed.fit(mixture(gate()), datamodule, ckpt_path="last")
    for name, state in whole.states.items():
        again = resumed.states[name]
        assert_same_bits(again.server, state.server)
        assert (again.round, again.best_round, again.stopped) == (state.round, state.best_round, state.stopped)
        assert again.kept.keys() == state.kept.keys()
        for client in state.kept:
            assert_same_bits(again.kept[client], state.kept[client])
    assert (resumed.run_dir / "rounds.csv").read_bytes() == (whole.run_dir / "rounds.csv").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"patience": 3}, "patience is 3, which needs a monitor"),
        ({"patience": 0, "monitor": "validation_loss"}, "patience is 0, but must be at least 1"),
        ({"min_delta": -0.1}, "min_delta is -0.1, but must be at least 0"),
        ({"monitor": "validation_loss", "evaluate_every_n_rounds": 0}, "evaluate_every_n_rounds is 0, but monitor is"),
        ({"monitor": "validation_loss", "evaluate": False}, "monitor is 'validation_loss', which needs evaluate: true"),
        ({"trainer": {"max_epochs": 3}}, "trainer has max_epochs, which a phase takes as `max_epochs`"),
        ({"trainer": {"limit_val_batchs": 1.0}}, "unexpected keyword argument 'limit_val_batchs'"),
        ({"monitor": "validation_loss"}, "monitor is 'validation_loss', but data.init_args.validation_fraction is 0"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused_before_training(tmp_path, arguments, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        run([Phase("FedAvg", OptInFedAvg(), **arguments)], mixture(), blobs(), tmp_path)
    assert not list(tmp_path.rglob("version_*"))
