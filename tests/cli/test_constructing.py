"""A class of the configuration that cannot be made is named with its key and the cause, whatever types fit there."""

from pathlib import Path

import pytest
import yaml
from helpers.configurations import QUICKSTART, shortened
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.cli import FederationCLI

CLASSES = """
from lightning.pytorch.loggers import CSVLogger

from fedmoe_pl import PersonalizedMoE
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.callbacks import FederationCallback


class NeedsLibrary(CSVLogger):
    def __init__(self, save_dir: str = "logs"):
        import library_that_is_not_installed


class Divides(FederationCallback):
    def __init__(self, by: int = 0):
        self.ratio = 1 / by


class Unready(PersonalizedMoE):
    def __init__(self, width: int = 1):
        raise OSError(f"no weights of width {width}")


class TooLong(CSVLogger):
    def __init__(self, save_dir: str = "logs"):
        from fedmoe_pl.checks import InvalidArgumentError

        raise InvalidArgumentError("TooLong", "save_dir", save_dir, "of 3 letters")


class Broken(FedAvg):
    def __init__(self) -> None:
        raise KeyError("of the user")


class Untyped(FedAvg):
    def __init__(self, rate, shared="*"):
        super().__init__(shared)
"""


def failing(name: str, **arguments) -> dict:
    return {"class_path": f"failing.{name}", "init_args": arguments}


def phase(name: str) -> list[dict]:
    return [{"name": "A", "algorithm": f"failing.{name}"}]


REFUSED = [
    (
        *("federation", "logger", failing("NeedsLibrary")),
        "federation.logger: NeedsLibrary cannot be made: "
        "ModuleNotFoundError: No module named 'library_that_is_not_installed'",
    ),
    (  # one of several objects of a class is told by its arguments
        *("federation", "callbacks", [failing("Divides", by=2), failing("Divides", by=0), failing("Divides", by=3)]),
        "federation.callbacks[1]: Divides cannot be made: ZeroDivisionError: division by zero",
    ),
    ("model", "", failing("Unready", width=2), "model: Unready cannot be made: OSError: no weights of width 2"),
    (  # a refusal is passed on wherever its class stands among the types
        *("federation", "logger", failing("TooLong", save_dir="runs")),
        "federation.logger.init_args.save_dir is 'runs', but must be of 3 letters.",
    ),
    (
        "federation",
        "phases",
        phase("Untyped"),
        "federation.phases.A.algorithm.init_args.rate is None, but must be given.",
    ),
    (
        *("federation", "metrics", {"f1": {"class_path": "torchmetrics.F1Score", "init_args": {"task": "multiclass"}}}),
        "federation.metrics.f1: F1Score cannot be made: ValueError: `num_classes` is expected to be `int` but `<class "
        "'NoneType'> was passed.`",
    ),
    (
        *("trainer", "callbacks", [{"class_path": "EarlyStopping", "init_args": {"monitor": "loss", "mode": "least"}}]),
        "trainer.callbacks[0]: EarlyStopping cannot be made: "
        "MisconfigurationException: `mode` can be min, max, got least",
    ),
    ("federation", "phases", phase("Broken"), KeyError("of the user")),  # where one class fits, it stays as it is
]


@pytest.mark.parametrize(("group", "name", "value", "expected"), REFUSED)
def test_what_cannot_be_made_is_named(group, name, value, expected, tmp_path, monkeypatch):
    """The shortened quickstart is changed."""
    (tmp_path / "failing.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    config = shortened(yaml.safe_load(Path(QUICKSTART).read_text()), tmp_path)
    node = config[group] if name else config
    node[name or group] = value
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(KeyError if isinstance(expected, KeyError) else MisconfigurationException) as error:
        FederationCLI(["fit", "--config", str(tmp_path / "changed.yaml")])
    assert str(error.value) == str(expected)
    assert not list(tmp_path.rglob("version_*"))
