"""What a configuration says of phases: their classes, their numbers, modules of their own, and what their seeds are."""

from pathlib import Path

import pytest
import torch
import yaml
from helpers import assert_same_bits
from helpers.configurations import REPOSITORY
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics.classification import MulticlassF1Score

from fedmoe_pl import PersonalizedMoE
from fedmoe_pl.aggregation import CoordinateMedian, DifferentialPrivacy, NearestNeighborMixing, UnderAttack
from fedmoe_pl.checkpoints.checkpoint import load_checkpoint
from fedmoe_pl.cli import FederationCLI, main
from fedmoe_pl.cli.command_line import configured, objects_of
from fedmoe_pl.models import SmallMLP


def of_class(name: str, **arguments) -> dict:
    return {"class_path": name, "init_args": arguments}


SETTINGS = {"logger": False, "enable_progress_bar": False}


def written(folder, phases: list[dict], seed: int = 0, **sections) -> str:
    """A file of a small run with these phases."""
    path = folder / "run.yaml"
    content = {
        "seed_everything": seed,
        "model": of_class("PersonalizedMoE", global_expert="SmallMLP"),
        "data": of_class("Digits", num_clients=4, partitioner=of_class("Dirichlet", alpha=0.5), batch_size=100),
        "trainer": {"accelerator": "cpu", "max_epochs": 1},
        "federation": {**SETTINGS, "default_root_dir": str(folder)},
        **sections,
    }
    content["federation"]["phases"] = phases
    path.write_text(yaml.safe_dump(content))
    return str(path)


def fitted(folder, phases: list[dict], **sections):
    return FederationCLI(["fit", "--config", written(folder, phases, **sections)]).trainer


FEDAVG = {"name": "FedAvg", "algorithm": of_class("FedAvg", shared="global_expert.*"), "gate": "GlobalOnly"}
MIXING = of_class("NearestNeighborMixing", aggregation="CoordinateMedian", num_byzantine=1)
ATTACKED = of_class("UnderAttack", attack="ALittleIsEnough", attackers=[0, 2], aggregation=MIXING)
PRIVATE = of_class("DifferentialPrivacy", noise_multiplier=0, max_norm=0.5, delta=1e-4)


@pytest.mark.slow
def test_phases_have_the_aggregations_and_server_optimizers_of_the_configuration(tmp_path):
    arguments = {
        "attacked": {"aggregation": ATTACKED},
        "private": {"aggregation": PRIVATE},
        "FedYogi": {"server_optimizer": of_class("FedYogi", lr=0.1, tau=0.01)},
        "FedAvgM": {"server_optimizer": of_class("torch.optim.SGD", lr=1.0, momentum=0.9)},
    }
    phases = [{**FEDAVG, "name": name, "start": "initial", **arguments[name]} for name in arguments]
    run = fitted(tmp_path, phases).run
    attacked, private = (phase.aggregation for phase in run.phases[:2])
    assert isinstance(attacked, UnderAttack) and attacked.attackers == [0, 2]
    assert isinstance(attacked.aggregation, NearestNeighborMixing)
    assert isinstance(attacked.aggregation.aggregation, CoordinateMedian)
    assert isinstance(private, DifferentialPrivacy)
    assert run.states["private"].epsilon == float("inf") and run.states["attacked"].epsilon != 0
    for name, keys in (("FedYogi", {"m", "v"}), ("FedAvgM", {"momentum_buffer"})):
        assert {key.split("/")[-1] for key in run.states[name].server_optimizer} == keys
    yogi = run.states["FedYogi"]
    for name in (name for name in yogi.server if name.endswith("weight")):
        m, v = (yogi.server_optimizer[f"optimizer/{name}/{key}"] for key in "mv")
        torch.testing.assert_close(yogi.server[name], yogi.initial[name] + 0.1 * m / (v.sqrt() + 0.01))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"aggregation": {**PRIVATE, "init_args": {**PRIVATE["init_args"], "delta": 2.0}}},
            "aggregation.init_args.delta is 2.0, but must be a finite number above 0 and",
        ),
        (
            {"aggregation": of_class("TrimmedMean", num_byzantine=30)},
            "clients_per_round is 1.0, but must be a cohort of at least 61",
        ),
        (
            {"server_optimizer": of_class("FedYogi", lr=-1.0)},
            "server_optimizer.init_args.lr is -1.0, but must be a finite number above 0.",
        ),
    ],
)
def test_an_argument_out_of_range_is_named_by_its_key(changed, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", written(tmp_path, [{**FEDAVG, "name": "other"}, {**FEDAVG, **changed}])])
    assert f"federation.phases.FedAvg.{sentence}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["my_losses.half", "HuberLoss"])
def test_a_loss_is_a_class_or_a_function_and_metrics_have_names(loss, tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text("def half(outputs, targets):\n    return (outputs - targets).abs().mean()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    f1 = {"class_path": "torchmetrics.F1Score", "init_args": {"task": "multiclass", "num_classes": 3}}
    changes = {
        "model": {"init_args": {"loss": loss}},
        "federation": {"metrics": {"rmse": "MeanSquaredError", "f1": f1}},
    }
    files = [str(REPOSITORY / "configs/diabetes.yaml"), yaml.safe_dump(changes, default_flow_style=True)]
    federation, model, _ = objects_of([word for file in files for word in ("--config", file)])
    assert isinstance(federation.metrics["f1"], MulticlassF1Score) and {*federation.metrics} == {"rmse", "f1"}
    assert model.criterion.__name__ == "half" if "half" in loss else isinstance(model.criterion, nn.HuberLoss)
    assert model.loss_of(torch.ones(2, 1), torch.zeros(2)).dim() == 0


def cohorts(*numbers) -> list[dict]:
    alone = {"algorithm": "Local", "gate": "LocalOnly", "train": {"max_epochs": 0}}
    return [{"name": f"P{index}", **alone, "clients_per_round": number} for index, number in enumerate(numbers)]


def numbers_of(*arguments: str) -> list[tuple[str, float | None]]:
    """The numbers of clients per round that are made of a command line, by type and value."""
    numbers = [phase.clients_per_round for phase in configured(arguments, False)[0].phases]
    return [(type(number).__name__, number) for number in numbers]


NUMBERS = [("int", 1), ("int", 2), ("float", 1.0), ("float", 0.5), ("NoneType", None)]


@pytest.mark.slow
def test_one_client_is_not_all_of_them_however_a_configuration_says_it(tmp_path):
    """Files over files, the command line, and the configuration in a run's folder."""
    (tmp_path / "other").mkdir()
    base = written(tmp_path, cohorts(3, 4))
    over = written(tmp_path / "other", cohorts(1, 2, 1.0, 0.5, None))
    assert numbers_of("--config", base, "--config", over) == NUMBERS
    phases = "[{name: A, algorithm: Local, clients_per_round: 1}, {name: B, algorithm: Local, clients_per_round: 1.0}]"
    added = "{name: C, algorithm: Local, clients_per_round: 2}"
    arguments = ["--federation.phases", phases, f"--federation.phases+={added}"]
    assert numbers_of("--config", base, *arguments) == [("int", 1), ("float", 1.0), ("int", 2)]
    main(["fit", "--config", over])
    (resolved,) = (tmp_path / "other").rglob("config.yaml")
    assert numbers_of("--config", str(resolved)) == NUMBERS
    main(["fit", "--config", str(resolved)])
    first, repeated = (path.read_bytes() for path in (tmp_path / "other").rglob("clients.csv"))
    assert first == repeated


def test_one_batch_is_not_all_batches(tmp_path):
    numbers = {"limit_train_batches": 1, "limit_val_batches": 1.0}
    federation = fitted(tmp_path, cohorts(1), trainer={"accelerator": "cpu", **numbers})
    (resolved,) = tmp_path.rglob("config.yaml")
    for trainer in (federation.trainer, yaml.safe_load(resolved.read_text())["trainer"]):
        assert [repr(trainer[name]) for name in numbers] == ["1", "1.0"]


class Net(LightningModule):
    def __init__(self, width: int = 3, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Wrapped(PersonalizedMoE):
    """Differs from others of its class in a nested class only."""

    def __init__(self, global_expert: SmallMLP):
        super().__init__(global_expert)
        self.save_hyperparameters(ignore="global_expert")


def files_of_models(folder, *models: dict) -> dict[str, Path]:
    """The checkpoint of each phase's model, by the phase's name; the first is also the run's."""
    phases = [{"name": str(index), "algorithm": "FedAvg", "model": model} for index, model in enumerate(models)]
    fitted(
        folder,
        phases,
        model=models[0],
        federation={**SETTINGS, "callbacks": ["ClientCheckpoint"], "default_root_dir": str(folder)},
    )
    return {path.parent.name: path for path in folder.rglob("all_clients.ckpt")}


@pytest.mark.slow
def test_each_module_has_its_own_hyperparameters_and_trains_with_its_own_rate(tmp_path):
    rates = {"0": (8, 0.0), "1": (4, 0.5), "2": (4, 0.25)}
    models = [of_class(f"{__name__}.Net", width=width, lr=lr) for width, lr in rates.values()]
    paths = files_of_models(tmp_path, *models)
    before = load_checkpoint(next(tmp_path.rglob("last.ckpt")))["models"]
    for phase, (width, lr) in rates.items():
        module = Net.load_from_checkpoint(paths[phase])
        assert (module.hparams.width, module.hparams.lr, module.net[1].out_features) == (width, lr, width)
        after = torch.load(paths[phase])["state_dict"]["net.2.bias"]
        assert torch.equal(after, before[phase]["net.2.bias"]) == (lr == 0), "a rate of 0 trains nothing"


@pytest.mark.slow
def test_modules_that_differ_in_a_nested_class_are_told_apart(tmp_path):
    experts = [of_class("SmallMLP", hidden_features=hidden) for hidden in (5, 6, 7)]
    models = [of_class(f"{__name__}.Wrapped", global_expert=expert) for expert in experts]
    paths = files_of_models(tmp_path, *models)
    for index, expert in enumerate(experts):
        made = torch.load(paths[str(index)], weights_only=False)["hyper_parameters"]["global_expert"]
        assert made["init_args"]["hidden_features"] == expert["init_args"]["hidden_features"]


GATE = of_class("LinearGate", in_features=64)  # draws its parameters when it is made
TUNED = {"name": "tuned", "algorithm": "FineTuning", "gate": "LocalOnly", "start": "FedAvg"}
JOINT = {"name": "joint", "algorithm": "Local", "gate": GATE, "start": "initial"}
MIXED = {"name": "mixed", "algorithm": of_class("Local", trainable="local_expert.*"), "gate": GATE, "start": "tuned"}
OWN = {"name": "own", "algorithm": "Local", "model": of_class("PersonalizedMoE", global_expert="SmallMLP", gate=GATE)}
ALL = [FEDAVG, TUNED, JOINT, MIXED, OWN]
OTHER = {**JOINT, "name": "other"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["fedmoe"])
        return fitted(tmp_path_factory.mktemp("whole"), ALL)


@pytest.mark.few("one alone")
@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([FEDAVG, OTHER, TUNED, {**OWN, "name": "second model"}, JOINT, MIXED, OWN], id="added between"),
        pytest.param([OWN, FEDAVG, TUNED, MIXED], id="in another order without one"),
        pytest.param([JOINT], id="one alone"),
    ],
)
def test_adding_removing_and_reordering_phases_leaves_the_others_their_bits(whole, phases, tmp_path):
    run = fitted(tmp_path, phases)
    for name in {phase["name"] for phase in phases} & {phase["name"] for phase in ALL}:
        assert run.results[name].spread("global_test") == whole.results[name].spread("global_test")
        for client in range(4):
            now, before = (dict(each.client_module(name, client).state_dict()) for each in (run, whole))
            assert_same_bits(now, before)


@pytest.mark.slow
def test_gates_that_take_their_width_from_a_sample_have_random_numbers_of_their_own_too(tmp_path):
    phases = [{**JOINT, "name": name, "gate": "LinearGate", "train": {"max_epochs": 0}} for name in ("one", "other")]
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
