"""What travels to workers is complete, and small."""

from pathlib import Path

import torch
from helpers.runs import assert_same

from fedmoe_pl.backends.workers.pickling import dumps, loads
from fedmoe_pl.cli import FederationCLI

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
