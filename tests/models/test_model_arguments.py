"""Arguments of experts and gates are kept for checkpoints."""

import copy
import inspect

import pytest
import torch
from helpers import assert_same_bits
from lightning.pytorch import Trainer

from fedmoe_pl.models import (
    CNN,
    IFCACNN,
    LEAFCNN,
    BiLSTM,
    ConstantGate,
    FedAvgCNN,
    GateCNN,
    PersonalizedMoE,
    SwitchNorm1d,
    SwitchNormGate,
    TwoConvCNN,
)

ARGUMENTS = [
    (CNN, {"variant": 2, "in_channels": 1, "num_classes": 7}),
    (LEAFCNN, dict(zip(inspect.signature(LEAFCNN).parameters, (1, 7, 2, 3, 4, 0.1, True, 20), strict=True))),
    (IFCACNN, {"in_channels": 1, "num_classes": 7, "dropout": 0.1, "relu_logits": True}),
    (TwoConvCNN, dict(zip(inspect.signature(TwoConvCNN).parameters, (1, 7, 20, 0.1, 2, 3, 4, 5), strict=True))),
    (FedAvgCNN, {"in_channels": 1, "num_classes": 7, "image_size": 20}),
    (BiLSTM, {"vocabulary_size": 9, "embedding_dim": 2, "hidden": 3, "num_classes": 7}),
    (GateCNN, dict(zip(inspect.signature(GateCNN).parameters, (1, 3, 2, None, 4, 0.1, True, 20), strict=True))),
    (SwitchNormGate, {"in_features": 6, "hidden": 4, "momentum": 0.5}),
    (SwitchNorm1d, {"num_features": 6, "momentum": 0.5, "eps": 0.1}),
]


@pytest.mark.parametrize(("make", "arguments"), ARGUMENTS, ids=lambda value: getattr(value, "__name__", ""))
def test_all_arguments_are_kept_as_plain_attributes_of_their_name(make, arguments):
    module = make(**arguments)
    assert list(arguments) == list(inspect.signature(make).parameters)
    assert {name: getattr(module, name) for name in arguments} == arguments


checkpoint_warnings = pytest.mark.filterwarnings("ignore:.weights_only. was not set")


@checkpoint_warnings
@pytest.mark.parametrize(
    ("expert", "gate"),
    [
        (LEAFCNN(1, 3, 2, 2, 4, relu_logits=True, image_size=16), SwitchNormGate(256, 4, 0.5)),
        (TwoConvCNN(1, 3, 16, 0.1, 2, 2, 4, 4), ConstantGate(0.3)),
        (FedAvgCNN(1, 3, 16), None),
        (CNN(5, 1, 3), None),
        (IFCACNN(1, 3), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_checkpoint_rebuilds_experts_and_gate(tmp_path, expert, gate):
    module = PersonalizedMoE(copy.deepcopy(expert), gate=copy.deepcopy(gate))
    loaded = PersonalizedMoE.load_from_checkpoint(save_weights(module, tmp_path))
    assert_same_bits(loaded.state_dict(), module.state_dict())
    x = torch.randn(2, *expert.input_shape)
    assert torch.equal(loaded.eval()(x), module.eval()(x))


def save_weights(module, folder):
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=folder)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(folder / "mixture.ckpt")
    return folder / "mixture.ckpt"
