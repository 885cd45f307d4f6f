"""Type hints: a user's script with what the README shows passes pyright."""

import json
import re
import subprocess
import sys

import pytest
from helpers.configurations import REPOSITORY

README = (REPOSITORY / "README.md").read_text()


@pytest.mark.slow  # pyright reads torch's types
def test_the_python_of_the_readme_passes_a_type_checker(tmp_path):
    pytest.importorskip("pyright")
    blocks = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "from helpers" not in block]
    assert any("federation.fit(" in block for block in blocks)
    module = "logits, weights = federation.client_module('PFL-MFE', client=0).mix(torch.zeros(2, 1, 8, 8))\n"
    (tmp_path / "script.py").write_text("\n".join([*blocks, module]))
    settings = {"include": ["script.py"], "extraPaths": [str(REPOSITORY)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
