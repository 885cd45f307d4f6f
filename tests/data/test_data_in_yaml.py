"""Data modules and partitioners by their bare class names in a YAML."""

import pytest
import yaml
from helpers import map_style
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI

from fedmoe_pl.data import FederatedDataModule, FromDataModule, FromDatasets, PredefinedIndices

OWN_YAML = """
seed_everything: 0
model: lightning.pytorch.demos.boring_classes.BoringModel
data:
  class_path: FromDatasets
  init_args:
    train_dataset:
      class_path: torchvision.datasets.FakeData
      init_args: {size: 6, image_size: [3, 4, 4], num_classes: 2, transform: helpers.map_style.to_tensor}
    test_dataset: {class_path: helpers.map_style.Noisy, init_args: {size: 3}}
    targets: targets
    groups: helpers.map_style.users
    collate_fn: helpers.map_style.padded
    num_workers: 1
"""
LIGHTNING_YAML = """
seed_everything: 0
model: lightning.pytorch.demos.boring_classes.BoringModel
data:
  class_path: FromDataModule
  init_args:
    datamodule: {class_path: helpers.map_style.DictData, init_args: {batch_size: 3}}
    targets: label
    test_fraction: 0.5
    partitioner: {class_path: PredefinedIndices, init_args: {indices: helpers.map_style.halves}}
"""


# jsonargparse deprecates what lightning 2.6.6 uses
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_own_data_can_be_written_in_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])  # LightningCLI warns of arguments besides `args`

    def read(text):
        (tmp_path / "run.yaml").write_text(text)
        arguments = {"subclass_mode_model": True, "subclass_mode_data": True, "run": False}
        path = str(tmp_path / "run.yaml")
        cli = LightningCLI(LightningModule, FederatedDataModule, args=["--config", path], **arguments)
        written = yaml.safe_load(cli.parser.dump(cli.config))["data"]["init_args"]  # as in a run's config.yaml
        assert written["targets"] == cli.datamodule.targets
        assert written.get("groups") == (None if cli.datamodule.groups is None else "helpers.map_style.users")
        return cli.datamodule

    datasets = read(OWN_YAML)
    assert isinstance(datasets, FromDatasets) and isinstance(datasets.test_dataset, map_style.Noisy)
    assert (datasets.targets, datasets.groups, datasets.num_workers) == ("targets", map_style.users, 1)
    assert datasets.collate_fn is map_style.padded and datasets.train_dataset[0][0].shape == (3, 4, 4)
    scans = read(LIGHTNING_YAML)
    assert isinstance(scans, FromDataModule) and isinstance(scans.datamodule, map_style.DictData)
    assert isinstance(scans.partitioner, PredefinedIndices) and scans.partitioner.indices is map_style.halves
    assert (scans.targets, scans.groups, scans.test_fraction) == ("label", None, 0.5)
