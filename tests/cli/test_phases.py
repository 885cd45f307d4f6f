"""Arguments of single phases on the command line: by the phase's name, and in no other way."""

from pathlib import Path

import pytest
import yaml
from helpers.configurations import QUICKSTART
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.cli import main
from fedmoe_pl.cli.phases import with_phases


@pytest.fixture
def printed(capsys):
    """The phases that ``--print_config`` prints, by name."""

    def of(*arguments):
        with pytest.raises(SystemExit) as exit:
            main(["fit", *arguments, "--print_config"])
        out, err = capsys.readouterr()
        assert not exit.value.code, err
        return {phase["name"]: phase for phase in yaml.safe_load(out)["federation"]["phases"]}

    return of


def test_arguments_change_the_phase_that_they_name_and_no_other(printed):
    before = printed("--config", QUICKSTART)
    after = printed(
        *("--config", QUICKSTART, "--federation.phases.FedAvg.rounds", "5", "--trainer.max_epochs=3"),
        *(
            "--federation.phases.FedAvg.algorithm.init_args.weighting=uniform",
            "--federation.phases.Local.evaluate=false",
        ),
        *("--federation.phases.label prior.algorithm.init_args.tau", "0.5"),
        *("--federation.phases.PFL-MF.callbacks+=Timer", "--federation.phases.PFL-MFE.max_epochs=9"),
    )
    before["FedAvg"]["rounds"] = 5
    before["FedAvg"]["algorithm"]["init_args"]["weighting"] = "uniform"
    before["Local"]["evaluate"] = False
    before["label prior"]["algorithm"]["init_args"]["tau"] = 0.5
    before["PFL-MFE"]["max_epochs"] = 9
    assert after["PFL-MF"].pop("callbacks")[0]["class_path"].endswith("Timer")
    assert before["PFL-MF"].pop("callbacks") is None
    assert after == before


def test_another_class_keeps_the_arguments_that_fit(printed):
    of_phase = "--federation.phases.FedAvg.algorithm"
    prox = printed("--config", QUICKSTART, of_phase, "FedProx", f"{of_phase}.init_args.mu=0.5")["FedAvg"]["algorithm"]
    assert prox["class_path"] == "fedmoe_pl.algorithms.FedProx"
    assert prox["init_args"]["shared"] == "global_expert.*"
    assert prox["init_args"]["mu"] == 0.5
    alone = printed("--config", QUICKSTART, of_phase, "Local")["FedAvg"]["algorithm"]
    assert alone["class_path"] == "fedmoe_pl.algorithms.Local"


def test_phases_are_found_in_files_of_files_and_in_what_was_appended(printed, tmp_path, monkeypatch):
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    config["federation"]["phases"][1]["name"] = "a.b=0.5 rounds"
    (tmp_path / "phases.yaml").write_text(yaml.safe_dump(config["federation"]["phases"]))
    config["federation"]["phases"] = "phases.yaml"
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir("/")
    phases = printed(
        *("--config", str(tmp_path / "own.yaml"), "--federation.phases+={name: new, algorithm: FedAvg}"),
        *("--federation.phases.a.b=0.5 rounds.loop=3", "--federation.phases.new.rounds=4"),
    )
    assert (phases["a.b=0.5 rounds"]["rounds"], phases["new"]["rounds"]) == (3, 4)
    assert len(phases) == 8


def test_texts_stay_texts():
    phase = '{federation: {phases: [{name: "1e-3", algorithm: FedAvg, gate_lr: .inf, start: "no"}]}}'
    changed = with_phases(["fit", "--config", phase, "--federation.phases.1e-3.rounds=2"])
    (read,) = yaml.safe_load(changed[-1])
    assert read == {"name": "1e-3", "algorithm": "FedAvg", "gate_lr": float("inf"), "start": "no", "rounds": 2}


REFUSED = {
    "federation.phases.max_epochs names no phase and one of its arguments, such as federation.phases.NAME.rounds; the "
    "phases are Local, FedAvg, ": ["--config", QUICKSTART, "--federation.phases.max_epochs=7"],
    "federation.phases.FedAv.rounds names no phase and one of its arguments, such as federation.phases.NAME.rounds; "
    "did you mean FedAvg?": ["--config", QUICKSTART, "--federation.phases.FedAv.rounds", "7"],
    "federation.phases.FedAvg.rounds is an argument of a phase, but no --config before it has any.": (
        ["--federation.phases.FedAvg.rounds=3", "--config", QUICKSTART]
    ),
    "federation.phases.FedAvg needs one of the phase's arguments, such as federation.phases.FedAvg.rounds.": (
        ["--config", QUICKSTART, "--federation.phases.FedAvg", "null"]
    ),
    "federation.phases.FedAvg.rounds has no value.": ["--config", QUICKSTART, "--federation.phases.FedAvg.rounds"],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_names_no_phase_is_refused(sentence):
    with pytest.raises(MisconfigurationException) as error:
        with_phases(["fit", *REFUSED[sentence]])
    assert str(error.value).startswith(sentence)
