"""Gates of fixed weights that take their width from the mixture, in every kind of mixture."""

import pytest
import torch
from helpers import mixture, sparse_mixture
from helpers.data import refused_argument
from helpers.models import samples
from torch import nn

from fedmoe_pl import models
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.evaluation.client_models import evaluated_model
from fedmoe_pl.evaluation.outputs import has_trained_gate
from fedmoe_pl.models.mixtures.mixing import mix_outputs
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.begin import phase_module


class ThreeExperts(models.MixtureOfExperts):
    """A user's own mixture, of three experts."""

    gate_width = 3

    def __init__(self, gate: models.Gate | None = None) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        self.gate = models.EqualWeights() if gate is None else gate
        self.check_parts()

    def mix(self, x):
        weights = self.gate(x)
        return mix_outputs([expert(x) for expert in self.experts], weights, "logits"), weights


def personalized() -> models.PersonalizedMoE:
    return models.PersonalizedMoE(models.SmallMLP(5, 4, 3), models.SmallMLP(5, 6, 3))


def clustered(num_clusters=3) -> models.ClusteredMoE:
    return models.ClusteredMoE(models.SmallMLP(5, 4, 3), num_clusters, models.SmallMLP(5, 6, 3))


def representation() -> models.RepresentationMoE:
    return models.RepresentationMoE(models.RepresentationMLP(5, 4, 2, 3), [models.RepresentationMLP(5, 6, 2, 3)])


def sparse() -> models.SparseMoE:
    return sparse_mixture(4, dtype=torch.float32)


MIXTURES = {
    "personalized": (personalized, 2),
    "clustered": (clustered, 4),
    "representation": (representation, 2),
    "sparse": (sparse, 4),
    "own": (ThreeExperts, 3),
}
IN_EVERY_MIXTURE = pytest.mark.parametrize(("make", "width"), MIXTURES.values(), ids=MIXTURES)
FIXED = [models.GlobalOnly, models.LocalOnly, models.EqualWeights]


def weights_of(gate: type[models.FixedGate], width: int) -> list[float]:
    first, last, equal = [1.0] + [0.0] * (width - 1), [0.0] * (width - 1) + [1.0], [1 / width] * width
    return {models.GlobalOnly: first, models.LocalOnly: last, models.EqualWeights: equal}[gate]


def replaced(module: models.MixtureOfExperts, gate: models.Gate) -> models.MixtureOfExperts:
    """The module with the gate of a phase."""
    other = phase_module(module, Phase("phase", FedAvg(), gate=gate))
    assert isinstance(other, models.MixtureOfExperts)
    return other


@IN_EVERY_MIXTURE
@pytest.mark.parametrize("gate", FIXED)
def test_a_fixed_gate_takes_the_mixtures_width_and_gives_the_bits_of_its_weights_spelled_out(make, width, gate):
    module, x = make().eval(), torch.randn(4, 5)
    expected = replaced(module, models.ConstantGate(weights_of(gate, width))).mix(x)
    actual = replaced(module, gate()).mix(x)
    assert actual[1].tolist() == torch.tensor([weights_of(gate, width)] * 4).tolist()
    for value, constant in zip(actual, expected, strict=True):
        assert torch.equal(value, constant)


@IN_EVERY_MIXTURE
def test_a_constant_gate_of_another_width_is_refused(make, width):
    assert refused_argument(lambda: replaced(make(), models.ConstantGate([0.0] * width + [1.0]))) == "gate"


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
    expected = {models.GlobalOnly: outputs[0], models.LocalOnly: outputs[-1], models.EqualWeights: sum(outputs) / kept}[
        gate
    ]
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(
    ("gate", "evaluated"),
    [(models.GlobalOnly, "global expert"), (models.LocalOnly, "local expert"), (models.EqualWeights, "mixture")],
)
def test_a_table_names_what_a_fixed_gate_evaluates(gate, evaluated):
    for module in (personalized(), clustered(), representation()):
        assert evaluated_model(replaced(module, gate()), FedAvg()) == evaluated
    assert evaluated_model(replaced(sparse(), gate()), FedAvg()) == (
        "mixture" if gate is models.EqualWeights else "one expert"
    )


@IN_EVERY_MIXTURE
def test_mixture_weights_start_equal_and_are_a_buffer_that_no_optimizer_trains(make, width):
    module, x = replaced(make(), models.MixtureWeights()).eval(), torch.randn(4, 5)
    assert torch.equal(module.mix(x)[0], replaced(module, models.EqualWeights()).mix(x)[0])
    assert module.gate.weights.tolist() == torch.full((width,), 1 / width).tolist()
    assert not [*module.gate.parameters()] and "gate.weights" in module.state_dict()


@IN_EVERY_MIXTURE
def test_a_mixture_uses_the_mixture_weights_that_an_algorithm_has_set_and_shows_them(make, width):
    module, x = replaced(make(), models.MixtureWeights()).eval(), torch.randn(4, 5)
    estimated = torch.arange(width) / sum(range(width))
    module.load_state_dict({**module.state_dict(), "gate.weights": estimated})
    module.check_parts()  # as when a phase replaces a part
    assert torch.equal(module.mix(x)[1], estimated.expand(4, width))
    torch.testing.assert_close(module.mix(x)[0], replaced(module, models.ConstantGate(estimated.tolist())).mix(x)[0])
    assert has_trained_gate(module) and not has_trained_gate(replaced(module, models.EqualWeights()))


PARTS = {  # what is computed before the experts, the experts, and what follows
    "personalized": lambda m: (nn.Identity(), [m.global_expert, m.local_expert], nn.Identity()),
    "clustered": lambda m: (nn.Identity(), [*m.global_experts, m.local_expert], nn.Identity()),
    "representation": lambda m: (nn.Identity(), [m.shared_extractor, m.local_experts[0]], m.header),
    "sparse": lambda m: (m.embedding, m.experts, nn.Identity()),
}


def never(*_):
    raise AssertionError("computed for nothing")


@pytest.mark.parametrize("name", PARTS)
def test_a_constant_gate_of_one_expert_computes_that_alone_and_others_are_mixed(name):
    (make, width), x = MIXTURES[name], torch.randn(4, 5)
    module = make().eval()
    module.mixing = "logits"
    before, experts, after = PARTS[name](module)
    alone = [after(expert(before(x))) for expert in experts]
    for index in range(width):
        held = replaced(module, models.ConstantGate([float(i == index) for i in range(width)]))
        for other, expert in enumerate(PARTS[name](held)[1]):
            if other != index:
                expert.register_forward_pre_hook(never)
        assert torch.equal(held(x), alone[index])
    mixed = replaced(module, models.ConstantGate([0.25, *[0.0] * (width - 2), 0.75]))(x)
    torch.testing.assert_close(mixed, 0.25 * alone[0] + 0.75 * alone[-1])


@pytest.mark.parametrize("gate", [None, models.ConstantGate(0.5)])
def test_constant_gate_of_a_half_is_the_default_and_the_mean_of_the_experts(gate):
    x, _ = samples()
    module = mixture(gate, dtype=torch.float32)
    assert torch.equal(module(x), (module.global_expert(x) + module.local_expert(x)) / 2)
