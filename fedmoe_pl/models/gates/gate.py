"""The base of all gates: for every sample, a gate computes the weights of the experts.

A gate returns weights of shape (B, experts) that are at least 0 and add up to 1. Global experts always come first and
the local one last, whatever the order in a paper: of two experts, index 0 is the global one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from fedmoe_pl.models.layers import draw_anew


class Gate(nn.Module, ABC):
    """The base of all gates.

    Attributes:
        reads_features: whether the gate reads the features of the global expert's extractor instead of the input.
    """

    reads_features: bool = False

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Weights of shape (B, experts), the local expert's last.

        Args:
            x: the input (B, ...), or the features (B, F) if ``reads_features`` is set.
        """

    def reset_parameters(self) -> None:
        """Draws new initial parameters for all layers, as PFL-MoE does for every client."""
        for part in self.children():
            draw_anew(part)
