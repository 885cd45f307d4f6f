"""Chooses the fastest backend that gives the right result for a phase."""

from __future__ import annotations

import math

from fedmoe_pl.backends.backend import Backend, Plan
from fedmoe_pl.backends.code_of_user import code_of_user
from fedmoe_pl.backends.stacked import NotStackable, StackedPlan, try_to_stack
from fedmoe_pl.backends.trainer import TrainerPlan
from fedmoe_pl.backends.training import LocalTraining

_MOST_OPERATIONS_ON_CPU = 5 * 10**8  # in a client's step: about 20 ms on one core, of which calls into PyTorch are 10 %


class AutoBackend(Backend):
    """Stacks clients if that is faster than a ``Trainer`` per client and gives the same result; else uses Trainers.

    The choice follows rules, not measured times. On a GPU, stacked clients share kernel launches. On a CPU, they share
    the overhead of calls into PyTorch, which dominates in small linear layers; convolutions gain nothing there. Only
    experts and gates may be code of your own: if you wrote the algorithm, mixture, loss, scheduler or augmentation,
    each client is trained alone. If you know that the loss depends on nothing but parameters, buffers and batch,
    choose :class:`StackedBackend`.
    """

    def plan(self, training: LocalTraining) -> Plan:
        """Chooses a stack if, in this order, all of this holds.

        * On a CPU, nothing that is trained convolves (``LocalTraining.trains_convolutions``).
        * Outside experts and gates, no code of a user runs in the steps (``code_of_user``).
        * Nothing must see a client's batches (``loop.needs_every_batch``), and the module, the algorithm and the
          Trainer have nothing that a stack lacks (``trial.check_without_trial``).
        * In a trial, two stacked clients take the step that each takes alone; on a CPU, it has at most 5e8 operations
          (``trial.try_to_stack``).
        """
        on_cpu = training.device.type == "cpu"
        try:
            if on_cpu and training.trains_convolutions:
                raise NotStackable("convolutions gain nothing from stacking on a CPU")
            if of_user := code_of_user(training):
                because = "auto does not stack; choose StackedBackend if steps depend on tensors and batch alone"
                raise NotStackable(f"{of_user} is code of your own, which {because}")
            trial = try_to_stack(training, _MOST_OPERATIONS_ON_CPU if on_cpu else math.inf)
            if on_cpu and trial.computes_convolutions:
                raise NotStackable("convolutions gain nothing from stacking on a CPU")
        except NotStackable as reason:
            return TrainerPlan(training, f"a Trainer per client ({reason})")
        most = trial.clients_per_stack
        why = "faster, because nothing convolves" if on_cpu else "they share the launches of kernels"
        return StackedPlan(training, f"up to {most} clients stacked in one Trainer ({why})", most)
