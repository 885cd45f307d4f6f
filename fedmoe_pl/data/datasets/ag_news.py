"""AG News, and functions that turn texts into ids of words."""

from __future__ import annotations

import csv
import gzip
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datamodule import FederatedDataModule

PAD, UNKNOWN = 0, 1  # ids of padding and of words outside the vocabulary
_FIRST_WORD = 2
_SPACES = str.maketrans(";:", "  ", '"')


class AGNews(FederatedDataModule):
    """AG News: 120,000 training and 7,600 test texts; classes world, sports, business, science (Zhang et al. 2015).

    It is read from the official ``train.csv`` and ``test.csv``, or from ``train.csv.gz`` and ``test.csv.gz``. These
    have no header, and the columns are class (1 to 4), title and description. A text is its title followed by its
    description. Samples are int64 ids of words: 0 is padding, 1 is any word outside the vocabulary, and the words of
    the vocabulary follow, the most frequent first. An embedding therefore needs ``vocabulary_size + 2`` rows.

    Args:
        root: folder with the files.
        vocabulary_size: number of words in the vocabulary, the most frequent ones of the training texts.
        length: number of words that a text is cut or padded to; 95 % of the training texts have at most 65.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(self, root: str = "data", vocabulary_size: int = 10_000, length: int = 64, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.vocabulary_size = vocabulary_size
        self.length = length
        self._texts: tuple[list[list[str]], list[list[str]]] = [], []  # of training and test, until they have ids

    def load(self) -> Arrays:
        """Reads the files; ``learn`` looks up the ids of the words when the vocabulary is known."""
        (train, y_train), (test, y_test) = (_read(self.root, part) for part in ("train", "test"))
        self._texts = train, test
        return Arrays(to_ids(train, {}, 0), y_train, to_ids(test, {}, 0), y_test)

    def learn(self, arrays: Arrays, samples: Tensor | None) -> None:
        """Makes the vocabulary from some training texts unless there is one, and looks up the words' ids."""
        train, test = self._texts
        if self.vocabulary is None:
            counted = train if samples is None else [train[i] for i in samples.tolist()]
            self.vocabulary = [*vocabulary(counted, self.vocabulary_size)]
            self.has_learned = True
        ids = {word: i for i, word in enumerate(self.vocabulary, start=_FIRST_WORD)}
        arrays.x_train, arrays.x_test = (to_ids(texts, ids, self.length) for texts in (train, test))
        self._texts = [], []


def tokenize(text: str) -> list[str]:
    """Splits a text into words in lower case; each of the characters . , ( ) ! ? and ' counts as a word.

    Quotation marks are removed; semicolons and colons become spaces. Except for "<br />", it does the same as
    torchtext's ``basic_english``.

    Example:
        >>> tokenize('Oil prices: "Too high" (again), say U.S. experts!')
        ['oil', 'prices', 'too', 'high', '(', 'again', ')', ',', 'say', 'u', '.', 's', '.', 'experts', '!']
    """
    return re.findall(r"[.,()!?']|[^\s.,()!?']+", text.lower().translate(_SPACES))


def vocabulary(texts: Iterable[list[str]], size: int) -> dict[str, int]:
    """The ids, from 2, of the ``size`` most frequent words by frequency; ties are in alphabetical order."""
    counts = Counter(word for text in texts for word in text)
    words = sorted(counts, key=lambda word: (-counts[word], word))[:size]
    return {word: i for i, word in enumerate(words, start=_FIRST_WORD)}


def to_ids(texts: list[list[str]], ids: dict[str, int], length: int) -> Tensor:
    """The ids of each text's words, cut or padded to a length, int64, shape (texts, length)."""
    x = torch.full((len(texts), length), PAD)
    for row, text in zip(x.numpy(), texts, strict=True):
        cut = text[:length]
        row[: len(cut)] = [ids.get(word, UNKNOWN) for word in cut]
    return x


def _read(root: str, part: str) -> tuple[list[list[str]], Tensor]:
    """Returns the words of every text of one file, and the classes from 0."""
    path = os.path.join(root, f"{part}.csv")
    compressed = not os.path.isfile(path)
    path += ".gz" if compressed else ""
    with (gzip.open if compressed else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file))
    texts, labels = [], []
    for number, row in enumerate(rows, start=1):
        if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
            columns = "a folder with files of three columns: class (1 to 4), title and description"
            raise InvalidArgumentError("AGNews", "root", root, columns, f"row {number} of '{path}' is {row}"[:300])
        texts.append(tokenize(f"{row[1]} {row[2]}"))
        labels.append(int(row[0]) - 1)
    return texts, torch.tensor(labels, dtype=torch.int64)
