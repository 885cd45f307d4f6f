"""``fedmoe list``: every class that a configuration can name, with one line."""

import inspect
import subprocess
import sys

import pytest

import fedmoe_pl.algorithms
from fedmoe_pl.cli import main
from fedmoe_pl.cli.listing import KINDS


def test_every_class_has_a_line(capsys):
    main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:-1] for line in lines if line.endswith(":") and line[0] != " "] == [*KINDS]
    shown = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    assert {each.__name__ for classes in KINDS.values() for each in classes} == {*shown}
    assert all("`" not in text for text in shown.values())
    public = [getattr(fedmoe_pl.algorithms, name) for name in fedmoe_pl.algorithms.__all__]
    concrete = {each.__name__ for each in public if inspect.isclass(each) and not inspect.isabstract(each)}
    assert concrete - {*shown} <= {"Algorithm"}
    assert "BestEpoch" in shown and "SwitchNorm1d" not in shown
    assert all(text[0].isupper() for text in shown.values()), "sentences, and no formulas"


def test_a_kind_alone(capsys):
    main(["list", "gates", "partitioners"])
    out = capsys.readouterr().out
    assert "FeatureGate" in out and "Dirichlet" in out and "FedAvg " not in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gate"], "list: kind is 'gate', but must be one of algorithms, "),
        (["--gates"], "gates is not an argument."),
    ],
)
def test_what_is_unknown_is_named(arguments, sentence, capsys):
    with pytest.raises(SystemExit):
        main(["list", *arguments])
    assert sentence in capsys.readouterr().err


@pytest.mark.slow  # a Python of its own
def test_a_pipe_that_nobody_reads_is_no_traceback():
    command = f"{sys.executable} -m fedmoe_pl list | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (141, "")
