"""Type hints: the package, and a user's scripts with what the README and the documentation show, pass pyright."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.configurations import REPOSITORY

# without pages about libraries whose type hints say less than what they return
TUTORIALS = {*(REPOSITORY / "docs/tutorials").glob("*.md")} - {
    REPOSITORY / f"docs/tutorials/{name}.md" for name in ("experiment_trackers", "hugging_face_datasets")
}
PAGES = [REPOSITORY / "README.md", REPOSITORY / "docs/guide/python.md", *sorted(TUTORIALS)]
CODE = re.compile(r"^```(?:python|\{code-cell\}[^\n]*)\n((?::[^\n]*\n)*)(.*?)^```", re.DOTALL | re.MULTILINE)
MODULE = """
from fedmoe_pl import PersonalizedMoE

scores, weights = federation.client_module("PFL-MFE", client=0).mix(torch.zeros(2, 1, 8, 8))
annotated: PersonalizedMoE = federation.client_module("PFL-MFE", client=0)
width: int = annotated.mix(torch.zeros(2, 1, 8, 8))[1].shape[1]
"""
# of a run with a mixture, and of one with a module of the user's own
SCRIPT = """
import torch
from lightning.pytorch import LightningModule

from fedmoe_pl import Federation, PersonalizedMoE


class Classifier(LightningModule):
    width: int = 3


def use(federation: Federation) -> None:
    module = federation.client_module("FedAvg", client=0)
    scores, weights = module.mix(torch.zeros(2, 5))
    labels = module(torch.zeros(2, 5)).argmax(1)
    mixture: PersonalizedMoE = federation.client_module("FedAvg", client=0)
    own: Classifier = federation.client_module("FedAvg", client=0)
    width: int = own.width
    module.mixx(torch.zeros(2, 5))  # wrong
    federation.client_module("FedAvg", client=0).mixx(torch.zeros(2, 5))  # wrong
"""


@pytest.mark.slow  # pyright reads torch's types; `.ci/run` runs it
def test_the_package_and_the_documentation_pass_a_type_checker_and_misspelt_methods_do_not(tmp_path):
    pytest.importorskip("pyright")
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    for page in PAGES:
        text = page.read_text()
        if "```{include} ../../README.md" in text:  # the page goes on from the README's script
            text = PAGES[0].read_text() + text
        found = [block.lstrip() for _, block in CODE.findall(text) if "from helpers" not in block]
        blocks = [block for block in found if not re.match(r"%%writefile \S+\.yaml", block)]
        lines = [line for line in "\n".join(blocks).splitlines() if not line.startswith(("!", "%"))]
        extra = MODULE if page.name == "README.md" else ""
        (tmp_path / f"{page.stem.lower()}.py").write_text("\n".join(lines) + "\n" + extra)
    assert "federation.fit(" in (tmp_path / "readme.py").read_text()
    assert "Federation(" in (tmp_path / "own_model_and_data.py").read_text()
    (tmp_path / "script_of_a_user.py").write_text(SCRIPT)
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pyright"]
    settings["include"] = ["*.py", *(os.path.relpath(REPOSITORY / path, tmp_path) for path in settings["include"])]
    # a notebook's own module, the variable of a loop, and what a reader sees not to be None
    usual = ("reportMissingImports", "reportPossiblyUnboundVariable", "reportOptionalSubscript")
    of_scripts = {"root": str(tmp_path), "extraPaths": [str(REPOSITORY)], **dict.fromkeys(usual, False)}
    settings["executionEnvironments"] = [of_scripts, {"root": str(REPOSITORY)}]
    # the sources of libraries without type hints, and all models of transformers, take as long as everything else
    settings |= {"useLibraryCodeForTypes": False, "stubPath": str(tmp_path / "stubs")}
    (tmp_path / "stubs/transformers").mkdir(parents=True)
    (tmp_path / "stubs/transformers/__init__.pyi").write_text("def __getattr__(name: str): ...\n")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable, "--outputjson"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    messages = json.loads(result.stdout)["generalDiagnostics"]
    places = [(Path(message["file"]), message["range"]["start"]["line"]) for message in messages]
    wrong = [path.read_text().splitlines()[line] for path, line in places]
    assert wrong == [line for line in SCRIPT.splitlines() if line.endswith("# wrong")], json.dumps(messages, indent=1)
