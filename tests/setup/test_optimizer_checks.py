"""Arguments of optimizers and schedulers with which no training can go well."""

from functools import partial

import pytest
from helpers import mixture
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, StepLR

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.models import EqualWeights
from fedmoe_pl.rounds.begin import phase_module
from fedmoe_pl.setup.check_optimizer import check_optimizer, check_server_optimizer

NAN, INFINITY = float("nan"), float("inf")
OWN_OPTIMIZER = {
    "Phase 'p': SGD: lr is nan, but must be finite.": partial(SGD, lr=NAN),
    "Phase 'p': SGD: lr is inf, but must be finite.": partial(SGD, lr=INFINITY),
    "Phase 'p': SGD: lr is -1, but must be one that SGD accepts (Invalid learning rate: -1).": partial(SGD, lr=-1),
    "Phase 'p': SGD: momentum is 1.5, but must be at least 0 and below 1.": partial(SGD, lr=0.1, momentum=1.5),
    "Phase 'p': SGD: momentum is nan, but must be finite.": partial(SGD, lr=0.1, momentum=NAN),
    "Phase 'p': SGD: dampening is inf, but must be finite.": partial(SGD, lr=0.1, momentum=0.5, dampening=INFINITY),
    "Phase 'p': SGD: weight_decay is nan, but must be finite.": partial(SGD, lr=0.1, weight_decay=NAN),
    "Phase 'p': SGD: weight_decay is None, but must be one that SGD accepts": partial(SGD, lr=0.1, weight_decay=None),
    "Phase 'p': Adam: betas is (0.9, nan), but must be one that Adam accepts": partial(Adam, lr=0.1, betas=(0.9, NAN)),
    "Phase 'p': Adam: eps is inf, but must be finite.": partial(Adam, eps=INFINITY),
}
SCHEDULERS = {
    "lr_scheduler is StepLR, but must be one that can be stepped once per epoch (": partial(StepLR, step_size=0),
    "lr_scheduler gives a learning rate of nan": partial(ExponentialLR, gamma=NAN),
    "lr_scheduler gives a learning rate of inf": partial(ExponentialLR, gamma=INFINITY),
    "lr_scheduler gives a learning rate of -": partial(ExponentialLR, gamma=-0.5),
}


def checked(rounds=3, max_epochs=2, **arguments):
    phase = Phase("p", FedAvg(), rounds=rounds, **arguments)
    module = phase_module(mixture(EqualWeights(), optimizer=partial(SGD, lr=0.1)), phase)
    check_optimizer(phase, module, max_epochs)
    check_server_optimizer(phase, module)


def refusal(**arguments) -> str:
    with pytest.raises(MisconfigurationException) as error:
        checked(**arguments)
    return str(error.value)


@pytest.mark.parametrize("sentence", OWN_OPTIMIZER)
def test_an_optimizer_that_cannot_train_is_refused(sentence):
    assert refusal(optimizer=OWN_OPTIMIZER[sentence]).startswith(sentence)
    assert refusal(server_optimizer=OWN_OPTIMIZER[sentence]).startswith(sentence)


@pytest.mark.parametrize("sentence", SCHEDULERS)
def test_a_scheduler_that_cannot_train_is_refused(sentence):
    assert sentence in refusal(lr_scheduler=SCHEDULERS[sentence])
    assert refusal(round_lr_scheduler=SCHEDULERS[sentence]).startswith("Phase 'p': round_lr_scheduler ")


def test_the_model_s_own_optimizer_is_refused_without_the_phase():
    phase = Phase("p", FedAvg())
    module = phase_module(mixture(EqualWeights(), optimizer=partial(SGD, lr=0.1, momentum=1.5)), phase)
    with pytest.raises(MisconfigurationException, match=r"^SGD: momentum is 1\.5, but must be"):
        check_optimizer(phase, module, max_epochs=1)


def test_many_rounds_and_epochs_take_no_time():
    slowly = partial(ExponentialLR, gamma=0.999999)
    checked(rounds=10**9, max_epochs=10**9, lr_scheduler=slowly, round_lr_scheduler=slowly)


class Bounded(SGD):
    """SGD with an option whose default is infinite."""

    def __init__(self, params, lr=0.1, bound=INFINITY):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["bound"] = bound


def test_an_infinite_default_of_an_optimizer_is_not_refused():
    checked(optimizer=Bounded, server_optimizer=partial(Bounded, lr=1.0))
    checked(optimizer=lambda parameters: Bounded(parameters))
    assert "Bounded: bound is nan, but must be finite." in refusal(optimizer=partial(Bounded, bound=NAN))


def test_a_scheduler_over_a_list_is_stepped_no_more_often_than_in_training():
    for steps in (1, 2, 3):
        over_list = partial(LambdaLR, lr_lambda=lambda step, steps=steps: [1.0, 0.5, 0.1][:steps][step])
        checked(rounds=steps, round_lr_scheduler=over_list)
        checked(max_epochs=steps - 1, lr_scheduler=over_list)  # the last step comes after the last epoch
        assert "list index out of range" in refusal(rounds=steps + 1, round_lr_scheduler=over_list)
        assert "list index out of range" in refusal(max_epochs=steps, lr_scheduler=over_list)
