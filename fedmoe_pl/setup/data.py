"""Sets the data up: what preprocessing learns, it learns from samples that opt in in every phase."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from torch import Tensor

from fedmoe_pl.checkpoints.checkpoint import is_of_run
from fedmoe_pl.checkpoints.writing import replacing
from fedmoe_pl.checks import check_kind
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.own_client import add_clients
from fedmoe_pl.data.partitioners.given import AllToOne
from fedmoe_pl.phases.phase import Phase

_OWN_CLIENT = "client.json"


def set_up(datamodule: FederatedDataModule, phases: Sequence[Phase], seed: int) -> None:
    """Sets the data up so that preprocessing learns only from training samples that opt in in every phase.

    If nothing opts out, it learns from all training samples of the data set, as without a federation.
    Data that are already set up do not change.
    """
    hint = ", such as FromDatasets or FromDataModule, which deal the samples of any others"
    if isinstance(datamodule, LightningDataModule):
        hint = f", such as FromDataModule({type(datamodule).__name__}(...), num_clients=10), which deals its samples"
    check_kind("Federation", "datamodule", datamodule, FederatedDataModule, hint)
    try:
        datamodule.prepare_data()
        datamodule.deal()
    except OSError as error:  # such as a missing file
        raise MisconfigurationException(f"{type(datamodule).__name__} cannot be read: {error}.") from error
    samples = _opted_in_everywhere(datamodule, phases, seed)
    if not datamodule.is_set_up:
        datamodule.learn_from = samples
    datamodule.setup()
    if not datamodule.has_learned or samples is None:
        return
    learned_from = datamodule.learn_from
    if not len(samples):
        problem, remedy = "no sample opts in in every phase", "run these phases in federations of their own"
    elif learned_from is None or not torch.isin(learned_from, samples).all():
        problem = "it was computed from samples that opt out, because setup was called before the federation"
        remedy = "leave setup to the federation"
    else:
        return
    what = "vocabulary" if datamodule.normalization is None else "normalization"
    remedy = remedy if what == "vocabulary" else f"give mean and std, or {remedy}"
    raise MisconfigurationException(f"{type(datamodule).__name__}: {what}: {problem}; {remedy}.")


def _opted_in_everywhere(datamodule: FederatedDataModule, phases: Sequence[Phase], seed: int) -> Tensor | None:
    """The training samples that opt in in every phase, shape (n,); None if no sample opts out of any phase.

    A phase whose result comes from a checkpoint does not count: nothing leaves its clients.
    """
    train, validation = datamodule.train_samples, datamodule.validation_samples
    samples, number = train.indices, len(train.indices) + len(validation.indices)
    all_opt_in = True
    for opt_out in (phase.algorithm.opt_out for phase in phases if not phase.ckpt_path):
        chosen = opt_out.opted_in_of_all(train, seed).indices
        if len(chosen) + len(opt_out.opted_in_of_all(validation, seed, validation=True).indices) < number:
            samples, all_opt_in = samples[torch.isin(samples, chosen)], False
    return None if all_opt_in else samples


@dataclass(frozen=True)
class OwnClient:
    """The client of a deployed federation whose machine this is, and what it knows of the others."""

    id: int
    num_clients: int
    num_classes: int

    def write(self, folder: Path) -> None:
        """Writes it into the folder of the client's run."""
        with replacing(folder / _OWN_CLIENT) as temporary:
            temporary.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, checkpoint: Path) -> OwnClient | None:
        """Reads it from the run that a checkpoint belongs to; None if that is no client's."""
        path = checkpoint.parent.parent / _OWN_CLIENT
        if not (is_of_run(checkpoint) and path.is_file()):
            return None
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise MisconfigurationException(
                f"ckpt_path is '{checkpoint}', a client's, but '{path}' is damaged; it must be as the run wrote it."
            ) from error


def set_up_as_saved(
    datamodule: FederatedDataModule, checkpoint: Path, phases: Sequence[Phase], seed: int
) -> int | None:
    """Sets the data up for a checkpoint's run; returns the id of the only client with samples, if there is only one."""
    own = OwnClient.read(checkpoint)
    if own is not None and not datamodule.is_set_up:
        datamodule.partitioner = AllToOne(own.id)
    set_up(datamodule, phases, seed)
    if own is None:
        return None
    add_clients(datamodule, own.num_clients, own.num_classes)
    return own.id
