"""What copies of a module would not carry over, which is refused before any training, and what they do."""

import re
from collections import OrderedDict
from functools import partial
from types import MethodType
from weakref import ref

import pytest
import torch
from helpers import Expert
from helpers.runs import data, federation
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric

from fedmoe_pl import PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import ClusteredMoE, LinearGate, PooledMoE, RepresentationMoE, SparseMoE
from fedmoe_pl.models.copies import check_copies


class Own(LightningModule):
    """A user's module with a body and a head, which a function may change."""

    def __init__(self, change=None):
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        if change is not None:
            change(self)

    def forward(self, x):
        return self.head(self.twice(self.body(x)))

    def twice(self, x, factor=2):
        return factor * x

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def refusal(tmp_path, module, **arguments) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as error:
        federation(tmp_path, [Phase("p", FedAvg(), **arguments)]).fit(module, data())
    assert not list(tmp_path.rglob("version_*"))
    return error.value


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_torchscript_may_be_in_a_module_if_it_is_frozen(tmp_path):
    def scripted(module):
        module.body = nn.Sequential(torch.jit.script(module.body))

    module = Own(scripted)
    refused = refusal(tmp_path, module)
    assert refused.argument == "body.0" and "a frozen one" in refused.allowed
    module.body.requires_grad_(False)
    federation(tmp_path, [Phase("p", FedAvg())]).fit(module, data())


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.body.weight.register_hook(lambda gradient: 0 * gradient),
        lambda module: module.body.weight.register_post_accumulate_grad_hook(lambda weight: None),
    ],
)
def test_hooks_of_parameters_are_refused(tmp_path, change):
    refused = refusal(tmp_path, Own(change))
    assert refused.argument == "body.weight" and "on_after_backward" in refused.allowed


def transposed(module):
    module.tied = nn.Linear(4, 5)
    module.tied.weight.data = module.body.weight.data.T


TIED = {
    "transposed": transposed,
    "in a buffer": lambda module: module.register_buffer("tied", module.body.weight.data[:2]),
    "frozen": lambda module: setattr(module, "tied", nn.Parameter(module.body.weight.data, requires_grad=False)),
}


@pytest.mark.parametrize("name", TIED)
def test_memory_that_a_trained_parameter_shares_is_refused(tmp_path, name):
    refused = refusal(tmp_path, Own(TIED[name]))
    sentence = r"Own: (body|tied)(\.weight)? is 'in the memory of (body|tied)(\.weight)?', but must be in memory of its"
    assert "same Parameter" in refused.allowed and re.search(sentence, str(refused))


def test_the_same_parameter_frozen_ones_and_memory_beside_each_other_may_be_in_a_module():
    module, memory, frozen = Own(), torch.zeros(6, 5), torch.zeros(1, 3)
    module.same = module.body
    module.left, module.top = nn.Parameter(memory[:, :2]), nn.Parameter(memory[:2, 2:])
    module.register_buffer("rest", memory[2:, 2:])
    module.register_buffer("empty", memory[:0])
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    module.register_buffer("expanded", frozen.expand(2, 3))
    module.frozen, module.lazy = nn.Parameter(frozen, requires_grad=False), nn.LazyLinear(2)
    check_copies(module)


def test_phases_may_not_tie_a_gates_parameters_by_their_memory(tmp_path):
    gate = LinearGate(5)
    gate.register_buffer("first", gate.linear.weight.data)
    assert refusal(tmp_path, PersonalizedMoE(Expert()), gate=gate).owner == "LinearGate"


def with_block(make):
    """Sets an attribute to what is made of the module."""
    return lambda module: setattr(module, "block", make(module))


def of_a_closure(module):
    inner = {"one": [partial(lambda x: module.twice(x))]}
    return lambda x: inner["one"][0](x)


def replaced_forward(module):
    forward = module.body.forward
    module.body.forward = lambda x: 2 * forward(x)


def in_a_layer(module):
    module.head = nn.Sequential(module.head)
    module.head.function = lambda x: module.body(x)


FUNCTIONS = {
    "closure": (with_block(lambda module: lambda x: module.body(x).tanh()), "block"),
    "closure of a closure": (with_block(of_a_closure), "block"),
    "default": (with_block(lambda module: lambda x, *, weight=module.body.weight: x @ weight), "block"),
    "in a list": (
        with_block(lambda module: [len, partial(lambda: module.body.weight.abs().sum())]),
        "a value in block",
    ),
    "replaced forward": (replaced_forward, "body.forward"),
    "method": (with_block(lambda module: MethodType(lambda self, x: module.body(x), module)), "a value in block"),
    "in a layer": (in_a_layer, "head.function"),
    "weak reference": (lambda module: vars(module).update(block=ref(module.head)), "block"),
    "hook": (lambda module: module.body.register_forward_hook(lambda *_: module.twice(0)), "a hook of body"),
    "pre hook": (lambda module: module.register_forward_pre_hook(lambda *_: module.twice(0)), "a hook of the module"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_use_the_original_module_are_refused(tmp_path, name):
    change, argument = FUNCTIONS[name]
    refused = refusal(tmp_path, Own(change))
    assert (refused.owner, refused.argument) == ("Own", argument)
    assert refused.because.startswith("it uses the original ")


of_this_file = None


def test_a_function_that_finds_the_module_in_its_file_is_refused(monkeypatch):
    module = Own(with_block(lambda module: lambda x: of_this_file(x)))
    check_copies(module)
    monkeypatch.setitem(globals(), "of_this_file", module.body)
    sentence = "Own: block is a function, but must be a method, a module, or a partial of one, because it uses the orig"
    with pytest.raises(InvalidArgumentError, match=f"^{sentence}inal body, and clients train copies"):
        check_copies(module)


def test_what_copies_carry_over_is_accepted():
    module, criterion = Own(), nn.CrossEntropyLoss(weight=torch.ones(3))
    module.method, module.partial, module.layers = module.twice, partial(module.twice, factor=3), [module.body]
    module.replaced = MethodType(lambda self, x: self.weight * x, module.body)
    module.called = {"other": lambda x, y: criterion(x, y), "later": lambda x: later(x)}
    module.body.register_full_backward_hook(lambda layer, *gradients: None)
    module.body.register_forward_hook(module.twice)
    module.metric, module.compiled = MeanMetric(), torch.compile(nn.Linear(2, 2))
    module.normalized = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    module.normalized.register_parameter("more", nn.Parameter(torch.ones(2)))
    module.known = OrderedDict(itself=[])
    module.known["itself"].append(module.known)
    check_copies(module)
    later = len
    assert module.called["later"]("abc") == 3


@pytest.mark.parametrize(
    "mixture",
    [
        PersonalizedMoE,
        partial(ClusteredMoE, num_clusters=2),
        partial(PooledMoE, num_experts=2),
        lambda expert: SparseMoE(nn.Linear(5, 5), expert, num_experts=2),
        lambda expert: RepresentationMoE(Expert(), [expert]),
    ],
)
def test_experts_that_a_mixture_copies_are_checked_when_it_is_made(mixture):
    expert = Expert()
    layer = expert.classifier[1]
    expert.classifier[1].forward = lambda x: nn.functional.linear(x, layer.weight)
    with pytest.raises(InvalidArgumentError, match=r"forward is a function, .* it uses the original"):
        mixture(expert)
