"""What the user has put into eval mode stays there, as in a plain loop; what the package puts there comes back."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, client_generator, phase, run, tensors
from helpers.backends import WithBatchNorm, local_training
from helpers.models import Adapted
from helpers.workers import TwoInThisProcess
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl.algorithms import FedAvg, PFLMoE
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.pfl_moe import _GATE
from fedmoe_pl.algorithms.shared.parts import set_aside
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.evaluation.outputs import load_to_evaluate
from fedmoe_pl.models import GlobalOnly, LinearGate, PersonalizedMoE
from fedmoe_pl.models.layers import evaluating, modes_of
from fedmoe_pl.phases.phase import INITIAL, Train
from fedmoe_pl.rounds.begin import sized
from fedmoe_pl.trees import copy_module

SIZES, SEED = (12, 8, 9), 3
warned = pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")


def data(**kwargs):
    """Each client has samples of one class, of which the last batch of the last one is a single sample."""
    datamodule = blobs(SIZES, **kwargs)
    datamodule.y[: sum(SIZES)] = torch.arange(3).repeat_interleave(torch.tensor(SIZES))
    return datamodule


class Pretrained(nn.Module):
    """Batch normalization and dropout in eval mode, as ``from_pretrained`` returns them, and a head in train mode."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.extractor = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh())
        nn.init.uniform_(self.extractor[1].running_var, 1, 2)
        nn.init.normal_(self.extractor[1].running_mean)
        self.classifier = nn.Linear(6, 3)
        self.extractor.eval()

    def forward(self, x):
        return self.classifier(self.extractor(x))


class Plain(LightningModule):
    """A user's own module."""

    def __init__(self):
        super().__init__()
        self.net = Pretrained().double()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def mixture(gate=None):
    sgd = partial(torch.optim.SGD, lr=0.1)
    return PersonalizedMoE(Pretrained(), gate=gate or GlobalOnly(), optimizer=sgd).double()


def by_hand(module, datamodule, rounds, epochs=2):
    """FedAvg of ``module`` in plain PyTorch."""
    server = copy.deepcopy(module)
    for round in range(rounds):
        trained = []
        for client, samples in enumerate(datamodule.train_samples):
            batches = datamodule.batches(samples, generator=client_generator(SEED, client, round))
            trained.append(own := copy.deepcopy(server))
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            for _ in range(epochs):
                for x, y in batches:
                    optimizer.zero_grad()
                    F.cross_entropy(own(x), y).backward()
                    optimizer.step()
        for name, tensor in server.state_dict().items():
            mean = sum(n * each.state_dict()[name] for n, each in zip(SIZES, trained, strict=True)) / sum(SIZES)
            tensor.copy_(mean)
    return server.state_dict()


PATHS = {
    "clients in one Trainer": {"backend": TrainerBackend()},
    "a Trainer per client": {"backend": TrainerBackend(), "every_batch": True},
    "stacked": {"backend": StackedBackend()},
    "auto": {"backend": AutoBackend()},
    "workers": {"backend": TwoInThisProcess()},
    "a user's module": {"model": Plain},
    "evaluated in each round": {"evaluate": True},
}


@warned
@pytest.mark.few("clients in one Trainer")
@pytest.mark.parametrize("path", PATHS)
def test_pretrained_parts_in_eval_mode_are_trained_as_in_a_plain_loop(path, tmp_path):
    arguments = {"model": mixture, "evaluate": False, **PATHS[path]}
    module, of_phase = arguments.pop("model")(), {"evaluate": arguments.pop("evaluate")}
    phases = [phase("FedAvg", FedAvg(), rounds=2, **of_phase)]
    expert = module.net if isinstance(module, Plain) else module.global_expert
    before, expected = copy.deepcopy(tensors(expert)), by_hand(expert, data(), 2)
    federation = run(phases, module, data(), tmp_path, seed=SEED, **arguments)
    prefix = "net." if isinstance(module, Plain) else "global_expert."
    server = {name.removeprefix(prefix): t for name, t in federation.run.states["FedAvg"].server.items()}
    actual = {name: server[name] for name in expected}
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert not torch.equal(actual["extractor.0.weight"], before["extractor.0.weight"])
    assert_same_bits(*({name: tree[name] for name in before if "running" in name} for tree in (actual, before)))


@warned
def test_rounds_that_alternate_leave_the_modes_of_the_user(tmp_path):
    """PFL-MoE's own schedule, whose even rounds train the local expert and whose odd ones train the gate."""
    phases = [
        phase("FedAvg", FedAvg(), gate=GlobalOnly()),
        phase("PFL-MF", PFLMoE(0.25, True, "local_expert.*"), rounds=3, gate=LinearGate(5), train=Train(max_epochs=1)),
    ]
    federation = run(phases, mixture(), data(), tmp_path, seed=SEED, backend=TrainerBackend())
    start, state = federation.run.states["FedAvg"].server, federation.run.states["PFL-MF"]
    for client, samples in enumerate(data().train_samples):
        expert = Pretrained().double()
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


def test_normalization_in_eval_mode_takes_single_samples():
    """A client's last batch may be one sample, or all of its samples, also with clipped gradients of each."""
    datamodule = blobs((1, 5), batch_size=4)
    for module, counts in ((mixture(), True), (mixture().train(), False)):
        training = local_training(module, FedAvg(), datamodule)
        assert training.has_batch_norm != counts


def test_sizing_lazy_layers_keeps_the_modes():
    expert = nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4), nn.LazyLinear(3))
    expert[0].eval(), expert[1].eval()
    module = sized(PersonalizedMoE(expert, gate=GlobalOnly()), blobs(dtype=torch.float32), 0)
    assert [part.training for part in module.global_expert] == [False, False, True]


@pytest.mark.few(1)
@pytest.mark.parametrize("every_batch", [False, True])
def test_parts_in_eval_mode_are_named_once_in_a_run(every_batch, tmp_path):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        phases = [phase(name, FedAvg(), rounds=2) for name in "ab"]
        run(phases, mixture(), data(), tmp_path / "eval", every_batch=every_batch)
        run(phases, mixture().train(), data(), tmp_path / "train", every_batch=every_batch)
    (message,) = [str(each.message) for each in found if "eval mode" in str(each.message)]
    assert message.startswith("Found 10 module(s) in eval mode at the start of training, such as global_expert.extrac")
