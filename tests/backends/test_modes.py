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

from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.models import GlobalOnly, LinearGate, PersonalizedMoE, SparseMoE
from fedmoe_pl.models.layers import evaluating
from fedmoe_pl.phases.phase import Phase, Train
from fedmoe_pl.trees import copy_module

SIZES, SEED = (12, 8, 9), 3


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
