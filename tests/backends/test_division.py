"""Which losses two processes may compute in shares of each batch, and that these are then the losses of whole batches.

The reference is a Trainer per client in one process.
"""

from collections import OrderedDict
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import mixture, momentum_sgd, sparse_mixture
from helpers.backends import local_training, train_clients
from helpers.methods import METHODS
from helpers.ranks import Centered, ClassWeighted, Contrast, FromEight, Ignoring, Manual, Own, own_mean, sample_weighted
from helpers.runs import federation
from helpers.workers import CPU
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl.algorithms import FD, FedAvg, FedProx
from fedmoe_pl.backends import DistributedBackend, TrainerBackend
from fedmoe_pl.backends.workers.distributed import check_division
from fedmoe_pl.models import FeatureGate, LinearGate, PersonalizedMoE
from fedmoe_pl.setup import start

SIZES = (16, 23)
DDP = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def team():
    backend = DistributedBackend([CPU, CPU])
    yield backend
    backend.close()


def layers(outputs=3, *last) -> nn.Sequential:
    """Layers of PyTorch's."""
    extractor, classifier = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, outputs), *last)
    return nn.Sequential(OrderedDict(extractor=extractor, classifier=classifier))


def model(expert=None, gate=None, **kwargs) -> PersonalizedMoE:
    torch.manual_seed(0)
    kwargs = {"optimizer": momentum_sgd, **kwargs}
    return PersonalizedMoE(expert or layers(), gate=gate or LinearGate(5), **kwargs).double()


def data(y=None, ignored=None, sizes=SIZES, **kwargs) -> Ignoring:
    """Batches of eight samples: first those of class 0, then 1, then 2; most labels may be ignored."""
    x = torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(1))
    y = torch.cat([torch.arange(size) * 3 // size for size in sizes]) if y is None else y
    parts = torch.arange(sum(sizes)).split([*sizes])
    made = Ignoring(x, y, parts, dtype=torch.float64, batch_size=8, **kwargs)
    made.ignored = ignored
    made.setup()
    return made


def assert_divided(team, training, loss_is_mean=False):
    """Two processes give what one Trainer for each client gives."""
    shared, team.loss_is_mean = replace(training, trainer={**training.trainer, "strategy": "ddp"}), loss_is_mean
    plans = team.plan(shared).begin(shared), TrainerBackend().plan(training).begin(training)
    (two, two_kept), (one, one_kept) = map(train_clients, plans)
    team.close()  # other tests have other data
    close(two.sent, one.sent)
    close(two_kept, one_kept)
    assert any(not torch.equal(one.sent[name], training.initial[name]) for name in training.initial)


WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
FLAGS = (torch.arange(3 * sum(SIZES)) % 5 < 2).double().view(-1, 3)
PIXELS = torch.arange(4 * sum(SIZES)).view(-1, 4) % 3
DIVIDED = {
    "class weights": (lambda: model(loss=nn.CrossEntropyLoss(WEIGHTS)), data),
    "ignored labels": (model, lambda: data(ignored=-100)),
    "another ignored label": (lambda: model(loss=nn.CrossEntropyLoss(ignore_index=2)), data),
    "all of it": (
        lambda: model(loss=nn.CrossEntropyLoss(WEIGHTS, ignore_index=255, label_smoothing=0.2)),
        lambda: data(ignored=255),
    ),
    "mixed probabilities": (lambda: model(mixing="probabilities"), lambda: data(ignored=-100)),
    "a gate that reads features": (lambda: model(gate=FeatureGate(6)), lambda: data(ignored=-100)),
    "pixels": (
        lambda: model(layers(12, nn.Unflatten(1, (3, 4))), loss=nn.CrossEntropyLoss(WEIGHTS, ignore_index=1)),
        lambda: data(PIXELS),
    ),
    "flags": (lambda: model(loss=nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)), lambda: data(FLAGS)),
    "values": (lambda: model(loss=nn.HuberLoss()), lambda: data(FLAGS * WEIGHTS)),
}


@pytest.mark.few("flags")
@pytest.mark.parametrize("setting", DIVIDED)
def test_known_losses_are_divided(team, setting):
    module, samples = DIVIDED[setting]
    assert_divided(team, local_training(module(), FedAvg(), samples()))


def hooked() -> PersonalizedMoE:
    module = model()
    module.global_expert.classifier.register_forward_hook(lambda part, x, y: y - y.mean(0))
    return module


class Normalization(nn.BatchNorm1d):
    """May compute anything."""


def with_a_loss_of_its_own() -> PersonalizedMoE:
    module = model()
    module.loss = lambda batch: (module(batch[0]).mean().square(), {})
    return module


UNKNOWN = {
    "class weights in a training step": (lambda: ClassWeighted(".").double(), FedAvg(), "the loss of ClassWeighted"),
    "a training step": (lambda: Own(".").double(), FedAvg(), "the loss of Own"),
    "weighted samples": (lambda: model(loss=sample_weighted, task="multiclass"), FedAvg(), "sample_weighted"),
    "another criterion": (lambda: model(loss=nn.NLLLoss(), task="multiclass"), FedAvg(), "NLLLoss"),
    "a rescaled criterion": (lambda: model(loss=nn.BCEWithLogitsLoss(WEIGHTS)), FedAvg(), "BCEWithLogitsLoss"),
    "two means": (
        lambda: model(loss=nn.CrossEntropyLoss(WEIGHTS)),
        FD("local_expert"),
        "CrossEntropyLoss in the loss of FD",
    ),
    "a term that starts at zero": (model, Contrast(), "the algorithm Contrast"),
    "a term of large batches": (model, FromEight(), "the algorithm FromEight"),
    "a layer of one's own": (lambda: model(Centered(5, 3)), FedAvg(), "the layers of PersonalizedMoE"),
    "a layer that compares samples": (lambda: model(nn.Sequential(nn.Softmax(0), nn.Linear(5, 3))), FedAvg(), "layers"),
    "statistics of a batch": (
        lambda: model(nn.Sequential(nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True))),
        FedAvg(),
        "layers",
    ),
    "rows of limited length": (
        lambda: model(nn.Sequential(nn.Identity(), nn.Embedding(2, 2, max_norm=1))),
        FedAvg(),
        "layers",
    ),
    "normalization of one's own": (
        lambda: model(nn.Sequential(nn.Linear(5, 3), Normalization(3))),
        FedAvg(),
        "layers",
    ),
    "a hook": (hooked, FedAvg(), "layers"),
    "a replaced method": (with_a_loss_of_its_own, FedAvg(), "layers"),
}


@pytest.mark.parametrize("setting", UNKNOWN)
def test_other_losses_need_the_user_s_word(setting):
    module, algorithm, unknown = UNKNOWN[setting]
    training = local_training(module(), algorithm, data(), strategy="ddp")
    sentence = f"loss_is_mean is False, but must be True, if .*trainer.strategy divides batches, and .*{unknown}"
    with pytest.raises(MisconfigurationException, match=sentence):
        check_division(training, loss_is_mean=False)
    check_division(training, loss_is_mean=True)


WORD = {
    "a training step": (lambda folder: Own(folder).double(), data),
    "a criterion": (lambda _: model(loss=own_mean, task="multiclass"), data),
    "layers": (lambda _: mixture(LinearGate(5)), lambda: data(ignored=-100)),
    "sparse experts": (lambda _: sparse_mixture(), lambda: data(ignored=-100)),
}


@pytest.mark.few("a training step")
@pytest.mark.parametrize("setting", WORD)
def test_with_the_user_s_word_they_are_divided(team, setting, tmp_path):
    module, samples = WORD[setting]
    assert_divided(team, local_training(module(tmp_path), FedAvg(), samples()), loss_is_mean=True)


@pytest.mark.parametrize("module", [lambda: sparse_mixture(load_balancing=0.1), lambda: Manual(".").double()])
def test_what_is_no_mean_is_refused_whatever_the_user_says(module):
    with pytest.raises(MisconfigurationException, match="strategy is 'ddp', but must be left out, because"):
        check_division(local_training(module(), FedAvg(), data(), strategy="ddp"), loss_is_mean=True)


@pytest.mark.parametrize("expert", [layers, lambda: nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))])
def test_layers_of_pytorch_are_known(expert):
    check_division(local_training(model(expert()), FedProx(0.1), data()), loss_is_mean=False)


OF_ALGORITHMS = "APFL Ditto FML FedAPEN FedEM FedProx FedRoD Scaffold".split()


@pytest.mark.few("FML")
@pytest.mark.parametrize("name", OF_ALGORITHMS)
def test_ignored_labels_do_not_count_in_losses_of_algorithms(team, name):
    """Most are ignored, and of some shares all."""
    (phase,), module = METHODS[name].phases(), METHODS[name].model()
    module.gate = phase.gate or module.gate
    assert_divided(team, local_training(module, phase.algorithm, data(ignored=-100)), loss_is_mean=True)


REFUSED = {"CoMiGS", "FedKD", "FedMix", "PFedMe", "PerFedAvg"}
SPLIT = {"FedBN"}  # whose processes normalize by the statistics of their own samples, as in Lightning


@pytest.mark.few("Scaffold")
@pytest.mark.parametrize("name", [name for name in METHODS if name not in SPLIT])
def test_every_method_is_divided_or_refused(team, name, tmp_path, monkeypatch):
    method = METHODS[name]
    monkeypatch.setattr(start, "DistributedBackend", lambda *arguments: team)
    team.loss_is_mean = True  # the layers are the tests' own

    def run(folder, **trainer):
        trainer = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, **trainer}
        samples = data(sizes=(17, 9, 11, 15, 12), **method.split)
        made = federation(tmp_path / folder, method.phases(), trainer=trainer, backend=TrainerBackend())
        made.fit(method.model(), samples)
        return made.run.states

    if name in REFUSED:
        with pytest.raises(MisconfigurationException, match="whole batches"):
            run("two", **DDP)
        return
    one, two = run("one"), run("two", **DDP)
    assert one
    for phase in one:
        close(two[phase].server, one[phase].server)
        for client in one[phase].clients:
            close(dict(two[phase].clients[client]), dict(one[phase].clients[client]))
