"""What copies of a module would not carry over, which is refused before any training, and what they do."""

import pytest
import torch
from helpers.runs import data, federation
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.checks import InvalidArgumentError


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
