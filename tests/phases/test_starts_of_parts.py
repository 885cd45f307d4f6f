"""A phase whose parts start from different phases, or whose own model has only some of a start's parts."""

from functools import partial

import pytest
import torch
from helpers import Expert, assert_same_bits, client_generator, mixture, tensors, train_by_hand
from helpers.methods import METHODS
from helpers.methods import data as data_of_methods
from helpers.runs import assert_same, data, federation
from torch import nn

from fedmoe_pl import Federation, PersonalizedMoE, Phase, Train
from fedmoe_pl.algorithms import (
    APFL,
    Ditto,
    FedALA,
    FedAvg,
    FedRoD,
    FineTuning,
    Local,
    PerFedAvg,
    PFLMoE,
    SpecialistMixture,
)
from fedmoe_pl.algorithms.algorithm import chooses_model
from fedmoe_pl.checkpoints.client_state import StatesOnDisk, joined
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import GlobalOnly, LinearGate, LocalOnly, SparseMoE
from fedmoe_pl.phases.starts import find_starts

SGD = partial(torch.optim.SGD, lr=0.1)
BOTH = {"global_expert": "FedAvg", "local_expert": "FedPer"}


def model():
    return mixture(LinearGate(5), dtype=torch.float32)


def gate() -> LinearGate:
    torch.manual_seed(7)
    return LinearGate(5)


def fedavg(**kwargs) -> Phase:
    return Phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly(), **{"rounds": 3, **kwargs})


def fedper(**kwargs) -> Phase:
    algorithm = FedAvg("local_expert.extractor.*", "local_expert.*")
    return Phase("FedPer", algorithm, rounds=2, clients_per_round=2, gate=LocalOnly(), **kwargs)


def phases(start=BOTH, **kwargs) -> list[Phase]:
    return [fedavg(), fedper(), Phase("Mixture", PFLMoE(0), gate=gate(), start=start, **kwargs)]


def fitted(path, its_phases=None, ckpt_path=None, **kwargs) -> Federation:
    run = federation(path, its_phases or phases(), **kwargs)
    run.fit(model(), data(), ckpt_path=ckpt_path)
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Federation:
    run = fitted(tmp_path_factory.mktemp("whole"))
    assert not run.run.states["FedAvg"].clients and len(run.run.states["FedPer"].clients) == 2, (
        "one client never took part"
    )
    return run


def test_each_part_is_what_its_phase_made_of_it_and_the_gate_is_trained_on_top(whole):
    for client in range(3):
        module = mixture(gate(), dtype=torch.float32)
        sources = [whole.client_module(name, client) for name in ("FedAvg", "FedPer")]
        module.load_state_dict(tensors(sources[0], "global_expert.") | tensors(sources[1], "local_expert."), False)
        generator = client_generator(0, client, 3)  # the rounds of the longer chain
        module.gate.reset_parameters()  # by the seed that the generator has set
        batches = data().batches(data().train_samples[client], generator=generator)
        train_by_hand(module, "gate.", batches, module.optimizer, 1)
        actual = dict(whole.client_module("Mixture", client).state_dict())
        torch.testing.assert_close(actual, dict(module.state_dict()), rtol=0, atol=1e-6)
        for part in ("global_expert.", "local_expert."):
            assert_same_bits({name: actual[name] for name in tensors(module, part)}, tensors(module, part))


@pytest.mark.parametrize(
    ("algorithm", "gate", "part"),
    [
        (FedALA(), GlobalOnly(), "global_expert"),
        (PerFedAvg(), GlobalOnly(), "global_expert"),
        (APFL(), LocalOnly(), "local_expert"),
    ],
)
@pytest.mark.few(1)
def test_a_part_that_was_evaluated_as_another_than_the_one_that_is_taken_is_warned_of(algorithm, gate, part, tmp_path):
    before, start = Phase("before", algorithm, rounds=2, gate=gate), {part: "before"}
    after = Phase("after", Local("local_expert.*"), gate=gate, start=start, train=Train(max_epochs=0))
    name = type(algorithm).__name__
    sentence = f"start takes {part} from 'before' as the server and the clients hold it.*: {name} computes that one for"
    with pytest.warns(UserWarning, match=sentence):
        run = fitted(tmp_path, [before, after])
    states = [tensors(run.client_module(name, 0), f"{part}.") for name in ("before", "after")]
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [name for name in METHODS if chooses_model(METHODS[name].phases()[-1].algorithm)])
def test_the_parts_with_such_a_warning_are_those_of_which_nobody_holds_the_evaluated_tensors(name, tmp_path):
    run = Federation(METHODS[name].phases(), {"max_epochs": 2}, default_root_dir=str(tmp_path), logger=False)
    run.fit(METHODS[name].model(), data_of_methods())
    last, differing = run.phases[-1], set()
    state = run.run.states[last.name]
    for client in range(5):
        evaluated = run.client_module(last.name, client).state_dict()
        held = {**state.initial, **state.server, **state.clients.get(client, {})}
        differing |= {name.split(".")[0] for name, tensor in evaluated.items() if not torch.equal(tensor, held[name])}
    assert differing == {*last.algorithm.parts.computed}


def test_parts_that_are_not_named_or_initial_start_from_the_initial_model(tmp_path):
    trained = Phase("Local", Local(), train=Train(max_epochs=1))
    for start in ({"local_expert": "Local"}, {"local_expert": "Local", "global_expert": "initial"}):
        run = fitted(tmp_path, [trained, Phase("G", PFLMoE(0), start=start, evaluate=False)], trainer={"max_epochs": 0})
        for client in range(3):
            module = run.client_module("G", client)
            assert_same_bits(tensors(module, "global_expert."), tensors(model(), "global_expert."))
            assert_same_bits(tensors(module, "local_expert."), tensors(run.client_module("Local", client), "local_exp"))


@pytest.mark.slow
def test_two_phases_whose_clients_both_keep_tensors_meet_in_memory_and_in_files(tmp_path):
    def both(in_files):
        return fitted(
            tmp_path / str(in_files),
            [
                fedper(),
                Phase("Local", Local("global_expert.*"), gate=GlobalOnly()),
                Phase("Mixture", SpecialistMixture(), start={"local_expert": "FedPer", "global_expert": "Local"}),
            ],
            enable_checkpointing=in_files,
        )

    runs = [both(in_files) for in_files in (False, True)]
    assert isinstance(runs[1].run.states["Mixture"].clients, StatesOnDisk)
    for client in range(3):
        modules = [run.client_module("Mixture", client).state_dict() for run in runs]
        assert_same(dict(modules[0]), dict(modules[1]))
        of_start = tensors(runs[0].client_module("Local", client), "global_expert.")
        assert_same_bits({name: modules[0][name] for name in of_start}, of_start)
        assert any(name.startswith("global_expert.") for name in runs[0].run.states["Mixture"].clients[client])
        assert any(name.startswith("local_expert.") for name in runs[0].run.states["Mixture"].clients[client])
        # as after a resume with enable_checkpointing: false
        kept = [runs[1].run.states["FedPer"].clients, runs[0].run.states["Local"].clients]
        assert_same(joined(kept)[client], {**kept[0].get(client, {}), **kept[1].get(client, {})})


def test_newcomers_take_their_parts_from_the_same_phases(whole, tmp_path):
    later = federation(tmp_path, phases())
    later.personalize(model(), data(sizes=(9, 6)), str(whole.run_dir / "checkpoints/last.ckpt"), rounds=2)
    for client in range(2):
        module = later.client_module("Mixture", client)
        for part, name in BOTH.items():
            assert_same_bits(tensors(module, f"{part}."), tensors(later.client_module(name, client), f"{part}."))
        assert not torch.equal(module.gate.linear.weight, gate().linear.weight), "the gate is trained"


def after(*others, algorithm=None, name="G", **start):
    """Phases after FedAvg, the last of which starts its parts from some of them."""
    return [fedavg(), *others, Phase(name, algorithm or PFLMoE(), start=start)]


LOCAL = Phase("Local", Local("local_expert.*"))
BOTH_PARTS = {"global_expert": "FedAvg", "local_expert": "Local"}
REFUSED = {
    "a phase that is not there": after(algorithm=Local(), local_expert="Ditto"),
    "an expert that has seen the gate's samples": after(LOCAL, **BOTH_PARTS),
    "also two phases before": [
        *after(LOCAL, algorithm=Local("gate.*"), name="both", **BOTH_PARTS),
        Phase("G", PFLMoE(), start={"global_expert": "FedAvg", "local_expert": "both"}),
    ],
    "a model of another architecture": after(
        Phase("own", FedAvg("global_expert.*"), model=mixture(expert=Expert(hidden=7)), gate=GlobalOnly()),
        algorithm=Local(),
        global_expert="FedAvg",
        local_expert="own",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_start_that_misses_something_is_refused(case):
    with pytest.raises(InvalidArgumentError) as error:
        find_starts(REFUSED[case])
    assert (error.value.owner, error.value.argument) == ("Phase 'G'", "start")


def test_a_gate_with_samples_of_its_own_may_meet_an_expert_that_has_not_seen_them():
    fine_tuned = Phase("Fine-tuned", FineTuning(gate_fraction=0.25))
    again = Phase("again", FedAvg("global_expert.*"), start={"global_expert": "FedAvg"})
    phases = after(fine_tuned, again, global_expert="again", local_expert="Fine-tuned")
    phases.append(Phase("H", PFLMoE(), start="G"))  # follows the local expert, not the global one
    assert find_starts(phases)["G"] == {"global_expert": "again", "local_expert": "Fine-tuned"}


class Two(PersonalizedMoE):
    """Has a part that the model of other phases lacks."""

    def __init__(self, hidden=6):
        super().__init__(Expert(hidden=hidden), Expert(), LinearGate(5))
        self.pool = nn.Linear(5, 3)


class Other(PersonalizedMoE):
    """Has no part of the other models but the gate."""

    def __init__(self):
        super().__init__(Expert(), gate=LinearGate(5))
        self.model = self.global_expert
        del self.global_expert, self.local_expert


@pytest.mark.parametrize(
    "phase",
    [
        Phase("G", Local(), start={"local": "FedAvg"}),
        Phase("G", Local(), model=Two(hidden=7), start={"global_expert": "FedAvg"}),
        Phase("G", Local(), model=Two(), start={"pool": "FedAvg"}),
        Phase("G", Local(), model=Two(hidden=7), start="FedPer"),
        Phase("G", Local(), model=Other(), start="FedPer", evaluate=False),
        # the algorithm starts local_expert as a copy of another part
        *(Phase("G", algorithm, start=BOTH) for algorithm in (Ditto(), FedRoD(), FineTuning())),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_any_training(tmp_path, phase):
    with pytest.raises(InvalidArgumentError) as error:
        federation(tmp_path, [fedavg(), fedper(), phase]).fit(model(), data())
    assert (error.value.owner, error.value.argument) == ("Phase 'G'", "start")
    assert not (tmp_path / "federation").exists()


def test_an_own_model_takes_the_parts_that_both_have_and_begins_its_other_parts_anew(tmp_path):
    bigger = Two()
    bigger.gate = LinearGate(5)
    pool = {name: tensor.clone() for name, tensor in tensors(bigger, "pool.").items()}
    run = fitted(
        tmp_path,
        [
            fedavg(),
            fedper(),
            Phase("own", Local("gate.*"), model=bigger, start="FedPer", evaluate=False),
            Phase("later", Local("gate.*"), start="own", evaluate=False),
        ],
        trainer={"max_epochs": 1},
    )
    for client in range(3):
        for name in ("own", "later"):
            module = run.client_module(name, client)
            assert_same_bits(
                tensors(module, "local_expert."), tensors(run.client_module("FedPer", client), "local_expert.")
            )
            assert_same_bits(tensors(module, "pool."), pool)


def sparse(num_experts) -> SparseMoE:
    torch.manual_seed(num_experts)
    return SparseMoE(nn.Sequential(nn.Linear(5, 4), nn.ReLU()), nn.Linear(4, 3), num_experts, optimizer=SGD)


@pytest.mark.parametrize("shared", ["*", "embedding.*"])
def test_a_mixture_that_has_got_one_more_expert_takes_the_others_from_its_start(tmp_path, shared):
    grown = Phase("four", FedAvg(shared), model=sparse(4), start="three", train=Train(max_epochs=0))
    run = federation(tmp_path, [Phase("three", FedAvg(shared), rounds=2), grown])
    run.fit(sparse(3), data())
    initial = sparse(4).state_dict()
    for client in range(3):
        before, after = (run.client_module(method, client).state_dict() for method in ("three", "four"))
        after = {name: tensor for name, tensor in after.items() if not name.startswith("gate.")}
        assert {name for name in after if name not in before} == {"experts.3.weight", "experts.3.bias"}
        for name, tensor in after.items():
            assert torch.equal(tensor, (before if name in before else initial)[name]), name


def test_an_expert_that_a_start_has_is_not_left_out_silently(tmp_path):
    run = federation(tmp_path, [Phase("three", FedAvg()), Phase("two", FedAvg(), model=sparse(2), start="three")])
    with pytest.raises(
        InvalidArgumentError, match=r"the model of 'three' differs from the phase's own in 'experts'\.$"
    ):
        run.fit(sparse(3), data())
