"""Random numbers follow from the seed, the client and the rounds since the beginning of a chain of phases."""

from dataclasses import replace

from helpers import assert_same_bits, blobs
from helpers.runs import data, federation, model

from fedmoe_pl import ClientFailures, Phase
from fedmoe_pl.algorithms import FedAvg, OptInFedAvg, PFLMoE
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.models import GlobalOnly


def fedavg(name, rounds, **kwargs) -> Phase:
    return Phase(name, FedAvg("global_expert.*"), rounds, clients_per_round=2, gate=GlobalOnly(), **kwargs)


def test_a_phase_that_goes_on_from_another_does_not_repeat_its_cohorts_orders_and_dropout(tmp_path):
    half = {"failures": ClientFailures(dropout=0.5)}
    whole = federation(tmp_path / "whole", [fedavg("all", 5)], **half)
    whole.fit(model(), data())
    parts = federation(
        tmp_path / "parts",
        [fedavg("first", 2), fedavg("rest", 2, start="first"), fedavg("last", 1, start="rest"), fedavg("alone", 1)],
        **half,
    )
    parts.fit(model(), data())
    assert_same_bits(parts.run.states["last"].server, whole.run.states["all"].server)
    assert (
        sum(parts.run.states[name].failed for name in ("first", "rest", "last")) == whole.run.states["all"].failed > 0
    )
    assert [parts.run.rounds_before(phase) for phase in parts.phases] == [0, 2, 4, 0]


def test_a_phase_that_goes_on_from_a_checkpoint_s_result_counts_the_rounds_that_this_had(tmp_path):
    whole = federation(tmp_path / "whole", [fedavg("first", 3), fedavg("rest", 2, start="first")])
    whole.fit(model(), data())
    path = str(whole.run_dir / "checkpoints/last.ckpt")
    phases = [fedavg("first", 1, ckpt_path=path), fedavg("rest", 2, start="first")]
    given = federation(tmp_path / "given", phases)
    given.fit(model(), data())
    assert_same_bits(given.run.states["rest"].server, whole.run.states["rest"].server)
    path = str(given.run_dir / "checkpoints/last.ckpt")  # whose result is a given one, too
    through = federation(tmp_path / "through", [replace(phases[0], ckpt_path=path), phases[1]])
    assert through.fit(model(), data())["first"].round == 3
    assert_same_bits(through.run.states["rest"].server, whole.run.states["rest"].server)
    again = federation(tmp_path / "given", phases)
    again.test(model(), data())
    assert again.run.rounds_before(phases[1]) == 3


def test_the_samples_that_opt_out_and_those_of_the_gate_are_drawn_independently():
    datamodule = blobs((4000,))
    client = Client(0, 0, 3, model(), datamodule.train_samples[0], {}, datamodule)
    everyone = set(client.samples.tolist())
    out = everyone - set(OptInFedAvg(opt_out_data=0.5).client_samples(client).tolist())
    gate = set(PFLMoE(gate_fraction=0.5).client_samples(client).tolist())
    assert len(out) == len(gate) == 2000
    # hypergeometric: 1000 of the 2000 on average, with a standard deviation of sqrt(4000) / 4 = 16
    assert abs(len(out & gate) - 1000) < 80
