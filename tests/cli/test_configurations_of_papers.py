"""Every configuration of a paper's data set names what there is and, shortened, runs a round of each phase."""

import copy
import re

import pytest
import torch
import yaml
from helpers.configurations import CONFIGURATIONS, REPOSITORY, files_of, printed, run_short

from fedmoe_pl import Federation
from fedmoe_pl.cli import main
from fedmoe_pl.data import CIFAR10, AGNews, Arrays, FashionMNIST

PAPERS = [path for path in CONFIGURATIONS if yaml.safe_load(path.read_text())["data"]["class_path"] != "Digits"]
# These differ from a faster one in their data or widths alone.
SIMILAR = {
    *("adaptive_experts_cifar10", "adaptive_experts_rotated_cifar10", "fedmoe_da_emnist", "fedmoe_da_mnist"),
    *("fedmoe_da_svhn", "opt_out_cifar10", "pfedmoe_cifar100"),
}


@pytest.mark.parametrize("path", [path for path in PAPERS if path.stem in SIMILAR], ids=lambda path: path.stem)
def test_configurations_that_are_not_run_name_what_there_is(path):
    config = printed(path)
    assert config["federation"]["name"] == path.stem
    assert config["federation"]["phases"] and config["model"]["class_path"].startswith("fedmoe_pl.")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in SIMILAR else []) for path in PAPERS],
    ids=lambda path: path.stem,
)
def test_every_configuration_of_a_paper_runs_one_round(path, tmp_path, capfd):
    run_short(path, tmp_path, capfd)


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_every_configuration_is_readable(path):
    text = path.read_text()
    assert files_of(path)[-1] == str(path), "the command at the top runs this file"
    assert max(len(line) for line in text.splitlines()) <= 120
    anchors, aliases = re.findall(r"[ -]&(\w+)", text), re.findall(r"\*(\w+)", text)
    assert set(anchors) <= set(aliases), "every anchor is used"
    assert re.search(r"https://arxiv\.org/abs/\d{4}\.\d{5}", text), "the paper has a link"


@pytest.mark.parametrize(
    ("stem", "data", "classes", "size", "for_training", "columns"),
    [
        ("opt_out_cifar10", CIFAR10, 10, 50_000, 100, (0.3, 0.6, 0.7, 0.8, 1.0)),
        ("opt_out_fmnist", FashionMNIST, 10, 60_000, 100, (0.3, 0.6, 0.7, 0.8, 1.0)),
        ("opt_out_agnews", AGNews, 4, 120_000, 100, (0.5, 0.7, 0.8, 0.9, 1.0)),
    ],
)
def test_majority_samples_have_their_share_of_every_clients_training_samples(
    stem, data, classes, size, for_training, columns, monkeypatch
):
    """On arrays with as many samples and classes as the data set, with each p of the paper's tables."""
    y = torch.arange(size) % classes
    monkeypatch.setattr(data, "load", lambda self: Arrays(y[:, None], y, y[:1000, None], y[:1000]))
    caught = []
    monkeypatch.setattr(Federation, "partition", lambda self, model, datamodule: caught.append(datamodule))
    main(["partition", *(f"--config={name}" for name in files_of(REPOSITORY / f"configs/{stem}.yaml"))])
    assert caught[0].partitioner.majority_share in columns
    for share in columns:
        datamodule = copy.deepcopy(caught[0])
        datamodule.partitioner.majority_share = share
        datamodule.deal()
        for samples in datamodule.train_samples:
            counts = datamodule.y[samples].bincount(minlength=classes).sort(descending=True).values
            assert counts[:2].sum() == round(share * for_training)
            assert 0 <= len(samples) - for_training <= 2


@pytest.mark.parametrize("stem", ["pfl_moe_cifar10_lenet5", "pfl_moe_fmnist_lenet5"])
def test_pfl_moe_trains_local_with_sgd_and_with_adam(stem):
    """The paper prints the better of 300 epochs of SGD, whose rate falls to a tenth every 100, and of Adam."""
    phases = printed(next(path for path in PAPERS if path.stem == stem))["federation"]["phases"]
    sgd, adam = [phase for phase in phases if phase["algorithm"]["class_path"].endswith(".Local")]
    assert sgd["max_epochs"] == adam["max_epochs"] == 300
    assert (sgd["optimizer"]["class_path"], adam["optimizer"]["class_path"]) == ("torch.optim.SGD", "torch.optim.Adam")
    expected = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    assert {name: sgd["optimizer"]["init_args"][name] for name in expected} == expected
    assert sgd["lr_scheduler"]["class_path"] == "torch.optim.lr_scheduler.StepLR"
    steps = sgd["lr_scheduler"]["init_args"]
    assert (steps["step_size"], steps["gamma"]) == (100, 0.1)
