"""FedRep: Collins, Hassani, Mokhtari, Shakkottai, ICML 2021, Algorithm 1 (https://arxiv.org/abs/2102.07078).

===============  ==============================  ==============================  =======================================
topic            paper                           official code (lgcollins)       here
===============  ==============================  ==============================  =======================================
optimizers       a step of the body after all    one for head and body           one for all epochs of a round; a frozen
                 steps of the head                                               part has no gradient and is not stepped
average          uniform                         uniform, or by samples for      ``weighting``
                                                 FEMNIST
first head       each client's own               initial, or the mean of the     the initial one
                                                 heads if never trained
last round       not mentioned                   trains all heads once more      a phase of ``Local`` that starts from
                                                                                 this one
===============  ==============================  ==============================  =======================================
"""

from __future__ import annotations

from fedmoe_pl.algorithms.algorithm import Algorithm, Weighting
from fedmoe_pl.checks import check_at_least


class FedRep(Algorithm):
    """Averages the body; each client trains first its own head, then the body, each with the other one frozen.

    The head is all that is not shared. Its epochs come first in every round, the phase's ``max_epochs`` counts those of
    head and body together, and must be above ``head_epochs``.

    Args:
        shared: glob patterns of the body's parameters and buffers, which are averaged.
        head_epochs: local epochs of the head; 0 trains the body only.
        weighting: ``samples`` weighs a client by its number of training samples; ``uniform`` gives all clients the same
            weight.
    """

    samples_in_loss_only = True

    def __init__(
        self,
        shared: str | list[str] = "global_expert.extractor.*",
        head_epochs: int = 10,
        weighting: Weighting = "samples",
    ) -> None:
        check_at_least(self, "head_epochs", head_epochs, 0)
        super().__init__(shared, weighting=weighting)
        self.head_epochs = head_epochs

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """Lines 6 to 9: the head in the first epochs, the body in the others."""
        return self.is_shared(name) == (epoch >= self.head_epochs)
