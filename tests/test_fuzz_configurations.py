"""Malformed configurations are refused in one line that names the key: no traceback, no hang, no training."""

import random
import re
import signal
import time
import warnings

import pytest
import yaml
from helpers.configurations import REPOSITORY, printed, shortened
from helpers.fuzzing import malformed, misspelt, places

from fedmoe_pl.cli import FederationCLI, commands

CONFIGURATIONS = (
    *("quickstart", "opt_out_digits", "pfedmoe_digits", "fedmoe_da_digits", "adaptive_experts_digits"),
    "pfl_moe_variants_digits",
)
SECONDS = 20  # of CPU time; a run needs one or two


class Started(Exception):
    """The training would have started."""


class TimedOut(BaseException):  # nobody catches it on its way
    """A run has taken too much time."""


class OnlyFit(FederationCLI):
    """The command line with one subcommand, whose parsers take less time to make."""

    @staticmethod
    def subcommands():
        return {"fit": FederationCLI.subcommands()["fit"]}


@pytest.fixture(autouse=True)
def no_training(monkeypatch, tmp_path):
    """No training starts, and none of the commands takes longer than it may."""

    def started(run):
        raise Started

    def timed_out(*_):
        raise TimedOut

    monkeypatch.chdir(tmp_path)  # for runs without a folder
    monkeypatch.setattr("sys.argv", ["fedmoe"])
    monkeypatch.setattr(commands, "FederationCLI", OnlyFit)
    monkeypatch.setattr("fedmoe_pl.federation.fit", started)
    before = signal.signal(signal.SIGPROF, timed_out)
    yield
    signal.signal(signal.SIGPROF, before)


def configuration(name: str, folder) -> dict:
    """A shipped configuration with all its defaults, shortened, without logs."""
    config = shortened(printed(REPOSITORY / f"configs/{name}.yaml"), folder)
    config["federation"] |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return {section: config[section] for section in ("model", "data", "trainer", "federation")}


def written(config: dict, intact: dict, section: str, way: str, folder) -> list[str]:
    """Writes a configuration with a fault in a section, and gives the options that name its files.

    Args:
        config: the configuration.
        intact: the same without the fault.
        section: the section.
        way: ``one file``, ``overlay`` if the section is in a second one, or ``named file`` if the first one names it.
        folder: where to write.
    """

    def write(name: str, content) -> str:
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False))
        return str(folder / name)

    if way == "overlay":
        overlay = {name: value for name, value in config.items() if name == section or name not in intact}
        return ["--config", write("config.yaml", intact), "--config", write("overlay.yaml", overlay)]
    if way == "named file" and isinstance(config.get(section), dict):
        write("section.yaml", config[section])
        config = {**config, section: "section.yaml"}
    return ["--config", write("config.yaml", config)]


def outcome(options: list[str], capfd) -> str:
    """What the command line does with a configuration: its line, or ``started``, ``hang`` or a traceback."""
    capfd.readouterr()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            commands.main(["fit", *options])
        result = "started: the run is over"
    except Started:
        result = "started"
    except TimedOut:
        result = "hang"
    except SystemExit as exit:
        lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("Seed set to")]
        result = lines[-1] if exit.code == 2 and len(lines) == 1 else f"exit {exit.code}: {lines}"
    except BaseException as error:
        result = f"traceback: {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return result


def faults_of(number: int, seed: int, folder, capfd) -> list[str]:
    """What is wrong with the answers to so many malformed configurations."""
    rng, wrong = random.Random(seed), []
    configs = {name: configuration(name, folder) for name in CONFIGURATIONS}
    while number:
        name = rng.choice(CONFIGURATIONS)
        path = rng.choice([path for path in places(configs[name]) if len(path) > 1])
        case = (misspelt if rng.random() < 0.15 else malformed)(configs[name], path, rng)
        if case is None:
            continue
        number -= 1
        way = rng.choice(["one file", "overlay", "named file"])
        start = time.perf_counter()
        result = outcome(written(case.config, configs[name], str(path[0]), way, folder), capfd)
        # a phase's own trainer has any keys, so that it is checked later
        key = case.key.rpartition(".")[2] if ".trainer." in case.key else case.key
        names_key = not case.is_nonsense or key in re.sub(r"\[\d+\]", "", result)
        refused = result.startswith("fedmoe: ") and len(result) < 600 and names_key
        accepted = not case.is_nonsense and result == "started"
        if not (refused or accepted):
            seconds = time.perf_counter() - start
            wrong.append(f"{name}, {way}: {case.key}: {case.what} [{seconds:.0f} s]\n    {result[:500]}")
    return wrong


def test_a_few_malformed_configurations_are_refused(tmp_path, capfd):
    faults = faults_of(12, 0, tmp_path, capfd)
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_fifty_malformed_configurations_are_refused(seed, tmp_path, capfd):
    faults = faults_of(50, seed, tmp_path, capfd)
    assert not faults, "\n".join(faults)
