"""``clients_per_round: 1`` is one client and ``1.0`` all of them, however a configuration gives it; so with batches."""

from pathlib import Path

import pytest
import yaml
from helpers.configurations import QUICKSTART, shortened

from fedmoe_pl import Federation
from fedmoe_pl.cli import FederationCLI, main


def phases_of(*numbers) -> list[dict]:
    return [
        {"name": f"P{index}", "algorithm": "Local", "gate": "LocalOnly", "max_epochs": 0, "clients_per_round": number}
        for index, number in enumerate(numbers)
    ]


@pytest.fixture
def parsed(tmp_path, monkeypatch):
    """What the phases of the run have, by type and value, after files and arguments are parsed and phases are made."""

    def parse(*overlays, arguments=()) -> list[tuple[str, float | None]]:
        base = shortened(yaml.safe_load(Path(QUICKSTART).read_text()), tmp_path)
        options = []
        for index, content in enumerate([base, *overlays]):
            file = content
            if not isinstance(content, Path):
                file = tmp_path / f"{index}.yaml"
                file.write_text(yaml.safe_dump(content))
            options += ["--config", str(file)]
        with monkeypatch.context() as no_training:
            no_training.setattr(Federation, "fit", lambda self, model, datamodule, ckpt_path=None: None)
            phases = FederationCLI(["fit", *options, *arguments]).trainer.phases
        return [(type(phase.clients_per_round).__name__, phase.clients_per_round) for phase in phases]

    return parse


NUMBERS = [("int", 1), ("int", 2), ("float", 1.0), ("float", 0.5), ("NoneType", None)]


def test_a_list_of_phases_in_an_overlay(parsed):
    assert parsed({"federation": {"phases": phases_of(1, 2, 1.0, 0.5, None)}}) == NUMBERS
    few, other = ({"federation": {"phases": phases_of(*numbers)}} for numbers in ((3, 4), (1, 2, 1.0, 0.5, None)))
    assert parsed(few, other) == NUMBERS


def test_phases_that_the_command_line_gives_or_adds(parsed):
    phases = "[{name: A, algorithm: Local, clients_per_round: 1}, {name: B, algorithm: Local, clients_per_round: 1.0}]"
    assert parsed(arguments=["--federation.phases", phases]) == [("int", 1), ("float", 1.0)]
    added = ["--federation.phases+={name: A, algorithm: Local, clients_per_round: 2}"]
    added += ["--federation.phases+={name: B, algorithm: Local, clients_per_round: 1.0}"]
    overlay = {"federation": {"phases": phases_of(1)}}
    assert parsed(overlay, arguments=added) == [("int", 1), ("int", 2), ("float", 1.0)]


def test_the_configuration_in_a_run_s_folder_repeats_the_run(parsed, tmp_path):
    config = shortened(yaml.safe_load(Path(QUICKSTART).read_text()), tmp_path)
    config["federation"] |= {"phases": phases_of(1, 2, 1.0, 0.5, None), "logger": False}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(tmp_path / "run.yaml")])
    (resolved,) = tmp_path.rglob("config.yaml")
    numbers = [phase["clients_per_round"] for phase in yaml.safe_load(resolved.read_text())["federation"]["phases"]]
    assert [(type(number).__name__, number) for number in numbers] == NUMBERS
    assert parsed(resolved) == NUMBERS


def test_one_batch_is_not_all_batches(tmp_path):
    numbers = {"limit_train_batches": 1, "limit_val_batches": 1.0}
    config = shortened(yaml.safe_load(Path(QUICKSTART).read_text()), tmp_path)
    config["trainer"] |= numbers
    config["federation"] |= {"phases": phases_of(1), "logger": False}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    federation = FederationCLI(["fit", "--config", str(tmp_path / "run.yaml")]).trainer
    for trainer in (federation.trainer, yaml.safe_load(next(tmp_path.rglob("config.yaml")).read_text())["trainer"]):
        assert [repr(trainer[name]) for name in numbers] == ["1", "1.0"]
