"""Any LightningDataModule."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.core.hooks import DataHooks
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from fedmoe_pl.checks import InvalidArgumentError, check_at_least
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.datasets.from_datasets import with_values
from fedmoe_pl.data.map_style import MapStyleData, is_map_style
from fedmoe_pl.data.targets import Values, imported, reason_of
from fedmoe_pl.seeds import seeded

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class FromDataModule(FederatedDataModule):
    """A ``LightningDataModule`` of your own, whose training samples are dealt to clients.

    The dataset of its ``train_dataloader`` is dealt, and that of its ``test_dataloader`` or, if it has none, of its
    ``val_dataloader`` is the global test set. The loaders' ``collate_fn`` makes the batches of training and of
    evaluation; batch size, number of workers and ``worker_init_fn`` are those of ``train_dataloader``. Clients shuffle
    their samples themselves and keep last batches that are smaller. They validate on the samples that
    ``validation_fraction`` holds out. What ``setup`` draws at random, such as ``random_split``, depends only on
    ``partition_seed``. See :class:`FromDatasets` for random transforms and tensors in memory.

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
        self._set_up("fit")
        train = self._loader("train_dataloader")
        assert train is not None
        if self._overrides("test_dataloader"):
            self._set_up("test")
        test = self._loader("test_dataloader")
        if test is None:
            test = self._loader("val_dataloader")
        if not self._keeps_batch_size and train.batch_size is not None:
            self.batch_size = train.batch_size
        data = MapStyleData(
            train.dataset,
            None if test is None else test.dataset,
            None if self.eval_dataset is None else getattr(self.datamodule, self.eval_dataset),
            collate_fn=train.collate_fn,
            eval_collate_fn=None if test is None else test.collate_fn,
            num_workers=train.num_workers,
            worker_init_fn=train.worker_init_fn,
        )
        return with_values(self, data, self.targets, self.groups)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the data module, once its datasets are known: it may refer to what cannot be sent to a process."""
        return {**vars(self), "datamodule": None} if self.is_set_up else vars(self)

    def _set_up(self, stage: str) -> None:
        try:
            with seeded(self.partition_seed):  # the same samples in every run and process
                self.datamodule.setup(stage)
        except Exception as error:  # whatever a user's data module raises
            allowed = f"one whose setup('{stage}') works without a Trainer"
            raise InvalidArgumentError(self, "datamodule", self.datamodule, allowed, reason_of(error)) from error

    def _overrides(self, name: str) -> bool:
        return getattr(type(self.datamodule), name) is not getattr(DataHooks, name) or name in vars(self.datamodule)

    def _loader(self, name: str) -> DataLoader | None:
        """The data module's loader; None if it has none, except for training."""
        if not self._overrides(name) and name != "train_dataloader":
            return None
        loader = getattr(self.datamodule, name)() if self._overrides(name) else None
        if isinstance(loader, (list, tuple)) and len(loader) == 1:
            loader = loader[0]
        if not isinstance(loader, DataLoader):
            allowed = f"one whose {name} returns one DataLoader of a map-style dataset"
            raise InvalidArgumentError(self, "datamodule", self.datamodule, allowed)
        if name == "train_dataloader" and is_map_style(loader.dataset) and not _keeps_all_samples(loader):
            allowed = f"one whose {name} has no sampler of its own, and a batch_size"
            reason = "each client shuffles its own samples; a torch.utils.data.Subset can choose some"
            raise InvalidArgumentError(self, "datamodule", self.datamodule, allowed, reason)
        return loader


def _keeps_all_samples(loader: DataLoader) -> bool:
    """Whether an epoch has each sample once."""
    sampler = loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return isinstance(sampler, SequentialSampler)
