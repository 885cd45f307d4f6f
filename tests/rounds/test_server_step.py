"""The server's optimizer in a run: what it steps, its state, and what it is refused for."""

from functools import partial

import pytest
import torch
from helpers import blobs, mixture, phase, run, sparse_mixture
from helpers.backends import WithBatchNorm
from helpers.clusters import clustered, only
from helpers.pfedmoe import model as of_three_architectures
from helpers.runs import Kill, assert_same
from torch import nn

from fedmoe_pl import Evaluate, Federation, Phase, Select
from fedmoe_pl.algorithms import EpsilonGreedyIFCA, FedAdam, FedAvg, FedMoEDA, PFedMoE, Scaffold
from fedmoe_pl.checkpoints.checkpoint import load_checkpoint
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.rounds.fit import server_step

sgd = partial(torch.optim.SGD, lr=0.1)
HALF = partial(torch.optim.SGD, lr=0.5)
ADAM = partial(FedAdam, lr=3.0)

AVERAGING = {
    "FedAvg": (lambda: FedAvg("global_expert.*"), mixture),
    "Scaffold": (lambda: Scaffold(server_lr=0.8), lambda: mixture(optimizer=sgd)),
    "FedMoEDA": (FedMoEDA, sparse_mixture),
    "PFedMoE": (PFedMoE, of_three_architectures),
    "IFCA": (lambda: EpsilonGreedyIFCA(0.3), lambda: clustered(gate=only(0))),
}


def server_of(name, path, **arguments):
    """The server's tree after one round, and its parameters before it."""
    algorithm, model = AVERAGING[name]
    module = model()
    federation = run([phase("it", algorithm(), **arguments)], module, blobs(), path)
    names = dict(module.named_parameters())
    initial = {name: tensor for name, tensor in algorithm().server_init(module).items() if name in names}
    return federation.run.states["it"].server, initial


@pytest.mark.few("FedAvg")
@pytest.mark.parametrize("name", AVERAGING)
def test_half_a_step_goes_half_the_way_of_every_algorithm_that_averages(name, tmp_path):
    mean, initial = server_of(name, tmp_path / "mean")
    half, _ = server_of(name, tmp_path / "half", server_optimizer=HALF)
    assert half.keys() == mean.keys()
    moved = 0
    for key, tensor in mean.items():
        if key in initial:
            moved += not torch.equal(tensor, initial[key])
            tensor = (initial[key] + tensor) / 2
        torch.testing.assert_close(half[key], tensor, rtol=1e-13, atol=1e-15)
    assert moved > 1


def test_statistics_of_batch_normalization_take_the_mean(tmp_path):
    def server(**arguments):
        it = phase("it", FedAvg(), **arguments)
        return run([it], mixture(expert=WithBatchNorm()), blobs(), tmp_path).run.states["it"].server

    mean, half = server(), server(server_optimizer=HALF)
    buffers = [name for name in mean if "running" in name or "num_batches" in name]
    assert len(buffers) == 6
    weights = [name for name in mean if name.endswith("weight")]
    for name in (*buffers, *weights):
        assert torch.equal(half[name], mean[name]) == (name in buffers), name


def test_what_no_client_changed_stays_and_so_does_its_momentum():
    """As for a cluster that nobody picked, and for parts that are not trained, also with weight decay."""
    module = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
    optimizer = partial(torch.optim.SGD, lr=1.0, momentum=0.5, weight_decay=0.1)
    old = {"a": torch.ones(2), "b": torch.ones(2), "c/own": torch.ones(2)}
    moved = {name: tensor + 1 for name, tensor in old.items()}
    first, state = server_step(optimizer, module, old, moved, {})
    assert first["c/own"].tolist() == [2, 2] and first["b"].tolist() == pytest.approx([1.9, 1.9])
    second, later = server_step(optimizer, module, first, {**first, "a": first["a"] + 1}, state)
    assert torch.equal(second["b"], first["b"]) and not torch.equal(second["a"], first["a"])
    assert torch.equal(later["optimizer/b/momentum_buffer"], state["optimizer/b/momentum_buffer"])
    assert not torch.equal(later["optimizer/a/momentum_buffer"], state["optimizer/a/momentum_buffer"])
    assert old["a"].tolist() == [1, 1], "trees are not changed in place"


def phases(**arguments):
    fedavg = Phase("FedAvg", FedAvg(), 4, clients_per_round=2, server_optimizer=ADAM, gate=GlobalOnly(), **arguments)
    return [fedavg, Phase("again", FedAvg(), start="FedAvg", gate=GlobalOnly(), server_optimizer=ADAM)]


def federation(path, **kwargs):
    arguments = {"trainer": {"max_epochs": 2, "accelerator": "cpu"}, "enable_progress_bar": False, "logger": False}
    arguments |= {"default_root_dir": str(path)} | kwargs
    return Federation(phases(select=Select("global_test"), evaluate=Evaluate(every_n_rounds=1)), **arguments)


def content(federation):
    return load_checkpoint(federation.run_dir / "checkpoints/last.ckpt")


def test_a_killed_run_goes_on_with_the_optimizer_s_state(tmp_path):
    whole = federation(tmp_path / "whole")
    whole.fit(mixture(), blobs())
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path / "killed", callbacks=[Kill("on_round_end", 2)]).fit(mixture(), blobs())
    saved = load_checkpoint(next((tmp_path / "killed").rglob("last.ckpt")))["phases"]["FedAvg"]
    names = [name for name, _ in mixture().named_parameters() if name.startswith("global_expert")]
    assert {*saved.server_optimizer} == {f"optimizer/{name}/{key}" for name in names for key in "mv"}
    assert not any(name.startswith("optimizer/") for name in saved.server), "it is not sent"
    resumed = federation(tmp_path / "killed")
    resumed.fit(mixture(), blobs(), ckpt_path="last")
    assert_same(content(resumed), content(whole))


def test_a_phase_ends_at_its_best_round_and_the_next_one_begins_without_momentum(tmp_path):
    it = federation(tmp_path)
    it.fit(mixture(), blobs())
    first, again = it.run.states["FedAvg"], it.run.states["again"]
    rounds = [row["round"] for row in it.run.rows if row["method"] == "FedAvg"]
    assert first.best_round < max(rounds), "or this says nothing"
    short = federation(tmp_path / "short")
    short.phases[0].rounds = first.best_round
    short.fit(mixture(), blobs())
    assert_same(first.server, short.run.states["FedAvg"].server)
    assert not first.server_optimizer
    for name, m in again.server_optimizer.items():
        if name.endswith("/m"):
            parameter = name.split("/")[1]
            v = again.server_optimizer[f"optimizer/{parameter}/v"]
            step = 3 * m / (v.sqrt() + 1e-3)
            torch.testing.assert_close(again.server[parameter], first.server[parameter] + step, rtol=1e-12, atol=0)
