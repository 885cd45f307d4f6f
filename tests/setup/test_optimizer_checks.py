"""Optimizers and schedulers that cannot be made, or would be overlooked, are refused."""

from functools import partial

import pytest
from helpers import mixture
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import EqualWeights
from fedmoe_pl.rounds.begin import phase_module
from fedmoe_pl.setup.check_optimizer import check_optimizer, check_server_optimizer


def checked(rounds=3, **arguments):
    phase = Phase("p", FedAvg(), rounds=rounds, **arguments)
    module = phase_module(mixture(EqualWeights(), optimizer=partial(SGD, lr=0.1)), phase)
    check_optimizer(phase, module)
    check_server_optimizer(phase, module)


def refused(**arguments) -> tuple[str, str]:
    """The owner and the argument that are refused."""
    with pytest.raises(InvalidArgumentError) as error:
        checked(**arguments)
    return error.value.owner, error.value.argument


@pytest.mark.parametrize("part", ["optimizer", "server_optimizer"])
def test_the_argument_that_an_optimizer_refuses_is_named(part):
    assert refused(**{part: partial(SGD, lr=-1)}) == ("SGD", "lr")
    assert refused(**{part: partial(Adam, lr=0.1, betas=(0.9, float("nan")))}) == ("Adam", "betas")
    assert refused(**{part: partial(SGD, lr=-1, momentum=-1)}) == ("Phase 'p'", part)


def test_a_scheduler_that_would_not_be_followed_is_refused():
    assert refused(lr_scheduler=ReduceLROnPlateau) == ("Phase 'p'", "lr_scheduler")
    cycle = partial(OneCycleLR, max_lr=0.1, total_steps=2)
    assert refused(lr_scheduler=cycle, round_lr_scheduler=partial(StepLR, step_size=1)) == (
        "Phase 'p'",
        "round_lr_scheduler",
    )


def test_a_scheduler_over_rounds_is_tried_for_as_many_as_there_are():
    for rounds in (1, 2, 3):
        over_list = partial(LambdaLR, lr_lambda=lambda step, rounds=rounds: [1.0, 0.5, 0.1][:rounds][step])
        checked(rounds=rounds, round_lr_scheduler=over_list)
        assert refused(rounds=rounds + 1, round_lr_scheduler=over_list) == ("Phase 'p'", "round_lr_scheduler")
    checked(rounds=10**9, round_lr_scheduler=partial(StepLR, step_size=1))  # takes no time
