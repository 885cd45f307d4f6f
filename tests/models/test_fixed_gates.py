"""Gates of fixed weights that take their width from the mixture, in every kind of mixture."""

import math

import pytest
import torch
from helpers import mixture, sparse_mixture
from helpers.data import refused_argument
from helpers.models import samples
from torch import nn

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.evaluation.client_models import evaluated_model
from fedmoe_pl.evaluation.outputs import has_trained_gate
from fedmoe_pl.models import (
    ClusteredMoE,
    ConstantGate,
    EqualWeights,
    FixedGate,
    Gate,
    GlobalOnly,
    LocalOnly,
    MixtureOfExperts,
    MixtureWeights,
    PersonalizedMoE,
    RepresentationMLP,
    RepresentationMoE,
    SmallMLP,
    SparseMoE,
)
from fedmoe_pl.models.mixtures.mixing import mix_outputs
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.begin import phase_module


class ThreeExperts(MixtureOfExperts):
    """A user's own mixture, of three experts."""

    gate_width = 3

    def __init__(self, gate: Gate | None = None) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        self.gate = EqualWeights() if gate is None else gate
        self.check_parts()

    def mix(self, x):
        weights = self.gate(x)
        return mix_outputs([expert(x) for expert in self.experts], weights, "logits"), weights


def personalized() -> PersonalizedMoE:
    return PersonalizedMoE(SmallMLP(5, 4, 3), SmallMLP(5, 6, 3))


def clustered(num_clusters=3) -> ClusteredMoE:
    return ClusteredMoE(SmallMLP(5, 4, 3), num_clusters, SmallMLP(5, 6, 3))


def representation() -> RepresentationMoE:
    return RepresentationMoE(RepresentationMLP(5, 4, 2, 3), [RepresentationMLP(5, 6, 2, 3)])


def sparse() -> SparseMoE:
    return sparse_mixture(4, dtype=torch.float32)


MIXTURES = {
    "personalized": (personalized, 2),
    "clustered": (clustered, 4),
    "representation": (representation, 2),
    "sparse": (sparse, 4),
    "own": (ThreeExperts, 3),
}
IN_EVERY_MIXTURE = pytest.mark.parametrize(("make", "width"), MIXTURES.values(), ids=MIXTURES)
FIXED = [GlobalOnly, LocalOnly, EqualWeights]


def weights_of(gate: type[FixedGate], width: int) -> list[float]:
    first, last, equal = [1.0] + [0.0] * (width - 1), [0.0] * (width - 1) + [1.0], [1 / width] * width
    return {GlobalOnly: first, LocalOnly: last, EqualWeights: equal}[gate]


def replaced(module: MixtureOfExperts, gate: Gate) -> MixtureOfExperts:
    """The module with the gate of a phase."""
    other = phase_module(module, Phase("phase", FedAvg(), gate=gate))
    assert isinstance(other, MixtureOfExperts)
    return other


@IN_EVERY_MIXTURE
@pytest.mark.parametrize("gate", FIXED)
def test_a_fixed_gate_takes_the_mixtures_width_and_gives_the_bits_of_its_weights_spelled_out(make, width, gate):
    module, x = make().eval(), torch.randn(4, 5)
    expected = replaced(module, ConstantGate(weights_of(gate, width))).mix(x)
    actual = replaced(module, gate()).mix(x)
    assert actual[1].tolist() == torch.tensor([weights_of(gate, width)] * 4).tolist()
    for value, constant in zip(actual, expected, strict=True):
        assert torch.equal(value, constant)


@IN_EVERY_MIXTURE
def test_a_constant_gate_of_another_width_is_refused(make, width):
    assert refused_argument(lambda: replaced(make(), ConstantGate([0.0] * width + [1.0]))) == "gate"


@pytest.mark.parametrize("gate", FIXED)
def test_a_gate_moved_to_a_mixture_of_another_width_takes_that_one(gate):
    moved = gate()
    for module, width in ((clustered(5), 6), (personalized(), 2), (sparse(), 4), (clustered(2), 3)):
        in_phase = replaced(module, moved)
        assert in_phase.gate.weights == weights_of(gate, width)
        module.gate = moved
        module.check_parts()
        assert moved.weights == weights_of(gate, width)
    assert in_phase.gate is not moved


@pytest.mark.parametrize("gate", FIXED)
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_a_client_with_fewer_experts_has_a_gate_as_wide(gate, kept):
    module = replaced(sparse_mixture([4, kept]), gate())
    module.keep_architecture(kept)
    assert module.gate.weights == weights_of(gate, kept)
    x = torch.randn(4, 5, dtype=torch.float64)
    outputs = [expert(module.embedding(x)) for expert in module.experts]
    expected = {GlobalOnly: outputs[0], LocalOnly: outputs[-1], EqualWeights: sum(outputs) / kept}[gate]
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(
    ("gate", "evaluated"), [(GlobalOnly, "global expert"), (LocalOnly, "local expert"), (EqualWeights, "mixture")]
)
def test_a_table_names_what_a_fixed_gate_evaluates(gate, evaluated):
    for module in (personalized(), clustered(), representation()):
        assert evaluated_model(replaced(module, gate()), FedAvg()) == evaluated
    assert evaluated_model(replaced(sparse(), gate()), FedAvg()) == (
        "mixture" if gate is EqualWeights else "one expert"
    )


@IN_EVERY_MIXTURE
def test_mixture_weights_start_equal_and_are_a_buffer_that_no_optimizer_trains(make, width):
    module, x = replaced(make(), MixtureWeights()).eval(), torch.randn(4, 5)
    assert torch.equal(module.mix(x)[0], replaced(module, EqualWeights()).mix(x)[0])
    assert module.gate.weights.tolist() == torch.full((width,), 1 / width).tolist()
    assert not [*module.gate.parameters()] and "gate.weights" in module.state_dict()


@IN_EVERY_MIXTURE
def test_a_mixture_uses_the_mixture_weights_that_an_algorithm_has_set_and_shows_them(make, width):
    module, x = replaced(make(), MixtureWeights()).eval(), torch.randn(4, 5)
    estimated = torch.arange(width) / sum(range(width))
    module.load_state_dict({**module.state_dict(), "gate.weights": estimated})
    module.check_parts()  # as when a phase replaces a part
    assert torch.equal(module.mix(x)[1], estimated.expand(4, width))
    torch.testing.assert_close(module.mix(x)[0], replaced(module, ConstantGate(estimated.tolist())).mix(x)[0])
    assert has_trained_gate(module) and not has_trained_gate(replaced(module, EqualWeights()))


@pytest.mark.parametrize(
    ("weight", "expert", "other"), [(1, "global_expert", "local_expert"), (0, "local_expert", "global_expert")]
)
def test_constant_gate_of_1_or_0_is_bitwise_the_one_expert_whatever_the_other_gives(weight, expert, other):
    x, _ = samples()
    module = mixture(ConstantGate(weight), dtype=torch.float32)
    for parameter in getattr(module, other).parameters():
        nn.init.constant_(parameter, math.nan)
    assert torch.equal(module(x), getattr(module, expert)(x))


@pytest.mark.parametrize("gate", [None, ConstantGate(0.5)])
def test_constant_gate_of_a_half_is_the_default_and_the_mean_of_the_experts(gate):
    x, _ = samples()
    module = mixture(gate, dtype=torch.float32)
    assert torch.equal(module(x), (module.global_expert(x) + module.local_expert(x)) / 2)
