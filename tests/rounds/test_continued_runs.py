"""A run that was ended before, in or after any phase ends with the bits of one that was not, with any devices."""

import functools
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
import torch
import yaml
from helpers import Expert, TensorData, blobs, momentum_sgd
from helpers.configurations import QUICKSTART, REPOSITORY, short_file
from helpers.methods import METHODS, SIZES
from helpers.reports import leave_pictures_blank
from helpers.runs import assert_same, federation
from lightning.pytorch import LightningModule

from fedmoe_pl import Federation, PersonalizedMoE, Phase, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, LabelPrior, Local, PFLMoE
from fedmoe_pl.backends import Backend, PoolBackend, StackedBackend, TrainerBackend, trainer
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.checkpoints.checkpoint import FILE, load_checkpoint
from fedmoe_pl.cli import main
from fedmoe_pl.evaluation import stacked_models
from fedmoe_pl.models import EqualWeights, FeatureGate, GlobalOnly, LinearGate, LocalOnly

BACKENDS: dict[str, Callable[[], Backend | Literal["auto"]]] = {
    "auto": lambda: "auto",
    "trainer": TrainerBackend,
    "stacked": lambda: StackedBackend(2),  # several groups of clients, which workers divide
}


def equal_pair() -> PersonalizedMoE:
    """A mixture whose local expert is a copy of the global one, as in the quickstart."""
    torch.manual_seed(2)
    return PersonalizedMoE(Expert().double(), optimizer=momentum_sgd)


@dataclass
class Chain:
    """Phases, given a folder for runs that they start from, their model, and arguments of their data."""

    phases: Callable[[Path], list[Phase]]
    model: Callable[[], LightningModule] = equal_pair
    split: dict[str, float] = field(default_factory=dict)
    stacks: bool = True

    def data(self, sizes=SIZES) -> TensorData:
        """Samples of each client."""
        return blobs(sizes, **self.split)

    def federation(self, folder: Path, backend="auto", devices: int | str = 1, **kwargs) -> Federation:
        """A federation that trains the chain in a folder."""
        trainer = {"accelerator": "cpu", "max_epochs": 1, "devices": devices}
        phases = self.phases(folder.parent)
        return federation(folder, phases, trainer=trainer, backend=BACKENDS[backend](), **kwargs)

    def fit(self, folder: Path, *args, ckpt_path=None, **kwargs) -> Federation:
        """A finished run of fresh objects; a continued one is given another initial model, which must not matter."""
        run, model = self.federation(folder, *args, **kwargs), self.model()
        if ckpt_path:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        run.fit(model, self.data(), ckpt_path)
        return run


def quickstart(_=None) -> list[Phase]:
    """The phases of ``configs/quickstart.yaml``, with fewer rounds and epochs."""
    torch.manual_seed(1)
    gate_optimizer = partial(torch.optim.Adam, lr=0.001, weight_decay=0.0005)
    tuning = FineTuning("local_expert.classifier.*", gate_fraction=0.25)
    return [
        Phase("Local", Local(), gate=LocalOnly()),
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=3, clients_per_round=0.5, gate=GlobalOnly()),
        Phase("PFL-FB", tuning, gate=LocalOnly(), start="FedAvg"),
        Phase("equal weights", PFLMoE(), gate=EqualWeights(), train=Train(max_epochs=0)),
        Phase("PFL-MF", PFLMoE(), gate=LinearGate(5).double(), train=Train(max_epochs=2, optimizer=gate_optimizer)),
        Phase("PFL-MFE", PFLMoE(), gate=FeatureGate(6).double(), train=Train(max_epochs=2, optimizer=gate_optimizer)),
        Phase("label prior", LabelPrior(), gate=GlobalOnly(), start="FedAvg"),
    ]


def tuned_and_mixed(_=None) -> list[Phase]:
    """The experts are equal when the classifier is tuned, and their extractors when the gate is trained."""
    phases = quickstart()
    return [*phases[1:3], phases[4]]


def parts(_) -> list[Phase]:
    """Each part starts from a phase of its own; a client that no round had has both of them as they were."""
    torch.manual_seed(1)
    start = {"global_expert": "FedAvg", "local_expert": "FedPer"}
    fedper = FedAvg("local_expert.extractor.*", "local_expert.*")
    return [
        Phase("FedAvg", FedAvg("global_expert.*", "global_expert.extractor.*"), rounds=2, gate=GlobalOnly()),
        Phase("FedPer", fedper, rounds=2, clients_per_round=2, gate=LocalOnly()),
        Phase("mixture", PFLMoE(0), gate=LinearGate(5).double(), train=Train(max_epochs=2), start=start),
    ]


_other = TemporaryDirectory()  # one for all runs, whose configuration has its path


def other_run(folder: Path) -> list[Phase]:
    """Goes on with both experts of another run, in which training with equal weights has left them equal."""
    given, *rest = quickstart()[1:5]
    given = replace(given, algorithm=FedAvg(), gate=EqualWeights())
    if not any(Path(_other.name).iterdir()):
        Chain(lambda _: [given]).fit(Path(_other.name))
    return [replace(given, ckpt_path=str(Path(_other.name) / "federation/version_0" / FILE)), *rest]


def of_method(name: str) -> Chain:
    """The phases of a method, each of them evaluated."""
    method = METHODS[name]
    return Chain(
        lambda _: [replace(phase, evaluate=True) for phase in method.phases()],
        method.model,
        method.split,
        method.stacks,
    )


CHAINS = {
    "quickstart": Chain(quickstart),
    "tuned and mixed": Chain(tuned_and_mixed),
    "parts": Chain(parts),
    "other run": Chain(other_run),
    "PFLMoE": of_method("PFLMoE"),
    "PFedMoE": of_method("PFedMoE"),
    "IFCA": of_method("IFCA"),
    "SpecialistMixture": of_method("SpecialistMixture"),
    "FedMoEDA": of_method("FedMoEDA"),
    "LabelPrior": of_method("LabelPrior"),
}


class Snapshots(FederationCallback):
    """Copies a run's folder before each phase and in its rounds: what a kill then leaves on disk, by the moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.moments: dict[str, Path] = {}
        self.clients: dict[str, int] = {}

    def on_round_start(self, run, phase, round):
        """Before a phase: the one before has just been finished."""
        if round == 0:
            self._copy(run, f"before {phase.name}")

    def on_client_end(self, run, phase, round, client):
        """In the middle of the last round but one, or of the only one."""
        if round == max(phase.rounds - 2, 0):
            self.clients[phase.name] = self.clients.get(phase.name, 0) + 1
            if self.clients[phase.name] == 2:
                self._copy(run, f"in a round of {phase.name}")

    def on_phase_end(self, run, phase, evaluation):
        """After a phase's last round, and before it is marked as finished."""
        self._copy(run, f"at the end of {phase.name}")

    def _copy(self, run, moment):
        self.moments[moment] = self.folder / f"{len(self.moments)}"
        shutil.copytree(run.folder.parent, self.moments[moment] / run.folder.parent.name)


class StopsBeforeEveryPhase(FederationCallback):
    """Stops a run before each of its phases once."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_round_start(self, run, phase, round):
        """Raises what Ctrl-C does."""
        if phase.name not in self.seen:
            self.seen.add(phase.name)
            raise KeyboardInterrupt


def outcome(run: Federation) -> dict[str, object]:
    """Everything that a run has come to: its checkpoint, its rows and the models of its clients."""
    folder = run.run_dir
    content = load_checkpoint(folder / FILE)
    del content["configuration"], content["rows"]  # backend and initial model differ; the rows of all rounds follow
    clients = range(len(SIZES))
    models = {method: [run.client_module(method, client).state_dict() for client in clients] for method in run.results}
    rows = {name: (folder / name).read_text() for name in ("rounds.csv", "clients.csv", "summary.csv")}
    return {**content, **rows, "models": models}


WAYS = {"1": ("auto", 1), "2": ("trainer", 2), "auto": ("auto", "auto"), "2 of stacks": ("stacked", 2)}
"""The backend and the number of devices with which a run is continued."""


@pytest.fixture(autouse=True)
def divided(monkeypatch):
    """Workers get every client alone, and start at once also where the number of devices is left to `auto`."""
    leave_pictures_blank(monkeypatch)
    monkeypatch.setattr(trainer, "_SAMPLES_PER_TRAINER", 0)
    monkeypatch.setattr(stacked_models, "_MOST", 1)
    monkeypatch.setattr(PoolBackend, "is_worth_starting", lambda pool, gain: True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Makes a run on one device that nothing ended, what it came to, and what a kill would have left at its moments."""

    @functools.cache
    def make(name: str, backend: str):
        folder = tmp_path_factory.mktemp("whole")
        moments = Snapshots(folder / "moments")
        run = CHAINS[name].fit(folder / "whole", backend, callbacks=[moments])
        return run, outcome(run), moments.moments

    return make


def continued(name: str, moment: Path, path: Path, way: str) -> Federation:
    """A run that goes on from files alone."""
    shutil.copytree(moment, path / "continued")
    return CHAINS[name].fit(path / "continued", *WAYS[way], ckpt_path="last")


def test_the_quickstart_s_phases_are_those_of_its_configuration():
    configured = yaml.safe_load(Path(QUICKSTART).read_text())["federation"]["phases"]
    algorithms = [each["algorithm"] for each in configured]
    names = [each if isinstance(each, str) else each["class_path"] for each in algorithms]
    expected = [(each["name"], name, each["gate"]) for each, name in zip(configured, names, strict=True)]
    assert [(each.name, type(each.algorithm).__name__, type(each.gate).__name__) for each in quickstart()] == expected


@pytest.mark.parametrize("moment", ["before PFL-MF", "in a round of PFL-MF"])
@pytest.mark.parametrize("way", ["1", "2"])
@pytest.mark.few(1)
def test_a_mixture_whose_experts_were_equal_is_continued_with_the_bits_of_a_whole_run(whole, tmp_path, way, moment):
    _, expected, moments = whole("tuned and mixed", WAYS[way][0])
    assert_same(outcome(continued("tuned and mixed", moments[moment], tmp_path, way)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHAINS)
def test_a_run_is_continued_from_the_files_of_any_moment_with_any_devices(whole, tmp_path, name, way):
    if WAYS[way][0] == "stacked" and not CHAINS[name].stacks:
        pytest.skip("its clients cannot be stacked")
    _, expected, moments = whole(name, WAYS[way][0])
    for number, (moment, folder) in enumerate(moments.items()):
        run = continued(name, folder, tmp_path / str(number), way)
        try:
            assert_same(outcome(run), expected)
        except AssertionError as error:
            raise AssertionError(f"continued {moment}") from error


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHAINS if name not in ("PFedMoE", "FedMoEDA")])  # of one phase
def test_a_run_that_is_ended_before_every_phase_and_continued_with_the_same_objects_is_a_whole_one(
    whole, tmp_path, name
):
    _, expected, _ = whole(name, "trainer")
    chain, stops = CHAINS[name], StopsBeforeEveryPhase()
    run = chain.federation(tmp_path / "stopped", *WAYS["2"], callbacks=[stops])
    model, data = chain.model(), chain.data()
    finished = False
    while not finished:
        with suppress(KeyboardInterrupt):
            run.fit(model, data, "last" if stops.seen else None)
            finished = True
    assert len(stops.seen) > 1
    assert_same(outcome(run), expected)


def results_of_commands(chain: Chain, folder: Path, devices: int) -> dict[str, object]:
    """What ``predict`` and ``personalize`` make of a finished run."""
    run = chain.federation(folder, "trainer", devices)
    run.predict(chain.model(), chain.data())
    (predictions,) = folder.rglob("predictions.csv")
    run = chain.federation(folder, "trainer", devices)
    newcomers = run.personalize(chain.model(), chain.data(sizes=(9, 6, 7)), rounds=1)
    models = {name: [run.client_module(name, client).state_dict() for client in range(3)] for name in newcomers}
    return {"predictions": predictions.read_text(), "newcomers": newcomers, "models": models}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "parts", "other run", "IFCA"])
def test_predictions_and_newcomers_of_a_continued_run_are_those_of_a_whole_one(whole, tmp_path, name):
    chain, (run, _, moments) = CHAINS[name], whole(name, "trainer")
    expected = results_of_commands(chain, run.runs.parent, 1)
    *_, before_last = (moment for moment in moments if moment.startswith("before"))
    continued(name, moments[before_last], tmp_path, "2")
    assert_same(results_of_commands(chain, tmp_path / "continued", 2), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "signum"),
    [
        *((name, signal.SIGTERM) for name in ("finished/PFL-FB.ckpt", "finished/PFL-MF.ckpt", "rows.jsonl")),
        ("rows.jsonl", signal.SIGKILL),
    ],
)
def test_a_command_that_a_signal_ends_is_continued_with_two_devices(tmp_path, monkeypatch, file, signum):
    """The quickstart's own command, ended as soon as a file of its checkpoints is there."""
    monkeypatch.undo()  # the command has a process of its own, in which nothing is replaced
    monkeypatch.setattr("sys.argv", ["fedmoe"])  # LightningCLI warns of arguments beside those that it is given
    short = short_file(Path(QUICKSTART), tmp_path)
    arguments = ["fit", "--config", str(short), "--federation.backend", "TrainerBackend"]
    main([*arguments, "--trainer.devices", "1", "--federation.default_root_dir", str(tmp_path / "whole")])
    arguments = [*arguments, "--trainer.devices", "2", "--federation.default_root_dir", str(tmp_path / "ended")]
    ended, whole = (tmp_path / name / "quickstart/version_0" for name in ("ended", "whole"))
    command = [sys.executable, str(REPOSITORY / "cli.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (ended / "checkpoints" / file).is_file():
            with pytest.raises(subprocess.TimeoutExpired):  # it has not ended
                process.wait(0.01)
        process.send_signal(signum)
    begun, phases = (load_checkpoint(folder / FILE)["phases"] for folder in (ended, whole))
    ended_with = 128 + signum if signum == signal.SIGTERM else -signum
    assert process.returncode == ended_with and len(begun) < len(phases)
    main([*arguments, "--ckpt_path", "last"])
    assert_same(load_checkpoint(ended / FILE)["phases"], phases)
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert (ended / name).read_bytes() == (whole / name).read_bytes()
