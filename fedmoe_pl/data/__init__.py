"""Data sets, partitions over clients, and batches."""

from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.augmentation import Augmentation, RandomCrop, RandomHorizontalFlip
from fedmoe_pl.data.batches import Batches
from fedmoe_pl.data.class_partitions import MajorityClasses, Pathological, Shards, TwoClasses
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.datasets import CIFAR10, CIFAR100, EMNIST, MNIST, SVHN, Digits, FashionMNIST, TorchvisionDataModule
from fedmoe_pl.data.dirichlet_partitions import BalancedDirichlet, ClientDirichlet
from fedmoe_pl.data.files import ImageFolder, NpzFile
from fedmoe_pl.data.leaf import FEMNIST
from fedmoe_pl.data.partition import IID, Dirichlet, NaturalIds, Partitioner
from fedmoe_pl.data.partition_report import partition_figure, partition_table
from fedmoe_pl.data.parts import Parts
from fedmoe_pl.data.text import AGNews

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "FEMNIST",
    "IID",
    "MNIST",
    "SVHN",
    "AGNews",
    "Arrays",
    "Augmentation",
    "BalancedDirichlet",
    "Batches",
    "ClientDirichlet",
    "Digits",
    "Dirichlet",
    "FashionMNIST",
    "FederatedDataModule",
    "ImageFolder",
    "MajorityClasses",
    "NaturalIds",
    "NpzFile",
    "Partitioner",
    "Parts",
    "Pathological",
    "RandomCrop",
    "RandomHorizontalFlip",
    "Shards",
    "TorchvisionDataModule",
    "TwoClasses",
    "partition_figure",
    "partition_table",
]
