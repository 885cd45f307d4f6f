"""FedAvg in plain PyTorch; imports nothing but torch, so that it also serves where another framework is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

EVALUATED_AT_ONCE = 1000  # images in a batch for evaluation, as in fedmoe_pl


@dataclass(frozen=True)
class Work:
    """What the clients hold and how they train.

    Attributes:
        x: all samples, shape (n, ...).
        y: their classes, shape (n,).
        samples: indices into ``x``, one tensor per client, by its number.
        batch_size: samples per batch.
        epochs: local epochs of a round.
        half: whether forward passes run in bfloat16 where autocast does so, as with Lightning's ``bf16-mixed``.
    """

    x: Tensor
    y: Tensor
    samples: Sequence[Tensor] | Mapping[int, Tensor]
    batch_size: int
    epochs: int
    half: bool = False


def shuffled_batches(work: Work, client: int, generator: Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of a client's batches, in an order of its own."""
    samples = work.samples[client]
    order = samples[torch.randperm(len(samples), generator=generator)].to(work.x.device)
    for batch in order.split(work.batch_size):
        yield work.x[batch], work.y[batch]


def train_client(model: nn.Module, work: Work, client: int, seed: int) -> None:
    """A client's part of a round, in place: a fresh optimizer, a permutation per epoch."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    torch.manual_seed(seed)  # dropout
    generator = Generator().manual_seed(seed)
    for _ in range(work.epochs):
        for x, y in shuffled_batches(work, client, generator):
            with torch.autocast(x.device.type, torch.bfloat16) if work.half else nullcontext():
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.inference_mode()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of samples that the model, which is left in eval mode, classifies correctly.

    Args:
        model: any classifier.
        x: samples, shape (n, ...).
        y: their classes, shape (n,).
    """
    model.eval()
    batches = zip(x.split(EVALUATED_AT_ONCE), y.split(EVALUATED_AT_ONCE), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches) / len(y)


def bare_round(
    model: nn.Module, work: Work, seeds: Sequence[int], after_training: Callable[[nn.Module], None] | None = None
) -> dict[str, Tensor]:
    """The mean of the clients' state dicts, each trained from the model as it is; leaves the model unchanged.

    Args:
        model: the start.
        work: what the clients hold and how they train.
        seeds: a seed per client, for its permutations.
        after_training: called with the model that each client has trained, in the order of the clients.
    """
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mean = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for client, seed in enumerate(seeds):
        model.load_state_dict(start)
        train_client(model, work, client, seed)
        for name, tensor in model.state_dict().items():
            mean[name] += tensor / len(seeds)
        if after_training:
            after_training(model)
    model.load_state_dict(start)
    return mean
