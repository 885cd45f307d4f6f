"""Every script in ``examples`` runs as it stands, and the documentation shows it."""

import runpy

import pytest
from helpers.configurations import REPOSITORY

SCRIPTS = sorted((REPOSITORY / "examples").glob("*.py"))
LAST_LINES = {
    "own_algorithm.py": "       tensorboard --logdir runs/own_algorithm/version_0",
    "own_model_and_data.py": "classes of three tumours: [0, 0, 0]",
    "plain_trainer.py": "weights of global and local expert",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
@pytest.mark.few(1)
def test_a_script_runs(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith(LAST_LINES[script.name])


def test_the_documentation_shows_every_script():
    page = (REPOSITORY / "docs" / "tutorials" / "examples.md").read_text()
    assert SCRIPTS and all(f"../../examples/{script.name}\n" in page for script in SCRIPTS)
