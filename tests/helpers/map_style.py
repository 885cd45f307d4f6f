"""Map-style datasets, a LightningDataModule with dict batches, and a module that reads these."""

import random

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import FakeData
from torchvision.transforms import v2

TO_TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


def images(size=24, transforms=(), offset=0):
    """Random images of shape (3, 6, 6) in three classes, with random transforms."""
    return FakeData(size, (3, 6, 6), 3, v2.Compose([*TO_TENSOR, *transforms]), random_offset=offset)


class Noisy(Dataset):
    """Sample i is the number i, disturbed by the three global random generators; its class is i % 3."""

    def __init__(self, size: int, noise: float = 1.0):
        self.targets = [index % 3 for index in range(size)]
        self.noise = noise

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        drawn = torch.rand(3) + torch.as_tensor(np.random.rand(3)) + random.random()
        return index + self.noise * drawn.float(), self.targets[index]


class Dicts(Dataset):
    """Samples are dicts of a sequence of words of its own length, a label and a user."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"words": [1 + index % 5] * (1 + index % 4), "label": index % 2, "user": f"user {index % 3}"}


def padded(samples):
    """Batches that differ with their longest sequence, and hold what is not a tensor."""
    words = nn.utils.rnn.pad_sequence([torch.tensor(sample["words"]) for sample in samples], batch_first=True)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"words": words, "label": labels, "users": [sample["user"] for sample in samples]}


to_tensor = v2.Compose(TO_TENSOR)


def users(dataset):
    return [index % 3 for index in range(len(dataset))]


def halves(labels):
    return np.array_split(np.arange(len(labels)), 2)


class DictData(LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.arguments = {"batch_size": batch_size, "collate_fn": padded}

    def setup(self, stage):
        if stage == "fit":
            self.training = Dicts(22)
        else:
            self.testing = Dicts(10)

    def train_dataloader(self):
        return DataLoader(self.training, shuffle=True, **self.arguments)

    def test_dataloader(self):
        return DataLoader(self.testing, batch_size=5, collate_fn=padded)


class Words(LightningModule):
    """Reads dicts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.EmbeddingBag(6, 4, padding_idx=0)
        self.head = nn.Linear(4, 2)

    def forward(self, batch):
        return self.head(self.embedding(batch["words"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class WordModel(Words):
    """With a training step of its own."""

    def training_step(self, batch, batch_idx):
        assert isinstance(batch["users"], list)
        return nn.functional.cross_entropy(self(batch), batch["label"])


class WordLoss(Words):
    """With the loss that algorithms build on."""

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch), batch["label"]), {}
