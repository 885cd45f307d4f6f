"""The five networks of pFedMoE."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from fedmoe_pl.models.experts.expert import Expert


class CNN(Expert):
    """CNN-1 to CNN-5 of pFedMoE (Yi et al. 2024, https://arxiv.org/abs/2402.01350).

    In all five, the ``extractor`` gives a representation of 500 values, and the ``classifier`` is pFedMoE's header.
    CNN-4 has the paper's widths, although they do not match the model size in the paper.

    Args:
        variant: 1 to 5 for CNN-1 to CNN-5, with 2,621,558, 1,815,142, 1,320,558, 1,060,358 and 670,058 parameters.
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.
    """

    _WIDTHS: ClassVar = {1: (32, 2000), 2: (16, 2000), 3: (32, 1000), 4: (32, 800), 5: (32, 500)}  # of conv2 and fc1

    def __init__(self, variant: int = 1, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__(locals())
        self.input_shape = (in_channels, 32, 32)
        channels, hidden = self._WIDTHS[variant]
        self.extractor = nn.Sequential(
            nn.Conv2d(in_channels, 16, 5),  # (B, 16, 28, 28)
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, channels, 5),  # (B, channels, 10, 10)
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),  # (B, channels * 25)
            nn.Linear(channels * 25, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 500),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(500, num_classes)
