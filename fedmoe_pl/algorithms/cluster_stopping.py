"""Early stopping of single clusters (Isaksson et al. 2022).

The server holds for each of J clusters whether it is active, bool (J,); its lowest validation loss, float64 (J,); and
the number of checks since then, int64 (J,).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedmoe_pl.algorithms.clusters import cluster_of
from fedmoe_pl.trees import Tree, of_module

ACTIVE = "clusters/active"
"""Name of the tensor that says which clusters have not stopped."""
BEST = "clusters/best/"
"""Prefix of a tensor's name: the tensor when its cluster had the lowest validation loss."""
_BEST_LOSS, _WAITED = "clusters/best_loss", "clusters/checks_without_improvement"


def all_active(clusters: int) -> Tree:
    """The server's tensors for a number of clusters that have not been validated yet."""
    return {
        ACTIVE: torch.ones(clusters, dtype=torch.bool),
        _BEST_LOSS: torch.full((clusters,), math.inf, dtype=torch.float64),
        _WAITED: torch.zeros(clusters, dtype=torch.int64),
    }


def stop_clusters(server: Tree, updated: Tree, tally: Tensor, patience: int) -> Tree:
    """Stops clusters that no longer improve, and restores their best parameters.

    Args:
        server: the server's state before the round, with the models that clients validated.
        updated: its state after the round.
        tally: the round's tallies, (J, 4).
        patience: number of checks without a lower loss.
    """
    validated = tally[:, 3] > 0
    losses = (tally[:, 2] / tally[:, 3]).where(validated, math.inf)
    better = losses < server[_BEST_LOSS]
    waited = (server[_WAITED] + validated).where(~better, 0)
    stopped = server[ACTIVE] & (waited >= patience)
    models = of_module(server)
    updated |= {BEST + name: models[name] for name in models if better[cluster_of(name)]}
    updated |= {name: updated.get(BEST + name, updated[name]) for name in models if stopped[cluster_of(name)]}
    return updated | {
        ACTIVE: server[ACTIVE] & ~stopped,
        _BEST_LOSS: losses.where(better, server[_BEST_LOSS]),
        _WAITED: waited,
    }
