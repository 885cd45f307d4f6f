"""Epsilon is that of all rounds in the model, for the delta beside it: in the log, the rows and the checkpoint."""

import math
from collections import Counter
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from helpers import blobs, mixture
from helpers.reports import csv_rows
from helpers.runs import Kill, Notes, federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scipy.optimize import brentq

from fedmoe_pl import ClientFailures, Phase
from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.algorithms import FedAvg, FineTuning
from fedmoe_pl.checkpoints.checkpoint import load_checkpoint
from fedmoe_pl.models import GlobalOnly, LocalOnly

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="needs Opacus")
LAST = "federation/version_0/checkpoints/last.ckpt"


def private(delta=1e-3, noise=2.0):
    return DifferentialPrivacy(noise, 0.5, delta)


def phase(name="it", aggregation=None, rounds=2, **arguments):
    arguments = {"gate": GlobalOnly(), "clients_per_round": 2, **arguments}
    return Phase(name, FedAvg("global_expert.*"), rounds, aggregation=aggregation, **arguments)


def fit(path, phases, ckpt_path=None, allow_changes=None, **kwargs):
    run = federation(path, phases, **kwargs)
    run.fit(mixture(), blobs(), ckpt_path=ckpt_path, allow_changes=allow_changes)
    return run


def stopped(path, phases):
    with pytest.raises(KeyboardInterrupt):
        fit(path, phases, callbacks=[Kill("on_round_end", 1)])


def rows(run, name):
    return [(row["epsilon"], row["delta"]) for row in csv_rows(run.run_dir / "rounds.csv") if row["method"] == name]


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """The checkpoint of a private phase that starts from another one."""
    path = tmp_path_factory.mktemp("chain")
    fit(path, [phase("first", private()), phase("second", private(), start="first")])
    return str(path / LAST)


def test_a_result_from_a_checkpoint_costs_what_its_run_cost_for_the_delta_of_this_run(chain, tmp_path, caplog):
    given = phase("second", private(1e-5), ckpt_path=chain)
    third = phase("third", private(1e-5), start="second")
    with caplog.at_level("INFO"):
        run = fit(tmp_path, [given, third])
    states = run.run.states
    assert states["second"].epsilon == private(1e-5).epsilon([[2 / 3, 2.0, 4]])
    assert states["third"].epsilon == private(1e-5).epsilon([[2 / 3, 2.0, 6]])
    for name in ("second", "third"):
        assert f"Phase '{name}': the server's model has (epsilon, delta)-differential privacy" in caplog.text
        assert f"epsilon {states[name].epsilon:.3g} and delta 1e-05" in caplog.text
        assert rows(run, name)[-1] == (repr(states[name].epsilon), "1e-05")
        content = load_checkpoint(run.run_dir / "checkpoints/last.ckpt")["phases"][name]
        assert (content.epsilon, content.delta) == (states[name].epsilon, 1e-5)


def test_rounds_that_two_results_have_in_common_count_once(chain, tmp_path):
    first, second = (phase(name, private(), ckpt_path=chain) for name in ("first", "second"))
    third = phase("third", private(), start={"global_expert": "second", "local_expert": "first"})
    other = phase("other", private(), start="initial")
    fourth = phase("fourth", private(), start={"global_expert": "third", "local_expert": "other"})
    states = fit(tmp_path, [first, second, third, other, fourth]).run.states
    for name, rounds in {"third": 6, "other": 2, "fourth": 10}.items():
        assert states[name].epsilon == pytest.approx(private().epsilon([[2 / 3, 2.0, rounds]]), rel=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["federation", "Lightning"])
def test_a_result_without_privacy_has_an_infinite_epsilon(kind, tmp_path, caplog):
    run = fit(tmp_path / "open", [phase()])
    path = tmp_path / "open" / LAST
    if kind == "Lightning":
        path = tmp_path / "model.ckpt"
        torch.save({"state_dict": run.client_module("it", 0).state_dict()}, path)
    it, after = phase("it", private(), ckpt_path=str(path)), phase("after", private(), start="it")
    tuned = Phase("PFL-FT", FineTuning(gate_fraction=0.25), gate=LocalOnly(), start="after")
    with caplog.at_level("INFO"):
        run = fit(tmp_path, [it, after, tuned])
    for name in ("it", "after"):
        assert run.run.states[name].epsilon == math.inf
        assert rows(run, name)[-1] == ("inf", "0.001")
        assert f"Phase '{name}': the server's model has no differential privacy" in caplog.text
    assert "epsilon nan" not in caplog.text and rows(run, "PFL-FT") == [("", "")]


def test_rounds_without_privacy_after_private_ones_make_epsilon_infinite(tmp_path, caplog):
    stopped(tmp_path, [phase(aggregation=private())])
    with caplog.at_level("INFO"):
        run = fit(tmp_path, [phase()], "last", ["phases"])
    expected = repr(private().epsilon([[2 / 3, 2.0, 1]]))
    assert rows(run, "it") == [(expected, "0.001"), ("inf", "0.001")]
    assert load_checkpoint(run.run_dir / "checkpoints/last.ckpt")["phases"]["it"].epsilon == math.inf
    assert "Phase 'it': the server's model has no differential privacy" in caplog.text


def test_a_phase_that_starts_from_one_with_such_rounds_has_an_infinite_epsilon(tmp_path):
    stopped(tmp_path, [phase(), phase("after", start="it")])
    changed = [phase(aggregation=private()), phase("after", private(), start="it")]
    states = fit(tmp_path, changed, "last", ["phases"]).run.states
    assert states["it"].epsilon == states["after"].epsilon == math.inf


def test_another_delta_belongs_to_the_epsilons_from_then_on(tmp_path):
    stopped(tmp_path, [phase(aggregation=private(1e-3), rounds=1)])
    changed = [phase(aggregation=private(1e-6), rounds=1)]
    with pytest.raises(MisconfigurationException, match=r"delta was 0\.001, now 1e-06"):
        fit(tmp_path, changed, "last")
    state = fit(tmp_path, changed, "last", ["phases"]).run.states["it"]
    assert (state.epsilon, state.delta) == (private(1e-6).epsilon([[2 / 3, 2.0, 1]]), 1e-6)


def exact_epsilon(one, other, delta):
    """Of sums with noise of deviation 1, of cohorts with these probabilities; client 0 sends 1, client 1 sends -1."""
    x = np.linspace(-12, 12, 20_001)
    sums = [{clients: sum((1, -1)[client] for client in clients) for clients in cohorts} for cohorts in (one, other)]
    p, q = (
        sum(share * np.exp(-((x - means[clients]) ** 2) / 2) for clients, share in cohorts.items())
        for cohorts, means in zip((one, other), sums, strict=True)
    )

    def excess(epsilon):
        return max(np.maximum(a - math.exp(epsilon) * b, 0).sum() / a.sum() for a, b in ((p, q), (q, p))) - delta

    return brentq(excess, 0, 20)


@pytest.mark.slow
def test_epsilon_holds_where_clients_drop_out(tmp_path):
    """Whether one of two clients takes part must not change how often the other one does."""
    rounds, shares = 100, []
    for sizes in ((6,), (6, 6)):
        trained = Notes(on_client_end=lambda run, phase, round, client: (round, client))
        it = phase("it", private(noise=1.0), rounds, evaluate=False, clients_per_round=1.0)
        settings = {"failures": ClientFailures(dropout=0.5), "enable_checkpointing": False, "callbacks": [trained]}
        run = federation(tmp_path, [it], trainer={"max_epochs": 1, "accelerator": "cpu"}, **settings)
        run.fit(mixture(), blobs(sizes))
        assert run.run.states["it"].counted_rounds == {"it": [[1.0, 1.0, rounds]]}
        cohorts = [tuple(client for at, client in trained.noted if at == round) for round in range(rounds)]
        shares.append({clients: number / rounds for clients, number in Counter(cohorts).items()})
    assert exact_epsilon(*shares, 1e-3) < private().epsilon([[1.0, 1.0, 1]])
    assert shares[1].keys() == {(), (0,), (1,), (0, 1)}
