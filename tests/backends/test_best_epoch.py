"""Clients that end when their validation stops getting better, against bare loops."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import blobs, client_generator, mixture, momentum_sgd, phase, run, tensors
from helpers.early_stopping import stopped_by_hand
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn

from fedmoe_pl import Train
from fedmoe_pl.algorithms import FedProx, FineTuning, OptInFedAvg, Scaffold, SpecialistMixture
from fedmoe_pl.callbacks import BestEpoch
from fedmoe_pl.models import ConstantGate, LinearGate


def validated_losses(module, datamodule, client, seed, round, names, optimizer, epochs, every, loss):
    """Parameters and validation loss after every so many epochs of a bare loop."""
    generator = client_generator(seed, client, round)
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


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", ["Fine-tuned", "Mixture"])
def test_a_client_keeps_its_best_validated_epoch_and_one_without_validation_samples_trains_to_the_end(tmp_path, stage):
    patience, min_delta, every, epochs = 2, 0.02, 2, 40
    sizes = (40, 30, 1, 36)  # one sample of a client stays for training, so that client 2 has none to validate
    datamodule = blobs(sizes, validation_fraction=0.4)
    phases = [
        phase("FedAvg", OptInFedAvg("global_expert.*"), gate=ConstantGate(1), rounds=3),
        phase("Fine-tuned", FineTuning(), gate=ConstantGate(0), train=Train(max_epochs=1)),
        phase("Mixture", SpecialistMixture(), train=Train(max_epochs=1)),
    ]
    (stopping,) = (personal for personal in phases if personal.name == stage)
    stopping.train.max_epochs = epochs
    stopping.train.callbacks = [BestEpoch(min_delta=min_delta, patience=patience)]
    stopping.train.trainer = {"limit_val_batches": 1.0, "check_val_every_n_epoch": every}
    federation = run(phases, mixture(LinearGate(5)), datamodule, tmp_path)
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
            module.gate = LinearGate(5).double()
            client_generator(0, client, 4)
            module.gate.reset_parameters()
        round = 3 if stage == "Fine-tuned" else 4  # after the three rounds of FedAvg
        checks = validated_losses(module, datamodule, client, 0, round, names, momentum_sgd, epochs, every, loss)
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


def test_the_steps_of_a_client_are_those_until_its_best_epoch(tmp_path):
    """In SCAFFOLD, ``c_i`` is the mean gradient of these steps in the first round, ``(x - y) / (K lr)``."""
    rate, epochs, name = 0.3, 12, "global_expert.classifier.1.weight"
    datamodule, plain = blobs((40, 1, 36), validation_fraction=0.4), partial(torch.optim.SGD, lr=rate)
    stopping = Train(callbacks=[BestEpoch(patience=2)], trainer={"limit_val_batches": 1.0})
    scaffold = phase("Scaffold", Scaffold("global_expert.*"), gate=ConstantGate(1), train=stopping)
    federation = run([scaffold], mixture(optimizer=plain), datamodule, tmp_path, epochs)
    best_epochs = set()
    for client in range(3):
        module, loss = mixture(), lambda module, x, y: F.cross_entropy(module.global_expert(x), y)
        x, steps = module.state_dict()[name].clone(), len(datamodule.batches(datamodule.train_samples[client]))
        names = ("global_expert.",)
        checks = validated_losses(module, datamodule, client, 0, 0, names, plain, epochs, 1, loss)
        best = stopped_by_hand(checks, patience=2, min_delta=0.0)[0] + 1 if checks else epochs
        y = (checks[best - 1][1] if checks else module.state_dict())[name]
        kept = federation.run.states["Scaffold"].clients[client][f"control/{name}"]
        torch.testing.assert_close(kept, (x - y) / (best * steps * rate), rtol=1e-9, atol=1e-12)
        best_epochs.add(best)
    assert best_epochs > {epochs}, "the test would show nothing"


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", [FedProx(mu=5.0), Scaffold()], ids=["FedProx", "SCAFFOLD"])
@pytest.mark.parametrize("every_batch", [False, True])
def test_the_validation_loss_is_the_module_s_without_terms_of_the_algorithm(tmp_path, algorithm, every_batch):
    seen = []

    class Seen(Callback):
        def on_validation_end(self, trainer, pl_module):
            state = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
            seen.append((float(trainer.callback_metrics["validation_loss"]), state))

    datamodule = blobs((20, 20), validation_fraction=0.4)
    plain = partial(torch.optim.SGD, lr=0.1)
    trainer = {"limit_val_batches": 1.0}
    federated = phase("it", algorithm, rounds=2, train=Train(callbacks=[Seen()], trainer=trainer))
    run([federated], mixture(LinearGate(5), optimizer=plain), datamodule, tmp_path, every_batch=every_batch)
    assert len(seen) == 8  # two rounds of two epochs of two clients
    for (logged, state), client in zip(seen, (0, 0, 1, 1, 0, 0, 1, 1), strict=True):
        module = mixture(LinearGate(5))
        module.load_state_dict(state)
        samples = datamodule.validation_samples[client]
        expected = F.cross_entropy(module(datamodule.x[samples]), datamodule.y[samples]).item()
        assert logged == pytest.approx(expected, rel=1e-6)


def test_the_best_epoch_is_the_best_however_small_its_lead():
    """Losses 1.0, 0.9, 0.85 with a min_delta of 0.2: nothing is an improvement, and the third epoch is the best."""
    module, stop = mixture(), BestEpoch(min_delta=0.2, patience=2)
    trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING), should_stop=False, current_epoch=0)
    trainer.sanity_checking = trainer.fast_dev_run = False
    trainer.global_step = 5
    trainer.strategy = SimpleNamespace(reduce_boolean_decision=lambda decision, **kwargs: decision)
    for loss in (1.0, 0.9, 0.85):
        with torch.no_grad():
            next(iter(module.parameters())).fill_(loss)
        trainer.callback_metrics = {"validation_loss": torch.tensor(loss)}
        stop.on_validation_end(trainer, module)
    assert trainer.should_stop
    with torch.no_grad():
        next(iter(module.parameters())).fill_(7.0)
    stop.on_train_end(trainer, module)
    assert next(iter(module.parameters())).flatten()[0].item() == 0.85
