"""Modes: what the user has put into eval mode stays there, what is frozen comes back; and what an epoch trains."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from helpers import blobs, client_generator, mixture, phase, run
from helpers.backends import WithBatchNorm, local_training
from helpers.ingredients import NETS, build
from helpers.models import Adapted
from torch import nn

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg, FedRep, PFLMoE
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.pfl_moe import _GATE
from fedmoe_pl.algorithms.shared.parts import set_aside
from fedmoe_pl.backends import Freezing, TrainerBackend
from fedmoe_pl.backends.local_client import trainable_names
from fedmoe_pl.backends.training import epochs_to_try
from fedmoe_pl.evaluation.outputs import load_to_evaluate
from fedmoe_pl.models import GlobalOnly, LinearGate, PersonalizedMoE
from fedmoe_pl.models.layers import evaluating, modes_of
from fedmoe_pl.phases.phase import INITIAL, Train
from fedmoe_pl.rounds.begin import sized
from fedmoe_pl.setup.check_run import trained_names
from fedmoe_pl.trees import copy_module

SIZES, SEED = (12, 8, 9), 3
PRETRAINED = "BatchNorm in eval mode"  # that, and in other ways, it is trained as in plain Trainers: test_oracle.py
warned = pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")


def data():
    """Each client has samples of one class, of which the last batch of the last one is a single sample."""
    datamodule = blobs(SIZES)
    datamodule.y[: sum(SIZES)] = torch.arange(3).repeat_interleave(torch.tensor(SIZES))
    return datamodule


@warned
def test_rounds_that_alternate_leave_the_modes_of_the_user(tmp_path):
    """PFL-MoE's own schedule, whose even rounds train the local expert and whose odd ones train the gate."""
    phases = [
        phase("FedAvg", FedAvg(), gate=GlobalOnly()),
        phase("PFL-MF", PFLMoE(0.25, True, "local_expert.*"), rounds=3, gate=LinearGate(5), train=Train(max_epochs=1)),
    ]
    federation = run(phases, build(PRETRAINED), data(), tmp_path, seed=SEED, backend=TrainerBackend())
    start, state = federation.run.states["FedAvg"].server, federation.run.states["PFL-MF"]
    for client, samples in enumerate(data().train_samples):
        expert = NETS[PRETRAINED]().double()
        expert.load_state_dict({n.removeprefix("global_expert."): t for n, t in start.items() if n[0] == "g"})
        own = set_aside(Client(client, 0, SEED, federation.run.models[INITIAL], samples, {}, None), 0.25, _GATE)[1]
        for round in (1, 3):  # counted on from FedAvg
            batches = data().batches(own, generator=client_generator(SEED, client, round))
            optimizer = torch.optim.SGD(expert.parameters(), lr=0.1)
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(expert(x), y).backward()
                optimizer.step()
        kept = {n.removeprefix("local_expert."): t for n, t in state.clients[client].items() if n.startswith("local_")}
        expected = {name: tensor for name, tensor in expert.state_dict().items() if name in kept}
        torch.testing.assert_close(kept, expected, rtol=1e-12, atol=1e-12)
        assert "extractor.0.weight" in kept and "extractor.1.running_mean" not in kept


@pytest.mark.parametrize("evaluated", ["extractor.0", "extractor.1", "extractor", "classifier", ""])
def test_an_epoch_that_freezes_parts_leaves_all_modes_as_they_were(evaluated):
    class Alternating(FedAvg):
        def is_trainable(self, name, round, epoch):
            return (".extractor." in name) == (epoch == 1)

    module = PersonalizedMoE(WithBatchNorm(), gate=GlobalOnly())
    module.global_expert.get_submodule(evaluated).eval()
    before = modes_of(module)
    freezing = Freezing(local_training(module, Alternating(), data()), module, 0)
    for epoch, (frozen, trained) in enumerate((["extractor", "classifier"], ["classifier", "extractor"])):
        freezing.freeze(epoch)
        parts = [module.global_expert.get_submodule(name) for name in (frozen, trained)]
        assert not any(modes_of(parts[0]).values())
        assert modes_of(parts[1]) == {part: before[part] for part in parts[1].modules()}
        freezing.unfreeze()
        assert modes_of(module) == before


def test_adapters_that_are_merged_in_eval_mode_are_apart_after_it_unless_the_user_has_merged_them():
    """The output is that of both, and a part in eval mode stays merged, as ``eval`` of its own has left it."""
    module = nn.ModuleList([Adapted(5, 3), Adapted(5, 3).eval()]).double()
    x, weights = torch.randn(2, 5, dtype=torch.float64), [part.weight.clone() for part in module]
    outputs = [part(x) for part in module]
    for _ in range(2):
        with evaluating(module):
            assert module[0].is_merged and module[1].is_merged
        assert (module[0].is_merged, module[1].is_merged) == (False, True)
        load_to_evaluate(evaluated := copy_module(module), module.state_dict())
        load_to_evaluate(evaluated, module.state_dict())
        for own, part, weight, output in zip(module, evaluated, weights, outputs, strict=True):
            torch.testing.assert_close(own.weight, weight)
            torch.testing.assert_close(part(x), output)


def test_sizing_lazy_layers_keeps_the_modes():
    expert = nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4), nn.LazyLinear(3))
    expert[0].eval(), expert[1].eval()
    module = sized(PersonalizedMoE(expert, gate=GlobalOnly()), blobs(dtype=torch.float32), 0)
    assert [part.training for part in module.global_expert] == [False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("every_batch", [False, True])
def test_parts_in_eval_mode_are_named_once_in_a_run(every_batch, tmp_path):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        phases = [phase(name, FedAvg(), rounds=2) for name in "ab"]
        run(phases, build(PRETRAINED), data(), tmp_path / "eval", every_batch=every_batch)
        run(phases, build(PRETRAINED).train(), data(), tmp_path / "train", every_batch=every_batch)
    (message,) = [str(each.message) for each in found if "eval mode" in str(each.message)]
    assert message.startswith("Found 2 module(s) in eval mode at the start of training, such as global_expert.extrac")


MANY = 10**9


def training(algorithm, rounds, max_epochs):
    return local_training(mixture(LinearGate(5)), algorithm, blobs(), max_epochs, rounds)


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
