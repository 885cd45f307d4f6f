"""Mixtures on batches that are dicts: the same bits as with pairs, and what would give wrong targets is refused."""

import zlib
from collections import UserDict
from functools import partial

import pytest
import torch
from helpers import blobs
from helpers.data import set_up
from helpers.runs import assert_same, federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import default_collate

from fedmoe_pl import PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg, FedProto, FedRoD, FineTuning, KNNPer, PerFedAvg, PFLMoE
from fedmoe_pl.data import Dirichlet, FromDatasets
from fedmoe_pl.evaluation.outputs import labelled_batches
from fedmoe_pl.models import GlobalOnly, LinearGate, LocalOnly, NetworkGate


class Linear(nn.Linear):
    """Its input has a name, as the arguments of transformers' models have."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extractor, self.classifier = Linear(5, 4), nn.Linear(4, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.extractor(values))


def model(**kwargs) -> PersonalizedMoE:
    torch.manual_seed(0)
    return PersonalizedMoE(Expert(), optimizer=partial(torch.optim.SGD, lr=0.1), **kwargs)


def dicts(samples: list, key: str = "labels", kind: type = dict) -> object:
    x, y = default_collate(samples)
    return kind({key: y, "values": x})


def three(samples: list) -> tuple:
    return (*default_collate(samples), 0)


def others(samples: list) -> dict:
    """With other classes than those of the samples."""
    x, y = default_collate(samples)
    return {"values": x, "labels": (y + 1) % 3}


def data(collate_fn=None, **kwargs) -> FromDatasets:
    given = blobs(dtype=torch.float32)
    samples = [(x, int(y)) for x, y in zip(given.x, given.y, strict=True)]
    arguments = {"num_clients": 3, "batch_size": 4, "test_fraction": 0.2, "partitioner": Dirichlet(1.0)}
    return FromDatasets(samples[:32], samples[32:], collate_fn=collate_fn, **{**arguments, **kwargs})


def phases() -> list[Phase]:
    torch.manual_seed(1)
    return [
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=2, gate=GlobalOnly()),
        Phase("FT", FineTuning(gate_fraction=0.25), start="FedAvg", gate=LocalOnly()),
        Phase("MoE", PFLMoE(), start="FT", gate=NetworkGate(Linear(5, 1))),
        Phase("kNN", KNNPer(k=3), start="FedAvg", gate=GlobalOnly()),
        Phase("RoD", FedRoD(), gate=LocalOnly()),
        Phase("Per", PerFedAvg(expert="global_expert"), gate=GlobalOnly()),
    ]


@pytest.mark.slow
def test_all_methods_compute_the_same_with_dicts_as_with_pairs(tmp_path) -> None:
    trainer, states = {"accelerator": "cpu", "devices": 1}, []
    for collate_fn in (default_collate, dicts, partial(dicts, kind=UserDict)):
        run = federation(tmp_path, phases(), trainer=trainer)
        run.fit(model(), data(collate_fn, validation_fraction=0.2))
        states.append(run.run.states)
    for name, expected in states[0].items():
        assert 0 < expected.evaluations[0].spread("global_test").mean < 1
        for state in (states[1][name], states[2][name]):
            assert_same(state.server, expected.server)
            assert_same(*({client: dict(tree) for client, tree in each.clients.items()} for each in (state, expected)))
            assert [repr(each) for each in state.evaluations] == [repr(each) for each in expected.evaluations]
            assert state.traffic == expected.traffic


def test_prototypes_predict_the_same_for_dicts_as_for_pairs(tmp_path) -> None:
    found = []
    for collate_fn in (default_collate, dicts):
        run = federation(tmp_path, [Phase("it", FedProto(prediction="prototype"), gate=GlobalOnly())])
        found.append(run.fit(model(), data(collate_fn))["it"].clients)
    assert [repr(each) for each in found[0]] == [repr(each) for each in found[1]]
    assert any(each.global_test > 0 for each in found[0])


def test_a_batch_of_another_mapping_has_its_size() -> None:
    batches, plain = set_up(data(partial(dicts, kind=UserDict))), set_up(data(dicts))
    assert batches.evaluated_at_once == 1000 and batches.reader is not None and plain.reader is not None
    assert batches.reader.checksums(torch.arange(3)) == plain.reader.checksums(torch.arange(3))


def test_a_batch_may_have_a_tensor_without_dimensions() -> None:
    reader = set_up(data(lambda samples: {"x": default_collate(samples)[0], "scale": torch.tensor(2.0)})).reader
    assert reader is not None
    expected = [zlib.crc32(tensor.numpy().tobytes()) for tensor in reader.evaluation[[0], 0].values()]
    assert len(expected) == 2 and reader.checksums(torch.arange(1)) == expected


def test_classes_count_that_the_data_know_and_not_those_in_batches() -> None:
    batches = set_up(data(dicts))
    ((_, targets),) = labelled_batches(batches, batches.global_test, model())
    assert torch.equal(targets, batches.y[batches.global_test])


def without_numbers(samples: list) -> dict:
    return {"values": default_collate([x for x, _ in samples]), "labels": ["cat", "dog"]}


REFUSED = [
    (partial(dicts, key="label"), model, r"target_key is 'labels', but must be a key of the batches \(label"),
    (without_numbers, model, r"targets of a batch are \['cat', 'dog'\], but must be numbers; let the dataset"),
    (three, model, "A batch is a tuple, but mixtures need pairs of inputs and targets, or dicts"),
    (others, model, r"must be the key of the classes, \[\d, \d\] for the first samples"),
    (dicts, partial(model, gate=LinearGate(5)), "reads them, or a fixed one, because batches are dicts"),
]


@pytest.mark.parametrize(("collate_fn", "model", "sentence"), REFUSED)
def test_what_would_take_wrong_targets_or_inputs_is_refused(tmp_path, collate_fn, model, sentence) -> None:
    with pytest.raises(MisconfigurationException, match=sentence):
        federation(tmp_path, [Phase("p", FedAvg())]).fit(model(), data(collate_fn))
