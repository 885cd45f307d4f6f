"""Clients' models as checkpoints of Lightning, which ``load_from_checkpoint`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import __version__
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.parsing import clean_namespace

from fedmoe_pl.algorithms.algorithm import chooses_model
from fedmoe_pl.checkpoints.files import replacing
from fedmoe_pl.evaluation.client_models import has_own_model
from fedmoe_pl.models.description import configured_arguments, hyperparameters_of
from fedmoe_pl.rounds.run import Run


def write_lightning(run: Run, method: str, paths: Mapping[int, Path]) -> list[Path]:
    """Writes the models of clients as checkpoints of Lightning; one for all if several have the same model.

    The arguments of PyTorch's and this package's modules are known, and those of all classes that a configuration
    names; of your own classes in Python, what they gave to ``save_hyperparameters()``. Pass others to
    ``load_from_checkpoint``.
    """
    phase, evaluation_point = run.phase_and_point(method, next(iter(paths)))
    kept = run.states[phase.name].clients.values()
    if not (len(paths) == 1 or chooses_model(phase.algorithm) or any(has_own_model(t, evaluation_point) for t in kept)):
        client, path = next(iter(paths.items()))
        paths = {client: path.with_name("all_clients.ckpt")}
    for path, module in zip(paths.values(), run.client_modules(method, paths), strict=True):
        with replacing(path) as temporary:
            torch.save(lightning_checkpoint(module), temporary)
    return [*paths.values()]


def lightning_checkpoint(module: LightningModule) -> dict[str, Any]:
    """What ``Trainer.save_checkpoint`` writes of a module; from a configuration, with the arguments in it."""
    key, hyperparameters = module.CHECKPOINT_HYPER_PARAMS_KEY, dict(module.hparams)
    clean_namespace(hyperparameters)
    checkpoint = {"pytorch-lightning_version": __version__, "state_dict": module.state_dict(), key: hyperparameters}
    if arguments := configured_arguments(module):
        checkpoint[key] = hyperparameters_of(module, arguments)
    elif hyperparameters:  # the name of the constructor's argument that holds all of them, if there is one
        checkpoint[module.CHECKPOINT_HYPER_PARAMS_NAME] = getattr(module, "_hparams_name", None)
    module.on_save_checkpoint(checkpoint)
    return checkpoint
