"""One Trainer that serves many clients, which use one module in turn."""

from typing import ClassVar

import pytest
import torch
from helpers import EveryBatch, assert_same_bits, blobs, mixture, phase, run, tensors
from helpers.backends import UNEQUAL, local_training, train
from helpers.clusters import all_phases, clustered

from fedmoe_pl.algorithms import FedAvg, FedProx, PFLMoE
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import StackedBackend, TrainerBackend, group
from fedmoe_pl.backends import trainer as trainers
from fedmoe_pl.backends.features import FeatureCache
from fedmoe_pl.models import FeatureGate, LinearGate


@pytest.fixture
def fits(monkeypatch):
    """The number of clients that each shared Trainer served; frozen parts are computed in every step."""
    monkeypatch.setattr(FeatureCache, "find", lambda *arguments: None)
    served = []
    original = trainers.train_clients

    def counted(training, server, clients, *arguments):
        served.append(len(clients))
        return original(training, server, clients, *arguments)

    monkeypatch.setattr(trainers, "train_clients", counted)
    return served


def trained_alone(monkeypatch, *arguments, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(trainers, "needs_every_batch", lambda training: "each is watched")
        return run(*arguments, **kwargs)


ALGORITHMS = {
    "FedAvg": [phase("it", FedAvg("global_expert.*"), rounds=3)],
    "FedProx": [phase("it", FedProx(0.1), rounds=2, clients_per_round=5)],
    "interleaved": [phase("F", FedAvg()), phase("it", PFLMoE(interleaved=True), rounds=4, keep_optimizer=True)],
    "gate": [phase("F", FedAvg("global_expert.*")), phase("it", PFLMoE(), start="initial", max_epochs=3)],
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_shared_trainer_gives_the_bits_of_a_trainer_per_client(tmp_path, monkeypatch, fits, name):
    def model():
        return mixture(FeatureGate(6))

    arguments = {"backend": TrainerBackend(), "seed": 2}
    shared = run(ALGORITHMS[name], model(), blobs(UNEQUAL), tmp_path / "shared", **arguments)
    assert fits and max(fits) > 1, "a Trainer served several clients"
    number = len(fits)
    alone = trained_alone(monkeypatch, ALGORITHMS[name], model(), blobs(UNEQUAL), tmp_path / "alone", **arguments)
    assert len(fits) == number
    states = [federation.run.states["it"] for federation in (shared, alone)]
    assert_same_bits(states[0].server, states[1].server)
    assert states[0].clients.keys() == states[1].clients.keys()
    for client in states[0].clients:
        assert_same_bits(dict(states[0].clients[client]), dict(states[1].clients[client]))


def test_clients_of_clusters_and_of_dropout_have_the_same_bits_too(tmp_path, monkeypatch, fits):
    phases = all_phases()
    shared = run(phases, clustered(), blobs(), tmp_path / "shared", backend=TrainerBackend())
    assert max(fits) > 1
    alone = trained_alone(monkeypatch, all_phases(), clustered(), blobs(), tmp_path / "alone", backend=TrainerBackend())
    for name in ("Local", "IFCA", "Fine-tuned", "mixture"):
        for client in range(3):
            modules = [federation.client_module(name, client) for federation in (shared, alone)]
            assert_same_bits(tensors(modules[0]), tensors(modules[1]))


def test_chunks_hold_small_clients_only_and_never_change_the_groups():
    training = local_training(mixture(LinearGate(5)), FedAvg(), blobs((1500, 600, 10, 10, 10, 1900, 700)), max_epochs=1)
    plan = TrainerBackend().plan(training)
    groups = plan.groups(range(7))
    assert groups == [[client] for client in range(7)]
    assert plan.chunks(groups) == [[[0]], [[1], [2], [3], [4]], [[5]], [[6]]], "2000 samples in all epochs"
    assert plan.chunks(groups[2:5], at_least=3) == [[[2]], [[3]], [[4]]]
    longer = local_training(mixture(LinearGate(5)), FedAvg(), blobs((600, 500, 500)), max_epochs=2)
    assert TrainerBackend().plan(longer).chunks([[0], [1], [2]]) == [[[0]], [[1], [2]]]


@pytest.mark.parametrize(
    ("arguments", "shares"),
    [
        ({}, True),
        ({"gradient_clip_val": 0.1}, True),
        ({"precision": "bf16-mixed"}, True),
        ({"callbacks": [EveryBatch()]}, False),
        ({"limit_val_batches": 1.0}, False),
    ],
)
def test_a_client_has_a_trainer_of_its_own_where_something_looks_at_it(arguments, shares):
    data = blobs(UNEQUAL, validation_fraction=0.2)
    assert TrainerBackend().plan(local_training(mixture(), FedAvg(), data, **arguments)).shares_trainer == shares


class Watching(FedAvg):
    """Keeps what a client's module sees of its Trainer in the last step."""

    seen: ClassVar[list] = []

    def client_loss(self, module, batch, constants):
        self.seen.append((module.current_epoch, module.global_step, module.trainer.max_epochs, module.training))
        return super().client_loss(module, batch, constants)


def test_a_module_sees_its_own_progress_in_the_shared_trainer(tmp_path, monkeypatch, fits):
    watching = Watching("global_expert.*")
    run([phase("it", watching)], mixture(LinearGate(5)), blobs((8, 4)), tmp_path / "a", 3, backend=TrainerBackend())
    assert fits == [2]
    shared, Watching.seen = Watching.seen, []
    first = [(epoch, 2 * epoch + step, 3, True) for epoch in range(3) for step in range(2)]
    second = [(epoch, epoch, 3, True) for epoch in range(3)]
    counted = [seen for seen in shared if seen in first + second]
    assert counted[-9:] == first + second
    trained_alone(
        monkeypatch,
        [phase("it", watching)],
        mixture(LinearGate(5)),
        blobs((8, 4)),
        tmp_path / "b",
        3,
        backend=TrainerBackend(),
    )
    assert Watching.seen == shared, "as in a Trainer of its own"


class Asked(FedAvg):
    """Counts how often it is asked whether a parameter is trained."""

    count = 0

    def is_trainable(self, name, round, epoch):
        Asked.count += 1
        return super().is_trainable(name, round, epoch)


def test_a_group_takes_one_training_step_and_what_all_its_clients_share_is_asked_once(monkeypatch):
    steps, asked = [], []
    original = group._Group.training_step
    monkeypatch.setattr(group._Group, "training_step", lambda *args: (steps.append(args[1]), original(*args))[1])
    for sizes in ((8, 4), (8, 4, 7, 5, 9, 6)):
        training = local_training(mixture(LinearGate(5)), Asked(), blobs(sizes))
        Asked.count = 0
        group.train_clients(training, dict(training.initial), range(len(sizes)), {}, 0, FeatureCache())
        asked.append(Asked.count)
    assert [list(clients) for clients in steps] == [[0, 1], [0, 1, 2, 3, 4, 5]]
    assert asked[0] == asked[1] > 0


class SendsViews(FedAvg):
    def client_final(self, client, constants):
        state = {name: tensor for name, tensor in client.module.state_dict().items() if self.is_shared(name)}
        return Update(state, len(client.samples), {"gate.linear.bias": client.module.state_dict()["gate.linear.bias"]})


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend()])
def test_an_algorithm_may_return_the_module_s_own_tensors(backend):
    data = blobs(UNEQUAL)
    update, kept = train(backend, local_training(mixture(LinearGate(5)), SendsViews("global_expert.*"), data))
    expected, expected_kept = train(backend, local_training(mixture(LinearGate(5)), FedAvg("global_expert.*"), data))
    assert_same_bits(update.sent, expected.sent)
    for client in kept:
        assert torch.equal(kept[client]["gate.linear.bias"], expected_kept[client]["gate.linear.bias"])
