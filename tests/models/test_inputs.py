"""Batches that are dicts: mixtures compute with them what they compute with pairs, bit for bit."""

from collections import UserDict, namedtuple

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import models
from fedmoe_pl.algorithms.shared.parts import pair_of
from fedmoe_pl.models.inputs import batch_size_of, call


class Expert(nn.Module):
    """A network whose inputs have a name, and which returns what the test says."""

    def __init__(self, output: type = torch.Tensor) -> None:
        super().__init__()
        self.extractor, self.classifier = nn.Linear(4, 3), nn.Linear(3, 2)
        self.output = output

    def forward(self, values: torch.Tensor) -> object:
        logits = self.classifier(self.extractor(values))
        return logits if self.output is torch.Tensor else self.output(loss=None, logits=logits)


Named = namedtuple("Named", ["logits", "loss"])  # as of torchvision's GoogLeNet


class Network(nn.Linear):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values)


X, Y = torch.arange(12.0).reshape(3, 4) / 12, torch.tensor([0, 1, 1])
PAIR = (X, Y)


@pytest.mark.parametrize("output", [torch.Tensor, dict, UserDict, Named])
@pytest.mark.parametrize(
    "gate", [models.GlobalOnly(), models.LocalOnly(), models.EqualWeights(), models.NetworkGate(Network(4, 2))]
)
def test_a_mixture_computes_the_same_with_dicts(gate: models.FixedGate, output: type) -> None:
    module = models.PersonalizedMoE(Expert(output), Expert(output), gate=gate)
    for batch in ({"values": X, "labels": Y}, UserDict(labels=Y, values=X), ({"values": X}, Y), [X, Y]):
        loss, metrics = module.loss(batch)
        expected_loss, expected = module.loss(PAIR)
        assert torch.equal(loss, expected_loss) and expected_loss > 0
        assert all(torch.equal(metrics[name], expected[name]) for name in expected)
        predicted = module.predict_step(batch, 0)
        assert torch.equal(predicted["logits"], module.predict_step(X, 0)["logits"])


class Masked(nn.Linear):
    def forward(self, values: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return super().forward(values * attention_mask)


def test_labels_of_samples_are_no_targets_of_tokens_even_if_there_are_as_many() -> None:
    x = {"values": X, "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])}
    module, labels = models.PersonalizedMoE(Masked(4, 4), task="multilabel"), (X * 12).long() % 2
    loss = nn.functional.binary_cross_entropy_with_logits(module(x), labels.float())
    assert torch.equal(module.loss({**x, "labels": labels})[0], loss)
    assert pair_of(module, (x, labels))[1] is labels


def test_clusters_and_their_gate_read_dicts() -> None:
    module = models.ClusteredMoE(Expert(), num_clusters=2, target_key="y")
    assert torch.equal(module.loss({"values": X, "y": Y})[0], module.loss(PAIR)[0])


def test_a_gate_of_features_reads_them_of_dicts() -> None:
    expert = Expert()
    expert.extractor = Network(4, 3)
    module = models.PersonalizedMoE(expert, gate=models.FeatureGate(3))
    assert torch.equal(module.loss({"values": X, "labels": Y})[0], module.loss(PAIR)[0])


def test_integers_get_weights_in_the_default_precision() -> None:
    ids = {"flag": torch.tensor(1), "ids": torch.zeros(5, 2, dtype=torch.int64)}
    weights = models.EqualWeights()(ids)
    assert weights.shape == (5, 2) and weights.dtype == torch.float32 and batch_size_of(ids) == 5


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"a": X, "label": Y},
            "MixtureOfExperts: target_key is 'labels', but must be a key of the batches (a, label).",
        ),
        ((X, X, Y), "A batch is a tuple, but mixtures need pairs of inputs and targets, or dicts."),
        (X, "A batch is a Tensor, but mixtures need pairs of inputs and targets, or dicts."),
        (((X, X), Y), "Inputs are a tuple, but mixtures need a tensor, or a dict of tensors."),
    ],
)
def test_other_batches_are_refused(batch: object, message: str) -> None:
    with pytest.raises(MisconfigurationException) as error:
        models.PersonalizedMoE(Expert()).loss(batch)
    assert str(error.value) == message


def test_outputs_without_logits_are_refused() -> None:
    with pytest.raises(TypeError, match="an Expert must return a tensor, or an output with a tensor as 'logits'"):
        call(Expert(lambda **outputs: {"scores": outputs["logits"]}), X)
