"""What travels to workers is complete, and small."""

from pathlib import Path

import pytest
import torch
from helpers import blobs, mixture
from helpers.backends import begin, local_training, train_clients
from helpers.runs import assert_same

from fedmoe_pl.algorithms import FineTuning
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.backends.workers.pickling import dumps, loads
from fedmoe_pl.cli import FederationCLI
from fedmoe_pl.models import ConstantGate

REPOSITORY = Path(__file__).parents[2]


def test_tensors_travel_without_what_they_are_views_of():
    whole = torch.arange(100_000.0)
    tree = {"part": whole[10:20], "half": whole[:4].bfloat16(), "empty": whole[:0], "number": torch.tensor(3)}
    pickled = dumps(tree)
    assert len(pickled) < 3000
    assert_same(loads(pickled), tree)
    loads(pickled)["part"].add_(1)  # it is writable


def test_a_model_of_the_command_line_travels_without_its_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])
    config = str(REPOSITORY / "configs/quickstart.yaml")
    cli = FederationCLI(["partition", "--config", config, "--federation.default_root_dir", str(tmp_path)])
    pickled = dumps(cli.model, cli.datamodule)
    assert len(pickled) < 100_000
    optimizer = loads(pickled).optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert optimizer.defaults["momentum"] == 0.5


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend(2)])
def test_a_plan_travels_without_the_features_that_it_has_computed(backend):
    algorithm = FineTuning("local_expert.classifier.*")
    training = local_training(mixture(ConstantGate(0)), algorithm, blobs((500, 400)), max_epochs=1, rounds=2)
    plan = begin(backend, training)
    before = len(dumps(plan, training.datamodule))
    expected, _ = train_clients(plan)
    after = dumps(plan, training.datamodule)
    assert len(after) == before
    update, _ = train_clients(loads(after, training.datamodule))
    assert_same(update, expected)
