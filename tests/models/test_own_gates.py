"""A gate of one's own returns shares of each sample by itself; any other is refused before training."""

from functools import partial

import pytest
import torch
from helpers import Expert, blobs, phase, run
from helpers.data import refused_argument
from helpers.ingredients import InputShape, over_features
from helpers.models import samples
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import ClusteredMoE, PersonalizedMoE, models
from fedmoe_pl.algorithms import FedAvg, PFLMoE
from fedmoe_pl.models.layers import trying
from fedmoe_pl.setup.check_module import check_parts


class Own(models.Gate):
    """A layer, and what follows it."""

    def __init__(self, weigh, width=20, reads_features=True, experts=2):
        super().__init__()
        self.layer = nn.LazyLinear(experts) if width is None else nn.Linear(width, experts)
        self.weigh, self.reads_features = weigh, reads_features

    def forward(self, x):
        return self.weigh(self.layer(x))


def softmax(logits):
    return logits.softmax(1)


OF_SHAPE = r"weights of shape \(samples, experts\), here \(\d, 2\)"
WRONG = {
    "no softmax": (lambda logits: logits, "at least 0 and add up to 1 for each sample, because those of a sample are"),
    "positive": (lambda logits: logits.exp(), "at least 0 and add up to 1"),
    "negative": (lambda logits: logits.softmax(1) * 20 - 9.5, "at least 0 and add up to 1"),
    "sigmoid": (lambda logits: logits.sigmoid(), "at least 0 and add up to 1"),
    "no number": (lambda logits: logits.softmax(1) * torch.nan, "at least 0 and add up to 1"),
    "over the batch": (lambda logits: logits.softmax(0), "at least 0 and add up to 1"),
    "of the batch": (lambda logits: (logits - logits.mean(0)).softmax(1), "weighs each sample by itself, because a s"),
    "shifted": (lambda logits: logits.roll(1, 0).softmax(1), "weighs each sample by itself"),
    "one value": (lambda logits: logits[:, 0].sigmoid(), OF_SHAPE + ", because they h"),
    "one row": (lambda logits: logits.softmax(1)[:1], OF_SHAPE),
    "a tuple": (lambda logits: (logits.softmax(1), logits), "weights of shape"),
    "four": (
        lambda logits: torch.cat((logits, logits), 1).softmax(1),
        "weighs 2 experts, .* last, because it weighs 4",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_weights_that_are_no_shares_of_each_sample_are_refused(kind):
    weigh, sentence = WRONG[kind]
    with pytest.raises(
        MisconfigurationException, match=f"PersonalizedMoE: gate is an Own, but must be one .*{sentence}"
    ) as error:
        PersonalizedMoE(models.SmallMLP(9, 20, 3), gate=Own(weigh))
    assert "\n" not in str(error.value)


@pytest.mark.few("no softmax", "of the batch", "one value", "four")
@pytest.mark.parametrize("kind", WRONG)
def test_also_of_experts_that_do_not_tell_the_shape_of_their_inputs(kind, tmp_path):
    weigh, sentence = WRONG[kind]
    module = PersonalizedMoE(Expert(), gate=Own(weigh, 6)).double()
    with pytest.raises(MisconfigurationException, match=f"Phase 'p': .*gate is an Own, .*{sentence}"):
        run([phase("p", FedAvg())], module, blobs(), tmp_path)


@pytest.mark.parametrize("width", [7, 21])
def test_another_width_is_refused_with_the_right_one(width, tmp_path):
    sentence = r"gate is an Own, but must be one that reads features of shape \(\d, {}\), because it fails with: .*{}"
    with pytest.raises(MisconfigurationException, match=sentence.format(20, width)) as error:
        PersonalizedMoE(models.SmallMLP(9, 20, 3), gate=Own(softmax, width))
    assert "\n" not in str(error.value)
    with pytest.raises(MisconfigurationException, match=sentence.format(6, width)):
        run([phase("p", FedAvg())], PersonalizedMoE(Expert(), gate=Own(softmax, width)).double(), blobs(), tmp_path)


MLP = models.RepresentationMLP(9, 40, 30, 3)  # so wide that some features differ
MIXTURES = {
    "clusters": lambda gate: ClusteredMoE(models.SmallMLP(9, 20, 3), 1, gate=gate(9, False)),
    "pool": lambda gate: models.PooledMoE(models.SmallMLP(9, 20, 3), 2, gate(20, True)),
    "sparse": lambda gate: models.SparseMoE(models.SmallMLP(9, 20, 5), nn.Linear(5, 3), 2, gate=gate(5, False)),
    "representations": lambda gate: models.RepresentationMoE(MLP, [MLP], gate=gate(30, True)),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture_tries_its_gate(name):
    make = MIXTURES[name]
    make(lambda width, reads: Own(softmax, width, reads))
    make(lambda width, reads: Own(softmax, None, reads))
    for kind in ("sigmoid", "of the batch", "one value"):
        wrong = partial(make, partial(Own, WRONG[kind][0]))
        assert refused_argument(wrong) == "gate"


class Learned(models.Gate):
    """Weights that are learned, whatever the input."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.logits.softmax(0).expand(len(x), 2)


class Drawn(Learned):
    def reset_parameters(self):
        nn.init.normal_(self.logits)


def test_a_gate_that_clients_could_not_draw_anew_is_refused_where_they_do():
    def check(gate, algorithm):
        check_parts(phase("own", algorithm, gate=gate), PersonalizedMoE(Expert(), gate=gate))

    assert refused_argument(lambda: check(Learned(), PFLMoE())) == "gate"
    check(Drawn(), PFLMoE())
    check(Learned(), FedAvg())


def test_fixed_weights_of_ones_own_are_shares_too():
    class Fixed(models.FixedGate):
        def fit_to(self, num_experts):
            self.weights = [0.7] * num_experts

    assert refused_argument(lambda: PersonalizedMoE(Expert(), gate=Fixed())) == "gate"


def test_a_trial_leaves_generators_modes_and_statistics_as_they_are():
    """Also of an expert that cannot be run on a batch of one in train mode."""
    torch.manual_seed(0)
    expert, gate = InputShape(over_features(nn.BatchNorm1d(6))), Own(softmax, 6)
    state = torch.get_rng_state()
    module = PersonalizedMoE(expert, expert, gate)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.global_expert.extractor[1].num_batches_tracked == 0
    assert all(part.training for part in module.modules())
    module.eval().check_gate(samples(5)[0])
    assert not any(part.training for part in module.modules())
    assert not module.gate._forward_pre_hooks


class Counting(nn.Module):
    """Has a buffer whose elements share memory, and another name of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("scale", torch.ones(1).expand(6), persistent=False)
        self.same = self.calls

    def forward(self, x):
        self.calls += 1
        self.scale = self.scale * 2
        self.register_buffer("last", x)
        return self.scale * torch.rand(6)


def test_buffers_and_random_numbers_are_as_they_were_before_a_trial():
    module = Counting()
    buffers, versions = dict(module.named_buffers()), [buffer._version for buffer in module.buffers()]
    state = torch.get_rng_state()
    with trying(module):
        module(torch.ones(2))
        assert module.calls == 1 and module.scale[0] == 2
    assert dict(module.named_buffers()).keys() == buffers.keys()
    assert all(buffer is buffers[name] for name, buffer in module.named_buffers())
    assert [buffer._version for buffer in module.buffers()] == versions and module.same == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_gate_that_keeps_to_it_is_taken_also_in_half_precision():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        module = PersonalizedMoE(models.SmallMLP(9, 20, 3), gate=Own(softmax)).to(dtype)
        module.check_gate(torch.rand(5, 9).to(dtype))
    assert PersonalizedMoE(models.SmallMLP(9, 20, 3), gate=models.EqualWeights()).gate.weights == [0.5, 0.5]
