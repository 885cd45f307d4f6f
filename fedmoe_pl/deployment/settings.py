"""What server and clients need of a ``Federation``, which is made of this part and so cannot be imported here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch import LightningModule

from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.rounds.store import Store


class Settings(Protocol):
    """The settings of a federation, and what makes its runs; attributes and methods as in ``Federation``."""

    phases: list[Phase]
    callbacks: list[FederationCallback]
    runs: Path
    seed: int

    def run_of_client(self, model: LightningModule, datamodule: FederatedDataModule, folder: Path) -> Run:
        """A run that has not begun, for a client on its own machine."""
        ...

    def fit_elsewhere(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        ckpt_path: str | None,
        make_store: Callable[[Run], Store],
        **attributes: Any,
    ) -> dict[str, Evaluation]:
        """Runs all phases on clients that are not in this process."""
        ...
