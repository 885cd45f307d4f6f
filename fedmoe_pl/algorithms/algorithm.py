"""The hooks of a federated algorithm; their defaults are FedAvg."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.seeds import derive_seed
from fedmoe_pl.trees import Tree, changed, load_tree, mean_of_two

if TYPE_CHECKING:
    from fedmoe_pl.data import Batches, FederatedDataModule

EVALUATED_AT_ONCE = 1000  # samples in a batch where nothing is trained
_SPLIT = 2  # tells a client's split of its samples from the stream of random numbers of its training


@dataclass
class Client:
    """One client in one round, as the hooks see it.

    Attributes:
        id: the client's number.
        round: the round of the phase, counted from 0.
        seed: the run's seed.
        module: the client's own copy of the phase's module.
        samples: indices of its training samples, shape (n,).
        kept: what it kept from earlier rounds and phases.
        loaded: the phase's initial tensors, updated with what the server sent: the same for all clients that were
            sent the same.
        datamodule: who holds which data; already set up.
        steps: number of optimizer steps of its local training, once that is done.
    """

    id: int
    round: int
    seed: int
    module: LightningModule
    samples: Tensor
    kept: Tree
    loaded: Tree = field(default_factory=dict)
    datamodule: FederatedDataModule | None = None
    steps: int = 0

    def batches(self, samples: Tensor) -> Batches:
        """Large batches of some samples, in their order and not augmented, to evaluate models on.

        Args:
            samples: indices, such as ``self.samples``, shape (n,).
        """
        assert self.datamodule is not None, "backends and evaluations give clients their data"
        return self.datamodule.batches(samples, batch_size=EVALUATED_AT_ONCE)

    def shuffled_samples(self) -> Tensor:
        """Its training samples in an order that depends on (seed, client) alone: the same in every phase and round."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, _SPLIT, self.id))
        return self.samples[torch.randperm(len(self.samples), generator=generator)]


@dataclass
class Update:
    """What comes of one client's local training, or of several clients' after ``Algorithm.combine``.

    Attributes:
        sent: leaves the client.
        weight: counts in the aggregation.
        kept: stays on the client until it is trained next; empty after ``combine``.
    """

    sent: Tree
    weight: float
    kept: Tree = field(default_factory=dict)


class Algorithm:
    """What leaves a client, what comes back and how it is combined; the defaults are FedAvg.

    State goes in and out by value: nothing that must survive a round may be stored on ``self``, on a module or on a
    worker. Only ``client_loss`` is differentiated; it must be pure (no logging, no ``.item()``).

    Attributes:
        federated: whether clients share anything; False for training that every client does alone.
        frozen_train_mode: whether modules without a trainable parameter stay in train mode (dropout active), as in
            the official codes, rather than in eval mode (METHODS section 2).
        needs_all_clients: whether all clients must train in every round.
        needs_validation: whether clients must have validation samples.
        needs_plain_steps: whether steps must be those of the optimizer alone, without clipped gradients.
    """

    federated: bool = True
    needs_all_clients: bool = False
    needs_validation: bool = False
    needs_plain_steps: bool = False
    frozen_train_mode: bool = False

    @property
    def moment(self) -> str:
        """The moment of a round that the evaluated models are of, as tables say it."""
        return "after aggregation" if self.federated else "after local training"

    def check(self, module: LightningModule) -> None:
        """Refuses, before any training, a module that the algorithm cannot train.

        Raises:
            MisconfigurationException: with one sentence that names the key, the value and what is allowed.
        """

    def follows(self, earlier: Algorithm) -> bool:
        """Whether a phase of this algorithm starts from the result of an earlier one, when nothing else is asked for.

        An algorithm that overrides this needs such a phase; one that does not starts from the initial model.
        """
        return False

    def participants(self, clients: Sequence[int], seed: int) -> Sequence[int]:
        """The clients that rounds are sampled from: all of them, unless some opt out.

        Args:
            clients: ids of all clients.
            seed: the run's seed.
        """
        return clients

    def is_shared(self, name: str) -> bool:
        """Whether the parameter or buffer leaves the client."""
        return self.federated

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """Whether the parameter is trained in this local epoch (both counted from 0)."""
        return True

    def server_init(self, module: LightningModule) -> Tree:
        """The server's state before the first round, from the phase's module."""
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items() if self.is_shared(name)}

    def server_send(self, server: Tree, client_id: int) -> Tree:
        """What a client receives, by parameter name."""
        return server

    def client_samples(self, client: Client) -> Tensor:
        """Indices of the samples that the client trains on in this round."""
        return client.samples

    def client_init(self, client: Client, sent: Tree) -> dict[str, Any]:
        """Loads what was sent and what the client kept; returns constants for the loss."""
        load_tree(client.module, {**sent, **client.kept})
        return {}

    def client_loss(
        self, module: LightningModule, batch: Any, const: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The local loss and what else it computed: by default the module's own ``loss(batch)``."""
        return module.loss(batch)  # pyright: ignore[reportCallIssue]

    def client_final(self, client: Client, const: dict[str, Any]) -> Update:
        """What the client sends, its weight (here its number of samples), and what it keeps."""
        state = client.module.state_dict()
        sent = {name: tensor.detach().cpu().clone() for name, tensor in state.items() if self.is_shared(name)}
        kept = changed(client.module, client.loaded, client.kept)
        return Update(sent, len(client.samples), {name: kept[name] for name in kept if not self.is_shared(name)})

    def combine(self, a: Update, b: Update) -> Update:
        """Folds two updates into one: here the weighted mean, so that a round holds one model whatever its size.

        Must be associative and commutative: backends group clients in orders of their own. An algorithm that collects
        updates keeps them by client.
        """
        return Update(mean_of_two(a.sent, a.weight, b.sent, b.weight), a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """The server's next state."""
        return {**server, **combined.sent}

    def exchange(self, server: Tree, kept: Mapping[int, Tree], round: int) -> Iterator[tuple[int, Tree, Tree]]:
        """What clients send each other at the end of a round, past the server: nothing by default.

        Args:
            server: the server's state after this round.
            kept: what every client keeps after its local training.
            round: the round, counted from 0.

        Yields:
            A client, what it keeps from now on, and what it received from other clients, which is only counted.
        """
        yield from ()

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The tensors of the model that a client would use now: what the server sends, and what the client kept.

        Args:
            client: has the phase's module, with its initial tensors, and its data.
            server: the server's state.
        """
        return {**self.server_send(server, client.id), **client.kept}


def chooses_model(algorithm: Algorithm) -> bool:
    """Whether each client has a model of its own choice, whatever it was sent and kept."""
    return type(algorithm).personal_tensors is not Algorithm.personal_tensors
