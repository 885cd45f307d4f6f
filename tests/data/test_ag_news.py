"""AG News: words, vocabulary and files that the tests write."""

import csv
import gzip

import pytest
import torch
from helpers.data import set_up

from fedmoe_pl.data import AGNews
from fedmoe_pl.data.datasets.ag_news import to_ids, tokenize, vocabulary


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("You can now install TorchText using pip!", "you can now install torchtext using pip !"),  # torchtext's own
        ("Fed's  \tmove (again), at U.S. rates?", "fed ' s move ( again ) , at u . s . rates ?"),
        ('He said: "No"; then left...', "he said no then left . . ."),
        ("AP - 3.5% #39;s a-b &lt;b&gt;", "ap - 3 . 5% #39 s a-b &lt b&gt"),
        ("", ""),
        (" ;:", ""),
    ],
)
def test_texts_are_split_into_words_like_basic_english(text, words):
    assert tokenize(text) == words.split()


def test_the_vocabulary_is_what_is_most_frequent_and_equally_frequent_words_go_by_alphabet():
    texts = [tokenize(text) for text in ("b a b", "c a b", "d c")]
    assert vocabulary(texts, 10) == {"b": 2, "a": 3, "c": 4, "d": 5}
    assert vocabulary(texts, 2) == {"b": 2, "a": 3}
    assert to_ids(texts, vocabulary(texts, 2), 2).tolist() == [[2, 3], [1, 3], [1, 1]]
    assert to_ids(texts, vocabulary(texts, 3), 4).tolist() == [[2, 3, 2, 0], [4, 3, 2, 0], [1, 4, 0, 0]]


def write_csv(path, rows, opened=open):
    with opened(path, "wt", encoding="utf-8-sig", newline="") as file:  # as Excel writes it
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)


TRAIN = [(3, "Oil up", "Oil, again"), (1, "Talks", "oil talks"), (4, "Ünder", "the sea")]


TEST = [(2, "Oil", 'the "goal"')]


@pytest.mark.parametrize("compressed", [False, True])
def test_ag_news_files_become_ids_of_the_most_frequent_training_words(compressed, tmp_path):
    for part, rows in (("train", TRAIN), ("test", TEST)):
        name = f"{part}.csv.gz" if compressed else f"{part}.csv"
        write_csv(tmp_path / name, rows, gzip.open if compressed else open)
    data = set_up(AGNews(root=str(tmp_path), vocabulary_size=3, length=4, num_clients=2))
    # oil 3 times, talks 2 times, and of the words that are there once "," comes first
    assert data.x.tolist() == [[2, 1, 2, 4], [3, 2, 3, 0], [1, 1, 1, 0], [2, 1, 1, 0]]
    assert data.x.dtype == torch.int64 and data.y.tolist() == [2, 0, 3, 1]
    assert data.global_test.tolist() == [3] and data.num_classes == 4
