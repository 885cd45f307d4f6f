"""Modules whose state is saved or loaded by code of their own: as ``load_state_dict`` does it, or refused by name."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, client_generator, phase, run
from helpers.ingredients import CachedNorm, Own, Temperature
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torchmetrics.classification import MulticlassAccuracy

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.models import GlobalOnly, PersonalizedMoE
from fedmoe_pl.trees import load_tree

SIZES, SEED = (12, 8, 9), 3


class Clamped(nn.Linear):
    """Loads weights of at most 0.2."""

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].clamp(-0.2, 0.2)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


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


sgd = partial(torch.optim.SGD, lr=0.1)


class Plain(Own):
    """A user's own module."""

    def __init__(self, part=nn.Linear):
        super().__init__(Net(part), lambda parameters: sgd([p for p in parameters if p.requires_grad]))
        self.double()


class Rooted(Plain):
    """Loads its last layer with weights of at most 0.2."""

    def load_state_dict(self, state_dict, strict=True):
        name = "net.layers.2.weight"
        return super().load_state_dict({**state_dict, name: state_dict[name].clamp(-0.2, 0.2)}, strict)


def mixture(part):
    return PersonalizedMoE(Net(part), gate=GlobalOnly(), optimizer=sgd).double()


def by_hand(module, network, datamodule, rounds, drop_single=False):
    """FedAvg in plain PyTorch, whose clients and server load states with ``load_state_dict``."""
    server = module.state_dict()
    for round in range(rounds):
        states = []
        for client, samples in enumerate(datamodule.train_samples):
            batches = datamodule.batches(
                samples, generator=client_generator(SEED, client, round), drop_single=drop_single
            )
            own = copy.deepcopy(module)
            own.load_state_dict(server, strict=False)
            optimizer = sgd(network(own).parameters())
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


PARTS = [Temperature, CachedNorm, Clamped, Hooked, Scaled]
MODELS = {
    **{f"{part.__name__} in a user's module": partial(Plain, part) for part in PARTS},
    **{f"{part.__name__} in a mixture": partial(mixture, part) for part in PARTS},
    "load_state_dict of a user's module": Rooted,
}


@pytest.mark.parametrize("name", MODELS)
def test_code_that_loads_a_state_is_called(name, tmp_path):
    datamodule, is_mixture = blobs(SIZES), name.endswith("mixture")
    x = datamodule.x[datamodule.global_test]
    module = MODELS[name]()
    it = phase("FedAvg", FedAvg("global_expert.*" if is_mixture else "*"), rounds=2, evaluate=True)
    federation = run([it], copy.deepcopy(module), datamodule, tmp_path, max_epochs=1, seed=SEED)
    network = (lambda own: own.global_expert) if is_mixture else (lambda own: own.net)
    server, module = by_hand(module, network, datamodule, 2)
    state = federation.run.states["FedAvg"].server
    torch.testing.assert_close(dict(state), {n: server[n] for n in state}, rtol=1e-10, atol=1e-12)
    actual = federation.client_module("FedAvg", 1)
    torch.testing.assert_close(actual(x), module(x), rtol=1e-10, atol=1e-12)
    accuracy = (module(x).argmax(1) == datamodule.y[datamodule.global_test]).double().mean()
    assert federation.results["FedAvg"].clients[1].global_test == pytest.approx(accuracy.item())


class Configured(nn.Linear):
    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state):
        pass


class Pickled(Configured):
    def get_extra_state(self):
        return torch.tensor([1, 2], dtype=torch.uint8)


class Exponential(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.exp()


class Without(Plain):
    """Leaves a frozen encoder out of its state dict."""

    def __init__(self):
        super().__init__()
        self.net.layers[0].requires_grad_(False)

    def state_dict(self, **arguments):
        return {name: tensor for name, tensor in super().state_dict(**arguments).items() if "layers.0" not in name}


class Hiding(Plain):
    """Leaves a buffer out, by a hook."""

    def __init__(self):
        super().__init__()
        self.net.register_buffer("counts", torch.zeros(3))

        def hide(part, state, prefix, metadata):
            del state[f"{prefix}counts"]

        self.net.register_state_dict_post_hook(hide)


class OnCpu(Plain):
    def state_dict(self):
        return {name: tensor.cpu() for name, tensor in super().state_dict().items()}


REFUSED = {
    "a dict": (partial(Plain, Configured), r"net.layers.2._extra_state is 'a dict', but must be a tensor, because"),
    "bytes": (partial(mixture, Pickled), r"layers.2._extra_state is 'a tensor of bytes', but must be one of numbers"),
    "another form": (
        partial(Plain, Exponential),
        r"'net.layers.2.weight' is in another form in what its state_dict returns, but",
    ),
    "an encoder": (Without, r"^Without: 'net.layers.0.weight' is left out of what its state_dict returns, but must be"),
    "a buffer": (Hiding, r"^Hiding: 'net.counts' is left out of what its state_dict returns"),
    "no argument": (OnCpu, r"^OnCpu.state_dict cannot be called as PyTorch's: .*keep_vars"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_state_dict_that_is_not_the_modules_tensors_is_refused_before_training(what, tmp_path):
    make, message = REFUSED[what]
    with pytest.raises(MisconfigurationException, match=message) as error:
        run([phase("FedAvg", FedAvg())], make(), blobs(SIZES), tmp_path)
    assert "\n" not in str(error.value)


class Bank(nn.Linear):
    """Remembers what it has seen, and how."""

    def __init__(self, how, *sizes):
        super().__init__(*sizes)
        self.how = how
        self.register_buffer("seen", torch.zeros(0, 4, dtype=torch.float64), persistent=how != "is not saved")

    def forward(self, x):
        if self.training and self.how == "is new":
            self.register_buffer("own", x.detach().mean())
        elif self.training:
            self.seen = torch.cat([self.seen, x.detach()])
        return super().forward(x) + self.seen.sum()


@pytest.mark.parametrize("model", [Plain, mixture])
def test_a_buffer_whose_shape_changes_is_refused_after_the_first_client_unless_it_is_not_saved(model, tmp_path):
    refused = {
        "has grown": r"^Phase 'FedAvg', client 0: '.*layers.2.seen' had shape \(0, 4\) and has \(12, 4\) after its",
        "is new": r"^Phase 'FedAvg', client 0: '.*layers.2.own' is new after its training, but what clients",
    }
    for how, message in refused.items():
        with pytest.raises(MisconfigurationException, match=message):
            run([phase("FedAvg", FedAvg())], model(partial(Bank, how)), blobs(SIZES), tmp_path, max_epochs=1)
    run([phase("FedAvg", FedAvg())], model(partial(Bank, "is not saved")), blobs(SIZES), tmp_path, max_epochs=1)


class OfTorch(Plain):
    """Parts of torch and of torchmetrics with hooks and methods for their state."""

    def __init__(self, metric_is_saved=False):
        super().__init__()
        self.net.layers[0] = nn.Sequential(spectral_norm(nn.Linear(5, 4)), nn.BatchNorm1d(4))
        self.net.layers.insert(1, parametrizations.weight_norm(nn.Linear(4, 4)))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.accuracy.persistent(metric_is_saved)
        self.double()

    def training_step(self, batch, batch_idx):
        self.accuracy(logits := self(batch[0]), batch[1])
        return F.cross_entropy(logits, batch[1])


@pytest.mark.parametrize("metric_is_saved", [False, True])
def test_parts_of_torch_and_metrics_are_trained_as_by_hand(metric_is_saved, tmp_path):
    module = OfTorch(metric_is_saved)
    federation = run(
        [phase("FedAvg", FedAvg())], copy.deepcopy(module), blobs(SIZES), tmp_path, max_epochs=1, seed=SEED
    )
    server, _ = by_hand(module, lambda own: own.net, blobs(SIZES), 1, drop_single=True)
    actual = dict(federation.run.states["FedAvg"].server)
    assert actual.keys() == server.keys()
    of_net = [name for name in server if "net." in name and "num_batches" not in name]
    torch.testing.assert_close({n: actual[n] for n in of_net}, {n: server[n] for n in of_net}, rtol=1e-10, atol=1e-12)


def test_what_a_part_keeps_of_what_it_loads_is_its_own():
    """A metric that is saved keeps the tensors that it is given, and adds to them in place."""
    metrics = nn.ModuleList([MulticlassAccuracy(3)])
    metrics[0].persistent(True)
    tree = {name: tensor + 2 for name, tensor in metrics.state_dict().items()}
    before = copy.deepcopy(tree)
    load_tree(metrics, tree)
    assert_same_bits(dict(metrics.state_dict()), before)
    metrics[0](torch.eye(3), torch.arange(3))
    assert_same_bits(tree, before)
    assert not torch.equal(metrics.state_dict()["0.tp"], before["0.tp"])
