"""What leaves a client is what the audit said before, and nothing else reaches anyone; for every method."""

import copy
import inspect
from collections import Counter
from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch
from helpers import blobs, mixture, phase, run, sparse_mixture
from helpers.backends import WithBatchNorm
from helpers.clusters import clustered, only
from helpers.methods import CHOOSING, FEW_METHODS, METHODS, Messages, data, in_layers, kind, ledger
from helpers.runs import assert_same

from fedmoe_pl import Algorithm, Federation, Phase, Select, algorithms
from fedmoe_pl.aggregation import DifferentialPrivacy, TrimmedMean
from fedmoe_pl.algorithms import EpsilonGreedyIFCA, FedAvg, FedJETs
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.callbacks import TrafficLedger
from fedmoe_pl.models import EqualWeights, GlobalOnly
from fedmoe_pl.phases.client_failures import ClientFailures


def fitted(name, folder, datamodule, messages):
    method = METHODS[name]
    phases = messages.through(method.phases(), method.handed)
    settings = {"backend": TrainerBackend(), "callbacks": [TrafficLedger()], "max_epochs": 2}
    return run(phases, method.model(), datamodule, folder, **settings)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Runs a method once; gives the federation and the messages of its clients."""

    @cache
    def of_method(name):
        messages, datamodule = Messages(), data(**METHODS[name].split)
        return fitted(name, tmp_path_factory.mktemp("method"), datamodule, messages), copy.deepcopy(messages.sent)

    return of_method


def audited(phases, model, datamodule, tmp_path, **kwargs):
    trainer = {"max_epochs": 2, "accelerator": "cpu"}
    federation = Federation(phases, trainer, logger=False, default_root_dir=str(tmp_path), **kwargs)
    return federation.audit(model, datamodule)


@cache
def audit_of(name, tmp_path):
    method = METHODS[name]
    return audited(method.phases(), method.model(), data(**method.split), tmp_path)


def test_these_are_all_methods_of_the_package():
    public = (getattr(algorithms, name) for name in algorithms.__all__)
    kinds = {kind for kind in public if inspect.isclass(kind) and issubclass(kind, Algorithm)}
    assert {type(phase.algorithm) for method in METHODS.values() for phase in method.phases()} == kinds


def test_nobody_drops_out_of_a_dry_run(tmp_path):
    failures = ClientFailures(dropout=0.999, min_clients=3)
    (audit,) = audited([phase("it", FedAvg())], mixture(), blobs(), tmp_path, failures=failures).values()
    assert {each.client for each in audit.transfers[0]} == {0, 1, 2}


@pytest.mark.few(*FEW_METHODS)
@pytest.mark.parametrize("name", METHODS)
def test_the_ledger_of_every_method_adds_up_to_its_traffic(name, recorded):
    federation, _ = recorded(name)
    sums = Counter()
    for row in ledger(federation):
        sums[row["phase"], {"requests": "up"}.get(row["direction"], row["direction"])] += int(row["bytes"])
    for name, state in federation.run.states.items():
        for way in ("down", "up", "between_clients"):
            assert sums[name, way] == state.traffic[f"bytes_{way}"], (name, way)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.few(7)
def test_what_a_method_declares_private_never_leaves_a_client(name, recorded):
    names = {row["tensor"] for row in ledger(recorded(name)[0]) if row["direction"] != "down"}
    names |= {name.partition(".")[2] for name in names}  # between clients, a name begins with the sender's id
    assert not [tensor for tensor in names for pattern in METHODS[name].private if fnmatchcase(tensor, pattern)]


@pytest.mark.few(*FEW_METHODS)
@pytest.mark.parametrize("name", METHODS)
def test_the_audit_declares_what_the_ledger_of_every_method_then_has(name, recorded, tmp_path):
    audits = audit_of(name, tmp_path)
    assert not [*tmp_path.iterdir()], "nothing is written"
    rows = ledger(recorded(name)[0])
    for of_phase, audit in audits.items():
        found = [row for row in rows if row["phase"] == of_phase]
        own = {row["tensor"].partition(".")[2] for row in found if row["direction"] == "between_clients"}
        own |= {row["tensor"] for row in found if row["direction"] in ("requests", "up")}
        assert not own & {*audit.stays}
        declared = [(round, each) for round, sent in enumerate(audit.transfers, 1) for each in sent]
        if name in CHOOSING:
            expected = {(row["direction"], kind(row["tensor"])) for row in found}
            assert {(each.direction, kind(each.tensor)) for _, each in declared} == expected
            if name == "FedKD":
                most = sum(each.bytes for _, each in declared)
                assert 0.9 * most < sum(int(row["bytes"]) for row in found) <= most
        else:
            columns = ("direction", "client", "tensor", "dtype", "bytes")
            expected = [(int(row["round"]), *(row[column] for column in columns)) for row in found]
            values = [(round, *(str(getattr(each, column)) for column in columns)) for round, each in declared]
            assert values == expected


@pytest.mark.few("FedAvg")
@pytest.mark.parametrize("name", METHODS)
def test_nothing_but_messages_of_the_round_s_clients_reaches_anyone(name, recorded, tmp_path):
    """Data of absent clients change, and those of one that takes part, which sends the same all the same.

    Then neither the server nor any other client has another bit.
    """
    before, sent = recorded(name)
    present = {int(row["client"]) for row in ledger(before)}
    everyone = range(before.run.datamodule.num_clients)
    changed = {*everyone} - present | {min(present)} if present else {0}
    messages = Messages(changed, copy.deepcopy(sent))
    after = fitted(name, tmp_path, with_other_samples(data(**METHODS[name].split), changed), messages)
    messages.replayed = ()
    for of_phase, state in before.run.states.items():
        assert_same(after.run.states[of_phase].server, state.server)
        for client in {*everyone} - changed:
            assert_same(after.run.states[of_phase].clients.get(client, {}), state.clients.get(client, {}))
            models = (federation.client_module(of_phase, client).state_dict() for federation in (before, after))
            assert_same(*(dict(state) for state in models))


def with_other_samples(datamodule, clients):
    """The data, in which some clients have other samples and labels."""
    for client in clients:
        samples = datamodule.train_samples[client]
        datamodule.x[samples] = 1 - 2 * datamodule.x[samples]
        datamodule.y[samples] = (datamodule.y[samples] + 1) % 3
    counts = datamodule.class_counts()
    datamodule.class_shares = counts / counts.sum(1, keepdim=True)
    return datamodule


def test_other_samples_of_a_client_do_change_what_it_sends(recorded, tmp_path):
    before, _ = recorded("FedAvg")
    client = int(ledger(before)[0]["client"])
    after = fitted("FedAvg", tmp_path, with_other_samples(data(), [client]), Messages())
    name = "global_expert.classifier.1.weight"
    assert not torch.equal(*(each.run.states["it"].server[name] for each in (before, after)))


def test_what_the_server_uses_before_the_first_round_is_declared(tmp_path):
    common = phase("common", FedAvg(["embedding.*", "experts.0.*"]), gate=GlobalOnly())
    jets = phase("it", FedJETs(), start="common")
    audits = audited([common, jets], sparse_mixture(4), data(), tmp_path)
    assert audits["common"].before == [] and audits["it"].before == ["class_shares of all 5 clients"]
    drawn = phase("it", EpsilonGreedyIFCA(good_init=0.1), gate=only(0, 3), clients_per_round=3)
    audit = audited([drawn], clustered(2), data(), tmp_path)["it"]
    assert audit.before == ["what the algorithm computes from training samples of 3 clients"]
    assert audit_of("PMMoE", tmp_path)["PM-MoE"].before == ["tensors that 5 clients kept from earlier phases"]


def test_the_text_says_who_gets_what(tmp_path, capsys):
    algorithm = FedAvg(["global_expert.*", "local_expert.extractor.*"], weighting="uniform")
    phases = [Phase("ours", algorithm, 3, gate=GlobalOnly(), select=Select("global_test"))]
    audited(phases, mixture(), blobs(), tmp_path)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    shared = "global_expert.*, local_expert.extractor.*: 744 bytes"
    for line in (
        "ours (FedAvg): 3 of 3 clients, 3 rounds",
        f"the server sends a client {shared}",
        f"a client sends the server {shared}",
        "with the weight 1, the same for all",
        "of the updates, the server needs only their weighted mean",
        "stays with its client local_expert.classifier.*",
        "selection of the round global_test, a number of each participant, on test samples",
    ):
        assert line in lines, line


@pytest.mark.parametrize("kind", ["adapters", "normalized"])
def test_what_the_model_freezes_is_counted_and_not_named(tmp_path, capsys, kind):
    if kind == "adapters":
        model, frozen, pattern = in_layers(), 4, "global_expert.*"
    else:  # buffers of a frozen part are in eval mode; running statistics of the other change
        model, frozen, pattern = mixture(expert=WithBatchNorm()), 9, "local_expert.*"
        model.global_expert.requires_grad_(False)
    audit = audited([phase("it", FedAvg(pattern), gate=EqualWeights())], model, blobs(), tmp_path)["it"]
    assert len(audit.frozen) == frozen and not {*audit.frozen} & {*audit.stays}
    start = "base." if kind == "adapters" else "global_expert."
    assert all(name.startswith(start) for name in audit.frozen)
    text = " ".join(capsys.readouterr().out.split())
    told = "which nobody changes and no client sends; if deployed, the server does, when a phase begins"
    assert f"frozen by the model {frozen} tensors, {told}" in text
    assert start not in text


def test_aggregations_need_no_numbers_of_samples_and_their_own_tensors_are_named(tmp_path, capsys):
    private = DifferentialPrivacy(0.0, max_norm=1.0, delta=1e-4, quantile=0.5)
    phases = [phase("private", FedAvg(), aggregation=private), phase("robust", FedAvg(), aggregation=TrimmedMean(1))]
    audits = audited(phases, mixture(), blobs(), tmp_path)
    assert {audit.weight for audit in audits.values()} == {"1, the same for all"}
    text = capsys.readouterr().out
    assert "aggregation/max_norm (float64)" in text and "aggregation/within_max_norm (float64)" in text


def test_an_audit_changes_no_bit_of_the_run_that_follows(recorded, tmp_path):
    method = METHODS["FedMix"]
    off = {"logger": False, "enable_progress_bar": False, "default_root_dir": str(tmp_path)}
    federation = Federation(method.phases(), {"max_epochs": 2}, TrainerBackend(), **off)
    model, datamodule = method.model(), data()
    federation.audit(model, datamodule)
    federation.fit(model, datamodule)
    for name, state in recorded("FedMix")[0].run.states.items():
        assert_same(federation.run.states[name].server, state.server)
