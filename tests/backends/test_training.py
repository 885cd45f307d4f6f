"""What is trained together is known at once, however many rounds and epochs a phase has; modes of frozen parts."""

from contextlib import nullcontext

import pytest
from helpers import blobs, mixture
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, FedRep, PFLMoE
from fedmoe_pl.backends import LEAN_TRAINER, Freezing, LocalTraining
from fedmoe_pl.backends.local_client import trainable_names
from fedmoe_pl.backends.training import epochs_to_try
from fedmoe_pl.models import LinearGate
from fedmoe_pl.setup.check_run import trained_names

MANY = 10**9


def training(algorithm, rounds, max_epochs, gate=None) -> LocalTraining:
    module = mixture(gate or LinearGate(5))
    trainer = {**LEAN_TRAINER, "max_epochs": max_epochs}
    return LocalTraining(module, {}, algorithm, blobs(), trainer, None, 0, rounds)


@pytest.mark.few(3)
@pytest.mark.parametrize("numbers", [(1, MANY), (MANY, MANY), (MANY, 3)])
@pytest.mark.parametrize("algorithm", [FedAvg(), FedRep(shared="global_expert.*", head_epochs=2), PFLMoE()])
def test_many_rounds_and_epochs_take_no_time(numbers, algorithm):
    many = training(algorithm, *numbers)
    few = training(algorithm, min(numbers[0], 9), min(numbers[1], 9))
    assert many.trainable == few.trainable
    assert {*trainable_names(few, few.module, 0)} <= {*trainable_names(many, many.module, 0)}
    phase = Phase("p", algorithm, rounds=numbers[0], train=Train(max_epochs=numbers[1]))
    name = type(algorithm).__name__
    with nullcontext() if name == "FedAvg" else pytest.warns(match=f"too many to know what {name} never trains"):
        trained_names(phase, many.module, numbers[1])


def test_up_to_a_limit_all_epochs_are_tried():
    algorithm = OneAfterTheOther()
    assert len([*epochs_to_try(algorithm, range(1000), 100)[0]]) == 100_000
    assert epochs_to_try(algorithm, range(1000), 100)[1]
    pairs, shows_all = epochs_to_try(algorithm, range(1000), 101)
    assert not shows_all and 50_000 < len([*pairs]) <= 100_000
    assert [*epochs_to_try(FedAvg(), range(1000), 101)[0]] == [(0, 0)]
    assert [*epochs_to_try(FedAvg(), range(10 * MANY), 0)[0]] == []  # not even a list of the rounds


class OneAfterTheOther(FedAvg):
    """Trains another part in every round, and none in the first epoch."""

    def is_trainable(self, name, round, epoch):
        return bool(epoch) and name.startswith(("gate.", "local_expert.", "global_expert.")[round % 3])


def test_frozen_parts_are_not_guessed_from_the_first_epochs():
    assert training(PFLMoE(), 9, 9).frozen_modules
    assert not training(OneAfterTheOther(), MANY, 9).frozen_modules
    assert training(FedAvg(trainable="gate.*"), 1, MANY).frozen_modules


class Alone(nn.Sequential):
    """Leaves the mode of its parts alone."""

    def train(self, mode=True):
        self.training = mode
        return self


def test_parts_are_in_eval_mode_while_they_are_frozen_and_others_in_the_mode_that_the_user_gave_them():
    algorithm = FedAvg(trainable="global_expert.*")
    frozen = training(algorithm, 1, 1)
    module = frozen.module
    module.local_expert.extractor.append(nn.Dropout())
    module.local_expert.classifier.append(Alone(nn.BatchNorm1d(2), nn.ReLU()))
    modes = {name: part.training for name, part in module.named_modules()}
    freezing = Freezing(frozen, module, 0)
    module.global_expert.classifier.eval()
    freezing.freeze(0)
    in_eval_mode = {name for name, part in module.named_modules() if not part.training}
    by_user = {name for name in modes if name.startswith("global_expert.classifier")}
    relu = next(name for name, part in module.named_modules() if type(part) is nn.ReLU and "local" in name)
    assert in_eval_mode - {relu} == by_user | {n for n in modes if n.startswith(("local_expert", "gate"))} - {relu}
    freezing.unfreeze()
    assert {name for name, part in module.named_modules() if not part.training} - {relu} == by_user
