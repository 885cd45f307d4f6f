"""Models in bfloat16: what torch cannot compute in it is computed in float32, and the server stays in it."""

import math

import pytest
import torch
from helpers import mixture, phase
from helpers.methods import METHODS, data
from helpers.runs import federation

from fedmoe_pl.aggregation import CoordinateMedian, MultiKrum, NearestNeighborMixing
from fedmoe_pl.algorithms import FedAvg, FedProto, fedmoe_da
from fedmoe_pl.backends import TrainerBackend

MIXED = NearestNeighborMixing(CoordinateMedian(), 1)
PHASES = {
    "FedAvg": lambda: [phase("it", FedAvg(), evaluate=True, rounds=2)],
    "MultiKrum": lambda: [phase("it", FedAvg(), evaluate=True, aggregation=MultiKrum(1))],
    "NearestNeighborMixing": lambda: [
        phase("it", FedAvg(), evaluate=True, aggregation=NearestNeighborMixing(CoordinateMedian(), 1))
    ],
    "FedProto": lambda: [phase("it", FedProto(prediction="prototype"), evaluate=True)],
    **{name: METHODS[name].phases for name in ("FedKD", "KNNPer", "LabelPrior")},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PHASES)
def test_a_model_in_bfloat16_is_trained_aggregated_and_evaluated(name, tmp_path):
    model = (METHODS[name].model() if name in METHODS else mixture()).to(torch.bfloat16)
    trainer = {"accelerator": "cpu", "max_epochs": 1}
    run = federation(tmp_path, PHASES[name](), trainer=trainer, backend=TrainerBackend())
    run.fit(model, data(dtype=torch.bfloat16, **(METHODS[name].split if name in METHODS else {})))
    types = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    for state in run.run.states.values():
        assert all(tensor.dtype == types.get(name, tensor.dtype) for name, tensor in state.server.items())
    assert all(not math.isnan(result.spread("global_test").mean) for result in run.results.values())


def test_means_of_fedmoe_da_count_each_of_300_clients():
    """In bfloat16, a sum of so many small addends would stop growing, and each weight would be rounded."""
    trees = [{"w": torch.tensor([1.0 + client % 2], dtype=torch.bfloat16)} for client in range(300)]
    _, weights = fedmoe_da.aggregation_rows(torch.ones(300, 2, dtype=torch.bfloat16), "all")
    mean = fedmoe_da._mean(trees[0], [*zip(trees, weights[0], strict=True)])
    torch.testing.assert_close(mean, {"w": torch.tensor([1.5], dtype=torch.bfloat16)}, rtol=0, atol=0)
