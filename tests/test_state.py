"""Modules whose state is saved or loaded by code of their own: as ``load_state_dict`` does it, or refused by name."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import blobs, client_generator, phase, run
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import AutoBackend
from fedmoe_pl.models import GlobalOnly, PersonalizedMoE

SIZES, SEED = (12, 8, 9), 3


class Tempered(nn.Linear):
    """Has a temperature that falls in training, as extra state."""

    temperature = 1.0

    def get_extra_state(self):
        return torch.tensor(self.temperature, dtype=torch.float64)

    def set_extra_state(self, state):
        self.temperature = state.item()

    def forward(self, x):
        self.temperature *= 0.9 if self.training else 1
        return super().forward(x) / self.temperature


class Cached(nn.Linear):
    """Divides by the norm that its weight had when it was loaded."""

    norm = 1.0

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_load_state_dict_post_hook(self.cache)

    def cache(self, part, keys):
        self.norm = self.weight.detach().norm()

    def forward(self, x):
        return super().forward(x) / self.norm


class Clamped(nn.Linear):
    """Loads weights of at most 0.2."""

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].clamp(-0.2, 0.2)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Pinned(nn.Linear):
    """Never loads its bias."""

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        super()._load_from_state_dict({**state_dict, f"{prefix}bias": self.bias}, prefix, *arguments)


class Hooked(nn.Linear):
    """The same by a hook."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_load_state_dict_pre_hook(self.clamp)

    def clamp(self, part, state_dict, prefix, *arguments):
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].clamp(-0.2, 0.2)


class Scaled(nn.Linear):
    """Saves a number that is no buffer."""

    scale = 1.0

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.tensor(self.scale, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self.scale = state_dict.pop(f"{prefix}scale").item()
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def forward(self, x):
        self.scale += 0.1 if self.training else 0
        return super().forward(x) * self.scale


class Net(nn.Module):
    def __init__(self, part):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), part(4, 3))

    def forward(self, x):
        return self.layers(x)


class Plain(LightningModule):
    """A user's own module."""

    def __init__(self, part=nn.Linear):
        super().__init__()
        self.net = Net(part)
        self.double()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Rooted(Plain):
    """Loads its last layer with weights of at most 0.2."""

    def load_state_dict(self, state_dict, strict=True):
        name = "net.layers.2.weight"
        return super().load_state_dict({**state_dict, name: state_dict[name].clamp(-0.2, 0.2)}, strict)


def mixture(part):
    return PersonalizedMoE(Net(part), gate=GlobalOnly(), optimizer=partial(torch.optim.SGD, lr=0.1)).double()


def by_hand(module, network, datamodule, rounds):
    """FedAvg in plain PyTorch, whose clients and server load states with ``load_state_dict``."""
    server = module.state_dict()
    for round in range(rounds):
        states = []
        for client, samples in enumerate(datamodule.train_samples):
            batches = datamodule.batches(samples, generator=client_generator(SEED, client, round))
            own = copy.deepcopy(module)
            own.load_state_dict(server, strict=False)
            optimizer = torch.optim.SGD(network(own).parameters(), lr=0.1)
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(network(own)(x), y).backward()
                optimizer.step()
            states.append(own.state_dict())
        server = {
            name: sum(n * state[name] for n, state in zip(SIZES, states, strict=True)) / sum(SIZES) for name in server
        }
    module.load_state_dict(server, strict=False)
    return server, module.eval()


PARTS = [Tempered, Cached, Clamped, Hooked, Scaled]
MODELS = {
    **{f"{part.__name__} in a user's module": partial(Plain, part) for part in PARTS},
    **{f"{part.__name__} in a mixture": partial(mixture, part) for part in PARTS},
    "Pinned in a user's module": partial(Plain, Pinned),
    "load_state_dict of a user's module": Rooted,
}


@pytest.mark.parametrize("name", MODELS)
def test_code_that_loads_a_state_is_called(name, tmp_path):
    datamodule, is_mixture = blobs(SIZES), name.endswith("mixture")
    x = datamodule.x[datamodule.global_test]
    module = MODELS[name]()
    federation = run(
        [phase("FedAvg", FedAvg("global_expert.*" if is_mixture else "*"), rounds=2, evaluate=True)],
        copy.deepcopy(module),
        datamodule,
        tmp_path,
        max_epochs=1,
        seed=SEED,
        backend=AutoBackend(),
    )
    network = (lambda own: own.global_expert) if is_mixture else (lambda own: own.net)
    server, module = by_hand(module, network, datamodule, 2)
    state = federation.run.states["FedAvg"].server
    torch.testing.assert_close(dict(state), {n: server[n] for n in state}, rtol=1e-10, atol=1e-12)
    actual = federation.client_module("FedAvg", 1)
    torch.testing.assert_close(actual(x), module(x), rtol=1e-10, atol=1e-12)
    accuracy = (module(x).argmax(1) == datamodule.y[datamodule.global_test]).double().mean()
    assert federation.results["FedAvg"].clients[1].global_test == pytest.approx(accuracy.item())
