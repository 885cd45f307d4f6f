"""What an algorithm needs (``Algorithm.needs``) is declared once, and its lack is refused before any training."""

from functools import partial
from typing import get_args

import pytest
import torch
from helpers import TensorData, blobs, mixture, run
from lightning.pytorch import LightningModule

from fedmoe_pl import Phase, algorithms
from fedmoe_pl.aggregation import CoordinateMedian
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.algorithms.algorithm import Need
from fedmoe_pl.checks import InvalidArgumentError

SGD = partial(torch.optim.SGD, lr=0.1)


class Regression(LightningModule):
    """A module without a mixture's loss."""

    def __init__(self):
        super().__init__()
        self.global_expert = torch.nn.Linear(5, 1)

    def loss(self, batch):
        return (self.global_expert(batch[0]) - batch[1]).square().mean(), {}

    def configure_optimizers(self):
        return SGD(self.parameters())


def numbers():
    return TensorData(torch.randn(8, 5), torch.randn(8, 1), torch.arange(8).split(4))


MISSING = [
    ("all_clients", "clients_per_round", {"clients_per_round": 2}, mixture, blobs),
    ("validation_samples", "validation_fraction", {}, mixture, blobs),
    ("classes", "algorithm", {}, Regression, numbers),
    ("loss_of_outputs", "algorithm", {}, Regression, numbers),
    ("plain_steps", "trainer.gradient_clip_val", {"trainer": {"gradient_clip_val": 1.0}}, mixture, blobs),
    ("fresh_optimizers", "keep_optimizer", {"keep_optimizer": True, "rounds": 2}, mixture, blobs),
    ("own_server_step", "server_optimizer", {"server_optimizer": SGD}, mixture, blobs),
    ("own_server_step", "aggregation", {"aggregation": CoordinateMedian()}, mixture, blobs),
    ("clases", "needs", {}, mixture, blobs),
]


@pytest.mark.parametrize(("need", "argument", "arguments", "module", "data"), MISSING)
def test_a_missing_need_is_refused_before_any_training(tmp_path, need, argument, arguments, module, data):
    algorithm = FedAvg()
    algorithm.needs = (need,)
    with pytest.raises(InvalidArgumentError) as error:
        run([Phase("p", algorithm, evaluate=False, **arguments)], module(), data(), tmp_path)
    assert error.value.argument == argument and error.value.because.startswith("FedAvg needs" if arguments else "")


def test_every_need_is_checked_but_that_of_the_number_of_rounds():
    assert {need for need, *_ in MISSING} - {"clases"} == {*get_args(Need)} - {"fixed_rounds"}


OF_CLASSES = "LabelPrior FedProto FD FedPAC FedRoD KNNPer FML FedKD FedAPEN FedEM PFedMM FedMix FedJETs".split()
NEEDS = {
    "all_clients": "FineTunedCluster FedKD FedMoEDA KNNPer LabelPrior PMMoE".split(),
    "classes": OF_CLASSES,
    "loss_of_outputs": "APFL Ditto FedALA PFedMe PerFedAvg FineTuning".split(),
    "plain_steps": "PFedMe Scaffold".split(),
    "fresh_optimizers": ["EpsilonGreedyIFCA"],
    "own_server_step": ["FedKD"],
    "fixed_rounds": ["FedKD"],
    "validation_samples": [],
}


@pytest.mark.parametrize("need", NEEDS)
def test_algorithms_declare_what_they_need(need):
    made = {
        name: getattr(algorithms, name)()
        for name in algorithms.__all__
        if name not in ("FedAdagrad", "FedAdam", "FedYogi")
    }
    assert {name for name, algorithm in made.items() if need in algorithm.needs} == {*NEEDS[need]}


def test_some_needs_depend_on_arguments():
    for algorithm, need in (
        (algorithms.LabelPrior("auto"), "validation_samples"),
        (algorithms.FineTuning(keep_better=True), "validation_samples"),
        (algorithms.EpsilonGreedyIFCA(patience=3), "validation_samples"),
        (algorithms.EpsilonGreedyIFCA(schedule="power"), "fixed_rounds"),
        (algorithms.PFLMoE(interleaved=True), "loss_of_outputs"),
    ):
        assert need in algorithm.needs
    for algorithm in (algorithms.FedKD(1, 1), algorithms.EpsilonGreedyIFCA(schedule="power", decay_rounds=3)):
        assert "fixed_rounds" not in algorithm.needs
