"""Every configuration of a paper's data set names what there is and, shortened, runs a round of each phase."""

import copy
import re

import pytest
import torch
import yaml
from helpers.configurations import (
    CONFIGURATIONS,
    REPOSITORY,
    files_of,
    needs_no_download,
    printed,
    run_short,
    short_file,
)

from fedmoe_pl import data
from fedmoe_pl.cli.command_line import configured

PAPERS = [path for path in CONFIGURATIONS if not needs_no_download(path)]


@pytest.mark.slow
@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_every_configuration_of_a_paper_runs_one_round(path, tmp_path, capfd):
    run_short(path, tmp_path, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_every_configuration_of_a_paper_passes_all_checks(path, tmp_path):
    configured(["--config", str(short_file(path, tmp_path))], check=True)


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_every_configuration_is_readable(path):
    text = path.read_text()
    assert files_of(path)[-1] == str(path), "the command at the top runs this file"
    assert max(len(line) for line in text.splitlines()) <= 120
    anchors, aliases = re.findall(r"[ -]&(\w+)", text), re.findall(r"\*(\w+)", text)
    assert set(anchors) <= set(aliases), "every anchor is used"
    assert re.search(r"https://arxiv\.org/abs/\d{4}\.\d{5}", text), "the paper has a link"


def data_of(config, size, classes, monkeypatch):
    """The data module of a configuration, on arrays with as many samples and classes as the data set."""
    kind = getattr(data, config["data"]["class_path"].split(".")[-1])
    arguments = config["data"]["init_args"]
    partitioner = arguments.pop("partitioner")
    make = getattr(data, partitioner["class_path"].split(".")[-1])
    y, n = torch.arange(size) % classes, 5 * size // 6
    monkeypatch.setattr(kind, "load", lambda self: data.Arrays(y[:n, None], y[:n], y[n:, None], y[n:]))
    return kind(partitioner=make(**partitioner["init_args"]), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "classes", "size", "for_training", "columns"),
    [
        ("opt_out_fmnist", 10, 72_000, 100, (0.3, 0.6, 0.7, 0.8, 1.0)),
        ("opt_out_cifar10", 10, 60_000, 100, (0.3, 0.6, 0.7, 0.8, 1.0)),
        ("opt_out_agnews", 4, 144_000, 100, (0.5, 0.7, 0.8, 0.9, 1.0)),
        ("adaptive_experts_cifar10", 10, 60_000, 500, (0.2, 0.4, 0.6, 0.8, 1.0)),
    ],
)
def test_majority_samples_have_their_share_of_every_clients_training_samples(
    stem, classes, size, for_training, columns, monkeypatch
):
    """With each p of the paper's tables; other samples are as many as rounding per class leaves."""
    original = data_of(printed(REPOSITORY / f"configs/{stem}.yaml"), size, classes, monkeypatch)
    assert original.partitioner.majority_share in columns
    for share in columns:
        datamodule = copy.deepcopy(original)
        datamodule.partitioner.majority_share = share
        datamodule.deal()
        for samples in datamodule.train_samples:
            counts = datamodule.y[samples].bincount(minlength=classes).sort(descending=True).values
            assert counts[:2].sum() == round(share * for_training)
            assert abs(len(samples) - for_training) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["pfedmoe_cifar10", "pfedmoe_practical"])
def test_pfedmoe_has_the_papers_numbers_of_clients_of_which_ten_train_in_a_round(stem, monkeypatch):
    config = printed(REPOSITORY / f"configs/{stem}.yaml")
    original = data_of(config, 60_000, 10, monkeypatch)
    for num_clients, share in ((10, 1.0), (50, 0.2), (100, 0.1)):
        datamodule = copy.deepcopy(original)
        datamodule.requested_clients = num_clients
        datamodule.deal()
        assert datamodule.num_clients == num_clients
        trained = [phase for phase in config["federation"]["phases"] if "label prior" not in phase["name"]]
        sizes = {phase["name"]: phase["clients_per_round"] for phase in trained}
        assert sizes.pop("FedKD") == 1.0 and {*sizes.values()} == {share * num_clients}
        held = sum(len(samples) for samples in datamodule.train_samples)
        assert abs(held - 0.8 * 60_000) <= 10 * num_clients / 2, "8 of 10 samples, rounded in every class"
        classes = {len(datamodule.y[samples].unique()) for samples in datamodule.train_samples}
        assert (classes == {2}) == (stem == "pfedmoe_cifar10")


def test_pfl_moe_with_vgg16_differs_in_one_rate():
    """An overlay replaces the whole list of phases."""
    paths = [REPOSITORY / f"configs/pfl_moe_cifar10_{network}.yaml" for network in ("lenet5", "vgg16")]
    lenet5, vgg16 = (
        {phase["name"]: phase for phase in yaml.safe_load(path.read_text())["federation"]["phases"]} for path in paths
    )
    rates = [phases["PFL-FB"]["train"]["optimizer"]["init_args"].pop("lr") for phases in (lenet5, vgg16)]
    assert rates == [0.001, 0.005] and lenet5 == vgg16
