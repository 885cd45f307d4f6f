"""Texts as ids of words."""

from __future__ import annotations

import csv
import gzip
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.datasets.images import READ_ERRORS

PAD, UNKNOWN = 0, 1  # ids of what fills up short texts, and of words outside the vocabulary
_FIRST_WORD = 2
_SPACES = str.maketrans(";:", "  ", '"')


class AGNews(FederatedDataModule):
    """AG News: 120,000 and 7,600 news texts in 4 classes: world, sports, business, science (Zhang et al. 2015).

    Read from the official ``train.csv`` and ``test.csv``, or the same compressed as ``train.csv.gz`` and
    ``test.csv.gz``, with the columns class (1 to 4), title and description and no header. A text is its title followed
    by its description. Samples are ids of words, int64: 0 fills up short texts, 1 is every word outside the vocabulary,
    and the words of the vocabulary follow, by falling frequency. An embedding thus needs ``vocabulary_size + 2`` rows.

    Args:
        root: folder that holds the files.
        vocabulary_size: number of words in the vocabulary, the most frequent ones of the training texts.
        length: words that a text is cut to or filled up to; 95 % of the training texts have at most 65.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(self, root: str = "data", vocabulary_size: int = 10_000, length: int = 64, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, value in (("vocabulary_size", vocabulary_size), ("length", length)):
            if value < 1:
                raise MisconfigurationException(
                    f"data.init_args.{name} is {value}, but must be an integer of at least 1."
                )
        self.root = root
        self.vocabulary_size = vocabulary_size
        self.length = length

    def load(self) -> Arrays:
        """Read the files, count the words unless there is a vocabulary, and look up their ids."""
        (train, y_train), (test, y_test) = (_read(self.root, part) for part in ("train", "test"))
        if self.vocabulary is None:
            self.vocabulary = [*vocabulary(train, self.vocabulary_size)]
        ids = {word: i for i, word in enumerate(self.vocabulary, start=_FIRST_WORD)}
        return Arrays(to_ids(train, ids, self.length), y_train, to_ids(test, ids, self.length), y_test)


def tokenize(text: str) -> list[str]:
    """Split a text into words in lower case; the signs . , ( ) ! ? and ' are words of their own.

    The same as torchtext's ``basic_english``, but for "<br />": quotation marks go, semicolons and colons are spaces.

    Example:
        >>> tokenize('Oil prices: "Too high" (again), say U.S. experts!')
        ['oil', 'prices', 'too', 'high', '(', 'again', ')', ',', 'say', 'u', '.', 's', '.', 'experts', '!']
    """
    return re.findall(r"[.,()!?']|[^\s.,()!?']+", text.lower().translate(_SPACES))


def vocabulary(texts: Iterable[list[str]], size: int) -> dict[str, int]:
    """Return the ids of the most frequent words, from 2 by falling frequency; equally frequent ones by alphabet.

    Args:
        texts: words of each text.
        size: number of words; fewer if the texts have fewer.

    Example:
        >>> vocabulary([["b", "c", "a"], ["c"]], 2)
        {'c': 2, 'a': 3}
    """
    counts = Counter(word for text in texts for word in text)
    words = sorted(counts, key=lambda word: (-counts[word], word))[:size]
    return {word: i for i, word in enumerate(words, start=_FIRST_WORD)}


def to_ids(texts: list[list[str]], ids: dict[str, int], length: int) -> Tensor:
    """Look up the words of each text, and cut it or fill it up to a length.

    Args:
        texts: words of each text.
        ids: id of each word of the vocabulary.
        length: words per text.

    Returns:
        Ids, int64, shape (len(texts), length).

    Example:
        >>> to_ids([["c", "x"], ["a", "c", "c", "a"]], {"c": 2, "a": 3}, 3).tolist()
        [[2, 1, 0], [3, 2, 2]]
    """
    x = torch.full((len(texts), length), PAD)
    for row, text in zip(x.numpy(), texts, strict=True):
        cut = text[:length]
        row[: len(cut)] = [ids.get(word, UNKNOWN) for word in cut]
    return x


def _read(root: str, part: str) -> tuple[list[list[str]], Tensor]:
    """Return the words of every text of one file, and the classes from 0."""
    path = os.path.join(root, f"{part}.csv")
    key = f"data.init_args.root: '{root}'"
    compressed = not os.path.isfile(path)
    path += ".gz" if compressed else ""
    if not os.path.isfile(path):
        raise MisconfigurationException(
            f"{key} holds neither {part}.csv nor {part}.csv.gz ('{os.path.abspath(root)}'), the files of AG News."
        )
    try:
        with (gzip.open if compressed else open)(path, "rt", encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (*READ_ERRORS, csv.Error) as error:
        raise MisconfigurationException(f"{key}: '{path}' cannot be read as a CSV file ({error}).") from error
    texts, labels = [], []
    for number, row in enumerate(rows, start=1):
        if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
            raise MisconfigurationException(
                f"{key}: row {number} of '{path}' has {len(row)} columns and begins with '{row[0] if row else ''}', "
                "but must have three: class (1 to 4), title and description."
            )
        texts.append(tokenize(f"{row[1]} {row[2]}"))
        labels.append(int(row[0]) - 1)
    return texts, torch.tensor(labels, dtype=torch.int64)
