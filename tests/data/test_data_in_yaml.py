"""Data modules and partitioners by their bare class names in a YAML."""

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI

from fedmoe_pl.data import (
    CIFAR10,
    Dirichlet,
    FederatedDataModule,
    RandomCrop,
    RandomHorizontalFlip,
)

YAML = """
seed_everything: 0
model: lightning.pytorch.demos.boring_classes.BoringModel
data:
  class_path: CIFAR10
  init_args:
    root: somewhere
    image_size: 24
    mean: [0.5, 0.5, 0.5]
    std: [0.5, 0.5, 0.5]
    num_clients: 100
    partitioner: {class_path: Dirichlet, init_args: {alpha: 0.5}}
    augmentation:
      - {class_path: RandomCrop, init_args: {padding: 2}}
      - RandomHorizontalFlip
"""


# jsonargparse deprecates what lightning 2.6.6 uses
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_yaml_with_bare_class_names_becomes_a_data_module(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])  # LightningCLI warns of arguments besides `args`
    (tmp_path / "run.yaml").write_text(YAML)
    cli = LightningCLI(
        LightningModule,
        FederatedDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=["--config", str(tmp_path / "run.yaml")],
    )
    data = cli.datamodule
    assert isinstance(data, CIFAR10)
    assert (data.root, data.image_size, data.mean, data.requested_clients) == ("somewhere", 24, (0.5, 0.5, 0.5), 100)
    assert isinstance(data.partitioner, Dirichlet) and data.partitioner.alpha == 0.5
    crop, flip = data.augmentation
    assert isinstance(crop, RandomCrop) and isinstance(flip, RandomHorizontalFlip)
    assert (crop.padding, flip.p) == (2, 0.5)
    assert "padding: 2" in cli.parser.dump(cli.config)


PAPERS_YAML = """
seed_everything: 0
model: lightning.pytorch.demos.boring_classes.BoringModel
data:
  class_path: {name}
  init_args:
    root: somewhere
    num_clients: 20
    stratify: true
    pool: true
    test_fraction: 0.2
    global_test_size: 1000
    partitioner: {partitioner}
"""


@pytest.mark.parametrize(
    ("name", "partitioner"),
    [
        ("AGNews", "{class_path: MajorityClasses, init_args: {majority_share: 0.5, pairs: product}}"),
        ("FEMNIST", "{class_path: ClientDirichlet, init_args: {alpha: 0.5, samples_per_client: 500}}"),
        ("CIFAR10", "{class_path: TwoClasses, init_args: {balance: 0.75}}"),
        ("SVHN", "Shards"),
        ("CIFAR100", "{class_path: Pathological, init_args: {classes_per_client: 10, share: dirichlet}}"),
        ("CIFAR10", "{class_path: BalancedDirichlet, init_args: {alpha: 0.5}}"),
        ("CIFAR10", "null\n    rotations: [0, 180]"),
    ],
)
def test_the_papers_data_can_be_written_in_yaml(name, partitioner, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])  # LightningCLI warns of arguments besides `args`
    (tmp_path / "run.yaml").write_text(PAPERS_YAML.format(name=name, partitioner=partitioner))
    made = LightningCLI(
        LightningModule,
        FederatedDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=["--config", str(tmp_path / "run.yaml")],
    ).datamodule
    assert type(made).__name__ == name and (made.stratify, made.pool, made.global_test_size) == (True, True, 1000)
    assert made.partitioner is None or type(made.partitioner).__name__ in partitioner
    assert made.rotations == ([0, 180] if made.partitioner is None else None)
