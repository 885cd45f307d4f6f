"""What the README shows is run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_every_command_runs_in_the_order_of_the_page(tmp_path):
    """All of them but the installations and TensorBoard's server."""
    commands = [line.split(" && ")[-1] for block in blocks("bash") for line in block.splitlines()]
    commands = [command.split("  #")[0].strip() for command in commands if command.startswith("fedmoe ")]
    assert len(commands) == 7
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    table = None
    for command in commands:
        program = [sys.executable, str(REPOSITORY / "cli.py"), *command.split()[1:]]
        result = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        table = table or result.stdout
    shown = blocks("text")[0].strip().splitlines()
    assert [line.split("  ")[0] for line in table.strip().splitlines()[: len(shown)]] == [
        line.split("  ")[0] for line in shown
    ]


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks("python"):
        exec(block, names)
    assert names["logits"].shape == (2, 10)
    assert names["gate_weights"].shape == (2, 2)
    assert "Spread(mean=" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_is_in_the_table(path):
    assert f"`configs/{path.name}`" in README
