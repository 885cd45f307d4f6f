"""Features: outputs of frozen parts, which steps look up instead of computing them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends.client import on_device
from fedmoe_pl.backends.frozen_parts import FrozenParts, Rows, compute_rows, find_frozen_parts, no_input
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data import Batches, SampleBatches
from fedmoe_pl.trees import Tree


@dataclass(frozen=True)
class Features:
    """The outputs of frozen parts that a client's steps look up.

    Attributes:
        parts: the frozen submodules.
        rows: their outputs, one row per sample of the client, on the training's device.
    """

    parts: FrozenParts
    rows: Rows


class LookedUpBatches:
    """A client's batches, with the frozen parts' outputs for each; every iteration is one epoch.

    Args:
        batches: the client's batches, not augmented.
        features: the outputs of the frozen parts.
        lookup: receives the rows of each batch before the batch is yielded; see :func:`looked_up`.
    """

    def __init__(self, batches: SampleBatches, features: Features, lookup: Rows) -> None:
        assert isinstance(batches, Batches), "there are no features of samples that are read one by one"
        self.batches = batches
        self.features = features
        self.lookup = lookup

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterates over one epoch."""
        batches = self.batches
        samples = batches.samples.to(batches.x.device)
        labels = batches.y[batches.samples.to(batches.y.device)].to(batches.device)
        for places in batches.order().split(batches.batch_size):
            indices = places.to(batches.device)
            self.lookup.update({name: rows[indices] for name, rows in self.features.rows.items()})
            if self.features.parts.reads_input:
                x = batches.x[samples[places.to(samples.device)]].to(batches.device)
            else:
                x = no_input(batches.x, indices.shape).to(batches.device)
            yield x, labels[indices]


class FeatureCache:
    """Computes the features of one phase's clients, and keeps them for later rounds."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, FrozenParts], tuple[Tree, Tensor, Rows]] = {}

    def find(self, training: LocalTraining, client: Client, const: dict[str, Any], samples: Tensor) -> Features | None:
        """The features of a client that begins its local training; None if there are none to look up.

        Args:
            training: the local training of the phase's clients of this architecture.
            client: the client.
            const: the constants of its loss.
            samples: indices of the samples that it trains on.
        """
        pays = training.max_epochs * training.rounds > 1
        datamodule = training.datamodule
        if not pays or datamodule.augmentation or datamodule.reader is not None or not training.frozen_modules:
            return None  # what is read one by one may be changed at random
        device = training.device
        half = training.trainer.get("precision") in ("bf16", "bf16-mixed")
        generators = [device] if device.type == "cuda" else []
        module, const = client.module.to(device), on_device(const, device)
        try:
            # Autocast as in training. A module that draws numbers even in eval mode must not change the client's.
            with torch.random.fork_rng(generators), torch.autocast(device.type, torch.bfloat16, enabled=half):
                parts = find_frozen_parts(training, client, const, samples)
                return None if parts is None else Features(parts, self._rows(training, client, const, samples, parts))
        finally:
            module.cpu()

    def _rows(
        self, training: LocalTraining, client: Client, const: dict[str, Any], samples: Tensor, parts: FrozenParts
    ) -> Rows:
        """The rows of a client; computed again only if the frozen parts or the samples have changed."""
        if training.rounds == 1:
            return compute_rows(training, client, const, samples, parts.names)
        frozen_state = {
            name: tensor
            for name, tensor in client.module.state_dict().items()
            if any(name.startswith(f"{part}.") for part in parts.names)
        }
        kept_state, kept_samples, rows = self._kept.get((client.id, parts), ({}, samples, {}))
        same_state = kept_state.keys() == frozen_state.keys() and all(
            torch.equal(kept_state[name], tensor.cpu()) for name, tensor in frozen_state.items()
        )
        if not same_state or not torch.equal(kept_samples, samples):
            rows = compute_rows(training, client, const, samples, parts.names)
            initial = training.initial
            state = {
                name: initial[name] if torch.equal(initial[name], tensor.cpu()) else tensor.detach().cpu().clone()
                for name, tensor in frozen_state.items()
            }
            self._kept[client.id, parts] = state, samples, rows
        return rows
