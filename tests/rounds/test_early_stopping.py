"""Phases, and clients in them, that end when their validation stops getting better, against bare loops."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, client_generator, mixture, momentum_sgd, phase, run, tensors
from helpers.runs import Kill, Notes
from lightning.pytorch import Callback

from fedmoe_pl import Evaluate, Select
from fedmoe_pl.algorithms import FedAvg, FedProx, FineTuning, OptInFedAvg, Scaffold, SpecialistMixture
from fedmoe_pl.callbacks import BestEpoch
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import ConstantGate, LinearGate
from fedmoe_pl.phases.phase import Phase, Train


def stopped_by_hand(checks, patience, min_delta):
    """The check with the lowest loss, and how many checks there were.

    They end once so many in a row were not lower, by more than ``min_delta``, than the last one that was.
    """
    improved, waited, number = 0, 0, 0
    for number in range(1, len(checks)):
        better = checks[number][0] < checks[improved][0] - min_delta
        improved, waited = (number, 0) if better else (improved, waited + 1)
        if waited == patience:
            break
    losses = [loss for loss, _ in checks[: number + 1]]
    return losses.index(min(losses)), len(losses)


SIZES = (9, 4, 12, 7, 5, 8, 6, 10, 11, 4)


def losses_by_hand(datamodule, expert, clients):
    """Mean over clients of the mean negative log-likelihood of their validation samples."""
    means = []
    for client in clients:
        samples = datamodule.validation_samples[client]
        terms = [-torch.log(expert(datamodule.x[i][None]).softmax(1)[0, datamodule.y[i]]) for i in samples.tolist()]
        means.append(sum(terms) / len(terms))
    return (sum(means) / len(means)).item()


def stopping_phase(**kwargs) -> Phase:
    """Big steps, with which the validation loss goes up and down."""
    defaults = {"rounds": 20, "select": Select("validation_loss", patience=2), "evaluate": Evaluate(every_n_rounds=2)}
    defaults |= {"gate": ConstantGate(1), "clients_per_round": 3, "train": Train(optimizer=BIG_STEPS)}
    return Phase("FedAvg", OptInFedAvg("global_expert.*", 0.4), **{**defaults, **kwargs})


BIG_STEPS = partial(torch.optim.SGD, lr=0.6, momentum=0.9)


def test_patience_ends_a_phase_whose_result_is_the_best_validated_round_of_the_participants(tmp_path):
    datamodule, min_delta = blobs(SIZES, validation_fraction=0.4), 0.02
    federation = run(
        [stopping_phase(select=Select("validation_loss", patience=2, min_delta=min_delta))],
        mixture(),
        datamodule,
        tmp_path,
        seed=5,
    )
    clients = OptInFedAvg(opt_out_clients=0.4).opt_out.participants(range(10), 5)
    unstopped = stopping_phase(select=None, evaluate=False)
    servers = Notes(on_round_end=lambda run, phase, round: copy.deepcopy(run.states[phase.name].server))
    run([unstopped], mixture(), datamodule, tmp_path / "unstopped", seed=5, callbacks=[servers])
    losses, everybody = [], []
    for round in range(2, 21, 2):
        module = mixture()
        module.load_state_dict(servers.noted[round - 1], strict=False)
        losses.append(losses_by_hand(datamodule, module.global_expert, clients))
        everybody.append(losses_by_hand(datamodule, module.global_expert, range(10)))
    _, number = stopped_by_hand([(loss, None) for loss in losses], patience=2, min_delta=min_delta)
    assert 2 < number < len(losses), "the test would show nothing if the phase ran to its end"
    assert [row["round"] for row in federation.run.rows] == list(range(2, 2 * number + 1, 2))
    best = losses.index(min(losses[:number]))
    assert 0 < best < number - 1
    assert losses != pytest.approx(everybody, abs=1e-3), "those who opt out must not count"
    assert federation.results["FedAvg"].round == 2 * (best + 1)
    assert federation.results["FedAvg"].selection == "best round by validation_loss"
    assert_same_bits(federation.run.states["FedAvg"].server, servers.noted[2 * best + 1])
    measured = federation.results["FedAvg"].spread("validation_loss", set(clients)).mean
    assert measured == pytest.approx(losses[best], rel=1e-12)


def test_a_round_before_the_first_that_may_be_selected_is_not(tmp_path):
    it = Phase("it", FedAvg("global_expert.*"), 3, gate=ConstantGate(1), train=Train(optimizer=BIG_STEPS))
    it.select = Select("validation_loss", from_round=3)
    result = run([it], mixture(), blobs((9, 4), validation_fraction=0.4), tmp_path, seed=5)
    losses = [row["validation_loss_mean"] for row in result.run.rows]
    assert len(losses) == 3 and min(losses) < losses[2], "another round would be selected"
    assert result.results["it"].round == result.run.states["it"].best_round == 3
    assert result.results["it"].selection == "best round by validation_loss"


def early_phases() -> list[Phase]:
    train = Train(max_epochs=4, callbacks=[BestEpoch(patience=1)], trainer={"limit_val_batches": 1.0})
    return [
        stopping_phase(),
        phase("Fine-tuned", FineTuning(), train=Train(max_epochs=1)),
        Phase("Mixture", SpecialistMixture(), train=train),
    ]


def run_early_phases(path, **kwargs) -> Federation:
    datamodule = blobs(SIZES, validation_fraction=0.4)
    return run(early_phases(), mixture(LinearGate(5)), datamodule, path, enable_checkpointing=True, seed=2, **kwargs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that never stopped."""
    torch.manual_seed(0)
    return run_early_phases(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
def test_a_run_stopped_within_a_phase_that_ends_early_and_resumed_gives_the_same_bits(whole, tmp_path):
    assert 5 < whole.run.rows[-2]["round"] < 20, "the federated phase ends early, after the stops of this test"
    with pytest.raises(KeyboardInterrupt):
        run_early_phases(tmp_path, callbacks=[Kill("on_round_end", 5)])
    settings = {"default_root_dir": str(tmp_path), "enable_progress_bar": False, "logger": False}
    resumed = Federation(early_phases(), {"max_epochs": 2}, seed=2, **settings)
    datamodule = blobs(SIZES, validation_fraction=0.4)
    resumed.fit(mixture(LinearGate(5)), datamodule, ckpt_path="last", allow_changes="trainer.callbacks")
    for name, state in whole.run.states.items():
        again = resumed.run.states[name]
        assert_same_bits(again.server, state.server)
        assert (again.round, again.best_round, again.stopped) == (state.round, state.best_round, state.stopped)
        assert again.clients.keys() == state.clients.keys()
        for client in state.clients:
            assert_same_bits(again.clients[client], state.clients[client])
    assert (resumed.run_dir / "rounds.csv").read_bytes() == (whole.run_dir / "rounds.csv").read_bytes()


def test_a_round_without_a_number_is_never_the_best():
    state = PhaseState({}, {})
    for state.round, metric in enumerate((math.nan, 0.5, math.nan, 0.7, 0.6), start=1):
        state.remember_best(metric)
    assert (state.best_round, state.best_metric, state.improved_round) == (4, 0.7, 4)


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


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["Fine-tuned", "Mixture"])
def test_a_client_keeps_its_best_validated_epoch_and_one_without_validation_samples_trains_to_the_end(tmp_path, stage):
    """However small the lead of the best one: ``min_delta`` only says when training ends."""
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
