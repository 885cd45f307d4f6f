"""A phase's aggregation from a configuration, by class names."""

from pathlib import Path

import pytest
import yaml
from helpers.configurations import QUICKSTART, shortened

from fedmoe_pl.aggregation import CoordinateMedian, DifferentialPrivacy, NearestNeighborMixing, UnderAttack
from fedmoe_pl.cli import FederationCLI, main

MIXING = {"class_path": "NearestNeighborMixing", "init_args": {"aggregation": "CoordinateMedian", "num_byzantine": 1}}
ATTACKED = {
    "class_path": "UnderAttack",
    "init_args": {"attack": "ALittleIsEnough", "attackers": [0, 2], "aggregation": MIXING},
}
PRIVATE = {"class_path": "DifferentialPrivacy", "init_args": {"noise_multiplier": 0, "max_norm": 0.5, "delta": 1e-4}}


def configuration(folder, **aggregations) -> str:
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    algorithm = {"class_path": "FedAvg", "init_args": {"shared": "global_expert.*"}}
    config["federation"]["phases"] = [
        {"name": name, "algorithm": algorithm, "gate": "GlobalOnly", "start": "initial", "aggregation": aggregation}
        for name, aggregation in aggregations.items()
    ]
    config = shortened(config, folder)
    config["federation"]["logger"] = False
    (folder / "it.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "it.yaml")


def test_the_phases_of_a_configuration_have_their_aggregations(tmp_path):
    run = FederationCLI(["fit", "--config", configuration(tmp_path, attacked=ATTACKED, private=PRIVATE)]).trainer.run
    attacked, private = (phase.aggregation for phase in run.phases)
    assert isinstance(attacked, UnderAttack) and attacked.attackers == [0, 2]
    assert isinstance(attacked.aggregation, NearestNeighborMixing)
    assert isinstance(attacked.aggregation.aggregation, CoordinateMedian)
    assert isinstance(private, DifferentialPrivacy)
    assert run.states["private"].epsilon == float("inf") and run.states["attacked"].epsilon != 0


WRONG = {
    "federation.phases.it.aggregation.init_args.delta is 2.0, but must be a finite number above 0 and": {
        **PRIVATE,
        "init_args": {**PRIVATE["init_args"], "delta": 2.0},
    },
    "federation.phases.it.clients_per_round is 1.0, but must be a cohort of at least 61": {
        "class_path": "TrimmedMean",
        "init_args": {"num_byzantine": 30},
    },
}


@pytest.mark.parametrize("sentence", WRONG)
def test_an_argument_out_of_range_is_named_by_its_key(sentence, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", configuration(tmp_path, it=WRONG[sentence])])
    assert sentence in capsys.readouterr().err
