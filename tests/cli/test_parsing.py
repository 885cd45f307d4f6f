"""Files over files, phases by their names, and files that cannot be read."""

import json
from pathlib import Path

import pytest
import yaml
from helpers.configurations import QUICKSTART
from helpers.grids import TINY
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.cli import main
from fedmoe_pl.cli.command_line import configured


def phases_of(*arguments: str) -> dict[str, dict]:
    """The phases of ``fit`` with these arguments, by name."""
    return {phase["name"]: phase for phase in configured(arguments, False)[0].hparams["federation"]["phases"]}


def test_arguments_change_the_phase_that_they_name_and_no_other():
    before = phases_of("--config", QUICKSTART)
    after = phases_of(
        *("--config", QUICKSTART, "--federation.phases.FedAvg.rounds", "5", "--trainer.max_epochs=3"),
        "--federation.phases.FedAvg.algorithm.init_args.weighting=uniform",
        "--federation.phases.Local.evaluate=false",
        *("--federation.phases.label prior.algorithm.init_args.tau", "0.5"),
        *("--federation.phases.PFL-MF.train.callbacks+=Timer", "--federation.phases.PFL-MFE.train.max_epochs=9"),
    )
    before["FedAvg"]["rounds"] = 5
    before["FedAvg"]["algorithm"]["init_args"]["weighting"] = "uniform"
    before["Local"]["evaluate"] = False
    before["label prior"]["algorithm"]["init_args"]["tau"] = 0.5
    before["PFL-MFE"]["train"]["max_epochs"] = 9
    assert after["PFL-MF"]["train"].pop("callbacks")[0]["class_path"].endswith("Timer")
    assert before["PFL-MF"]["train"].pop("callbacks") is None
    assert after == before


@pytest.mark.slow
def test_another_class_keeps_the_arguments_that_fit():
    of_phase = "--federation.phases.FedAvg.algorithm"
    prox = phases_of("--config", QUICKSTART, of_phase, "FedProx", f"{of_phase}.init_args.mu=0.5")["FedAvg"]["algorithm"]
    assert prox["class_path"] == "fedmoe_pl.algorithms.FedProx"
    assert (prox["init_args"]["shared"], prox["init_args"]["mu"]) == ("global_expert.*", 0.5)


@pytest.mark.slow
def test_phases_are_found_in_files_of_files_and_in_what_was_appended(tmp_path, monkeypatch):
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    config["federation"]["phases"][1]["name"] = "a.b=0.5 rounds"
    for phase in config["federation"]["phases"]:
        phase["start"] = "initial"
    (tmp_path / "phases.yaml").write_text(yaml.safe_dump(config["federation"]["phases"]))
    config["federation"]["phases"] = "phases.yaml"
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir("/")
    phases = phases_of(
        *("--config", str(tmp_path / "own.yaml"), "--federation.phases+={name: new, algorithm: FedAvg}"),
        *("--federation.phases.a.b=0.5 rounds.rounds=3", "--federation.phases.new.rounds=4"),
    )
    assert (phases["a.b=0.5 rounds"]["rounds"], phases["new"]["rounds"]) == (3, 4)
    assert len(phases) == 8


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (["--config", QUICKSTART, "--federation.phases.FedAv.rounds", "7"], "NAME.rounds; did you mean FedAvg?"),
        (["--federation.phases.FedAvg.rounds=3", "--config", QUICKSTART], "such as federation.phases.NAME.rounds."),
    ],
)
def test_an_argument_of_an_unknown_phase_is_refused(arguments, end):
    with pytest.raises(MisconfigurationException, match=r"FedAvg?\.rounds must name a phase") as error:
        configured(arguments, False)
    assert str(error.value).endswith(end)


def test_a_null_byte_in_what_looks_like_a_path_is_refused(tmp_path):
    (tmp_path / "wrong.yaml").write_text(r'federation: {backend: "a/../\0b"}')
    with pytest.raises(MisconfigurationException, match=r"^federation\.backend is "):
        configured(["--config", QUICKSTART, "--config", str(tmp_path / "wrong.yaml")], False)


FEDAVG = {"class_path": "FedAvg", "init_args": {"shared": "global_expert.*", "weighting": "uniform"}}


@pytest.mark.slow
def test_a_phase_does_not_inherit_from_the_one_in_its_place(tmp_path):
    before = {"name": "A", "algorithm": FEDAVG, "gate": "GlobalOnly", "rounds": 7}
    after = {"name": "B", "algorithm": {"class_path": "FedAvg", "init_args": {"trainable": "global_expert.*"}}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({**TINY, "federation": {"phases": [before]}}))
    (tmp_path / "over.yaml").write_text(yaml.safe_dump({"federation": {"phases": [after]}}))
    base = ["--config", str(tmp_path / "base.yaml")]
    for more in (["--config", str(tmp_path / "over.yaml")], ["--federation.phases", yaml.safe_dump([after])]):
        (phase,) = phases_of(*base, *more).values()
        assert (phase["name"], phase["rounds"], phase["gate"]) == ("B", 1, None)
        expected = {"shared": "*", "trainable": "global_expert.*", "weighting": "samples"}
        assert phase["algorithm"]["init_args"] == expected


@pytest.mark.slow
def test_a_list_in_an_object_replaces_the_whole_list():
    """Also one of the same length."""
    crop = {"class_path": "RandomCrop", "init_args": {"padding": 7}}
    files = [json.dumps({"data": {"init_args": {"augmentation": [each]}}}) for each in (crop, "RandomCrop")]
    words = ["--config", QUICKSTART, *(word for text in files for word in ("--config", text))]
    data = configured(words, False)[0].hparams
    assert data["data"]["init_args"]["augmentation"][0]["init_args"]["padding"] != 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--model.optimizer=torch.optim.Adam", "--model.optimizer.lr=1e-3"],
        ["--config", "{trainer: {max_epochs: 3}}", "--data.partitioner=Shards"],
        ["--trainer.callbacks+=Timer", "--trainer.callbacks.verbose=false"],
        ["--config", "{data: {init_args: {num_clients: 3}}}", "--config", "{data: {class_path: MNIST}}"],
    ],
)
def test_what_lightning_takes_on_a_command_line_is_not_refused(arguments):
    configured(["--config", QUICKSTART, *arguments], False)


def test_an_option_without_a_value_does_not_take_the_next_option_for_one(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", QUICKSTART, "--print_config", "--trainer.max_epochs", "3"])
    assert not exit.value.code
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_epochs"] == 3


UNREADABLE = {
    "a: 1\nb:\n  c: 2\n  c: 3": "line 4 has the key 'c' again",
    "a: [0\nb: 1": "line 2, column 2",
    "a:\n " + "- " * 2000: "maximum recursion depth exceeded",
    "a: !!python/object:os.system {}": "could not determine a constructor",
    "a:\n\tb: 1": "line 2, column 1: found character '\\t' that cannot start any token, a tab; YAML is indented with",
    "a: 1\nb: 010": "line 2 has 010, which YAML takes for 8; write 10 or '010'",
    "a: [010]": "line 1 has 010",
    "": "it has no keys",
    "5: 3": "its key 5 must be a text",
    "trainer: {yes: 2}": "its key trainer.True must be a text",
    b"\xff\xfe\x80": "'utf-8' codec can't decode",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_file_that_cannot_be_read_is_named_with_the_line(text, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(MisconfigurationException) as error:
        configured(["--config", str(path)], False)
    assert str(error.value).startswith(f"config is '{path}', but it cannot be read: ")
    assert UNREADABLE[text] in str(error.value) and "\n" not in str(error.value)


def test_toml_is_refused_by_its_name(tmp_path):
    (tmp_path / "run.toml").write_text('[federation]\nname = "x"')
    with pytest.raises(MisconfigurationException, match=r"run.toml', but it cannot be read: it must be YAML, or JSON."):
        configured(["--config", str(tmp_path / "run.toml")], False)


def test_missing_files_and_those_that_name_others_are_refused_in_a_sentence(tmp_path):
    (tmp_path / "part.yaml").write_text("{class_path: SmallMLP, init_args: {}, init_args: {}}")
    (tmp_path / "base.yaml").write_text("model: part.yaml")
    (tmp_path / "cycle.yaml").write_text("model: &a {init_args: *a}")
    for name, sentence in (("none", "No such file"), ("base", "the key 'init_args'"), ("cycle", "contains itself")):
        with pytest.raises(MisconfigurationException, match=sentence):
            configured(["--config", str(tmp_path / f"{name}.yaml")], False)
