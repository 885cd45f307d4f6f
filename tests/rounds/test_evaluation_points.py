"""The point of a round at which clients are evaluated."""

import pytest
import torch
from helpers import (
    PureOneWeight,
    TensorData,
    assert_same_bits,
    blobs,
    client_generator,
    mixture,
    momentum_sgd,
    phase,
    sparse_mixture,
    tensors,
    train_by_hand,
)
from helpers import run as finished
from helpers.architectures import SIZES, pair
from helpers.backends import exchanged
from helpers.reports import csv_rows
from helpers.runs import Kill, Notes, assert_same, data, federation, model, resumed_after
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Evaluate, Messages, Phase, Select, Train
from fedmoe_pl.algorithms import FedAPEN, FedAvg, FedMoEDA, FedProx, Local
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.callbacks import ClientCheckpoint
from fedmoe_pl.models import GlobalOnly, MixtureWeights
from fedmoe_pl.trees import of_module, subtree

LOCAL, OTHER = "after local training", "after aggregation"


def test_both_moments_of_a_round_are_those_of_a_bare_loop(tmp_path):
    datamodule, start = blobs(), mixture()
    both = Phase("it", FedAvg("global_expert.*"), rounds=2, gate=GlobalOnly(), evaluate=Evaluate(after="both"))
    run = finished([both], start, datamodule, tmp_path)
    server = tensors(start, "global_expert.")
    for round in range(2):
        ends = []
        for client in range(3):
            module = mixture(GlobalOnly())
            module.load_state_dict({**module.state_dict(), **server})
            generator = client_generator(0, client, round)
            batches = datamodule.batches(datamodule.train_samples[client], generator=generator)
            train_by_hand(module, "global_expert.", batches, momentum_sgd, 2)
            ends.append(module)
        sizes = [len(samples) for samples in datamodule.train_samples]
        server = {
            name: sum(n * tensors(end)[name] for n, end in zip(sizes, ends, strict=True)) / sum(sizes)
            for name in server
        }
    x, y = datamodule.x[datamodule.global_test], datamodule.y[datamodule.global_test]
    for client, end in enumerate(ends):
        local = run.client_module(f"it {LOCAL}", client)
        torch.testing.assert_close(tensors(local, "global_"), tensors(end, "global_"), rtol=1e-11, atol=1e-13)
        right = (end(x).argmax(1) == y).double().mean().item()
        assert run.results[f"it {LOCAL}"].clients[client].global_test == pytest.approx(right, abs=1e-6)
        aggregated = run.client_module("it", client)
        torch.testing.assert_close(tensors(aggregated, "global_"), server, rtol=1e-11, atol=1e-13)
    assert {name: result.evaluation_point for name, result in run.results.items()} == {
        "it": OTHER,
        f"it {LOCAL}": LOCAL,
    }


@pytest.mark.slow
def test_every_file_and_table_names_the_moment(tmp_path, capsys):
    both = Phase("it", FedAvg("global_expert.*"), rounds=2, gate=GlobalOnly(), evaluate=Evaluate(after="both"))
    run = federation(tmp_path, [Phase("Local", Local()), both], callbacks=[ClientCheckpoint()])
    run.fit(model(), data())
    printed = capsys.readouterr().out
    for name, evaluation_point in (("it", OTHER), (f"it {LOCAL}", LOCAL)):
        assert (
            f"\n{name}  " in printed and f"{name}: global expert, {evaluation_point}, last round (round 2)" in printed
        )
        files = sorted(path.name for path in (run.run_dir / "clients" / name).iterdir())
        own = [f"client_{client:03d}.ckpt" for client in range(3)]
        assert files == (own if evaluation_point == LOCAL else ["all_clients.ckpt"])
    for file, rows in (("rounds.csv", 2), ("clients.csv", 3), ("summary.csv", 1)):
        found = [(row["method"], row["evaluation_point"]) for row in csv_rows(run.run_dir / file)]
        assert found.count(("it", OTHER)) == found.count((f"it {LOCAL}", LOCAL)) == rows
        assert set(found) == {("Local", LOCAL), ("it", OTHER), (f"it {LOCAL}", LOCAL)}
    run.predict(model(), data())
    found = {(row["method"], row["evaluation_point"]) for row in csv_rows(run.run_dir / "predictions.csv")}
    assert found == {("Local", LOCAL), ("it", OTHER), (f"it {LOCAL}", LOCAL)}
    capsys.readouterr()
    run.test(model(), data())
    assert capsys.readouterr().out.strip() in printed, "the same table from the checkpoint"


@pytest.mark.few(1)
@pytest.mark.parametrize("evaluate_after", ["local_training", "both"])
def test_the_moment_changes_nothing_but_the_evaluation(tmp_path, evaluate_after):
    runs = [
        finished(
            [phase("it", FedAvg("global_expert.*"), rounds=3, clients_per_round=2, evaluate=options)],
            mixture(),
            blobs(),
            tmp_path / str(index),
        )
        for index, options in enumerate((True, Evaluate(after=evaluate_after)))
    ]
    states = [run.run.states["it"] for run in runs]
    assert_same_bits(states[1].server, states[0].server)
    for client, kept in states[0].clients.items():
        assert_same_bits(of_module(states[1].clients[client]), kept)
        assert set(subtree(states[1].clients[client], "trained/")) == set(tensors(mixture(), "global_expert."))
    assert states[0].traffic == states[1].traffic, "what a client keeps is not sent"


def test_the_last_round_is_evaluated_before_it_ends_whatever_the_interval(tmp_path):
    evaluated, ended = "evaluated", "ended"
    order = Notes(
        on_evaluation_end=lambda run, phase, evaluation: (evaluated, evaluation.round),
        on_round_end=lambda run, phase, round: (ended, round + 1),
    )
    it = Phase("it", FedAvg("global_expert.*"), rounds=3, gate=GlobalOnly(), evaluate=Evaluate(every_n_rounds=2))
    finished([it], mixture(), blobs(), tmp_path, 1, callbacks=[order])
    assert order.noted == [(ended, 1), (evaluated, 2), (ended, 2), (evaluated, 3), (ended, 3)]


def test_before_an_exchange_a_client_has_the_experts_that_it_trained(tmp_path):
    algorithm = FedMoEDA(top_p="all", interval=1)
    both = Phase("DA", algorithm, rounds=3, evaluate=Evaluate(after="both"))
    run = finished([both], sparse_mixture(2), blobs(), tmp_path)
    kept = run.run.states["DA"].clients
    trained = {client: subtree(kept[client], "trained/") for client in kept}
    after_exchange = exchanged(algorithm, run.run.states["DA"].server, trained, 2)
    for client in range(3):
        names = [name for name in trained[client] if name.startswith("experts.")]
        before = tensors(run.client_module("DA", client), "experts.")
        assert_same_bits(before, {name: trained[client][name] for name in names})
        after = tensors(run.client_module("DA after aggregation", client), "experts.")
        assert_same_bits(after, {name: after_exchange[client][0][name] for name in names})
        assert not torch.equal(after[names[0]], trained[client][names[0]])


@pytest.mark.slow
def test_the_monitored_moment_is_the_papers_and_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    def phases():
        return [
            Phase("it", FedAvg("global_expert.*"), rounds=4, gate=GlobalOnly(), select=Select("global_test"), **BOTH),
            Phase("tuned", FedAvg("global_expert.*"), start="it", rounds=2, gate=GlobalOnly(), **BOTH),
        ]

    def make(folder="killed", **kwargs):
        return federation(tmp_path / folder, phases(), seed=2, **kwargs)

    whole = make("whole")
    results = whole.fit(model(), data())
    rows = [row for row in whole.run.rows if row["method"] == "it"]
    means = [row["global_test_mean"] for row in rows]
    assert results["it"].round == results[f"it {LOCAL}"].round == 1 + means.index(max(means))
    again = resumed_after(Kill("on_evaluation_end", 6), make, model, data)
    assert_same(again.results, results)
    assert_same(again.run.rows, whole.run.rows)


BOTH = {"evaluate": Evaluate(after="both")}


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend()])
def test_what_a_client_trained_last_may_be_its_initial_tensors(tmp_path, backend):
    """A step of rate 2 takes client 0 from w to 2 - w, client 1 from w to 2 - 3w: the means are 0, 2 and -2."""
    x = torch.tensor([[1.0, 1.0], [2.0, 0.5]])
    data = TensorData(x, torch.tensor([0, 1]), torch.arange(2).split([1, 1]), dtype=torch.float64)
    both = Phase("it", FedProx(mu=0.0), rounds=2, **BOTH)
    run = finished([both], PureOneWeight(lr=2.0), data, tmp_path, 1, backend=backend)
    assert [run.client_module("it", client).weight.item() for client in range(2)] == [-2, -2]
    assert [run.client_module(f"it {LOCAL}", client).weight.item() for client in range(2)] == [0, -4]


@pytest.mark.slow
def test_an_ensemble_after_local_training_has_the_weight_that_it_was_trained_with(tmp_path):
    results = []
    for weight_lr in (0.0, 100.0):
        algorithm = FedAPEN(0.2, weight_lr, weight_epochs=1)
        both = Phase("it", algorithm, gate=MixtureWeights(), **BOTH)
        run = finished([both], pair(), blobs(SIZES), tmp_path)
        weights = [run.client_module(f"it {LOCAL}", client).gate.weights.tolist() for client in range(len(SIZES))]
        assert weights == [[0.5, 0.5]] * len(SIZES), "it is learned after aggregation"
        results.append([client.global_test for client in run.results[f"it {LOCAL}"].clients])
        moved = [run.client_module("it", client).gate.weights[0].item() != 0.5 for client in range(len(SIZES))]
        assert any(moved) == (weight_lr > 0)
    assert results[0] == results[1]


class Forgetful(FedAvg):
    """Its hooks return only what they know of."""

    messages = Messages(exchanged=("own/",))

    def exchange(self, server, clients, round):
        yield from ((client, {"own/number": torch.tensor(client)}, {}) for client in range(3))


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.few(1)
def test_hooks_that_replace_what_clients_keep_lose_neither_models_nor_optimizers(tmp_path, in_files):
    def result(algorithm):
        phases = [Phase("it", algorithm, rounds=3, gate=GlobalOnly(), train=Train(keep_optimizer=True), **BOTH)]
        folder = tmp_path / type(algorithm).__name__
        return finished(phases, mixture(), blobs(), folder, enable_checkpointing=in_files)

    plain, forgetful = result(FedAvg("global_expert.*")), result(Forgetful("global_expert.*"))
    assert_same(forgetful.results, plain.results)
    for client in range(3):
        kept = dict(forgetful.run.states["it"].clients[client])
        assert kept.pop("own/number").item() == client
        assert_same_bits(kept, dict(plain.run.states["it"].clients[client]))


def test_a_result_without_the_models_that_clients_trained_is_not_evaluated_after_local_training(tmp_path):
    def it(**options):
        return Phase("it", FedAvg("global_expert.*"), rounds=2, gate=GlobalOnly(), **options)

    results, paths = {}, {}
    for name, options in (("aggregation", {}), ("both", BOTH)):
        run = federation(tmp_path / name, [it(**options)])
        results[name], paths[name] = run.fit(model(), data()), str(run.run_dir / "checkpoints/last.ckpt")
    refused = (
        "Phase 'it': evaluate.after is 'both', but must be aggregation, because the checkpoint has no models as they"
    )
    with pytest.raises(MisconfigurationException, match=refused):
        federation(tmp_path / "given", [it(ckpt_path=paths["aggregation"], **BOTH)]).fit(model(), data())
    with pytest.warns(match="evaluate was true"), pytest.raises(MisconfigurationException, match=refused):
        federation(tmp_path / "aggregation", [it(**BOTH)]).test(model(), data())
    given = federation(tmp_path / "given", [it(ckpt_path=paths["both"], **BOTH)]).fit(model(), data())
    for name, result in results["both"].items():
        assert_same(given[name].clients, result.clients)
