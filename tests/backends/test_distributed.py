"""Two processes that train each client together, by DDP over gloo, give what one gives; and what they may divide.

The reference is a Trainer per client in one process.
"""

import os
import signal
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import blobs, mixture, momentum_sgd, sparse_mixture
from helpers.backends import WithBatchNorm, local_training, train_clients
from helpers.ingredients import TowardsReceived, drift
from helpers.methods import METHODS
from helpers.ranks import Centered, Hangs, Ignoring, Manual, Misbehaves, Own, adam, own_mean, sample_weighted
from helpers.runs import Kill, assert_same, federation
from helpers.workers import CPU, trained_round, wait_until, workers
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FD, FedAvg, FedProx, FineTuning, PerFedAvg
from fedmoe_pl.backends import DistributedBackend, PoolBackend, StackedBackend, TrainerBackend
from fedmoe_pl.backends.workers import distributed
from fedmoe_pl.backends.workers.distributed import check_division
from fedmoe_pl.data import Share
from fedmoe_pl.models import EqualWeights, FeatureGate, GlobalOnly, LinearGate, LocalOnly, PersonalizedMoE
from fedmoe_pl.setup import start

# in batches of 4: a last batch of one sample, which only one process has; whole ones; an odd last batch; one sample
SIZES = (17, 10, 15, 1)
DDP = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-11)


@pytest.fixture(scope="module")
def datamodule():
    return blobs(sizes=SIZES, validation_fraction=0.25)


@pytest.fixture(scope="module")
def processes():
    """Two processes that all tests of this module use, because they take seconds to start."""
    backend = DistributedBackend([CPU, CPU])
    yield backend
    backend.close()


@pytest.fixture
def team(processes):
    processes.loss_is_mean = True  # of layers of the tests' own
    return processes


@pytest.fixture
def runs_use_the_team(team, monkeypatch):
    monkeypatch.setattr(start, "DistributedBackend", lambda *arguments: team)
    monkeypatch.setattr(team, "close", lambda: None)


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize(("processes", "at_least"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
def test_the_shares_of_a_batch_have_every_sample_once(size, processes, at_least):
    shares = [Share(rank, processes, at_least) for rank in range(processes)]
    counted = [sample for share in shares if share.weight(size) for sample in range(size)[share.part(size)]]
    assert counted == [*range(size)]
    values = torch.arange(size).double() ** 2
    means = [share.weight(size) * values[share.part(size)].mean() for share in shares]
    torch.testing.assert_close(torch.stack(means).mean(), values.mean(), rtol=1e-11, atol=1e-11)
    assert all(len(range(size)[share.part(size)]) >= min(at_least, size) for share in shares)


@pytest.mark.slow
@pytest.mark.usefixtures("runs_use_the_team")
def test_a_run_is_that_of_one_process_and_goes_on_with_the_same_bits(datamodule, tmp_path):
    def run(folder, callbacks=(), ckpt_path=None, **trainer):
        phases = [
            Phase("FedAvg", FedAvg("global_expert.*"), rounds=2, clients_per_round=3, gate=GlobalOnly()),
            Phase("FineTuning", FineTuning(), gate=LocalOnly(), train=Train(optimizer=adam)),
        ]
        trainer = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, **trainer}
        run = federation(tmp_path / folder, phases, trainer=trainer, backend=TrainerBackend(), callbacks=[*callbacks])
        with suppress(KeyboardInterrupt):
            run.fit(mixture(GlobalOnly()), datamodule, ckpt_path)
        return run

    alone, together = run("alone"), run("together", **DDP)
    for name, state in together.run.states.items():
        close(state.server, alone.run.states[name].server)
        for client in state.clients:
            close(dict(state.clients[client]), dict(alone.run.states[name].clients[client]))
    for evaluations in zip(*(each.results["FineTuning"].clients for each in (together, alone)), strict=True):
        assert_same(*(replace(each, validation_loss=0.0, gate_weights=None) for each in evaluations))
    stopped = run("stopped", [Kill("on_round_end", 1)], **DDP)
    assert "FineTuning" not in stopped.run.states
    assert_same(run("stopped", ckpt_path="last", **DDP).run.states, together.run.states)


@pytest.mark.parametrize(("ignored", "weights"), [(None, False), (-100, False), (-100, True)])
def test_means_are_logged_once_and_are_those_of_whole_batches(team, datamodule, ignored, weights, tmp_path):
    datamodule = datamodule if ignored is None else data(ignored=ignored, sizes=SIZES)
    module = model(loss=nn.CrossEntropyLoss(WEIGHTS)) if weights else mixture(GlobalOnly())
    team.close()  # other tests have other data
    loggers = {name: CSVLogger(tmp_path / name, version="") for name in ("two", "one")}
    rows = []
    for backend, name in ((team, "two"), (TrainerBackend(), "one")):
        trainer = {"logger": loggers[name], "log_every_n_steps": 1, **({"strategy": "ddp"} if name == "two" else {})}
        phase = local_training(module, FedAvg(), datamodule, **trainer)
        phase = replace(phase, phase_name="p", run_name="run")
        train_clients(backend.plan(phase).begin(phase))
        backend.close()
        (file,) = (tmp_path / name).rglob("client_000/**/metrics.csv")
        header, *lines = file.read_text().split()
        rows.append((header, [[float(value or 0) for value in line.split(",")] for line in lines]))
    (header, two), (expected_header, one) = rows
    assert header == expected_header and len(one) == 4  # the rates and the means of two epochs
    close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=1e-5)  # the file's digits


def test_a_module_of_ones_own_validates_once(team, datamodule, tmp_path):
    trainer = {"limit_val_batches": 1.0, "strategy": "ddp"}
    phase = local_training(Own(tmp_path).double(), FedAvg(), datamodule, max_epochs=1, **trainer)
    train_clients(team.plan(phase).begin(phase))
    number = sorted(datamodule.validation_samples.sizes.tolist())
    for rank in ("0", "1"):
        assert sorted(map(int, (tmp_path / rank).read_text().split())) == number


def test_batch_norm_of_shares_and_a_short_batch(team, datamodule):
    """A batch of 5 samples is 2 and 3; one of 3 samples stays whole, because a share needs two."""
    phase = local_training(mixture(GlobalOnly(), WithBatchNorm()), FedAvg(), datamodule, strategy="ddp")
    plan = team.plan(phase).begin(phase)
    results = [*plan.train(phase.algorithm.server_init(phase.module), plan.groups([0, 1, 2]), {}, 0)]
    assert [result.failed for result in results] == [{}] * 3
    assert all(tensor.isfinite().all() for result in results for tensor in result.update.sent.values())


@pytest.mark.slow
def test_a_process_that_dies_is_replaced_and_a_failure_in_one_is_the_clients(team, datamodule, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "_GRACE", 1.0)
    file = tmp_path / "kill"
    file.touch()
    phase = local_training(mixture(GlobalOnly()), Misbehaves(file), datamodule, strategy="ddp")
    one = replace(phase, trainer={**phase.trainer, "strategy": "auto"})
    results = trained_round(team.plan(phase).begin(phase))
    assert not file.exists()
    assert [[*result.failed] for result in results] == [[], [1], [], []]
    assert results[1].failed[1].reason == "ZeroDivisionError: in the second process"
    for result, expected in zip(results, trained_round(TrainerBackend().plan(one).begin(one)), strict=True):
        if result.update is not None:
            close(result.update.sent, expected.update.sent)


def test_ctrl_c_ends_processes_that_hang(team, datamodule, tmp_path):
    phase = local_training(mixture(GlobalOnly()), Hangs(tmp_path / "hangs"), datamodule, strategy="ddp")

    def interrupt():
        while not (tmp_path / "hangs").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        trained_round(team.plan(phase).begin(phase))
    signal.signal(signal.SIGINT, before)
    assert team.workers == []
    wait_until(lambda: not workers())


IMPOSSIBLE = {
    "stacking": ({}, {"backend": StackedBackend()}, "backend is a StackedBackend.*one client after another"),
    "own workers": (
        {"devices": 1},
        {"backend": PoolBackend(TrainerBackend(), [CPU])},
        "PoolBackend trains each client on one",
    ),
    "two machines": ({"num_nodes": 2}, {}, "num_nodes is 2, but must be left out"),
    "spawned": ({"strategy": "ddp_spawn"}, {}, "strategy is 'ddp_spawn', but must be ddp, or left out"),
    "parameters in parts": ({"strategy": FSDPStrategy(), "accelerator": "auto"}, {}, "ddp, or left out|GPU"),
    "an algorithm": ({}, {"phases": [Phase("p", PerFedAvg(), gate=GlobalOnly())]}, "PerFedAvg needs whole batches"),
}


@pytest.mark.parametrize("why", IMPOSSIBLE)
def test_what_cannot_be_divided_is_refused_before_any_training(why, datamodule, tmp_path):
    trainer, arguments, sentence = IMPOSSIBLE[why]
    arguments = {"phases": [Phase("p", FedAvg())], "trainer": {**DDP, **trainer}, **arguments}
    with pytest.raises(MisconfigurationException, match=sentence):
        federation(tmp_path, **arguments).check(mixture(GlobalOnly()), datamodule)


BATCHES = (16, 23)  # of eight samples


def layers(outputs=3, *last) -> nn.Sequential:
    """Layers of PyTorch's."""
    extractor, classifier = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, outputs), *last)
    return nn.Sequential(OrderedDict(extractor=extractor, classifier=classifier))


def model(expert=None, gate=None, **kwargs) -> PersonalizedMoE:
    torch.manual_seed(0)
    kwargs = {"optimizer": momentum_sgd, **kwargs}
    return PersonalizedMoE(expert or layers(), gate=gate or LinearGate(5), **kwargs).double()


def data(y=None, ignored=None, sizes=BATCHES, **kwargs) -> Ignoring:
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
    team.close()  # other tests have other data
    shared, team.loss_is_mean = replace(training, trainer={**training.trainer, "strategy": "ddp"}), loss_is_mean
    plans = team.plan(shared).begin(shared), TrainerBackend().plan(training).begin(training)
    (two, two_kept), (one, one_kept) = map(train_clients, plans)
    team.close()
    close(two.sent, one.sent)
    close(two_kept, one_kept)
    assert any(not torch.equal(one.sent[name], training.initial[name]) for name in training.initial)


WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
FLAGS = (torch.arange(3 * sum(BATCHES)) % 5 < 2).double().view(-1, 3)
PIXELS = torch.arange(4 * sum(BATCHES)).view(-1, 4) % 3
TOKENS = PIXELS.where(torch.arange(4) <= torch.arange(len(PIXELS)).view(-1, 1) % 5, -100)  # of texts of other lengths
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
    "tokens": (
        lambda: model(layers(12, nn.Unflatten(1, (4, 3))), EqualWeights(), task="causal_lm"),
        lambda: data(TOKENS),
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


def of_layers(*modules):
    return lambda: model(nn.Sequential(*modules))


UNKNOWN = {
    "a training step": ("the loss of Own", lambda: Own(".").double()),
    "weighted samples": ("sample_weighted", lambda: model(loss=sample_weighted, task="multiclass")),
    "another criterion": ("NLLLoss", lambda: model(loss=nn.NLLLoss(), task="multiclass")),
    "a rescaled criterion": ("BCEWithLogitsLoss", lambda: model(loss=nn.BCEWithLogitsLoss(WEIGHTS))),
    "two means": (
        "CrossEntropyLoss in the loss of FD",
        lambda: model(loss=nn.CrossEntropyLoss(WEIGHTS)),
        FD("local_expert"),
    ),
    "an algorithm of one's own": ("the algorithm TowardsReceived", model, TowardsReceived(drift)),
    "a layer of one's own": ("the layers of PersonalizedMoE", lambda: model(Centered(5, 3))),
    "a layer that compares samples": ("layers", of_layers(nn.Softmax(0), nn.Linear(5, 3))),
    "statistics of a batch": (
        "layers",
        of_layers(nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True)),
    ),
    "rows of limited length": ("layers", of_layers(nn.Identity(), nn.Embedding(2, 2, max_norm=1))),
    "normalization of one's own": ("layers", of_layers(nn.Linear(5, 3), Normalization(3))),
    "a hook": ("layers", hooked),
    "a replaced method": ("layers", with_a_loss_of_its_own),
}


@pytest.mark.parametrize("setting", UNKNOWN)
def test_other_losses_need_the_user_s_word(setting):
    unknown, module, *algorithm = UNKNOWN[setting]
    training = local_training(module(), *(algorithm or [FedAvg()]), data(), strategy="ddp")
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


@pytest.mark.few("Scaffold", "FedRep")
@pytest.mark.parametrize("name", [name for name in METHODS if name not in SPLIT])
def test_every_method_is_divided_or_refused(team, name, tmp_path, monkeypatch):
    method = METHODS[name]
    team.close()
    monkeypatch.setattr(start, "DistributedBackend", lambda *arguments: team)

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
