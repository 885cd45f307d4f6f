"""Malformed configurations are refused in one line that names the key: no traceback, no hang, no training."""

import copy
import math
import random
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import yaml
from helpers.configurations import REPOSITORY, printed, shortened

from fedmoe_pl.cli import FederationCLI, command_line

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
    monkeypatch.setattr(command_line, "FederationCLI", OnlyFit)
    monkeypatch.setattr("fedmoe_pl.federation.fit", started)
    before = signal.signal(signal.SIGPROF, timed_out)
    yield
    signal.signal(signal.SIGPROF, before)


Place = tuple[str | int, ...]


class Malformed(NamedTuple):
    """A configuration with one fault: what was done, the key that must be named, and whether it must be refused."""

    what: str
    config: dict[str, Any]
    key: str
    is_nonsense: bool


def places(node: Any, path: Place = ()) -> Iterator[Place]:
    """The way to everything in a configuration."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        yield (*path, name)
        yield from places(value, (*path, name))


def malformed(config: dict[str, Any], path: Place, rng: random.Random) -> Malformed | None:
    """The configuration with another value at a place; None where nothing can be wrong."""
    value, name = at(config, path), path[-1]
    faults: list[tuple[Any, bool]] = [(None, False)]
    if isinstance(value, bool) or value is None:
        faults += [(["x"], value is not None), ({"a": {"b": [1]}}, value is not None), ("nonsense", value is not None)]
    elif isinstance(value, (int, float)):
        faults += [(math.nan, True), ("nonsense", True), ([[1], "x"], True), ({"a": {"b": [1]}}, True)]
        faults += [(math.inf, False), (-math.inf, False), (-3, False), (0, False), (1.5, False)]
        faults += [(10**9, False), (10**18, False), (1e300, False)]
    elif name == "class_path":
        takes_modules = any(word in str(value) for word in (".models.", "torch.nn"))
        faults = [("torch.nn.Flatten", not takes_modules), ("os.path", True), (3, True), ("os.getcwd", True)]
        faults += [(f"{value}x", True), ("", True)]
    elif isinstance(value, str):
        faults += [("a/../\0b", False), ("", False), ({"a": {"b": [1]}}, False), (7.25, False)]
    elif isinstance(value, list):
        faults += [("nonsense", True), (7.25, True), ([*value, 7.25], False)]
    else:
        faults += [("nonsense", False), (7.25, False), ([1], False)]
    other, is_nonsense = rng.choice(faults)
    changed = copy.deepcopy(config)
    at(changed, path[:-1])[name] = other
    key = next(step for step in reversed(path) if isinstance(step, str) and step not in ("class_path", "init_args"))
    return Malformed(f"{other!r} in place of {value!r}", changed, key, is_nonsense)


def misspelt(config: dict[str, Any], path: Place, rng: random.Random) -> Malformed | None:
    """The configuration with a misspelt key; None for an item of a list, and for an empty section."""
    name, changed = path[-1], copy.deepcopy(config)
    node = at(changed, path[:-1])
    if not isinstance(name, str) or node[name] in ({}, None, []):
        return None
    index = rng.randrange(len(name))
    wrong = name[:index] + name[index] * 2 + name[index + 1 :]
    node[wrong] = node.pop(name)
    return Malformed(f"a misspelt key, {wrong}", changed, "" if name == "class_path" else wrong, True)


def at(node: Any, path: Place) -> Any:
    """What stands at a place."""
    for step in path:
        node = node[step]
    return node


def configuration(name: str, folder) -> dict:
    """A shipped configuration with all its defaults, shortened, without logs."""
    config = shortened(printed(REPOSITORY / f"configs/{name}.yaml"), folder)
    config["federation"] |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return {section: config[section] for section in ("model", "data", "trainer", "federation")}


def written(config: dict, intact: dict, section: str, way: str, folder) -> list[str]:
    """Writes a configuration whose section has a fault, in one file or in an overlay; gives the options."""
    files = {"config": config}
    if way == "overlay":
        overlay = {name: value for name, value in config.items() if name == section or name not in intact}
        files = {"config": intact, "overlay": overlay}
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return [option for name in files for option in ("--config", str(folder / f"{name}.yaml"))]


def outcome(options: list[str], capfd) -> str:
    """What the command line does with a configuration: its line, or ``started``, ``hang`` or a traceback."""
    capfd.readouterr()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            command_line.run(["fit", *options])
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
        way = rng.choice(["one file", "overlay"])
        start = time.perf_counter()
        result = outcome(written(case.config, configs[name], str(path[0]), way, folder), capfd)
        names_key = not case.is_nonsense or case.key in result
        refused = result.startswith("fedmoe: ") and len(result) < 600 and names_key
        accepted = not case.is_nonsense and result == "started"
        if not (refused or accepted):
            seconds = time.perf_counter() - start
            wrong.append(f"{name}, {way}: {case.key}: {case.what} [{seconds:.0f} s]\n    {result[:500]}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_fifty_malformed_configurations_are_refused(seed, tmp_path, capfd):
    faults = faults_of(50, seed, tmp_path, capfd)
    assert not faults, "\n".join(faults)
