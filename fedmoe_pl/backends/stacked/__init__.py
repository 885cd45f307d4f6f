"""Trains many clients in one Trainer by stacking their parameters and mapping the loss over them."""

from fedmoe_pl.backends.stacked.stacked_backend import StackedBackend, StackedPlan
from fedmoe_pl.backends.stacked.trial import NotStackable, Trial, try_to_stack

__all__ = ["NotStackable", "StackedBackend", "StackedPlan", "Trial", "try_to_stack"]
