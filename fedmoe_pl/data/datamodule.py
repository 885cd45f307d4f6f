"""Who holds which samples of a data set in memory, as a LightningDataModule."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from torch import Generator, Tensor

from fedmoe_pl.data.arrays import Arrays, normalized
from fedmoe_pl.data.augmentation import Augmentation
from fedmoe_pl.data.batches import Batches
from fedmoe_pl.data.partitioners.iid import IID
from fedmoe_pl.data.partitioners.natural_ids import NaturalIds
from fedmoe_pl.data.partitioners.partitioner import Partitioner
from fedmoe_pl.data.parts import Parts
from fedmoe_pl.data.rotation import check_rotations, rotated
from fedmoe_pl.data.splits import balanced_subset, natural_test_samples, pooled_ids, split


class FederatedDataModule(LightningDataModule, ABC):
    """A data set in memory and who holds what of it; derive from it and write ``load`` for data of your own.

    It also serves a plain Lightning ``Trainer``, with the pooled samples of all clients. The partition and every
    client's own splits depend on ``partition_seed`` alone, never on the seed of a run. Samples that the partitioner
    leaves with nobody are not used.

    Args:
        num_clients: number of clients; None if the data have client ids of their own.
        partitioner: who gets which training samples; None for ``NaturalIds`` if the data have ids, else ``IID``.
        batch_size: samples per batch.
        test_fraction: share of each client's samples that is held out as its own local test set, in [0, 1).
        validation_fraction: share of each client's samples that is held out for validation, in [0, 1).
        augmentation: changes of the training images, applied in this order.
        partition_seed: seed of the partition.
        stratify: whether each class of a client is split by itself into training, validation and test, so that all
            three have the client's shares of the classes, but for rounding: at 0.2 a class of one or two samples is for
            training only.
        pool: whether the data's own test samples are shared out among the clients together with the training samples;
            the global test set is then what all clients hold out as ``test_fraction`` (METHODS 5.6).
        global_test_size: number of random samples that the global test set is cut to, of each class equally many; None
            for all (METHODS 6.2).
        rotations: angles of groups of clients, in degrees: 0, 90, 180 or 270, counterclockwise. Each group shares all
            images, turned by its angle, among its clients, and the test images likewise as their own test samples; the
            global test set has each test image in every rotation (METHODS 5.8). None leaves images as they are.

    Attributes:
        x: all samples, the training samples followed by the test samples, shape (m, ...): normalized float32, or int64
            ids of words.
        y: their classes, int64, shape (m,).
        num_classes: number of classes.
        num_clients: number of clients.
        train_samples: indices into ``x``, one tensor per client, see :class:`Parts`.
        validation_samples: the same, held out for validation; may be empty.
        test_samples: the same, the client's own test samples; may be empty.
        global_test: indices of the global test set.
        num_shared: number of samples that were there to be shared out, the first ones of ``x``.
        class_shares: share of each class in each client's training and validation samples, float64,
            shape (num_clients, num_classes).
        normalization: mean and standard deviation of each channel that images are normalized with; set it before
            ``setup`` to those of another federation's data, where the data's own are not given. None for other data.
        vocabulary: words in the order of their ids, where the data are texts that are split into words; set it before
            ``setup`` to that of another federation's data. None for other data.
        black: what a black pixel is in ``x``, shape (channels, 1, 1); 0 for data that came as floating point.

    Raises:
        MisconfigurationException: for arguments outside their range; in ``setup`` for data that cannot be read or
            cannot be shared out like this.
    """

    x: Tensor
    y: Tensor
    black: Tensor
    num_classes: int
    num_clients: int
    num_shared: int
    train_samples: Parts
    validation_samples: Parts
    test_samples: Parts
    global_test: Tensor
    class_shares: Tensor

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
    ) -> None:
        super().__init__()
        if num_clients is not None:
            _check_at_least("num_clients", num_clients, 1)
        _check_at_least("batch_size", batch_size, 1)
        _check_at_least("partition_seed", partition_seed, 0)
        _check_fractions(test_fraction, validation_fraction, pool)
        if global_test_size is not None:
            _check_at_least("global_test_size", global_test_size, 1)
        if rotations is not None and not isinstance(partitioner, NaturalIds | None):
            raise MisconfigurationException(
                f"data.init_args.partitioner is {type(partitioner).__name__}, but must be null with "
                "data.init_args.rotations, which say who gets which images."
            )
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
        self.rotations = check_rotations(rotations)
        self.normalization: tuple[list[float], list[float]] | None = None
        self.vocabulary: list[str] | None = None

    @abstractmethod
    def load(self) -> Arrays:
        """Read the data set from disk; downloads belong into ``prepare_data``."""

    def setup(self, stage: str | None = None) -> None:
        """Read, normalize and share out the data; a second call does nothing.

        Args:
            stage: ignored; Lightning passes the kind of run.
        """
        if hasattr(self, "class_shares"):
            return
        arrays = self.load()
        arrays.check(needs_test=not self.pool)
        rng = np.random.default_rng(np.random.SeedSequence(self.partition_seed))
        if self.rotations is not None:
            arrays = rotated(arrays, self.rotations, self.requested_clients, rng)
        if self.augmentation and arrays.x_train.dim() != 4:
            raise MisconfigurationException(
                "data.init_args.augmentation needs images of shape (n, channels, height, width), "
                f"but the samples have shape {tuple(arrays.x_train.shape)}."
            )
        if arrays.is_images and arrays.mean is None:
            if self.normalization is None:
                arrays.compute_normalization()
            else:
                arrays.mean, arrays.std = self.normalization
        if arrays.mean is not None and arrays.std is not None:
            self.normalization = list(arrays.mean), list(arrays.std)
        self.x, self.black = normalized(arrays)
        self.y = torch.cat((arrays.y_train, arrays.y_test)).long()
        self.num_classes = int(self.y.max()) + 1
        self.num_shared = len(self.x) if self.pool else len(arrays.x_train)
        self._share_out(arrays, rng)
        self._choose_global_test()
        counts = self.class_counts()
        self.class_shares = counts / counts.sum(dim=1, keepdim=True)

    def _share_out(self, arrays: Arrays, rng: np.random.Generator) -> None:
        ids = pooled_ids(arrays) if self.pool else arrays.client_train
        partitioner = self.partitioner or (IID() if ids is None else NaturalIds())
        parts = partitioner(self.y[: self.num_shared].numpy(), self.requested_clients, rng, ids)
        sizes = np.array([len(part) for part in parts])
        if not sizes.all():
            raise MisconfigurationException(
                f"data.init_args.partitioner: {type(partitioner).__name__} leaves client {sizes.argmin()} of "
                f"{len(parts)} without training samples; lower data.init_args.num_clients"
                f"{_alpha_advice(partitioner)} or change data.init_args.partition_seed."
            )
        self.num_clients = len(parts)
        samples = np.concatenate(parts).astype(np.int64, copy=False)
        del parts  # as large as ``samples``
        natural_test = isinstance(partitioner, NaturalIds) and arrays.client_test is not None and not self.pool
        if natural_test and self.test_fraction > 0:
            raise MisconfigurationException(
                f"data.init_args.test_fraction is {self.test_fraction}, but must be 0 here: "
                "the data bring test samples of every client."
            )
        labels = self.y.numpy() if self.stratify else None
        self.train_samples, self.validation_samples, self.test_samples = split(
            samples, sizes, self.test_fraction, self.validation_fraction, self.partition_seed, labels
        )
        if natural_test:
            self.test_samples = natural_test_samples(arrays)

    def _choose_global_test(self) -> None:
        self.global_test = torch.arange(self.num_shared, len(self.x))
        if self.pool:
            self.global_test = self.test_samples.indices.sort().values
            if not len(self.global_test):
                raise MisconfigurationException(
                    f"data.init_args.test_fraction is {self.test_fraction}, which leaves no client a test sample; "
                    "raise it or lower data.init_args.num_clients."
                )
        if self.global_test_size is not None:
            labels = self.y[self.global_test]
            self.global_test = balanced_subset(self.global_test, labels, self.global_test_size, self.partition_seed)

    def class_counts(self) -> Tensor:
        """Count each class in each client's training and validation samples.

        Returns:
            Counts as float64, shape (num_clients, num_classes).
        """
        counts = torch.zeros(self.num_clients * self.num_classes, dtype=torch.int64)
        for parts in (self.train_samples, self.validation_samples):
            first_cells = torch.arange(0, len(counts), self.num_classes)
            cells = first_cells.repeat_interleave(parts.sizes).add_(self.y[parts.indices])
            counts += torch.bincount(cells, minlength=len(counts))
        return counts.view(self.num_clients, self.num_classes).double()

    def augment(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """Apply the augmentations, in their order, to normalized samples.

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
    ) -> Batches:
        """Return batches of some samples.

        Args:
            samples: indices into ``x``.
            batch_size: samples per batch; None for that of the data module.
            generator: shuffles every epoch, and augments; None for the order of ``samples``.
            augment: whether to augment.
            drop_single: whether to leave out a last batch of one sample, where it is not the only batch.
            device: where the batches are needed; None leaves them where the data are.
        """
        return Batches(
            self.x,
            self.y,
            samples,
            self.batch_size if batch_size is None else batch_size,
            shuffle=generator is not None,
            generator=generator,
            augment=self.augment if augment and self.augmentation else None,
            drop_single=drop_single,
            device=device,
        )

    def train_dataloader(self) -> Batches:
        """Return shuffled, augmented batches of all clients' training samples, for a plain Trainer."""
        augment = self.augment if self.augmentation else None
        return Batches(self.x, self.y, self.train_samples.indices, self.batch_size, shuffle=True, augment=augment)

    def val_dataloader(self) -> Batches | list[Batches]:
        """Return batches of all clients' validation samples; no loader if none are held out."""
        samples = self.validation_samples.indices
        return self.batches(samples) if len(samples) else []

    def test_dataloader(self) -> Batches:
        """Return batches of the global test set."""
        return self.batches(self.global_test)

    def predict_dataloader(self) -> Batches:
        """Return batches of the global test set."""
        return self.batches(self.global_test)


def _check_at_least(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise MisconfigurationException(
            f"data.init_args.{name} is {value}, but must be an integer of at least {lowest}."
        )


def _check_fractions(test_fraction: float, validation_fraction: float, pool: bool) -> None:
    for name, fraction in (("test_fraction", test_fraction), ("validation_fraction", validation_fraction)):
        if not 0 <= fraction < 1:
            raise MisconfigurationException(f"data.init_args.{name} is {fraction}, but must be in [0, 1).")
    if test_fraction + validation_fraction >= 1:
        raise MisconfigurationException(
            f"data.init_args.test_fraction ({test_fraction}) and data.init_args.validation_fraction "
            f"({validation_fraction}) must add up to less than 1, so that samples remain for training."
        )
    if pool and test_fraction == 0:
        raise MisconfigurationException(
            "data.init_args.pool is true, but data.init_args.test_fraction is 0; it must be above 0, because the "
            "samples that the clients hold out are the test set."
        )


def _alpha_advice(partitioner: Partitioner) -> str:
    alpha = getattr(partitioner, "alpha", None)
    return "" if alpha is None else f", raise data.init_args.partitioner.init_args.alpha above {alpha}"
