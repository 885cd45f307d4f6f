"""One fit of a Lightning Trainer."""

from __future__ import annotations

import copy
import logging
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data import Batches

LEAN_TRAINER: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}
"""Defaults of a client's Trainer: what costs time for every client and belongs to the federation is off."""


def fit(
    training: LocalTraining,
    module: LightningModule,
    batches: Iterable[Any],
    validation: Batches | None,
    freezing: Callback,
    **arguments: Any,
) -> Trainer:
    """Fits with a Trainer of its own: one serves one fit, and making it takes a few milliseconds.

    Args:
        training: has the Trainer's arguments.
        module: what to fit.
        batches: training batches.
        validation: validation batches; None for none.
        freezing: the callback that freezes what is not trained.
        arguments: arguments of the Trainer that take the place of those in ``training``.
    """
    given = copy.deepcopy(training.trainer) | arguments
    callbacks = given.pop("callbacks", None) or []
    callbacks = [freezing, *(callbacks if isinstance(callbacks, list) else [callbacks])]
    given["devices"] = [training.device.index or 0] if training.device.type == "cuda" else 1
    with quiet():
        trainer = Trainer(callbacks=callbacks, **given)
        try:
            trainer.fit(module, batches, validation)
        except SystemExit as exit:
            if not trainer.interrupted:
                raise
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from its exit on
            raise KeyboardInterrupt from exit
    return trainer


def client_callbacks(training: LocalTraining) -> Sequence[Callback]:
    """The Lightning callbacks of each client's Trainer."""
    callbacks = training.trainer.get("callbacks") or []
    return callbacks if isinstance(callbacks, list) else [callbacks]


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes with one CPU thread.

    Small models gain little from more and stall when another process holds a core, and results do not depend on the
    machine's number of cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps what Lightning says at every fit ("GPU available: ...") out of the federation's output."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # A client without validation samples is not a mistake.
            warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
            # lightning 2.6 with torch 2.14 and newer; nothing that a user could mend.
            warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
