"""Models of today's size: what a federation costs beside a bare PyTorch loop, in time, memory and files.

    python benchmarks/size.py
    python benchmarks/size.py --cases adapters large --repeats 1
    python benchmarks/size.py --accelerator gpu

* ``resnet``: ResNet-18 (11.2 million parameters), 20 clients of 20 images. FedAvg of all but the head for three
  rounds of two steps each, then fine-tuning of every client's whole model for one epoch; both are evaluated at the end.
* ``adapters``: a transformer of 35.5 million frozen parameters, with LoRA (rank 4) in queries and values and a head,
  0.07 million in all; 20 clients of 16 texts. FedAvg of what is trained for three rounds of two steps, evaluated at the
  end.
* ``large``: the same with 110 million frozen parameters, as many as BERT-base, and 10 clients.
* ``mixture``: the same base, in each adapted layer a global expert, which is averaged, a local one, and a router that
  weighs both for every token (``LayerwiseAdapterMoE`` with a ``TokenGate``; needs peft).

Both sides start with the same weights and draw the same batches. The bare loop holds one model, and keeps in memory
what each client has alone; it writes nothing. Each side is a process of its own, with one thread, in turns. Times
leave out imports and making the data. Memory is that of the side's processes at the peak, shared pages counted once
(PSS). On a GPU, seconds are those of a clock, and memory is the peak of the tensors in the GPU's memory. Files are
those of the run's folder, beside what differs: the server's tensors, what each client has alone, and the frozen base
once. ``distance`` is that of both sides' last global tensors, relative to their length; batch normalization lets
rounding grow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from peers_processes import PeakMemory
from plain import accuracy
from torch import Generator, Tensor, nn
from torchvision.models import resnet18
from workload import peak_memory, restart_with_environment

from fedmoe_pl import Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg, FineTuning
from fedmoe_pl.data import IID, Arrays, FederatedDataModule
from fedmoe_pl.models import GlobalOnly, LayerwiseAdapterMoE, LocalOnly, LoRA, TokenGate
from fedmoe_pl.seeds import derive_seed

ROUNDS, CLASSES, RANK = 3, 4, 4
OPTIMIZER = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
SIDES = "bare", "federation"
_SHUFFLE = 3  # the key of a client's batches, as the federation derives their seed
Tensors = dict[str, Tensor]


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained product of two matrices beside it (Hu et al., ICLR 2022)."""

    def __init__(self, width: int, rank: int = RANK) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.lora_b = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., width) to (..., width)."""
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


class TwoLoRALinear(nn.Module):
    """A frozen linear layer with two such products, which a trained router weighs for every token."""

    def __init__(self, width: int, rank: int = RANK) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_a_global = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.lora_b_global = nn.Parameter(torch.zeros(width, rank))
        self.lora_a_local = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.lora_b_local = nn.Parameter(torch.zeros(width, rank))
        self.lora_router = nn.Linear(width, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., width) to (..., width)."""
        weights = self.lora_router(x).softmax(-1)
        of_global = x @ self.lora_a_global.T @ self.lora_b_global.T
        of_local = x @ self.lora_a_local.T @ self.lora_b_local.T
        return self.base(x) + weights[..., :1] * of_global + weights[..., 1:] * of_local


class Block(nn.Module):
    """A layer of a transformer, with adapters in queries and values, if any."""

    def __init__(self, width: int, heads: int, adapted: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.values = adapted(width), adapted(width)
        self.keys, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, width) to (B, T, width)."""
        normed = self.norm_1(x)
        parts = (layer(normed).unflatten(-1, (self.heads, -1)) for layer in (self.queries, self.keys, self.values))
        attended = nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(self.norm_2(x))


class Transformer(nn.Module):
    """A classifier of texts whose base is frozen."""

    def __init__(self, width: int, layers: int, words: int, adapted: Callable[[int], nn.Module] = LoRALinear) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64, adapted) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora" in name or name.startswith("head"))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, classes) of tokens of shape (B, T)."""
        return self.head(self.norm(self.blocks(self.embedding(x))).mean(1))


class Classifier(LightningModule):
    """A network as a LightningModule of one's own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The network's logits."""
        return self.network(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1]), {}

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss."""
        return self.loss(batch)[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD of what is trained."""
        return OPTIMIZER([parameter for parameter in self.parameters() if parameter.requires_grad])


class RandomSamples(FederatedDataModule):
    """Random images or texts, dealt evenly; all clients are tested on the same ones.

    Args:
        case: what the clients hold.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(num_clients=case.clients, partitioner=IID(), batch_size=case.batch_size)
        self.case = case

    def load(self) -> Arrays:
        """Draws the samples."""
        return Arrays(*self.case.draw(2 * self.case.clients * self.case.batch_size, 0), *self.case.draw(20, 1))


@dataclass(frozen=True)
class Case:
    """A model and its clients.

    Attributes:
        network: makes the network.
        draw: draws samples and classes from a number and a seed.
        clients: how many there are.
        batch_size: samples in a step; each client has two batches.
        private: patterns of the parameters that each client trains for itself.
        fine_tunes: whether every client then trains a model of its own.
        is_mixture: whether the federation's model is a mixture of adapters.
    """

    network: Callable[[], nn.Module]
    draw: Callable[[int, int], tuple[Tensor, Tensor]]
    clients: int
    batch_size: int
    private: tuple[str, ...] = ()
    fine_tunes: bool = False
    is_mixture: bool = False

    def is_private(self, name: str) -> bool:
        """Whether each client trains this parameter for itself."""
        return any(fnmatchcase(name, pattern) for pattern in self.private)


def images(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random images of shape (3, 32, 32)."""
    generator = Generator().manual_seed(seed)
    x = torch.rand(number, 3, 32, 32, generator=generator)
    return x, torch.randint(CLASSES, (number,), generator=generator)


def texts(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random texts of 64 tokens."""
    generator = Generator().manual_seed(seed)
    x = torch.randint(20000, (number, 64), generator=generator)
    return x, torch.randint(CLASSES, (number,), generator=generator)


CASES = {
    "resnet": Case(partial(resnet18, num_classes=CLASSES), images, 20, 10, ("fc.*",), fine_tunes=True),
    "adapters": Case(partial(Transformer, 512, 8, 20000), texts, 20, 8),
    "large": Case(partial(Transformer, 768, 12, 30522), texts, 10, 8),
    "mixture": Case(
        partial(Transformer, 768, 12, 30522, TwoLoRALinear), texts, 10, 8, ("*_local", "*router*"), is_mixture=True
    ),
}


def network_of(case: Case) -> nn.Module:
    """The network with the initial weights of both sides."""
    torch.manual_seed(0)
    return case.network()


def model_of(case: Case) -> LightningModule:
    """The module that the federation trains: a mixture where clients get models of their own."""
    network = network_of(case)
    if case.is_mixture:
        return mixture_of(network)
    return PersonalizedMoE(network, gate=GlobalOnly(), optimizer=OPTIMIZER) if case.fine_tunes else Classifier(network)


def mixture_of(network: nn.Module) -> LightningModule:
    """The mixture with the weights of the network with two adapters and a router in each adapted layer."""
    state = {in_mixture(name): tensor for name, tensor in network.state_dict().items()}
    heads = {name: tensor for name, tensor in network.state_dict().items() if name.startswith("head.")}
    with torch.device("meta"):
        base = Transformer(768, 12, 30522, lambda width: nn.Linear(width, width))
    of_base = {name: state.pop(f"base.{name}") for name in base.state_dict() if not name.startswith("head.")}
    base.load_state_dict(of_base | heads, assign=True)  # in memory once, as in the bare loop
    lora = LoRA(["queries", "values"], r=RANK, lora_alpha=RANK, modules_to_save=["head"])
    module = LayerwiseAdapterMoE(base, lora, TokenGate(), optimizer=OPTIMIZER)
    module.load_state_dict(state, strict=False)
    return module


def in_mixture(name: str) -> str:
    """The name in the mixture of a tensor of the network."""
    layer, _, last = name.rpartition(".lora_")
    if name.startswith("head."):
        return f"head.{name}"
    if not layer:
        return f"base.{name.replace('.base.', '.')}"
    if last.startswith("router"):
        return f"gate.routers.{layer}.weight"
    factor, expert = last.split("_")
    return f"{expert}_expert.{layer}.lora_{factor.upper()}.weight"


def phases_of(case: Case) -> list[Phase]:
    """FedAvg and, where the case says so, fine-tuning."""
    if not case.fine_tunes:
        shared = ["global_expert.*", "head.*"] if case.is_mixture else "*"
        return [Phase("FedAvg", FedAvg(shared), rounds=ROUNDS)]
    federated = FedAvg(shared="global_expert.[!f]*", trainable="global_expert.*")
    return [Phase("FedAvg", federated, rounds=ROUNDS), Phase("fine-tuning", FineTuning(), gate=LocalOnly())]


def federated(case: Case, data: RandomSamples, folder: str, accelerator: str) -> Callable[[], tuple[Tensors, float]]:
    """Makes a federation; what it returns runs it: the global tensors, and the mean accuracy at the end."""
    model = model_of(case)
    federation = Federation(
        phases=phases_of(case),
        trainer={"max_epochs": 1, "accelerator": accelerator, "devices": 1},
        evaluate_every_n_rounds=0,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
    )

    def run() -> tuple[Tensors, float]:
        results = federation.fit(model, data)
        server = federation.run.states["FedAvg"].server
        prefix = "global_expert." if case.fine_tunes else "network."
        renamed = {in_mixture(name): name for name in network_of(case).state_dict()} if case.is_mixture else {}
        tensors = {renamed.get(name, name.removeprefix(prefix)): tensor for name, tensor in server.items()}
        return tensors, [*results.values()][-1].spread("global_test").mean

    return run


def train(network: nn.Module, data: RandomSamples, client: int, round: int) -> None:
    """An epoch of a client in plain PyTorch."""
    network.train()
    device = next(network.parameters()).device
    optimizer = OPTIMIZER([parameter for parameter in network.parameters() if parameter.requires_grad])
    generator = Generator().manual_seed(derive_seed(0, _SHUFFLE, client, round))
    samples = data.train_samples[client]
    for batch in samples[torch.randperm(len(samples), generator=generator)].split(data.batch_size):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(data.x[batch].to(device)), data.y[batch].to(device)).backward()
        optimizer.step()


def bare(case: Case, data: RandomSamples, device: torch.device) -> tuple[Tensors, float]:
    """The same in one loop over the clients."""
    network = network_of(case).to(device)
    state = network.state_dict()  # of the network's own memory
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    changing = [name for name in state if name in trained or name not in dict(network.named_parameters())]
    shared = [name for name in changing if not case.is_private(name)]
    server = {name: state[name].clone() for name in changing}
    private = [{name: server[name] for name in changing if name not in shared} for _ in range(case.clients)]
    for round in range(ROUNDS):
        mean = {name: torch.zeros_like(server[name]) for name in shared if server[name].is_floating_point()}
        for client in range(case.clients):
            network.load_state_dict({**server, **private[client]}, strict=False)
            train(network, data, client, round)
            for name, total in mean.items():
                total += state[name] / case.clients
            private[client] = {name: state[name].clone() for name in private[client]}
        server |= mean
    accuracies, test = [], (data.x[data.global_test].to(device), data.y[data.global_test].to(device))
    for client in range(case.clients):
        network.load_state_dict({**server, **private[client]}, strict=False)
        if case.fine_tunes:
            accuracy(network, *test)
            train(network, data, client, ROUNDS)
            private[client] = {name: state[name].clone() for name in changing}
        elif case.is_mixture:  # a client without test samples has its gate looked at on those that it trains on
            own = data.train_samples[client]
            accuracy(network, data.x[own].to(device), data.y[own].to(device))
        accuracies.append(accuracy(network, *test))
    return server, statistics.mean(accuracies)


def differing_bytes(case: Case) -> int:
    """What a run's folder has to hold: the frozen base, the server's tensors, and what each client has alone."""
    network = network_of(case)
    state = {name: tensor.numel() * tensor.element_size() for name, tensor in network.state_dict().items()}
    private = sum(size for name, size in state.items() if case.is_private(name))
    personal = sum(state.values()) if case.fine_tunes else 0
    return sum(state.values()) + case.clients * (private + personal)


def measure(name: str, side: str, out: str, accelerator: str) -> None:
    """Runs a side and prints what it took as JSON; the global tensors go into a file."""
    case = CASES[name]
    data = RandomSamples(case)
    data.setup()
    with tempfile.TemporaryDirectory() as folder:
        on_gpu = accelerator == "gpu"
        device = torch.device("cuda" if on_gpu else "cpu")
        clock = time.perf_counter if on_gpu else time.process_time
        torch.zeros(1, device=device)  # starts CUDA
        run = partial(bare, case, data, device) if side == "bare" else federated(case, data, folder, accelerator)
        begin = clock()
        tensors, result = run()
        seconds = clock() - begin
        files = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    torch.save({name: tensor.cpu() for name, tensor in tensors.items() if tensor.is_floating_point()}, out)
    peak = {"peak": peak_memory("gpu")} if on_gpu else {}
    print(json.dumps({"seconds": seconds, "files": files, "accuracy": result, **peak}))


def in_process(name: str, side: str, out: Path, accelerator: str) -> dict[str, float]:
    """What :func:`measure` prints in a process of its own, and the peak of its memory in MiB, sampled."""
    command = [sys.executable, __file__, "--cases", name, "--side", side, "--out", str(out)]
    command += ["--accelerator", accelerator]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, PeakMemory(process.pid) as peak:
        output, _ = process.communicate()
    if process.returncode:
        sys.exit(process.returncode)  # after its traceback
    return {"peak": peak.mebibytes, **json.loads(output.splitlines()[-1])}


def distance(one: Path, other: Path) -> float:
    """How far the global tensors of both sides are from each other, relative to their length."""
    a, b = torch.load(one), torch.load(other)
    names = a.keys() & b.keys()  # the clients of the bare loop have their heads from its server
    differences = sum((a[name] - b[name]).square().sum().item() for name in names)
    return (differences / sum(a[name].square().sum().item() for name in names)) ** 0.5


def main() -> None:
    """Measures the cases in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    restart_with_environment()
    if options.side:
        measure(options.cases[0], options.side, options.out, options.accelerator)
        return
    print(f"{'case':<10}{'bare':>9}{'federation':>12}{'ratio':>7}{'peak MiB':>15}{'files MiB':>18}{'distance':>10}")
    with tempfile.TemporaryDirectory() as folder:
        outs = Path(folder, "bare.pt"), Path(folder, "federation.pt")
        for name in options.cases:
            pairs = [
                [in_process(name, side, out, options.accelerator) for side, out in zip(SIDES, outs, strict=True)]
                for _ in range(options.repeats)
            ]
            loop, federation = (
                statistics.median(side["seconds"] for side in sides) for sides in zip(*pairs, strict=True)
            )
            peaks = ", ".join(f"{side['peak']:.0f}" for side in pairs[-1])
            files = f"{pairs[-1][1]['files'] / 2**20:.1f} of {differing_bytes(CASES[name]) / 2**20:.1f}"
            row = f"{name:<10}{loop:>7.1f} s{federation:>10.1f} s{federation / loop:>7.2f}{peaks:>15}{files:>18}"
            print(f"{row}{distance(*outs):>10.1e}", flush=True)


if __name__ == "__main__":
    main()
