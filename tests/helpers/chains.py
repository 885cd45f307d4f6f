"""Chains of phases, what a kill at any moment leaves of a run of them, and what a continued run is compared in."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from lightning.pytorch import LightningModule

from fedmoe_pl import Federation, PersonalizedMoE, Phase, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, LabelPrior, Local, PFLMoE
from fedmoe_pl.backends import Backend, StackedBackend, TrainerBackend
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.checkpoints.checkpoint import FILE, load_checkpoint
from fedmoe_pl.models import EqualWeights, FeatureGate, GlobalOnly, LinearGate, LocalOnly
from helpers import Expert, TensorData, blobs, momentum_sgd
from helpers.methods import METHODS, SIZES
from helpers.runs import federation

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
    """Phases, their model and their data.

    Attributes:
        phases: makes the phases, given a folder for the runs that they start from.
        model: makes the model.
        split: arguments of the data.
        stacks: whether clients can be stacked.
    """

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
    """Copies a run's folder before each phase and in its rounds: what a kill then leaves on disk.

    Args:
        folder: gets a folder with the copies for each moment.

    Attributes:
        moments: the folders, by moment.
    """

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
