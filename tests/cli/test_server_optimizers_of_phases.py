"""A phase's server optimizer from a configuration: by its class name, or any of PyTorch's."""

from pathlib import Path

import pytest
import torch
import yaml
from helpers.configurations import QUICKSTART, shortened

from fedmoe_pl.cli import FederationCLI, main

SERVERS = {
    "FedYogi": {"class_path": "FedYogi", "init_args": {"lr": 0.1, "tau": 0.01}},
    "FedAvgM": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0, "momentum": 0.9}},
}


def configuration(folder, **servers) -> str:
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    algorithm = {"class_path": "FedAvg", "init_args": {"shared": "global_expert.*"}}
    config["federation"]["phases"] = [
        {"name": name, "algorithm": algorithm, "gate": "GlobalOnly", "server_optimizer": servers[name]}
        for name in servers
    ]
    config = shortened(config, folder)
    config["federation"]["logger"] = False
    (folder / "it.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "it.yaml")


def test_the_phases_of_a_configuration_have_their_optimizers(tmp_path):
    states = FederationCLI(["fit", "--config", configuration(tmp_path, **SERVERS)]).trainer.run.states
    for name, keys in (("FedYogi", {"m", "v"}), ("FedAvgM", {"momentum_buffer"})):
        assert {key.split("/")[-1] for key in states[name].server_optimizer} == keys
    yogi = states["FedYogi"]
    for name in (name for name in yogi.server if name.endswith("weight")):
        m, v = (yogi.server_optimizer[f"optimizer/{name}/{key}"] for key in "mv")
        torch.testing.assert_close(yogi.server[name], yogi.initial[name] + 0.1 * m / (v.sqrt() + 0.01))


def test_an_argument_out_of_range_is_named_by_its_key(tmp_path, capsys):
    wrong = {"class_path": "FedYogi", "init_args": {"lr": -1.0}}
    with pytest.raises(SystemExit):
        main(["fit", "--config", configuration(tmp_path, FedAvgM=SERVERS["FedAvgM"], FedYogi=wrong)])
    sentence = "federation.phases.FedYogi.server_optimizer.init_args.lr is -1.0, but must be a finite number above 0."
    assert sentence in capsys.readouterr().err
