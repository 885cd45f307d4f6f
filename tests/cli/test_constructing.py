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
"""


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """What the command line says when the shortened quickstart is changed."""
    (tmp_path / "failing.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(tmp_path)

    def change(group: str, name: str, value: object) -> str:
        config = shortened(yaml.safe_load(Path(QUICKSTART).read_text()), tmp_path)
        node = config[group] if name else config
        node[name or group] = value
        (tmp_path / "changed.yaml").write_text(yaml.safe_dump(config))
        with pytest.raises(MisconfigurationException) as error:
            FederationCLI(["fit", "--config", str(tmp_path / "changed.yaml")])
        assert not list(tmp_path.rglob("version_*"))
        return str(error.value)

    return change


def failing(name: str, **arguments) -> dict:
    return {"class_path": f"failing.{name}", "init_args": arguments}


def test_a_logger_whose_library_is_missing_is_named_with_the_library(refusal):
    assert refusal("federation", "logger", failing("NeedsLibrary")) == (
        "federation.logger: NeedsLibrary cannot be made: "
        "ModuleNotFoundError: No module named 'library_that_is_not_installed'"
    )


def test_one_of_several_objects_of_a_class_is_told_by_its_arguments(refusal):
    callbacks = [failing("Divides", by=2), failing("Divides", by=0), failing("Divides", by=3)]
    assert refusal("federation", "callbacks", callbacks) == (
        "federation.callbacks[1]: Divides cannot be made: ZeroDivisionError: division by zero"
    )


def test_a_model_that_cannot_be_made_is_named(refusal):
    assert refusal("model", "", failing("Unready", width=2)) == (
        "model: Unready cannot be made: OSError: no weights of width 2"
    )


def test_a_refusal_is_passed_on_wherever_its_class_stands_among_the_types(refusal):
    assert refusal("federation", "logger", failing("TooLong", save_dir="runs")) == (
        "federation.logger.init_args.save_dir is 'runs', but must be of 3 letters."
    )


def test_an_exception_where_one_class_fits_stays_as_it_is(refusal, tmp_path):
    (tmp_path / "own_algorithm.py").write_text(
        "from fedmoe_pl.algorithms import FedAvg\n\n\nclass Broken(FedAvg):\n    def __init__(self) -> None:\n"
        "        raise KeyError('of the user')\n"
    )
    with pytest.raises(KeyError, match="of the user"):
        refusal("federation", "phases", [{"name": "A", "algorithm": "own_algorithm.Broken"}])


def test_an_argument_without_type_and_default_must_be_given(refusal, tmp_path):
    (tmp_path / "untyped_algorithm.py").write_text(
        "from fedmoe_pl.algorithms import FedAvg\n\n\nclass Untyped(FedAvg):\n"
        "    def __init__(self, rate, shared='*'):\n        super().__init__(shared)\n"
    )
    assert refusal("federation", "phases", [{"name": "A", "algorithm": "untyped_algorithm.Untyped"}]) == (
        "federation.phases.A.algorithm.init_args.rate is None, but must be given."
    )
