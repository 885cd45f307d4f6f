"""Checkpoints of mixtures, which ``load_from_checkpoint`` builds again from the arguments of all their parts."""

from functools import partial

import pytest
import torch
from helpers import assert_same_bits, mixture
from helpers.models import plain_trainer, trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl.models import (
    CNN,
    IFCACNN,
    LEAFCNN,
    ClusteredMoE,
    ConstantGate,
    ConvBlock,
    ConvExpert,
    EqualWeights,
    FeatureGate,
    FedAvgCNN,
    GateCNN,
    GlobalOnly,
    LinearGate,
    LocalOnly,
    MixtureWeights,
    MLPGate,
    NetworkGate,
    PersonalizedMoE,
    PooledMoE,
    RepresentationMLP,
    RepresentationMoE,
    SmallMLP,
    SparseMoE,
    SwitchNormGate,
    TwoConvCNN,
)


def half_squared_error(outputs, targets):
    return (outputs - targets).square().mean() / 2


def with_one_activation() -> PersonalizedMoE:
    activation = nn.ReLU()
    return PersonalizedMoE(nn.Sequential(nn.Linear(8, 4), activation, nn.Linear(4, 4), activation, nn.Linear(4, 3)))


def with_parts_of_odd_arguments() -> PersonalizedMoE:
    """Arguments that torch has renamed, or takes and does not use."""
    return PersonalizedMoE(
        nn.Sequential(nn.Linear(8, 4), nn.Hardtanh(-2.0, 2.0), nn.Identity(5, unused=0.1), nn.Linear(4, 3))
    )


def frozen() -> PersonalizedMoE:
    return PersonalizedMoE(SmallMLP(8, 4, 3).requires_grad_(False), SmallMLP(8, 5, 3), LinearGate())


def sparse(*arguments, **kwargs) -> SparseMoE:
    return SparseMoE(ConvBlock(1, 2, 16), ConvExpert(2, 3, 6, 3, 4), *arguments, **kwargs)


def of_architectures(own: int | None) -> PersonalizedMoE:
    module = PersonalizedMoE(SmallMLP(8), [SmallMLP(8, width) for width in (4, 7)])
    if own is not None:
        module.keep_architecture(own)
    return module


def estimated() -> SparseMoE:
    module = sparse(3, gate=MixtureWeights(), mixing="probabilities")
    module.gate.weights.copy_(torch.tensor([0.5, 0.2, 0.3]))
    return module


IMAGE = (1, 16, 16)
MIXTURES = [
    (partial(PersonalizedMoE, LEAFCNN(1, 3, 2, 2, 4, 0.1, True, 16), gate=SwitchNormGate(256, 4, 0.5)), IMAGE),
    (partial(PersonalizedMoE, TwoConvCNN(1, 3, 16, 0.1, 2, 2, 4, 4), gate=ConstantGate(0.3), gate_lr=0.5), IMAGE),
    (partial(PersonalizedMoE, FedAvgCNN(1, 3, 16), gate=NetworkGate(GateCNN(1, 2, 2, None, 4, 0.1, True, 16))), IMAGE),
    (partial(PersonalizedMoE, CNN(5, 1, 3), channels_last=True), (1, 32, 32)),
    (partial(PersonalizedMoE, IFCACNN(1, 3, 0.1, True)), (1, 32, 32)),
    (partial(PersonalizedMoE, SmallMLP(8, 6, 3), SmallMLP(8, 9, 3), FeatureGate()), (8,)),
    (with_one_activation, (8,)),
    (with_parts_of_odd_arguments, (8,)),
    (frozen, (8,)),
    (partial(PersonalizedMoE, SmallMLP(8, 6, 1), gate=LinearGate(), loss=nn.HuberLoss(delta=0.5)), (8,)),
    (partial(PersonalizedMoE, SmallMLP(8, 6, 1), gate=GlobalOnly(), task="regression", loss=half_squared_error), (8,)),
    *((partial(of_architectures, own), (8,)) for own in (None, 0, 1)),
    (partial(ClusteredMoE, SmallMLP(8, 4, 3), 3, SmallMLP(8, 6, 3), LocalOnly()), (8,)),
    (
        partial(
            RepresentationMoE,
            RepresentationMLP(8, 4, 2, 3, True),
            [RepresentationMLP(8, 6, 2)],
            nn.Linear(2, 3, bias=False),
            EqualWeights(),
            architectures=[0, 0],
        ),
        (8,),
    ),
    (partial(PooledMoE, SmallMLP(8, 4, 3), 3, MLPGate(3, dropout=0.2), 2), (8,)),
    (partial(sparse, [2, 1], load_balancing=0.5), IMAGE),
    (estimated, IMAGE),
]


@pytest.mark.few("frozen-shape8")
@plain_trainer
@pytest.mark.parametrize(("make", "shape"), MIXTURES)
def test_a_checkpoint_of_a_plain_trainer_builds_the_mixture_again(make, shape, tmp_path):
    module, plain = make().eval(), trainer(tmp_path)
    plain.strategy.connect(module)
    plain.save_checkpoint(tmp_path / "mixture.ckpt", weights_only=True)
    loaded = type(module).load_from_checkpoint(tmp_path / "mixture.ckpt", weights_only=True).eval()
    assert_same_bits(loaded.state_dict(), module.state_dict())
    assert [each.requires_grad for each in loaded.parameters()] == [each.requires_grad for each in module.parameters()]
    assert str(loaded) == str(module), "with the same dropout"
    arguments = [{}, {}]
    for each, checkpoint in zip((module, loaded), arguments, strict=True):
        each.on_save_checkpoint(checkpoint)
    assert arguments[0] == arguments[1]
    x, y = torch.randn(4, *shape), torch.arange(4) % 3
    (scores, weights), expected = loaded.mix(x), module.mix(x)
    assert torch.equal(scores, expected[0]) and torch.equal(weights, expected[1])
    y = y if module.task == "multiclass" else torch.rand(4)
    assert torch.equal(loaded.loss_of(scores, y), module.loss_of(scores, y))


def mine(width=6, **kwargs):
    class Mine(PersonalizedMoE):
        """As a class of ``__main__`` or of a renamed module, it cannot be imported by its saved path."""

        def __init__(self, width=width, **kwargs):
            self.save_hyperparameters("width")
            super().__init__(SmallMLP(8, width, 3), **kwargs)

    return Mine(**kwargs), Mine


class Child(PersonalizedMoE):
    """A subclass that takes what its parent takes."""


@plain_trainer
@pytest.mark.parametrize("is_parent", [False, True])
@pytest.mark.few(1)
def test_a_class_without_a_path_is_the_one_that_loads(is_parent, tmp_path):
    module, kind = mine(7, mixing="probabilities", gate=EqualWeights())
    if is_parent:
        module, kind = PersonalizedMoE(SmallMLP(8, 7, 3), mixing="probabilities", gate=EqualWeights()), Child
    plain = trainer(tmp_path)
    plain.strategy.connect(module)
    plain.save_checkpoint(tmp_path / "mixture.ckpt", weights_only=True)
    loaded = kind.load_from_checkpoint(tmp_path / "mixture.ckpt", weights_only=True)
    assert type(loaded) is kind and loaded.mixing == "probabilities"
    assert_same_bits(loaded.state_dict(), module.state_dict())
    with pytest.raises(MisconfigurationException, match="gate_lr is -1"):
        kind.load_from_checkpoint(tmp_path / "mixture.ckpt", gate_lr=-1.0)


@plain_trainer
def test_a_gate_of_unknown_width_is_loaded_with_what_was_frozen(tmp_path):
    torch.manual_seed(0)
    module, plain = mixture(FeatureGate(), dtype=torch.float32), trainer(tmp_path)
    module.mix(torch.zeros(2, 5))
    module.gate.requires_grad_(False)
    plain.strategy.connect(module)
    plain.save_checkpoint(tmp_path / "mixture.ckpt", weights_only=True)
    given = mixture(FeatureGate(), dtype=torch.float32)  # with a gate that has no parameters yet
    loaded = PersonalizedMoE.load_from_checkpoint(
        tmp_path / "mixture.ckpt", global_expert=given.global_expert, gate=FeatureGate(), weights_only=True
    )
    assert_same_bits(loaded.state_dict(), module.state_dict())
    assert [each.requires_grad for each in loaded.parameters()] == [each.requires_grad for each in module.parameters()]
