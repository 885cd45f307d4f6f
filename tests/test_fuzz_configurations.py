"""Malformed configurations are refused in one line that names the key: no traceback, no hang, no training."""

import random
import re
import signal
import time
import warnings

import pytest
import yaml
from helpers.configurations import REPOSITORY, shortened
from helpers.fuzzing import all_places, chosen, expanded, malformed, misspelt

from fedmoe_pl.cli import FederationCLI, commands
from fedmoe_pl.cli.schema import Argument, arguments_of

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

    parser_of_fit = None

    @staticmethod
    def subcommands():
        return {"fit": FederationCLI.subcommands()["fit"]}

    def parse_arguments(self, parser, args):
        OnlyFit.parser_of_fit = self._subcommand_parsers["fit"]
        super().parse_arguments(parser, args)


@pytest.fixture
def arguments(monkeypatch) -> dict[str, Argument]:
    """The arguments of ``fedmoe fit``; no training starts."""

    def started(run):
        raise Started

    def timed_out(*_):
        raise TimedOut

    monkeypatch.setattr("sys.argv", ["fedmoe"])
    monkeypatch.setattr(commands, "FederationCLI", OnlyFit)
    monkeypatch.setattr("fedmoe_pl.setup.run_maker.fit", started)
    before = signal.signal(signal.SIGPROF, timed_out)
    with pytest.raises(SystemExit):
        commands.main(["fit", "--config", "none.yaml"])
    yield arguments_of(OnlyFit.parser_of_fit)
    signal.signal(signal.SIGPROF, before)


def configuration(name: str, arguments: dict[str, Argument], folder) -> dict:
    """A shipped configuration, shortened, without logs."""
    config = shortened(yaml.safe_load((REPOSITORY / f"configs/{name}.yaml").read_text()), folder)
    config["federation"] |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for key in ("model", "data"):
        config[key] = expanded(config[key], arguments[key].hint)
    config["federation"]["phases"] = expanded(config["federation"]["phases"], arguments["federation.phases"].hint)
    return config


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


def faults_of(number: int, seed: int, arguments, folder, capfd) -> list[str]:
    """What is wrong with the answers to so many malformed configurations."""
    rng, wrong = random.Random(seed), []
    configs = {name: configuration(name, arguments, folder) for name in CONFIGURATIONS}
    for _ in range(number):
        name = rng.choice(CONFIGURATIONS)
        place = chosen(all_places(configs[name], arguments), rng)
        case = (misspelt if rng.random() < 0.15 else malformed)(configs[name], place, rng)
        way = rng.choice(["one file", "overlay", "named file"])
        start = time.perf_counter()
        result = outcome(written(case.config, configs[name], place.path[0], way, folder), capfd)
        argument = re.sub(r"\[\d+\]$", "", case.key.rsplit(".", 1)[-1])
        names_key = (case.key if case.is_nonsense else argument) in result
        refused = result.startswith("fedmoe: ") and len(result) < 600 and names_key
        accepted = not case.is_nonsense and result == "started"
        if not (refused or accepted):
            seconds = time.perf_counter() - start
            wrong.append(f"{name}, {way}: {case.key}: {case.what} [{seconds:.0f} s]\n    {result[:500]}")
    return wrong


def test_a_few_malformed_configurations_are_refused(arguments, tmp_path, capfd):
    faults = faults_of(12, 0, arguments, tmp_path, capfd)
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_fifty_malformed_configurations_are_refused(seed, arguments, tmp_path, capfd):
    faults = faults_of(50, seed, arguments, tmp_path, capfd)
    assert not faults, "\n".join(faults)
