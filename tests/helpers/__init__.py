"""Small data, models and runs that several test modules share."""

import copy
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Generator, Tensor, nn

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.data import Arrays, FederatedDataModule, Partitioner
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import PersonalizedMoE, SparseMoE
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.seeds import derive_seed


class GivenParts(Partitioner):
    """Client i holds the training samples ``parts[i]``; a dict has names of clients."""

    needs_classes = False

    def __init__(self, parts):
        self.parts = parts

    def __call__(self, labels, num_clients, rng, client_ids=None):
        if isinstance(self.parts, dict):
            return {name: torch.as_tensor(part).numpy() for name, part in self.parts.items()}
        return [torch.as_tensor(part).numpy() for part in self.parts]


class TensorData(FederatedDataModule):
    """Given tensors, dealt as ``parts`` says; the test set is ``test``, by default the training samples."""

    def __init__(self, x, y, parts, test=None, dtype=torch.float32, **kwargs):
        super().__init__(partitioner=GivenParts(parts), **kwargs)
        self.arrays = Arrays(x, y, *(test or (x, y)))
        self.dtype = dtype

    def load(self):
        return self.arrays

    def setup(self, stage=None):
        super().setup(stage)
        self.x = self.x.to(self.dtype)


def blobs(sizes=(13, 8, 11), features=5, classes=3, dtype=torch.float64, **kwargs) -> TensorData:
    """Clouds of points, one per class; client i holds ``sizes[i]`` of them, with classes of its own frequency."""
    generator = Generator().manual_seed(0)
    centers = 1.5 * torch.randn(classes, features, generator=generator)
    n, n_test = sum(sizes), 30
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    y = torch.arange(n + n_test) % classes
    y[:n][torch.rand(n, generator=generator) < 0.5] = 0
    y[:n] = (y[:n] + owner) % classes
    x = centers[y] + torch.randn(n + n_test, features, generator=generator)
    parts = torch.arange(n).split(list(sizes))
    datamodule = TensorData(x[:n], y[:n], parts, (x[n:], y[n:]), dtype, **{"batch_size": 4, **kwargs})
    datamodule.setup()
    return datamodule


class OneWeight(LightningModule):
    """A user's own module: loss a/2 (w - b)^2 for samples (a, b), with nothing that knows of federations."""

    def __init__(self, lr=0.05, start=0.0):
        super().__init__()
        self.lr = lr
        self.weight = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x

    def training_step(self, batch, batch_idx):
        loss = quadratic(self.weight, batch[0])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class PureOneWeight(OneWeight):
    """The same with the pure loss that algorithms and stacking build on."""

    def loss(self, batch):
        return quadratic(self.weight, batch[0]), {}


def quadratic(weight: Tensor, x: Tensor) -> Tensor:
    return (x[:, 0] / 2 * (weight - x[:, 1]) ** 2).mean()


def two_quadratics(sizes=(1, 1)) -> TensorData:
    """Client 0 has (a, b) = (1, 0), client 1 has (4, 5), each ``sizes[i]`` times."""
    owner = torch.tensor([0, 1]).repeat_interleave(torch.tensor(sizes))
    x = torch.tensor([[1.0, 0.0], [4.0, 5.0]])[owner]
    return TensorData(x, owner, torch.arange(sum(sizes)).split(list(sizes)), dtype=torch.float64, batch_size=100)


class Expert(nn.Module):
    """A user's own expert with dropout in front of both parts, as in VGG-16, and no ``input_shape``."""

    def __init__(self, features=5, hidden=6, classes=3, dropout=0.0):
        super().__init__()
        self.extractor = nn.Sequential(nn.Dropout(dropout), nn.Linear(features, hidden), nn.Tanh())
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(hidden, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.extractor(x))


momentum_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def mixture(gate=None, expert=None, dtype=torch.float64, optimizer=momentum_sgd, kind=PersonalizedMoE):
    """The mixture of two experts of one architecture and different parameters, the same at every call."""
    expert = expert or Expert()
    local_expert = copy.deepcopy(expert)
    torch.manual_seed(1)
    for layer in (*expert.modules(), *local_expert.modules()):
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    if gate is not None:
        gate.reset_parameters()
    return kind(expert, local_expert, gate, optimizer=optimizer).to(dtype)


class Embedding(nn.Module):
    """5 values to 6, with 36 parameters; tells its input's shape."""

    input_shape = (5,)

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def small_expert() -> nn.Sequential:
    """6 values to 3, with 43 parameters."""
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def sparse_mixture(num_experts=2, optimizer=momentum_sgd, dtype=torch.float64, **kwargs) -> SparseMoE:
    """A sparse mixture of small experts with proxies of their own, the same at every call."""
    torch.manual_seed(3)
    module = SparseMoE(Embedding(), small_expert(), num_experts, optimizer=optimizer, **kwargs).to(dtype)
    for proxy in module.gate.proxies:
        nn.init.normal_(proxy.weight)
    return module


class EveryBatch(Callback):
    """Makes a client's Trainer see every batch, the ordinary way."""

    def on_train_batch_end(self, *arguments):
        pass


def run(
    phases: list[Phase],
    model: LightningModule,
    datamodule,
    tmp_path: Path,
    max_epochs=2,
    every_batch=False,
    **kwargs,
) -> Federation:
    """A finished federation with everything off that a test of numbers does not look at."""
    arguments = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, **kwargs}
    trainer = {"max_epochs": max_epochs, "callbacks": [EveryBatch()] if every_batch else None}
    federation = Federation(phases, trainer, default_root_dir=str(tmp_path), **arguments)
    federation.fit(model, datamodule)
    return federation


def phase(name: str, algorithm: Algorithm, **kwargs) -> Phase:
    """A phase that is trained and not evaluated."""
    return Phase(name, algorithm, **{"evaluate": False, **kwargs})


def client_generator(seed: int, client: int, round: int) -> Generator:
    """The generator that shuffles a client's batches; seeds torch's global one as a client's training begins.

    `round` counts on from the phases that a phase starts from.
    """
    torch.manual_seed(derive_seed(seed, 0, client, round))
    return Generator().manual_seed(derive_seed(seed, 3, client, round))


def train_by_hand(module: PersonalizedMoE, names, batches, optimizer, max_epochs: int, loss=None) -> None:
    """A bare loop of plain PyTorch over the parameters with these name prefixes."""
    parameters = [p for name, p in module.named_parameters() if name.startswith(names)]
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith(names))
    optimizer = optimizer(parameters)
    for _ in range(max_epochs):
        for x, y in batches:
            optimizer.zero_grad()
            (loss(x, y) if loss else F.cross_entropy(module(x), y)).backward()
            optimizer.step()


def tensors(module: nn.Module, prefix="") -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if name.startswith(prefix)}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
