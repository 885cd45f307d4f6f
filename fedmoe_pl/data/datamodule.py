"""The base of all data modules: a data set divided among clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_kind, is_finite
from fedmoe_pl.data.arrays import NO_LABEL, Arrays, are_classes, mean_and_std, normalized
from fedmoe_pl.data.augmentation import Augmentation, RandomCrop, RandomHorizontalFlip
from fedmoe_pl.data.batches import EVALUATED_AT_ONCE, Batches, SampleBatches
from fedmoe_pl.data.client_names import ClientNames
from fedmoe_pl.data.client_samples import (
    ClientSamples,
    balanced_subset,
    joined,
    natural_test_samples,
    pooled_ids,
    split,
)
from fedmoe_pl.data.loaders import loader
from fedmoe_pl.data.map_style import DatasetBatches, MapStyleData, SampleReader
from fedmoe_pl.data.partitioners.given import AllToOne, NaturalIds
from fedmoe_pl.data.partitioners.partitioner import IID, Partitioner, check_parts
from fedmoe_pl.data.rotation import check_rotations, rotated
from fedmoe_pl.data.targets import quantile_bins

_OF_IMAGES = (RandomCrop, RandomHorizontalFlip)  # an augmentation of the user's own may change anything


class FederatedDataModule(LightningDataModule, ABC):
    """A data set and its partition among clients; derive from it and write ``load`` to use your own data.

    The data are tensors in memory, which is the fast way, or map-style datasets, whose samples are read one by one. It
    also works in a plain Lightning ``Trainer``, with the samples of all clients together in a ``DataLoader``. The
    partition and each client's split depend only on ``partition_seed``, not on the seed of a run. Samples that the
    partitioner gives to no client are not used.

    Args:
        num_clients: number of clients; None if the data have client ids.
        partitioner: deals the training samples; None for ``NaturalIds`` if the data have client ids, else ``IID``.
        batch_size: samples per batch.
        test_fraction: share of each client's samples that is held out as its local test set, in [0, 1).
        validation_fraction: share of each client's samples that is held out for validation, in [0, 1).
        augmentation: changes of the training images, applied in this order.
        partition_seed: seed of the partition.
        stratify: whether each class of a client is split separately into training, validation and test, so that all
            three have the client's shares of the classes, up to rounding. With a fraction of 0.2, a class with one or
            two samples is used for training only.
        pool: whether the data's own test samples are dealt to the clients together with the training samples; the
            global test set then consists of all samples that the clients hold out as ``test_fraction``.
        global_test_size: number of samples of the global test set, chosen at random, equally many of each class; None
            for all.
        rotations: one angle for each group of clients, in degrees: 0, 90, 180 or 270, counterclockwise. Each group
            divides among its clients all training images, and all test images as local test samples, rotated by its
            angle. The global test set has each test image in every rotation. None for no rotations, and with ``pool``.
        target_bins: number of bins of a target that is one number for each sample. Edges between bins are quantiles of
            the training targets, so that all bins have as many of them. Partitioners and ``stratify`` take the bins for
            classes. None for data with classes, or partitioners that need none.

    Attributes:
        x: all samples, the training samples followed by the test samples, shape (m, ...): normalized float32, or int64
            ids of words. Samples that are read one by one have none.
        y: their classes, int64, shape (m,), -100 for none; or other targets, shape (m, ...). If samples are read one by
            one, only batches have other targets, and the shape is (m, 0).
        num_classes: number of classes; 0 if the targets are not one class for each sample.
        reader: reads the samples one by one; None for samples in memory.
        bins: bin of each sample's target, int64, shape (m,), see ``target_bins``; None without it.
        num_clients: number of clients.
        client_names: what they are called, in the order of their numbers: their names in the data or, without any, the
            numbers as texts.
        train_samples: indices into ``x``, one tensor per client, see :class:`ClientSamples`.
        validation_samples: the same, held out for validation; may be empty.
        test_samples: the same, each client's local test set; may be empty.
        global_test: indices of the global test set.
        num_shared: number of samples that the partitioner could deal, the first ones of ``x``.
        dealt_by: the partitioner that has dealt the samples.
        class_shares: share of each class in each client's training and validation samples, float64,
            shape (num_clients, num_classes).
        normalization: mean and standard deviation of each channel of images; None for other data. If ``load`` gives
            none, set it before ``setup`` to use another federation's.
        vocabulary: words of texts in the order of their ids; None for other data. Set it before ``setup`` to use
            another federation's.
        classes: names of the classes in the order of their labels; None if the data have labels only. Set it before
            ``setup`` to use another federation's.
        columns: names of a sample's numbers, in their order; None if they have none.
        files: the file of each sample in ``x``; None if samples have none of their own.
        learn_from: the training samples that normalization and vocabulary are computed from, shape (n,); None for all.
            A federation with data that opt out sets it between ``deal`` and ``setup``.
        has_learned: whether one of them was computed from training samples.
        is_set_up: whether ``setup`` was called.
        black: value of a black pixel in ``x``, shape (channels, 1, 1); 0 for data that are not normalized.

    Raises:
        MisconfigurationException: if an argument is out of range; in ``setup``, if the data cannot be read or cannot be
            dealt as the arguments ask.
    """

    x: Tensor
    y: Tensor
    black: Tensor
    num_classes: int
    num_clients: int
    client_names: ClientNames
    num_shared: int
    dealt_by: Partitioner
    train_samples: ClientSamples
    validation_samples: ClientSamples
    test_samples: ClientSamples
    global_test: Tensor
    class_shares: Tensor
    withheld: Collection[str] = ()  # metrics that clients on other machines do not report
    _data: Arrays | MapStyleData  # between ``deal`` and ``setup``

    def __init__(
        self,
        num_clients: int | None = None,
        partitioner: Partitioner | None = None,
        batch_size: int = 10,
        test_fraction: float = 0.0,
        validation_fraction: float = 0.0,
        augmentation: list[Augmentation] | None = None,
        partition_seed: int = 0,
        stratify: bool = False,
        pool: bool = False,
        global_test_size: int | None = None,
        rotations: list[int] | None = None,
        target_bins: int | None = None,
    ) -> None:
        super().__init__()
        check_at_least(self, "batch_size", batch_size, 1)
        check_at_least(self, "global_test_size", global_test_size, 1)
        check_at_least(self, "partition_seed", partition_seed, 0, highest=None)
        for name, value in (("batch_size", batch_size), ("partition_seed", partition_seed)):
            if value is None:  # NumPy would draw another partition in every run
                raise InvalidArgumentError(self, name, value, "an integer")
        for name, fraction, most in (
            ("test_fraction", test_fraction, 1.0),
            ("validation_fraction", validation_fraction, 1 - (test_fraction or 0)),
        ):
            if not (is_finite(fraction) and 0 <= fraction < most):
                raise InvalidArgumentError(self, name, fraction, f"at least 0 and below {most:g}", "clients must train")
        check_kind(type(self).__name__, "partitioner", partitioner, Partitioner, ", such as IID()")
        check_rotations(self, rotations, partitioner, pool)
        self.requested_clients = num_clients
        self.partitioner = partitioner
        self.batch_size = batch_size
        self.test_fraction = test_fraction
        self.validation_fraction = validation_fraction
        self.augmentation = list(augmentation or [])
        self.partition_seed = partition_seed
        self.stratify = stratify
        self.pool = pool
        self.global_test_size = global_test_size
        self.rotations = None if rotations is None else list(rotations)
        self.target_bins = target_bins
        self.normalization: tuple[list[float], list[float]] | None = None
        self.vocabulary: list[str] | None = None
        self.classes: list[str] | None = None
        self.columns: list[str] | None = None
        self.files: list[str] | None = None
        self.learn_from: Tensor | None = None
        self.has_learned = self.is_set_up = False
        self.reader: SampleReader | None = None
        self.bins: Tensor | None = None

    @abstractmethod
    def load(self) -> Arrays | MapStyleData:
        """Reads the data set from disk; downloads belong in ``prepare_data``."""

    def deal(self) -> None:
        """Reads the data set and divides it among the clients, the first step of ``setup``; may be called before it."""
        if hasattr(self, "class_shares"):
            return
        data = self.load()
        if not isinstance(data, Arrays | MapStyleData):
            raise InvalidArgumentError(self, "what load returns", data, "Arrays or MapStyleData")
        data.check(self, needs_test=not self.pool)
        rng = np.random.default_rng(np.random.SeedSequence(self.partition_seed))
        if isinstance(data, MapStyleData):
            for name in ("augmentation", "rotations"):
                if value := getattr(self, name):
                    reason = "it changes tensors in memory; a transform of the dataset can do it"
                    raise InvalidArgumentError(self, name, value, "left out", reason)
        elif data.x_train.dim() != 4 and (wrong := [a for a in self.augmentation if isinstance(a, _OF_IMAGES)]):
            raise InvalidArgumentError(self, "augmentation", wrong[0], "left out for samples that are not images")
        elif self.rotations is not None:
            n, copies = data.sizes[0], len(self.rotations)
            data = rotated(self, data, self.rotations, self.requested_clients, rng)
            # in the order of rotation.py's _copies
            self.files = self.files and self.files[:n] * copies + self.files[n:] * copies
        self.y = data.targets
        self.num_classes = max(int(self.y.max()) + 1, len(self.classes or ())) if are_classes(self.y) else 0
        self.num_shared = len(self.y) if self.pool else data.sizes[0]
        if self.target_bins is not None:
            self.bins = quantile_bins(self, self.y, data.sizes[0], self.target_bins)
        self._deal(data, rng)
        self._choose_global_test()
        self._data, counts = data, self.class_counts()
        self.class_shares = counts / counts.sum(dim=1, keepdim=True)

    def setup(self, stage: str | None = None) -> None:
        """Reads, deals and normalizes the data; a second call does nothing.

        Args:
            stage: ignored; Lightning passes the type of run.
        """
        if self.is_set_up:
            return
        self.deal()
        if isinstance(data := self._data, MapStyleData):
            self.reader = SampleReader(self, data)
        else:
            samples = self.learn_from
            self.learn(data, None if samples is None else samples[samples < data.sizes[0]])
            self.x, self.black = normalized(data)
        del self._data
        self.is_set_up = True

    def learn(self, arrays: Arrays, samples: Tensor | None) -> None:
        """Completes the arrays by what some training samples, indices (n,), tell: mean and deviation of images.

        They come from ``load``, another federation or the images, in this order.
        """
        if not arrays.is_images:
            return
        if arrays.mean is None and self.normalization is not None:
            arrays.mean, arrays.std = self.normalization
        elif arrays.mean is None:
            arrays.mean, arrays.std = mean_and_std(arrays.x_train if samples is None else arrays.x_train[samples])
            self.has_learned = True
        assert arrays.mean is not None and arrays.std is not None
        self.normalization = list(arrays.mean), list(arrays.std)

    def _deal(self, data: Arrays | MapStyleData, rng: np.random.Generator) -> None:
        """Deals the samples to the clients and splits each client's samples."""
        ids = pooled_ids(self, data) if self.pool else data.client_train
        partitioner = self.partitioner or (IID() if ids is None else NaturalIds())
        labels = self.y if self.num_classes else self.bins
        for name, value, needs_classes in (
            ("partitioner", partitioner, partitioner.needs_classes),
            ("stratify", self.stratify, self.stratify),
        ):
            if needs_classes and labels is None:
                because = "the targets are not one class per sample; target_bins makes classes of numbers"
                raise InvalidArgumentError(self, name, value, "left out", because)
        labels = torch.zeros(len(self.y), dtype=torch.int64) if labels is None else labels
        if partitioner.needs_classes and (labels == NO_LABEL).any():
            because = f"some training samples have no label ({NO_LABEL})"
            allowed = "one that does not look at classes, such as IID, NaturalIds or PredefinedIndices"
            raise InvalidArgumentError(self, "partitioner", partitioner, allowed, because)
        self.dealt_by = partitioner
        dealt = partitioner(labels[: self.num_shared].numpy(), self.requested_clients, rng, ids)
        parts = [np.asarray(part) for part in (dealt.values() if isinstance(dealt, Mapping) else dealt)]
        check_parts(partitioner, "what it returns", dealt, parts, self.num_shared)
        self.client_names = ClientNames(dealt) if isinstance(dealt, Mapping) else ClientNames.numbers(len(parts))
        self.client_names.check(self)
        sizes = np.array([len(part) for part in parts])
        if not sizes.all() and not isinstance(partitioner, AllToOne):
            client = self.client_names[sizes.argmin()]
            reason = f"{type(partitioner).__name__} gives client {client} of {len(parts)} no training samples"
            reason += "; another partition_seed may help, too"
            raise InvalidArgumentError(self, "num_clients", self.requested_clients, "lower", reason)
        if self.requested_clients not in (None, len(sizes)) and not isinstance(partitioner, AllToOne):
            allowed = f"an array of indices for each of {self.requested_clients} clients"
            raise InvalidArgumentError(partitioner, "what it returns", dealt, allowed, f"it has {len(sizes)}")
        self.num_clients = len(sizes)
        samples = np.concatenate(parts).astype(np.int64, copy=False)
        lacks = labels.numpy()[samples] == NO_LABEL
        lacking = np.bincount(np.arange(len(sizes)).repeat(sizes)[lacks], minlength=len(sizes))
        if len(alone := np.flatnonzero((lacking == sizes) & lacks.any() & (sizes > 0))):
            because = f"client {self.client_names[alone[0]]} has none"
            allowed = "one that gives each client a sample with a label"
            raise InvalidArgumentError(self, "partitioner", partitioner, allowed, because)
        unlabelled, samples, sizes = samples[lacks], samples[~lacks], sizes - lacking
        of_class = labels.numpy() if self.stratify else None
        train, self.validation_samples, self.test_samples = self.split_clients(samples, sizes, of_class)
        self.train_samples = joined(train, ClientSamples(*map(torch.from_numpy, (unlabelled, lacking))))
        for name, part in (("test_fraction", self.test_samples), ("validation_fraction", self.validation_samples)):
            if (fraction := getattr(self, name)) and not part.sizes.any() and not isinstance(partitioner, AllToOne):
                because = f"it rounds to no sample for any client; the largest one has {sizes.max()}"
                raise InvalidArgumentError(self, name, fraction, "larger, or 0", because)
        if isinstance(partitioner, NaturalIds) and data.client_test is not None and not self.pool:
            self.test_samples = natural_test_samples(self, data, self.test_fraction)

    def split_clients(
        self, samples: np.ndarray, sizes: np.ndarray, labels: np.ndarray | None
    ) -> tuple[ClientSamples, ClientSamples, ClientSamples]:
        """Splits every client's samples into training, validation and test; override it to split them by other rules.

        Args:
            samples: indices into ``x`` of the clients' samples, one client after another, shape (n,), without those
                that have no label, which are always training samples.
            sizes: number of samples of each client, shape (num_clients,).
            labels: class or bin of each sample in ``x``, shape (m,), with ``stratify``; otherwise None.
        """
        return split(samples, sizes, self.test_fraction, self.validation_fraction, self.partition_seed, labels)

    def _choose_global_test(self) -> None:
        """Sets the global test set: of pooled samples, what the clients hold out."""
        self.global_test = torch.arange(self.num_shared, len(self.y))
        if self.pool:
            self.global_test = self.test_samples.indices.sort().values
            if not len(self.global_test):
                raise InvalidArgumentError(
                    self, "test_fraction", self.test_fraction, "higher", "no client holds out a sample"
                )
        if self.global_test_size is not None:
            samples, seed = self.global_test, self.partition_seed
            labels = self.y[samples] if self.num_classes else torch.zeros(len(samples), dtype=torch.int64)
            self.global_test = balanced_subset(self, samples, labels, self.global_test_size, seed)

    def class_counts(self) -> Tensor:
        """Each client's number of training and validation samples of each class, float64, (clients, classes)."""
        return self._counts(self.y, self.num_classes)

    def labelled(self, samples: Tensor) -> Tensor:
        """Those of some samples, indices (n,), that have a label: all, if the targets are no classes."""
        return samples[(self.y[samples] != NO_LABEL).to(samples.device)] if self.num_classes else samples

    def bin_counts(self) -> Tensor:
        """The same of each bin of ``target_bins``, float64, (clients, bins); there are no bins without it."""
        return self._counts(self.y, 0) if self.bins is None else self._counts(self.bins, int(self.bins.max()) + 1)

    def _counts(self, labels: Tensor, number: int) -> Tensor:
        """Each client's number of training and validation samples with each label, float64, (clients, number)."""
        if not number:
            return torch.zeros(self.num_clients, 0, dtype=torch.float64)
        counts = torch.zeros(self.num_clients * number, dtype=torch.int64)
        for parts in (self.train_samples, self.validation_samples):
            first_cells = torch.arange(0, len(counts), number)
            of_parts = labels[parts.indices]
            cells = first_cells.repeat_interleave(parts.sizes).add_(of_parts)[of_parts != NO_LABEL]
            counts += torch.bincount(cells, minlength=len(counts))
        return counts.view(self.num_clients, number).double()

    @property
    def has_pairs(self) -> bool:
        """Whether batches are pairs of inputs and targets, as those of samples in memory are."""
        return self.reader is None or self.reader.has_pairs

    @property
    def evaluated_at_once(self) -> int:
        """Samples in a batch for evaluation."""
        return EVALUATED_AT_ONCE if self.reader is None else self.reader.evaluated_at_once

    def augment(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """Applies the augmentations, in their order, to normalized samples.

        Args:
            x: samples, shape (n, channels, height, width).
            generator: source of randomness; None for PyTorch's global one.
        """
        for augmentation in self.augmentation:
            x = augmentation(x, generator, self.black.to(x.device))
        return x

    def batches(
        self,
        samples: Tensor,
        batch_size: int | None = None,
        generator: Generator | None = None,
        augment: bool = False,
        drop_single: bool = False,
        device: torch.device | None = None,
    ) -> SampleBatches:
        """Returns batches of some samples.

        Args:
            samples: indices into ``x``.
            batch_size: samples per batch; None for that of the data module.
            generator: for shuffling every epoch and random changes of samples; None for the order of ``samples``.
            augment: whether to augment or, if samples are read one by one, to read them as for training.
            drop_single: whether to leave out a last batch of one sample, if it is not the only batch.
            device: the device of the batches; None for that of the data.
        """
        size = self.batch_size if batch_size is None else batch_size
        shuffle = generator is not None
        if self.reader is not None:
            device = torch.device("cpu") if device is None else device
            return DatasetBatches(self.reader, augment, samples, size, shuffle, generator, drop_single, device)
        augmented = self.augment if augment and self.augmentation else None
        return Batches(self.x, self.y, samples, size, shuffle, generator, augmented, drop_single, device)

    def train_dataloader(self) -> DataLoader:
        """Returns shuffled, augmented batches of all clients' training samples, for a plain Trainer."""
        return loader(self, self.train_samples.indices, training=True)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Returns batches of all clients' validation samples; an empty list if none are held out."""
        samples = self.validation_samples.indices
        return loader(self, samples) if len(samples) else []

    def test_dataloader(self) -> DataLoader:
        """Returns batches of the global test set."""
        return loader(self, self.global_test)

    predict_dataloader = test_dataloader
