"""What copies of a module would not carry over, which is refused before any training, and what they do."""

import pytest
import torch
from helpers import Expert
from helpers.runs import data, federation
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl import PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import LinearGate
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


def hook(module):
    module.body.weight.register_hook(lambda gradient: 0 * gradient)


def hook_after_accumulation(module):
    module.body.weight.register_post_accumulate_grad_hook(lambda weight: None)


@pytest.mark.parametrize("change", [hook, hook_after_accumulation])
def test_hooks_of_parameters_are_refused(tmp_path, change):
    refused = refusal(tmp_path, Own(change))
    assert refused.argument == "body.weight" and "on_after_backward" in refused.allowed


def transposed(module):
    module.tied = nn.Linear(4, 5)
    module.tied.weight.data = module.body.weight.data.T


def in_a_buffer(module):
    module.register_buffer("tied", module.body.weight.data[:2])


def frozen(module):
    module.tied = nn.Parameter(module.body.weight.data, requires_grad=False)


@pytest.mark.parametrize("change", [transposed, in_a_buffer, frozen])
def test_memory_that_a_trained_parameter_shares_is_refused(tmp_path, change):
    refused = refusal(tmp_path, Own(change))
    sentence = r"Own: (body|tied)(\.weight)? is 'in the memory of (body|tied)(\.weight)?', but must be in memory of its"
    assert "same Parameter" in refused.allowed
    with pytest.raises(InvalidArgumentError, match=sentence):
        check_copies(Own(change))


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
