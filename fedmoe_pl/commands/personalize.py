"""Personalized models for clients that join after the federation's training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedmoe_pl.checkpoints.checkpoint import load_federation
from fedmoe_pl.checkpoints.resume import identify
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.setup.data import set_up
from fedmoe_pl.trees import Tree


def phases_of_new_clients(phases: Sequence[Phase], ckpt_path: Path, rounds: int) -> list[Phase]:
    """The phases for new clients: federated ones take their results from the checkpoint, the others are trained."""
    if not any(phase.algorithm.federated for phase in phases):
        raise MisconfigurationException(
            "personalize needs a federated phase, from whose result new clients start, but none of the phases is "
            "federated; use fit to train clients alone."
        )
    alone = [replace(phase, clients_per_round=None, clients=None, ckpt_path=None) for phase in phases]
    given = {"ckpt_path": str(ckpt_path), "rounds": rounds, "select": None}
    return [replace(phase, **given) if phase.algorithm.federated else phase for phase in alone]


def set_up_new_clients(
    datamodule: FederatedDataModule, path: Path, phases: Sequence[Phase], seed: int
) -> dict[str, Tree]:
    """Sets the new clients' data up with what the federation's preprocessing has learned; gives its initial models."""
    content = load_federation(path)
    if not datamodule.is_set_up:
        datamodule.normalization, datamodule.vocabulary = content["normalization"], content["vocabulary"]
        datamodule.classes = datamodule.classes or content["classes"]
    set_up(datamodule, phases, seed)
    identity = identify(seed, datamodule)
    for name, given in (("classes", datamodule.classes), ("columns", datamodule.columns)):
        if content[name] not in (None, given):
            allowed = f"{'left out or ' * (name == 'classes')}those of the federation, {content[name]}"
            raise InvalidArgumentError(datamodule, name, given, allowed)
    for name, what in (("normalization", "normalizes images"), ("vocabulary", "numbers words")):
        if content[name] != identity[name]:
            allowed = f"that of a federation that {what} as the new clients' data do"
            because = "mean and std must be left out or those of the federation, and personalize sets the data up"
            raise InvalidArgumentError("personalize", "ckpt_path", path, allowed, because)
    if datamodule.normalization is not None:
        _warn_of_other_images(datamodule.x, *datamodule.normalization)
    return content["models"]


def _warn_of_other_images(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> None:
    """Warns if the new clients' images are much brighter or darker than the federation's, as when they are inverted."""
    shift = x.mean(dim=(0, 2, 3)).tolist()
    if max(map(abs, shift)) <= 1:
        return
    pixels = [middle + by * scale for middle, by, scale in zip(mean, shift, std, strict=True)]
    rank_zero_warn(
        f"personalize: the mean of the new clients' pixels is {_written(pixels)}, more than one standard deviation "
        f"({_written(std)}) from the federation's, {_written(mean)}; are the images prepared in the same way?"
    )


def _written(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
