"""What README, documentation and examples show is run as it stands; the tutorials when the pages are built."""

import re
import runpy
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from helpers.configurations import QUICKSTART, REPOSITORY, shortened
from helpers.reports import leave_pictures_blank

import fedmoe_pl
from fedmoe_pl import Evaluate, Phase, Select, Train, backends, models
from fedmoe_pl.backends import Backend
from fedmoe_pl.cli import main
from fedmoe_pl.data import Digits

README = (REPOSITORY / "README.md").read_text()


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text()


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def few_digits(monkeypatch):
    """A sixth of the digits and blank pictures: the commands are the page's, and a run takes less time."""
    leave_pictures_blank(monkeypatch)
    load = Digits.load

    def load_some(self):
        arrays = load(self)
        some = {name: getattr(arrays, name)[::6] for name in ("x_train", "y_train", "x_test", "y_test")}
        return replace(arrays, **some)

    monkeypatch.setattr(Digits, "load", load_some)


def test_every_command_runs_in_the_order_of_the_pages(tmp_path, monkeypatch, capsys, few_digits):
    """All but installations, TensorBoard's server, grids, searches, deployment; in one process, to spare imports."""
    text = README.split("## In Python")[0] + page("start.md") + page("guide/command_line.md")
    commands = [line.split(" && ")[-1] for block in blocks("bash", text) for line in block.splitlines()]
    commands = [
        command.split("  #")[0].strip()
        for command in commands
        if re.match("fedmoe (?!benchmark|tune|serve|join|provision)", command)
    ]
    assert len(commands) == 10
    (tmp_path / "configs").mkdir()
    short = re.sub(r"(rounds|max_epochs): \d+", r"\1: 1", Path(QUICKSTART).read_text())
    short = short.replace("num_clients: 20", "num_clients: 4")
    (tmp_path / "configs/quickstart.yaml").write_text(short)
    monkeypatch.chdir(tmp_path)
    table = None
    for command in commands:
        monkeypatch.setattr(sys, "argv", command.split())
        try:
            main()
        except SystemExit as exit:
            assert exit.code == 0, f"{command}: {capsys.readouterr().err}"
        table = table or capsys.readouterr().out
    shown = blocks("text", text)[0].strip().splitlines()
    assert [line.split("  ")[0] for line in table.strip().splitlines()[: len(shown)]] == [
        line.split("  ")[0] for line in shown
    ]


def test_the_python_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks("python", README + page("guide/python.md") + page("guide/algorithms.md")):
        exec(block, names)
    assert names["logits"].shape == (2, 10)
    assert names["gate_weights"].shape == (2, 2)
    assert "Spread(mean=" in capsys.readouterr().out
    names["test_half_a_step_per_round"](tmp_path)


@pytest.mark.slow
def test_the_algorithm_runs_from_yaml_by_its_import_path(tmp_path, monkeypatch, capsys):
    (algorithm,) = (block for block in blocks("python", page("guide/algorithms.md")) if "class ServerStep" in block)
    (phase,) = (block for block in blocks("yaml", page("guide/algorithms.md")) if "ServerStep" in block)
    (tmp_path / "my_algorithms.py").write_text(algorithm)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command line adds the current folder
    monkeypatch.setattr(sys, "argv", ["fedmoe"])
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    config["federation"] |= {"phases": yaml.safe_load(phase), "logger": False}
    (tmp_path / "half.yaml").write_text(yaml.safe_dump(shortened(config, tmp_path)))
    main(["fit", "--config", str(tmp_path / "half.yaml")])
    assert "half: global expert, after aggregation, last round (round 1)" in capsys.readouterr().out


def test_phases_on_the_pages_have_only_arguments_that_there_are():
    known = {kind: {field.name for field in fields(kind)} for kind in (Phase, Train, Select, Evaluate)}
    kinds = {"train": Train, "select": Select, "evaluate": Evaluate}
    texts = [path.read_text() for path in (REPOSITORY / "docs").rglob("*.md")]
    phases = [phase for text in texts for block in blocks("yaml", text) for phase in phases_in(yaml.safe_load(block))]
    assert len(phases) > 10
    for phase in phases:
        inner = [(kinds[name], each) for name, each in phase.items() if name in kinds and isinstance(each, dict)]
        unknown = {name for kind, each in [(Phase, phase), *inner] for name in {*each} - known[kind]}
        assert not unknown, phase["name"]


def phases_in(node) -> list[dict]:
    """What has an algorithm in a part of a configuration."""
    if not isinstance(node, dict | list):
        return []
    inner = node.values() if isinstance(node, dict) else node
    return [each for value in inner for each in phases_in(value)] + [node] * ("algorithm" in node)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_is_in_the_table(path):
    assert f"`configs/{path.name}`" in page("guide/configurations.md")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_every_link_leads_to_a_file(name):
    """Those of the other pages are checked when the documentation is built."""
    links = re.findall(r"\]\(([^)#]+)\)", (REPOSITORY / name).read_text())
    assert links
    assert [link for link in links if "://" not in link and not (REPOSITORY / link).is_file()] == []


def test_every_public_class_is_in_the_reference():
    """Pages of folders list all their classes by themselves; these two pages name them."""
    named = page("reference/federation.md") + page("reference/backends.md")
    values = [getattr(backends, name) for name in backends.__all__]
    public = [value for value in values if isinstance(value, type) and issubclass(value, Backend)]
    values = [getattr(fedmoe_pl, name) for name in fedmoe_pl.__all__ if name not in models.__all__]
    public += [value for value in values if isinstance(value, type)]
    assert [value.__name__ for value in public if f".{value.__name__}\n" not in named] == []


def test_the_citation_has_the_version():
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == fedmoe_pl.__version__


SCRIPTS = sorted((REPOSITORY / "examples").glob("*.py"))
LAST_LINES = {
    "own_algorithm.py": "       tensorboard --logdir runs/own_algorithm/version_0",
    "own_model_and_data.py": "classes of three tumours: [0, 0, 0]",
    "plain_trainer.py": "weights of global and local expert",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_runs(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith(LAST_LINES[script.name])


def test_the_documentation_shows_every_script():
    assert SCRIPTS and all(f"../../examples/{script.name}\n" in page("tutorials/examples.md") for script in SCRIPTS)
