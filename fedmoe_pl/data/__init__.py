"""Data sets, partitions over clients, and batches."""

from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.augmentation import Augmentation, RandomCrop, RandomHorizontalFlip
from fedmoe_pl.data.batches import Batches
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.datasets import CIFAR10, CIFAR100, EMNIST, MNIST, SVHN, Digits, FashionMNIST, TorchvisionDataModule
from fedmoe_pl.data.files import ImageFolder, NpzFile
from fedmoe_pl.data.partition import IID, Dirichlet, NaturalIds, Partitioner
from fedmoe_pl.data.partition_report import partition_figure, partition_table
from fedmoe_pl.data.parts import Parts

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "IID",
    "MNIST",
    "SVHN",
    "Arrays",
    "Augmentation",
    "Batches",
    "Digits",
    "Dirichlet",
    "FashionMNIST",
    "FederatedDataModule",
    "ImageFolder",
    "NaturalIds",
    "NpzFile",
    "Partitioner",
    "Parts",
    "RandomCrop",
    "RandomHorizontalFlip",
    "TorchvisionDataModule",
    "partition_figure",
    "partition_table",
]
