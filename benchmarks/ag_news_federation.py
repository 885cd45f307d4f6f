"""The half of AG News that ``pretrain_ag_news.py`` leaves to a federation, and its model as a classifier.

    python benchmarks/ag_news_federation.py --data FOLDER_OF_ag_news_tokens.npz --base agnews_base --texts 4000
    PYTHONPATH=benchmarks fedmoe benchmark --config benchmarks/adapters_ag_news_grid.yaml

Writes ``federation.npz`` into the folder of the model: a seeded part of the texts that it has not seen, and test texts.
With ``--newcomers``, ``newcomers.npz`` has other such texts, for clients that come later, and the same test texts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from pretrain_ag_news import tokens_of_texts
from torch import nn

from fedmoe_pl.models import pretrained

CLASSES = 4


def classifier(path: str) -> nn.Module:
    """The pretrained model with a new last layer, which has a bias, as a label prior needs it."""
    model: Any = pretrained(path, arguments={"num_labels": CLASSES})
    model.score = nn.Linear(model.config.hidden_size, CLASSES)
    return model


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of ag_news_tokens.npz")
    parser.add_argument("--base", type=Path, required=True, help="folder of the model")
    parser.add_argument("--texts", type=int, default=4000, help="training texts")
    parser.add_argument("--test", type=int, default=1000, help="test texts")
    parser.add_argument("--newcomers", type=int, default=0, help="training texts of clients that come later")
    args = parser.parse_args()
    data, rng = np.load(args.data / "ag_news_tokens.npz"), np.random.default_rng(0)
    unseen = np.load(args.base / "federation_texts.npy")
    train = rng.choice(unseen, args.texts, replace=False)
    test = _arrays(data, "test", rng.choice(len(data["y_test"]), args.test, replace=False))
    files = {"federation": train}
    if args.newcomers:
        files["newcomers"] = rng.choice(np.setdiff1d(unseen, train), args.newcomers, replace=False)
    for name, texts in files.items():
        np.savez(args.base / f"{name}.npz", **{**_arrays(data, "train", texts), **test})
        print(f"{len(texts)} training and {args.test} test texts: {args.base / name}.npz")


def _arrays(data: Any, part: str, texts: np.ndarray) -> dict[str, Any]:
    """Tokens and classes of some of the training or test texts, by their names in the file."""
    tokens = tokens_of_texts(data[f"{part}_tokens"], data[f"{part}_offsets"])
    return {f"x_{part}": tokens[texts].numpy(), f"y_{part}": data[f"y_{part}"][texts].astype(np.int64)}


if __name__ == "__main__":
    main()
