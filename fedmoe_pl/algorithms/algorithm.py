"""The hooks of a federated algorithm; their defaults are FedAvg.

The trees that hooks exchange hold tensors of two kinds. Those of the module have the names of its state dict. Those of
the algorithm itself, such as control variates or prototypes, have names that contain a "/", for instance
``control/fc.weight``, which no name in a module may. Both kinds are sent, combined, kept and stored alike, but only
those of the module are loaded into a module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.data import Batches, FederatedDataModule
from fedmoe_pl.seeds import derive_seed
from fedmoe_pl.trees import Patterns, Tree, changed, load_tree, mean_of_two, of_algorithm, of_module

EVALUATED_AT_ONCE = 1000  # samples in a batch where nothing is trained
_SPLIT = 2  # tells the split of a client's samples from the random numbers of its training


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
        datamodule: the data of all clients; already set up.
        loaded: the phase's initial tensors and, in their place, what the server sent: the same for all clients that
            were sent the same.
        steps: number of optimizer steps in its local training; 0 before it.
    """

    id: int
    round: int
    seed: int
    module: LightningModule
    samples: Tensor
    kept: Tree
    datamodule: FederatedDataModule
    loaded: Tree = field(default_factory=dict)
    steps: int = 0

    def batches(self, samples: Tensor) -> Batches:
        """Large batches of some samples to evaluate models on: in the given order and not augmented.

        Args:
            samples: indices, such as ``self.samples``, shape (n,).
        """
        return self.datamodule.batches(samples, batch_size=EVALUATED_AT_ONCE)

    def shuffled_samples(self) -> Tensor:
        """Its training samples in an order that depends on seed and client alone: the same in every phase and round."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, _SPLIT, self.id))
        return self.samples[torch.randperm(len(self.samples), generator=generator)]


@dataclass
class Update:
    """The result of one client's local training or, after ``Algorithm.combine``, of several clients' training.

    Attributes:
        sent: what leaves the client.
        weight: its weight in the aggregation.
        kept: what stays on the client until it is trained again; empty after ``combine``.
    """

    sent: Tree
    weight: float
    kept: Tree = field(default_factory=dict)


class Algorithm:
    """What leaves a client, what comes back and how it is combined; the defaults are FedAvg.

    State goes in and out by value: nothing that must survive a round may be stored on ``self``, on a module or on a
    worker. Only ``client_loss`` is differentiated; it must be pure (no logging, no ``.item()``).

    Args:
        shared: glob patterns of the parameters and buffers that leave the clients.
        trainable: glob patterns of the parameters that are trained.

    Attributes:
        federated: whether clients share anything; False where every client trains alone.
        gate_starts_anew: whether every client draws its initial gate in the first round.
        frozen_train_mode: whether modules without a trainable parameter stay in train mode, with active dropout, as in
            some official codes. Otherwise they are in eval mode.
        needs_all_clients: whether all clients must train in every round.
        needs_validation: whether clients must have validation samples.
        needs_plain_steps: whether steps must be those of the optimizer alone, without clipped gradients.
    """

    federated: bool = True
    gate_starts_anew: bool = False
    frozen_train_mode: bool = False
    needs_all_clients: bool = False
    needs_validation: bool = False
    needs_plain_steps: bool = False

    def __init__(self, shared: str | list[str] = "*", trainable: str | list[str] = "*") -> None:
        self.shared = Patterns(shared)
        self.trainable = Patterns(trainable)

    @property
    def moment(self) -> str:
        """The moment of a round at which models are evaluated, in the words of the tables."""
        return "after aggregation" if self.federated else "after local training"

    def check(self, module: LightningModule) -> None:
        """Refuses, before any training, a module that the algorithm cannot train.

        Raises:
            MisconfigurationException: if a pattern of ``shared`` or ``trainable`` matches no tensor of the module, or
                the name of a tensor contains a "/".
        """
        check_names(module)
        self.shared.check(module.state_dict(), f"{type(self).__name__}: shared")
        self.trainable.check(module.state_dict(), f"{type(self).__name__}: trainable")

    def follows(self, earlier: Algorithm) -> bool:
        """Whether a phase of this algorithm starts from the result of an earlier phase, unless it names its ``start``.

        An algorithm that overrides this needs such a phase. All others start from the initial model.
        """
        return False

    def participants(self, clients: Sequence[int], seed: int) -> Sequence[int]:
        """The clients from which each round draws its own: all of them, unless some opt out.

        Args:
            clients: ids of all clients.
            seed: the run's seed.
        """
        return clients

    def is_shared(self, name: str) -> bool:
        """Whether the parameter or buffer leaves the client: ``shared`` matches its name."""
        return self.federated and name in self.shared

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """Whether the parameter is trained in a local epoch of a round, both counted from 0."""
        return name in self.trainable

    def server_init(self, module: LightningModule) -> Tree:
        """The server's state before the first round, from the phase's module."""
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items() if self.is_shared(name)}

    def server_send(self, server: Tree, client_id: int) -> Tree:
        """What a client receives."""
        return server

    def client_samples(self, client: Client) -> Tensor:
        """Indices of the samples that the client trains on in this round."""
        return client.samples

    def client_init(self, client: Client, sent: Tree) -> dict[str, Any]:
        """Loads what was sent and what the client kept, and draws the gate if it starts anew.

        Returns:
            Constants for the loss, with tensors on the CPU. Backends move them to the device of the training.
        """
        load_tree(client.module, of_module({**sent, **client.kept}))
        if self.gate_starts_anew and client.round == 0:
            client.module.gate.reset_parameters()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        return {}

    def client_loss(
        self, module: LightningModule, batch: Any, const: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The local loss and further values by name: by default those of the module's own ``loss(batch)``."""
        return module.loss(batch)  # pyright: ignore[reportCallIssue]

    def client_final(self, client: Client, const: dict[str, Any]) -> Update:
        """What the client sends, its weight, by default its number of samples, and what it keeps.

        Args:
            client: the client after its training.
            const: what ``client_init`` returned, with tensors on the CPU.
        """
        state = client.module.state_dict()
        sent = {name: tensor.detach().cpu().clone() for name, tensor in state.items() if self.is_shared(name)}
        return Update(sent, len(client.samples), self.private_tensors(client))

    def private_tensors(self, client: Client) -> Tree:
        """What a client keeps by default: what it does not share and has changed, and the algorithm's own tensors."""
        kept = changed(client.module, client.loaded, client.kept)
        return {name: kept[name] for name in kept if not self.is_shared(name)} | of_algorithm(client.kept)

    def combine(self, a: Update, b: Update) -> Update:
        """Folds two updates into one: by default their weighted mean, so that a round of any size holds one model.

        It must be associative and commutative, because backends choose the groups and their order. An algorithm that
        needs the updates one by one collects them by client.
        """
        return Update(mean_of_two(a.sent, a.weight, b.sent, b.weight), a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """The server's next state."""
        return {**server, **combined.sent}

    def exchange(self, server: Tree, kept: Mapping[int, Tree], round: int) -> Iterator[tuple[int, Tree, Tree]]:
        """What clients send each other at the end of a round, not through the server: nothing by default.

        Args:
            server: the server's state after this round.
            kept: what every client keeps after its local training.
            round: the round, counted from 0.

        Yields:
            A client, what it keeps from now on, and what it received from other clients, which only counts as traffic.
        """
        yield from ()

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The tensors of the model that a client would use now: what it kept and, for the rest, what the server sends.

        Args:
            client: has its data and the phase's module with its initial tensors.
            server: the server's state.
        """
        return of_module({**self.server_send(server, client.id), **client.kept})


def chooses_model(algorithm: Algorithm) -> bool:
    """Whether a client's model may differ from the others' although it was sent the same and kept nothing."""
    return type(algorithm).personal_tensors is not Algorithm.personal_tensors


def check_names(module: LightningModule) -> None:
    """Refuses a module with the name of a tensor that could be an algorithm's own.

    Raises:
        MisconfigurationException: if a name contains a "/".
    """
    for name in module.state_dict():
        if "/" in name:
            raise MisconfigurationException(
                f"{type(module).__name__}: a tensor's name is '{name}', but must not contain '/', which marks the "
                "tensors of algorithms."
            )
