"""A list in an overlay replaces the whole list, also one of the same length."""

import pytest
import yaml
from helpers.configurations import REPOSITORY
from helpers.grids import TINY

from fedmoe_pl.cli.commands import configured

FEDAVG = {"class_path": "FedAvg", "init_args": {"shared": "global_expert.*", "weighting": "uniform"}}


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])


def test_a_phase_does_not_inherit_from_the_one_in_its_place(tmp_path):
    before = {"name": "A", "algorithm": FEDAVG, "gate": "GlobalOnly", "rounds": 7, "select": {"monitor": "global_test"}}
    after = {"name": "B", "algorithm": {"class_path": "FedAvg", "init_args": {"trainable": "global_expert.*"}}}
    arguments = []
    for phase in (before, after):
        config = TINY if phase is before else {}
        path = tmp_path / f"{phase['name']}.yaml"
        path.write_text(yaml.safe_dump({**config, "federation": {"phases": [phase]}}))
        arguments += ["--config", str(path)]
    (phase,) = configured(arguments, False).hparams["federation"]["phases"]
    assert (phase["name"], phase["rounds"], phase["select"], phase["gate"]) == ("B", 1, None, None)
    expected = {"shared": "*", "trainable": "global_expert.*", "weighting": "samples"}
    assert phase["algorithm"]["init_args"] == expected


def test_in_the_homogeneous_setting_all_clients_have_one_architecture():
    files = [f"{REPOSITORY}/configs/{name}.yaml" for name in ("pfedmoe_cifar10", "pfedmoe_homogeneous")]
    federation = configured([word for path in files for word in ("--config", path)], False)
    models = [phase["model"]["init_args"] for phase in federation.hparams["federation"]["phases"] if phase["model"]]
    assert len(models) >= 5
    for model in models:
        assert model["global_expert"]["init_args"]["variant"] == 1 and model["local_expert"] is None
