"""The recurrent network of Listo Zec et al."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedmoe_pl.checks import check_sizes


class BiLSTM(nn.Module):
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
        super().__init__()
        check_sizes(
            self, vocabulary_size=vocabulary_size, embedding_dim=embedding_dim, hidden=hidden, num_classes=num_classes
        )
        self.vocabulary_size = vocabulary_size
        self.embedding_dim = embedding_dim
        self.hidden = hidden
        self.num_classes = num_classes
        self.input_shape = (1,)
        self.extractor = _LastStates(vocabulary_size, embedding_dim, hidden)
        self.classifier = nn.Linear(2 * hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes) of token ids (B, L)."""
        return self.classifier(self.extractor(x))


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
