"""Data sets, their partition among clients, and batches."""

from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.augmentation import Augmentation, RandomCrop, RandomHorizontalFlip
from fedmoe_pl.data.batches import EVALUATED_AT_ONCE, Batches, PoissonBatches, SampleBatches, Share, poisson_sampling
from fedmoe_pl.data.client_names import ClientNames
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.datasets.ag_news import AGNews
from fedmoe_pl.data.datasets.csv_file import CsvFile
from fedmoe_pl.data.datasets.femnist import FEMNIST
from fedmoe_pl.data.datasets.folders import ClientFolders, ImageFolder
from fedmoe_pl.data.datasets.images import ImageDataModule
from fedmoe_pl.data.datasets.npz import NpzFile
from fedmoe_pl.data.datasets.own import FromDataModule, FromDatasets
from fedmoe_pl.data.datasets.scikit_learn import Diabetes, Digits
from fedmoe_pl.data.datasets.synthetic import SyntheticMultilabel, SyntheticShapes
from fedmoe_pl.data.datasets.time_series import SyntheticTimeSeries, TimeSeriesDataModule, TimeSeriesFile
from fedmoe_pl.data.datasets.torchvision import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    MNIST,
    SVHN,
    FashionMNIST,
    TorchvisionDataModule,
)
from fedmoe_pl.data.map_style import MapStyleData, batch_length, is_pair
from fedmoe_pl.data.partition_report import partition_rows, partition_table
from fedmoe_pl.data.partitioners.classes import MajorityClasses, Pathological, Shards, TwoClasses
from fedmoe_pl.data.partitioners.dirichlet import BalancedDirichlet, ClientDirichlet, Dirichlet
from fedmoe_pl.data.partitioners.given import NaturalIds, PredefinedIndices
from fedmoe_pl.data.partitioners.partitioner import IID, Partitioner

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "EVALUATED_AT_ONCE",
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
    "ClientFolders",
    "ClientNames",
    "ClientSamples",
    "CsvFile",
    "Diabetes",
    "Digits",
    "Dirichlet",
    "FashionMNIST",
    "FederatedDataModule",
    "FromDataModule",
    "FromDatasets",
    "ImageDataModule",
    "ImageFolder",
    "MajorityClasses",
    "MapStyleData",
    "NaturalIds",
    "NpzFile",
    "Partitioner",
    "Pathological",
    "PoissonBatches",
    "PredefinedIndices",
    "RandomCrop",
    "RandomHorizontalFlip",
    "SampleBatches",
    "Shards",
    "Share",
    "SyntheticMultilabel",
    "SyntheticShapes",
    "SyntheticTimeSeries",
    "TimeSeriesDataModule",
    "TimeSeriesFile",
    "TorchvisionDataModule",
    "TwoClasses",
    "batch_length",
    "is_pair",
    "partition_rows",
    "partition_table",
    "poisson_sampling",
]
