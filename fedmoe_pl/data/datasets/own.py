"""Your own data: any map-style datasets of PyTorch, or any LightningDataModule."""

from __future__ import annotations

from collections.abc import Callable, Sized
from itertools import chain, islice
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_kind
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.class_names import join_by_name
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.map_style import WITHOUT_TEST, MapStyleData, check_groups
from fedmoe_pl.data.targets import Samples, Values, classes_of, imported, values_of
from fedmoe_pl.seeds import seeded

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class FromDatasets(FederatedDataModule):
    """Any map-style datasets of PyTorch, such as torchvision's, dealt to clients.

    Samples are read one by one, with their transforms, and batches are what ``collate_fn`` makes of them: pairs of
    inputs and targets, or for a module of your own, dicts or anything else. Random transforms start from a seed of the
    client, the round and the batch, so that results do not depend on the number of processes. A ``TensorDataset`` of
    float32 inputs (or int64 ids of words) and targets is held in memory, which is many times as fast.

    Args:
        train_dataset: the training samples.
        test_dataset: the samples of the global test set; None if ``pool`` is True.
        eval_dataset: the training samples in the same order without random transforms, as they are read for validation
            and local tests; None for ``train_dataset``.
        targets: the class of each sample: the name of an attribute of the datasets or of a key of their samples, or a
            function that gets a dataset and returns them. None for the attribute ``targets`` or ``labels`` or, if
            neither has an integer for each sample, for the second items of the samples, which are then read once.
            Targets that are not one integer for each sample, but numbers, several labels or masks, pass through to the
            model as they are; of dicts, name their key.
        groups: the group of each sample, such as its user or hospital, in one of the same ways; ``NaturalIds`` makes
            one client of each. None for none.
        collate_fn: makes a batch of a list of samples; None for PyTorch's ``default_collate``.
        eval_collate_fn: the same for evaluation, such as without mixing samples at random; None for ``collate_fn``.
        num_workers: number of processes that read samples, for each process that trains; 0 for none.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(
        self,
        train_dataset: Dataset,
        test_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        targets: Values | None = None,
        groups: Values | None = None,
        collate_fn: Callable[[list], Any] | None = None,
        eval_collate_fn: Callable[[list], Any] | None = None,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_at_least(self, "num_workers", num_workers, 0)
        given = {"train_dataset": train_dataset, "test_dataset": test_dataset, "eval_dataset": eval_dataset}
        for name, dataset in given.items():
            is_arrays = isinstance(dataset, tuple) and hasattr(next(iter(dataset), None), "shape")
            if is_arrays or isinstance(dataset, str | DataLoader):
                allowed = "a dataset, such as TensorDataset(x, y); FromDataModule takes what has loaders"
                raise InvalidArgumentError(self, name, dataset, allowed)
        self.train_dataset = train_dataset
        self.test_dataset = test_dataset
        self.eval_dataset = eval_dataset
        self.targets = imported(targets)
        self.groups = imported(groups)
        self.collate_fn = collate_fn
        self.eval_collate_fn = eval_collate_fn
        self.num_workers = num_workers

    def load(self) -> Arrays | MapStyleData:
        """Takes the tensors of a ``TensorDataset``; reads the classes and groups of others."""
        data = MapStyleData(
            self.train_dataset,
            self.test_dataset,
            self.eval_dataset,
            collate_fn=self.collate_fn or default_collate,
            eval_collate_fn=self.eval_collate_fn,
            num_workers=self.num_workers,
        )
        return _with_values(self, data, self.targets, self.groups)


class FromDataModule(FederatedDataModule):
    """A ``LightningDataModule`` of your own, whose training samples are dealt to clients.

    The dataset of its ``train_dataloader`` is dealt, and that of its ``test_dataloader`` or, if it has none, of its
    ``val_dataloader`` is the global test set. The loaders' ``collate_fn`` makes the batches of training and of
    evaluation; batch size, number of workers and ``worker_init_fn`` are those of ``train_dataloader``. Clients shuffle
    their samples themselves and keep last batches that are smaller; samplers that leave samples out are refused, and a
    ``Subset`` takes their place. They validate on the samples that ``validation_fraction`` holds out. What the
    data module draws from the global generators of PyTorch, NumPy and Python to set up and to make loaders, as
    ``random_split`` does, depends only on ``partition_seed``. With a generator of its own, it must split the samples in
    the same way in each ``setup``; another split is noticed only if the samples are tensors in memory or a ``Subset``.
    See :class:`FromDatasets` for random transforms and tensors in memory.

    Args:
        datamodule: the data module.
        eval_dataset: name of the data module's attribute with the training dataset as it is read for validation and
            local tests, without random transforms; None for the one of ``train_dataloader``.
        targets: the class of each sample, see :class:`FromDatasets`.
        groups: the group of each sample, see :class:`FromDatasets`.
        batch_size: samples per batch; None for that of ``train_dataloader``.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(
        self,
        datamodule: LightningDataModule,
        eval_dataset: str | None = None,
        targets: Values | None = None,
        groups: Values | None = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_at_least(self, "batch_size", batch_size, 1)
        check_kind(self, "datamodule", datamodule, LightningDataModule, "; FromDatasets takes datasets")
        self.datamodule = datamodule
        self.eval_dataset = eval_dataset
        self.targets = imported(targets)
        self.groups = imported(groups)
        self._keeps_batch_size = batch_size is not None
        self.batch_size = self.batch_size if batch_size is None else batch_size
        for hook in _TRANSFERS:
            if getattr(type(datamodule), hook) is not getattr(DataHooks, hook):
                reason = "no Trainer of a client calls it; its collate function or the model can do the same"
                raise InvalidArgumentError(self, "datamodule", datamodule, f"one that does not override {hook}", reason)

    def prepare_data(self) -> None:
        """Downloads the data, if the data module does; a copy whose datasets are known has none any more."""
        if not self.is_set_up:
            self.datamodule.prepare_data()

    def load(self) -> Arrays | MapStyleData:
        """Takes the datasets of the data module's loaders."""
        with seeded(self.partition_seed):  # the same samples in every run and process
            self.datamodule.setup("fit")
        train = self._loader("train_dataloader")
        if not _keeps_all_samples(train):
            allowed = "one whose train_dataloader has no sampler of its own, and a batch_size"
            reason = "each client shuffles its own samples; a torch.utils.data.Subset can choose some"
            raise InvalidArgumentError(self, "datamodule", self.datamodule, allowed, reason)
        if self._overrides("test_dataloader"):
            with seeded(self.partition_seed):
                self.datamodule.setup("test")
        given = [name for name in ("test_dataloader", "val_dataloader") if self._overrides(name)]
        if not (given or self.pool):
            allowed = f"one with a test_dataloader or a val_dataloader, or any {WITHOUT_TEST}"
            raise InvalidArgumentError(self, "datamodule", self.datamodule, allowed)
        test = self._loader(given[0]) if given else None
        if test is not None and (number := _num_common_samples(train.dataset, test.dataset)):
            again = self._loader("train_dataloader")
            if _num_common_samples(again.dataset, test.dataset) < number:  # setup("test") has drawn another split
                train = again
        with seeded(self.partition_seed):  # a sampler may draw at random
            has_all = test is None or _has_each_sample_once(test)
        if not has_all:
            allowed = f"one whose {given[0]} has a sampler that gives each sample once, or none"
            reason = "all samples of its dataset are evaluated; a torch.utils.data.Subset can choose some"
            raise InvalidArgumentError(self, "datamodule", self.datamodule, allowed, reason)
        if self.eval_dataset is not None and not hasattr(self.datamodule, self.eval_dataset):
            allowed = f"an attribute of {type(self.datamodule).__name__}, with its training dataset"
            raise InvalidArgumentError(self, "eval_dataset", self.eval_dataset, allowed)
        batch_size = getattr(train.batch_sampler, "batch_size", None) if train.batch_size is None else train.batch_size
        if not self._keeps_batch_size and batch_size is not None:
            self.batch_size = batch_size
        data = MapStyleData(
            train.dataset,
            None if test is None else test.dataset,
            None if self.eval_dataset is None else getattr(self.datamodule, self.eval_dataset),
            collate_fn=train.collate_fn,
            eval_collate_fn=None if test is None else test.collate_fn,
            num_workers=train.num_workers,
            worker_init_fn=train.worker_init_fn,
        )
        return _with_values(self, data, self.targets, self.groups)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the data module, once its datasets are known: it may refer to what cannot be sent to a process."""
        return {**vars(self), "datamodule": None} if self.is_set_up else vars(self)

    def _overrides(self, name: str) -> bool:
        return getattr(type(self.datamodule), name) is not getattr(DataHooks, name) or name in vars(self.datamodule)

    def _loader(self, name: str) -> DataLoader:
        with seeded(self.partition_seed):  # it may split a dataset, too
            loaders: Any = getattr(self.datamodule, name)()
        given = loaders if isinstance(loaders, (list, tuple)) else [loaders]
        if len(given) != 1 or not isinstance(given[0], DataLoader):
            kinds = ", ".join("None" if each is None else type(each).__name__ for each in given)
            allowed, reason = f"one whose {name} gives one DataLoader", f"it gives {kinds or 'none'}"
            raise InvalidArgumentError(self, "datamodule", self.datamodule, allowed, reason)
        return given[0]


def _num_common_samples(one: Any, other: Any) -> int:
    """How many different samples two datasets share, if they are tensors in memory or parts of a dataset.

    Each of two parts may have read the dataset anew. Of other datasets, nobody knows: 0.
    """
    if isinstance(one, Subset) and isinstance(other, Subset):
        wholes: list[Any] = [one.dataset, other.dataset]
        is_same = type(wholes[0]) is type(wholes[1]) and len(wholes[0]) == len(wholes[1])
        return len({*one.indices} & {*other.indices}) if is_same else 0
    if (tensors := _tensors(one)) is None or (others := _tensors(other)) is None:
        return 0
    rows = (x.detach().unsqueeze(1).flatten(1).contiguous() for x, _ in (tensors, others))
    mine, theirs = (x.view(torch.uint8).numpy() for x in rows)  # NumPy has no bfloat16
    return len({sample.tobytes() for sample in theirs}.intersection(sample.tobytes() for sample in mine))


def _keeps_all_samples(loader: DataLoader) -> bool:
    """Whether an epoch has each sample once, in the order of the dataset or any order."""
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else batches  # loader.sampler may be another one
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        return False
    return isinstance(sampler, RandomSampler | SequentialSampler) and len(sampler) == len(cast(Sized, loader.dataset))


def _has_each_sample_once(loader: DataLoader) -> bool:
    """Whether a loader for evaluation has all samples, in the order of any sampler, such as one by length."""
    dataset: Any = loader.dataset
    if not hasattr(dataset, "__len__"):
        return True  # a stream, which is refused for that
    batches = loader.batch_sampler
    if batches is None:
        indices = loader.sampler
    else:  # not those that drop_last leaves out, which are evaluated
        indices = batches.sampler if type(batches) is BatchSampler else chain.from_iterable(batches)
    drawn = [*islice(indices, len(dataset) + 1)]  # it may have no end
    return len(drawn) == len(dataset) and {*drawn} == {*range(len(dataset))}


def _with_values(
    owner: FederatedDataModule, data: MapStyleData, targets: Values | None, groups: Values | None
) -> Arrays | MapStyleData:
    """Completes datasets by the classes and groups of their samples; tensors in memory become arrays."""
    datasets = {"train": data.train_dataset, "test": data.test_dataset}
    for part, dataset in datasets.items():
        if dataset is not None and not hasattr(dataset, "__len__"):
            reason = "samples are dealt to clients by their number, which a stream does not have"
            raise InvalidArgumentError(owner, f"{part}_dataset", type(dataset).__name__, "one with a length", reason)
    samples = {
        part: Samples(owner, dataset, (targets, groups)) for part, dataset in datasets.items() if dataset is not None
    }
    ids = {} if groups is None else {part: values_of(its, "groups", groups) for part, its in samples.items()}
    for part, of_samples in ids.items():
        check_groups(owner, groups, of_samples, part, len(of_samples))
    data.client_train, data.client_test = ids.get("train"), ids.get("test")
    if targets is None and (arrays := _arrays(data, owner.pool)) is not None:
        return arrays
    data.target_key = targets if isinstance(targets, str) else None
    classes = [classes_of(its, targets) for its in samples.values()]
    known = [part for part in classes if part is not None]
    if 0 < len(known) < len(classes):
        with_classes, without = ("train", "test") if classes[1] is None else ("test", "train")
        rank_zero_warn(
            f"{type(owner).__name__}: only the targets of {with_classes}_dataset are classes (an integer for each "
            f"sample), and not those of {without}_dataset, so no accuracies are computed."
        )
    if len(known) == len(classes):
        data.classes = torch.cat(known)
        data.check(owner, needs_test=not owner.pool)
        join_by_name(owner, data)
    return data


def _arrays(data: MapStyleData, pool: bool) -> Arrays | None:
    """The data as arrays, if they are tensors in memory that need no change; None if they are not."""
    train, test = _tensors(data.train_dataset), _tensors(data.test_dataset)
    if train is None or data.eval_dataset is not None:
        return None
    if any(collate not in (None, default_collate) for collate in (data.collate_fn, data.eval_collate_fn)):
        return None
    if test is None and not (pool and data.test_dataset is None):
        return None
    test = test or (train[0][:0], train[1][:0])
    x, y = train
    as_they_are = x.dtype == torch.float32 or (x.dtype == torch.int64 and x.dim() == 2)
    if not as_they_are or x.shape[1:] != test[0].shape[1:] or y.dim() == 0:
        return None
    return Arrays(x, y, *test, data.client_train, data.client_test)


def _tensors(dataset: Any) -> tuple[Tensor, Tensor] | None:
    """The inputs and targets of a dataset that holds them as two tensors on the CPU; None for others."""
    if type(dataset) is Subset and (tensors := _tensors(dataset.dataset)) is not None:
        x, y = (tensor[torch.as_tensor(dataset.indices, dtype=torch.int64)] for tensor in tensors)
        return x, y
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        x, y = dataset.tensors
        return (x, y) if x.device.type == y.device.type == "cpu" else None
    return None
