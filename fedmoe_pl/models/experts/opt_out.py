"""The networks of Listo Zec et al."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedmoe_pl.models.experts.expert import Expert
from fedmoe_pl.models.layers import pooled_size, two_convolutions


class TwoConvCNN(Expert):
    """LeNet-5 with dropout (Listo Zec et al. 2020, https://arxiv.org/abs/2010.02056).

    It has 62,006 parameters for CIFAR-10 and 44,426 for Fashion-MNIST; there, the official code has the widths 6, 12,
    84 and 42. With ``num_classes=1``, in a ``NetworkGate``, it is the paper's gate.

    Args:
        in_channels: channels of the input, shape (B, in_channels, image_size, image_size).
        num_classes: number of outputs.
        image_size: height and width of the input in pixels; 28 for Fashion-MNIST.
        dropout: dropout probability after the first linear layer, in the official code but not in the paper.
        conv1_channels: width of the first convolution.
        conv2_channels: width of the second convolution.
        hidden1: width of the first linear layer.
        hidden2: width of the second linear layer.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int = 32,
        dropout: float = 0.5,
        conv1_channels: int = 6,
        conv2_channels: int = 16,
        hidden1: int = 120,
        hidden2: int = 84,
    ) -> None:
        super().__init__(locals())
        size = pooled_size(image_size)
        self.input_shape = (in_channels, image_size, image_size)
        self.extractor = two_convolutions(in_channels, conv1_channels, conv2_channels)
        self.classifier = nn.Sequential(
            nn.Linear(conv2_channels * size**2, hidden1),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden1, hidden2),
            nn.ReLU(),
            nn.Linear(hidden2, num_classes),
        )


class BiLSTM(Expert):
    """Bidirectional LSTM for AG News (Listo Zec et al. 2020); 1,085,708 parameters.

    It reads padding like any other token. With ``num_classes=1``, in a ``NetworkGate``, it is the paper's gate.

    Args:
        vocabulary_size: number of token ids, including those for unknown words and padding.
        embedding_dim: size of a token's embedding.
        hidden: units of the LSTM in each direction; the extractor gives twice as many features.
        num_classes: number of outputs.

    Attributes:
        input_dtype: token ids, shape (B, L), are int64; L may differ from batch to batch.
    """

    input_dtype = torch.int64

    def __init__(
        self, vocabulary_size: int = 10_002, embedding_dim: int = 100, hidden: int = 64, num_classes: int = 4
    ) -> None:
        super().__init__(locals())
        self.input_shape = (1,)
        self.extractor = _LastStates(vocabulary_size, embedding_dim, hidden)
        self.classifier = nn.Linear(2 * hidden, num_classes)


class _LastStates(nn.Module):
    """A bidirectional LSTM's final states: the forward one after the last token, the backward one after the first."""

    def __init__(self, vocabulary_size: int, embedding_dim: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding_dim)
        self.lstm = nn.LSTM(embedding_dim, hidden, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, 2 * hidden) of token ids (B, L)."""
        _, (states, _) = self.lstm(self.embedding(x))  # (2, B, hidden)
        return torch.cat((states[0], states[1]), dim=1)
