"""Newcomers fit what they keep to what the server has: what is shared stays as it is, in every backend."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import EveryBatch, assert_same_bits, blobs, client_generator, mixture, tensors
from helpers.backends import WithBatchNorm
from helpers.workers import TwoInThisProcess
from torch import nn

from fedmoe_pl.algorithms import FedAvg, FedPAC, FedProx, FedRep
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.phases.phase import Phase

sgd = partial(torch.optim.SGD, lr=0.1)
EPOCHS, ROUNDS = 3, 2
ONE_BY_ONE = {"callbacks": [EveryBatch()]}
BACKENDS = {
    "in a Trainer that sees every batch": (TrainerBackend, ONE_BY_ONE),
    "one by one": (TrainerBackend, {}),
    "stacked": (StackedBackend, {}),
    "in workers": (lambda: TwoInThisProcess(AutoBackend()), {}),
}


class Normalized(WithBatchNorm):
    """Batch normalization without parameters, beside the linear layer that is not shared."""

    def __init__(self):
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False), nn.Tanh(), nn.Linear(6, 6))


BODY = "global_expert.extractor.*"
CASES = {  # the algorithm, the expert, what a newcomer trains, and in how many of the local epochs
    "FedPer": (lambda: FedAvg(BODY), None, "classifier.", EPOCHS),
    "LG-FedAvg": (lambda: FedAvg("global_expert.classifier.*"), None, "extractor.", EPOCHS),
    "FedRep": (lambda: FedRep(BODY, head_epochs=2), None, "classifier.", 2),
    "FedPAC": (lambda: FedPAC(weight=0.0), None, "classifier.", 1),
    "batch normalization": (lambda: FedAvg(BODY), WithBatchNorm, "classifier.", EPOCHS),
    "its statistics alone": (
        lambda: FedAvg(["global_expert.extractor.0.*", "global_expert.extractor.1.*"]),
        Normalized,
        ("extractor.3.", "classifier."),
        EPOCHS,
    ),
}


def model(expert=None):
    return mixture(GlobalOnly(), expert and expert(), optimizer=sgd)


def federation(path, algorithm, backend="one by one", rounds=1):
    make, arguments = BACKENDS[backend]
    phases = [Phase("it", algorithm(), rounds=rounds, gate=GlobalOnly())]
    trainer = {"max_epochs": EPOCHS, "accelerator": "cpu", **arguments}
    off = {"logger": False, "enable_progress_bar": False}
    return Federation(phases, trainer, backend=make(), default_root_dir=str(path), **off)


@pytest.fixture(scope="module", params=CASES)
def before(request, tmp_path_factory):
    algorithm, expert, trained, epochs = CASES[request.param]
    run = federation(tmp_path_factory.mktemp("before"), algorithm)
    run.fit(model(expert), blobs())
    return run, algorithm, expert, trained, epochs


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_newcomers_train_what_they_keep_around_what_the_server_has(before, backend, tmp_path):
    run, algorithm, expert, trained, epochs = before
    data = blobs(sizes=(10, 6))  # no batch of one sample, which is left out where there is batch normalization
    later = federation(tmp_path, algorithm, backend)
    later.personalize(model(expert), data, str(run.run_dir / "checkpoints/last.ckpt"), ROUNDS)
    server = {name: tensor for name, tensor in run.run.states["it"].server.items() if "/" not in name}
    shared = {name: tensor for name, tensor in server.items() if algorithm().is_shared(name)}
    assert_same_bits({name: later.run.states["it"].server[name] for name in shared}, shared)
    for client in (0, 1):
        bare = model(expert)
        bare.load_state_dict({**bare.state_dict(), **shared})
        part = bare.global_expert.eval()  # the running statistics are those of the server
        own = [parameter for name, parameter in part.named_parameters() if name.startswith(trained)]
        for round in range(ROUNDS):
            optimizer = sgd(own)
            batches = data.batches(data.train_samples[client], generator=client_generator(0, client, round))
            for _ in range(epochs):
                for x, y in batches:
                    optimizer.zero_grad()
                    F.cross_entropy(part(x), y).backward()
                    optimizer.step()
        actual = tensors(later.client_module("it", client), "global_expert.")
        torch.testing.assert_close(actual, tensors(bare, "global_expert."), rtol=0, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", [FedAvg, partial(FedProx, 0.1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_newcomers_with_nothing_to_learn_receive_the_model(tmp_path, algorithm, backend):
    """Nothing depends on the local expert, which is not shared."""
    algorithm = partial(algorithm, shared="global_expert.*")
    run = federation(tmp_path, algorithm, backend)
    run.fit(model(), blobs())
    server = run.run.states["it"].server
    run.personalize(model(), blobs(sizes=(9, 6)), rounds=ROUNDS)
    state = run.run.states["it"]
    assert state.flops == 0 and not state.clients and state.round == 1
    torch.testing.assert_close(tensors(run.client_module("it", 1), "global_expert."), server, rtol=0, atol=0)


class HeadLater(FedAvg):
    """The head is trained from the second round on."""

    def is_trainable(self, name, round, epoch):
        return self.is_shared(name) or round >= 1


class BodyFirst(FedAvg):
    """The head is trained from the second epoch on."""

    def is_trainable(self, name, round, epoch):
        return self.is_shared(name) == (epoch < 1)


def test_newcomers_wait_for_the_round_in_which_what_they_keep_is_trained(tmp_path):
    run = federation(tmp_path, lambda: HeadLater(BODY), rounds=2)
    run.fit(model(), blobs())
    run.personalize(model(), blobs(sizes=(9, 6)), rounds=3)
    state, start = run.run.states["it"], tensors(model(), "global_expert.classifier.")
    assert state.round == 3 and not any(torch.equal(state.clients[0][name], start[name]) for name in start)


def test_newcomers_whose_first_epoch_trains_nothing_are_told_so(tmp_path):
    run = federation(tmp_path, lambda: BodyFirst(BODY))
    run.fit(model(), blobs())
    with pytest.warns(UserWarning, match="^Phase 'it': newcomers train nothing, because BodyFirst trains none"):
        run.personalize(model(), blobs(sizes=(9, 6)), rounds=3)
    assert not run.run.states["it"].clients


def test_a_newcomer_s_model_can_be_trained_on_as_a_whole(tmp_path):
    run = federation(tmp_path, lambda: FedAvg(BODY))
    run.fit(model(), blobs())
    run.personalize(model(), blobs(sizes=(9, 6)), rounds=1)
    assert all(parameter.requires_grad for parameter in run.client_module("it", 0).parameters())
