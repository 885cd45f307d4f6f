"""A method's numbers follow from the seed and its own settings, whatever other phases stand in the file."""

import pytest
import torch
import yaml
from helpers import assert_same_bits

from fedmoe_pl.cli.cli import FederationCLI


def of_class(name, **arguments) -> dict:
    return {"class_path": name, "init_args": arguments}


GATE = of_class("LinearGate", in_features=64)  # draws its parameters when it is made
FEDAVG = {"name": "FedAvg", "algorithm": of_class("FedAvg", shared="global_expert.*"), "gate": "GlobalOnly"}
TUNED = {"name": "tuned", "algorithm": "FineTuning", "gate": "LocalOnly", "start": "FedAvg"}
JOINT = {"name": "joint", "algorithm": "Local", "gate": GATE, "start": "initial"}
MIXED = {"name": "mixed", "algorithm": of_class("Local", trainable="local_expert.*"), "gate": GATE, "start": "tuned"}
OWN = {"name": "own", "algorithm": "Local", "model": of_class("PersonalizedMoE", global_expert="SmallMLP", gate=GATE)}
ALL = [FEDAVG, TUNED, JOINT, MIXED, OWN]
OTHER = {**JOINT, "name": "other"}


def fitted(tmp_path, phases, seed=0):
    path = tmp_path / "run.yaml"
    content = {
        "seed_everything": seed,
        "model": of_class("PersonalizedMoE", global_expert="SmallMLP"),
        "data": of_class("Digits", num_clients=3, partitioner=of_class("Dirichlet", alpha=0.5), batch_size=100),
        "trainer": {"accelerator": "cpu", "max_epochs": 1},
        "federation": {"logger": False, "enable_progress_bar": False, "default_root_dir": str(tmp_path)},
    }
    content["federation"]["phases"] = phases
    path.write_text(yaml.safe_dump(content))
    return FederationCLI(["fit", "--config", str(path)]).trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["fedmoe"])
        return fitted(tmp_path_factory.mktemp("whole"), ALL)


@pytest.mark.parametrize(
    "phases",
    [
        [OTHER, *ALL],
        [FEDAVG, OTHER, TUNED, {**OWN, "name": "second model"}, JOINT, MIXED, OWN],
        [OWN, JOINT, FEDAVG, TUNED, MIXED],
        [FEDAVG, TUNED, MIXED],
        [JOINT],
        [OWN],
    ],
    ids=["added before", "added between", "in another order", "without two", "one alone", "own model alone"],
)
def test_adding_removing_and_reordering_phases_leaves_the_others_their_bits(whole, phases, tmp_path):
    run = fitted(tmp_path, phases)
    for name in {phase["name"] for phase in phases} & {phase["name"] for phase in ALL}:
        assert run.results[name].spread("global_test") == whole.results[name].spread("global_test")
        for client in range(3):
            now, before = (dict(each.client_module(name, client).state_dict()) for each in (run, whole))
            assert_same_bits(now, before)


def test_gates_that_take_their_width_from_a_sample_have_random_numbers_of_their_own_too(tmp_path):
    phases = [{**JOINT, "name": name, "gate": "LinearGate", "max_epochs": 0} for name in ("one", "other")]
    run = fitted(tmp_path, phases)
    weights = [run.client_module(phase["name"], 0).gate.linear.weight for phase in phases]
    assert not torch.equal(*weights)
    alone = fitted(tmp_path, phases[1:])
    assert torch.equal(alone.client_module("other", 0).gate.linear.weight, weights[1])


def test_every_part_has_random_numbers_of_its_own(whole, tmp_path):
    models = whole.run.models
    gates = [phase.gate.linear.weight for phase in whole.phases if phase.name in ("joint", "mixed")]
    own = models["own"]
    for one, other in (
        gates,
        (models["initial"].global_expert.classifier[0].weight, own.global_expert.classifier[0].weight),
        (gates[0], own.gate.linear.weight),
    ):
        assert not torch.equal(one, other)
    other_seed = fitted(tmp_path, [JOINT], seed=1)
    assert not torch.equal(other_seed.phases[0].gate.linear.weight, gates[0])
