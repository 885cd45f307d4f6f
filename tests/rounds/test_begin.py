"""What a phase starts from: an earlier phase, its best round, or a checkpoint."""

from dataclasses import replace

import pytest
import torch
from helpers import TensorData, mixture
from helpers.models import checkpoint
from helpers.runs import WithDropout, assert_same, data, federation, model, phases
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Federation, PersonalizedMoE, Phase, Select, Train
from fedmoe_pl.algorithms import Ditto, FedAvg, FedPAC, FineTuning, Local, PFLMoE
from fedmoe_pl.callbacks import ClientCheckpoint
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models import ConstantGate, FeatureGate, GlobalOnly, LinearGate, LocalOnly
from fedmoe_pl.rounds import given_result
from fedmoe_pl.rounds.begin import begin_phase, phase_module


def test_the_monitored_round_is_the_result_and_the_next_phase_starts_from_it(tmp_path):
    federated = Phase(
        "FedAvg", FedAvg("global_expert.*"), rounds=6, gate=ConstantGate(1.0), select=Select("global_test")
    )
    run = federation(tmp_path, [federated, Phase("PFL-FT", FineTuning(), train=Train(max_epochs=0))], seed=5)
    results = run.fit(model(), data())
    accuracies = [row["global_test_mean"] for row in run.run.rows[:6]]
    best = accuracies.index(max(accuracies)) + 1
    assert best < 6, "the test shows nothing if the last round is the best"
    assert (results["FedAvg"].round, results["FedAvg"].selection) == (best, "best round by global_test")
    assert results["FedAvg"].spread("global_test").mean == max(accuracies)

    given = Phase("FedAvg", FedAvg("global_expert.*"), gate=ConstantGate(1.0))
    given.ckpt_path = str(run.run_dir / "checkpoints/last.ckpt")
    assert federation(tmp_path / "given", [given], seed=5).fit(model(), data())["FedAvg"].round == best

    short = Phase("FedAvg", FedAvg("global_expert.*"), rounds=best, gate=ConstantGate(1.0))
    expected = federation(tmp_path / "short", [short], seed=5)
    expected.fit(model(), data())
    state = run.client_module("PFL-FT", 0).global_expert.state_dict()
    assert_same(dict(state), dict(expected.client_module("FedAvg", 0).global_expert.state_dict()))
    assert run.personalize(model(), data(sizes=(9,)))["FedAvg"].round == best, "also for newcomers"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Federation:
    run = federation(tmp_path_factory.mktemp("whole"), callbacks=[ClientCheckpoint(["FedAvg"])])
    run.fit(model(), data())
    return run


@pytest.mark.slow
@pytest.mark.parametrize("file", ["checkpoints/last.ckpt", "clients/FedAvg/all_clients.ckpt"])
def test_a_checkpoint_given_in_place_of_fedavg_gives_the_same_personalized_models(whole, file, tmp_path):
    given = phases()
    given[1].ckpt_path = str(whole.run_dir / file)
    run = federation(tmp_path, given)
    results = run.fit(model(), data())
    assert_same(run.run.states["PFL-MF"].clients, whole.run.states["PFL-MF"].clients)
    assert results["FedAvg"].selection == "given checkpoint"
    assert results["FedAvg"].spread("global_test") == whole.results["FedAvg"].spread("global_test")
    assert results["FedAvg"].round == (whole.results["FedAvg"].round if file.startswith("check") else 0)


@pytest.mark.parametrize("of_lightning", [False, True])
def test_a_given_result_has_what_nobody_trained_from_its_checkpoint(of_lightning, tmp_path):
    """The model of the new run has another extractor, which is neither shared nor trained."""
    classifier = FedAvg("global_expert.classifier.*", "global_expert.classifier.*")
    before = federation(tmp_path / "before", [Phase("it", classifier, gate=GlobalOnly())])
    before.fit(model(0), data())
    path = str(before.run_dir / "checkpoints/last.ckpt")
    if of_lightning:
        path = str(checkpoint(tmp_path, before.client_module("it", 0)))
    given = Phase("it", classifier, gate=GlobalOnly(), ckpt_path=path)
    tuned = Phase("tuned", FineTuning(), train=Train(max_epochs=0))
    after = federation(tmp_path / "after", [given, tuned])
    after.fit(model(1), data())
    expected = dict(before.client_module("it", 0).global_expert.state_dict())
    for method in ("it", "tuned"):
        assert_same(dict(after.client_module(method, 0).global_expert.state_dict()), expected)
    assert after.results["it"].spread("global_test") == before.results["it"].spread("global_test")


class Wide(WithDropout):
    def __init__(self):
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(5, 9), nn.ReLU())
        self.classifier = nn.Linear(9, 3)


def test_a_result_must_fit_the_model_and_belong_to_the_clients_before_any_training(whole, tmp_path):
    """What clients kept must be their own; for what is shared, one is warned."""
    path, others = str(whole.run_dir / "checkpoints/last.ckpt"), data(sizes=(11, 8, 13))
    shared = [Phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly(), ckpt_path=path)]
    with pytest.raises(MisconfigurationException, match="cannot be loaded"):
        federation(tmp_path, shared).fit(PersonalizedMoE(Wide()), data())
    kept = [Phase("Local", Local(), gate=LocalOnly(), ckpt_path=path)]
    with pytest.raises(MisconfigurationException, match=r"^Phase 'Local': ckpt_path .* what others have kept"):
        federation(tmp_path, kept).fit(model(), others)
    assert not [*tmp_path.iterdir()]
    with pytest.warns(UserWarning, match="other clients or samples; clients may be tested on samples"):
        federation(tmp_path, shared).fit(model(), others)


def named(**parts) -> FederatedDataModule:
    whole = data(sizes=(13, 8, 11, 9))
    arrays = whole.arrays
    datamodule = TensorData(arrays.x_train, arrays.y_train, parts, (arrays.x_test, arrays.y_test), batch_size=4)
    datamodule.setup()
    return datamodule


def per(model, clients, tmp_path, **kwargs) -> Federation:
    """A method whose clients keep their classifiers, in two phases."""
    shared = FedAvg("global_expert.extractor.*")
    first = Phase("it", shared, rounds=2, gate=GlobalOnly(), **kwargs)
    run = federation(tmp_path, [first, Phase("more", shared, rounds=3, gate=GlobalOnly(), start="it")])
    run.fit(model, clients)
    return run


def test_clients_of_the_same_names_go_on_with_what_they_kept_when_others_join_leave_or_change_their_data(tmp_path):
    a, b, c, d = torch.arange(41).split([13, 8, 11, 9])
    before = per(model(), named(a=a, b=b, c=c), tmp_path / "before")
    path = str(before.run_dir / "checkpoints/last.ckpt")
    with pytest.warns(UserWarning, match="client d begins anew; clients c, a may hold out other samples, which follow"):
        after = per(model(), named(c=c, d=d, a=b), tmp_path / "after", ckpt_path=path)  # b leaves, a's data change
    kept, new = (run.run.states["it"].clients for run in (before, after))
    assert [*new] == [0, 2]
    assert_same(new[0], kept[2])
    assert_same(new[2], kept[0])
    for name in ("a", "c"):
        modules = [run.client_module("it", name).state_dict() for run in (before, after)]
        assert_same(*map(dict, modules))
    (fresh, trained) = (dict(after.client_module(phase, "d").state_dict()) for phase in ("it", "more"))
    classifier = "global_expert.classifier.1.weight"
    assert_same(fresh[classifier], model().state_dict()[classifier])
    assert not torch.equal(trained[classifier], fresh[classifier])

    with pytest.warns(UserWarning, match="other clients or samples; clients .* may hold out other samples"):
        again = per(model(), named(b=b, c=c, a=a), tmp_path / "again", ckpt_path=path)  # only the order differs
    accuracies = [
        {run.run.datamodule.client_names[each.client]: each.reweighted_test for each in run.run.results["it"].clients}
        for run in (before, again)
    ]
    assert accuracies[0] == accuracies[1]


def test_experts_of_another_seed_are_refused_which_have_seen_what_is_set_aside_for_the_gate(tmp_path):
    fedavg = Phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly())
    tuned = Phase("tuned", FineTuning(gate_fraction=0.25), gate=LocalOnly())
    run = federation(tmp_path / "before", [fedavg, tuned])
    run.fit(model(), data())
    path = str(run.run_dir / "checkpoints/last.ckpt")
    given = [replace(phase, ckpt_path=path) for phase in (fedavg, tuned)]
    for seed, phases_of_run in ((0, given), (1, [given[0], tuned])):
        federation(tmp_path / f"{seed}", phases_of_run, seed=seed).fit(model(), data())
    with pytest.raises(MisconfigurationException, match=r"'tuned': ckpt_path .* a run with seed 1, because"):
        federation(tmp_path / "refused", given, seed=1).fit(model(), data())


@pytest.mark.parametrize("algorithm", [Ditto, FedPAC])
def test_a_server_that_holds_tensors_of_single_clients_is_refused_for_others(algorithm, tmp_path):
    a, b, c = torch.arange(32).split([13, 8, 11])
    more = {"gate": LocalOnly() if algorithm is Ditto else GlobalOnly(), "train": Train(max_epochs=2)}
    run = federation(tmp_path / "before", [Phase("it", algorithm(), **more)])
    run.fit(model(), named(a=a, b=b, c=c))
    before = run.run.states["it"].server
    given = [Phase("it", algorithm(), **more, ckpt_path=str(run.run_dir / "checkpoints/last.ckpt"))]
    after = federation(tmp_path / "after", given)
    if algorithm is FedPAC:
        with pytest.raises(MisconfigurationException, match="because its server holds tensors of single clients"):
            after.fit(model(), named(c=c, a=a))
        run.personalize(model(), named(d=torch.arange(32, 41)))
        for server, has_others in ((before, True), (run.run.states["it"].server, False)):
            assert any(name.startswith(FedPAC().messages.per_client) for name in server) == has_others
        return
    with pytest.warns(UserWarning, match="clients c, a may hold out"):
        after.fit(model(), named(c=c, a=a))
    assert_same(*(dict(each.client_module("it", "c").state_dict()) for each in (run, after)))


def test_dp_sgd_s_steps_follow_the_names_and_those_of_clients_that_left_still_count():
    steps = {client: [[0.5, 2.0, number]] for number, client in enumerate("012", start=1)}
    saved = PhaseState({}, {}, {0: {"w": torch.zeros(1)}, 2: {"w": torch.ones(1)}}, counted_steps={"it": steps})
    given = Phase("it", Local(), ckpt_path="run/last.ckpt")
    state = given_result._renumbered(given, mixture(), saved, ["a", "b", "c"], {0: 2, 2: 0})
    assert state.counted_steps == {"it": {"2": steps["0"], "run/last.ckpt/b": steps["1"], "0": steps["2"]}}
    assert {client: tree["w"].item() for client, tree in state.clients.items()} == {0: 1, 2: 0}


def test_what_clients_kept_is_refused_where_a_number_says_who_they_are(tmp_path):
    a, b, c, d = torch.arange(41).split([13, 8, 11, 9])
    several = PersonalizedMoE(WithDropout(), local_expert=[WithDropout(), WithDropout()])
    run = federation(tmp_path / "before", [Phase("it", Local(), gate=LocalOnly())])
    run.fit(several, named(a=a, b=b, c=c))
    given = [Phase("it", Local(), gate=LocalOnly(), ckpt_path=str(run.run_dir / "checkpoints/last.ckpt"))]
    with pytest.raises(MisconfigurationException, match="because a client's number chooses its architecture"):
        federation(tmp_path / "after", given).fit(several, named(c=c, a=a))
    with pytest.warns(UserWarning, match="other clients or samples; clients .* may hold out other samples"):
        federation(tmp_path / "same", given).fit(several, named(c=d, b=b, a=a))  # a and c keep theirs


@pytest.mark.parametrize("gate", [LinearGate(5), FeatureGate(), LinearGate()], ids=["given", "features", "lazy"])
def test_a_phase_s_gate_takes_the_model_s_floating_point_type(gate):
    module = phase_module(mixture(dtype=torch.float64), Phase("G", PFLMoE(), gate=gate))
    module.mix(torch.zeros(2, 5, dtype=torch.float64))
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float64}
    assert all(parameter.dtype != torch.float64 for parameter in gate.parameters()), "the phase's own stays as it was"


def test_a_given_result_adds_to_what_the_phases_before_have_cost_and_replaces_what_clients_kept():
    module, (old, new) = mixture(), ({"local_expert.x": torch.full((1,), value)} for value in (1.0, 2.0))
    names = module.state_dict().keys()
    of_before, of_result = (
        PhaseState(
            {},
            {},
            {client: dict.fromkeys(names, kept["local_expert.x"]) for client in clients},
            counted_rounds={name: [[1.0, noise, 3]]},
            counted_steps={name: {"0": [[0.5, noise, 3]]}},
        )
        for name, noise, kept, clients in (("before", 2.0, old, (0, 1)), ("p/it", 4.0, new, (1, 2)))
    )
    state = begin_phase(Phase("it", FineTuning()), module, [("", of_before)], of_result)
    assert state.counted_rounds == {"before": [[1.0, 2.0, 3]], "p/it": [[1.0, 4.0, 3]]}
    assert state.counted_steps == {"before": {"0": [[0.5, 2.0, 3]]}, "p/it": {"0": [[0.5, 4.0, 3]]}}
    assert {client: {*map(float, state.clients[client].values())} for client in range(3)} == {0: {1}, 1: {2}, 2: {2}}
