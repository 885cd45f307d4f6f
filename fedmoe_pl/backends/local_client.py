"""Prepares a client for its local training, in the same way in every backend."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_map

from fedmoe_pl.aggregation.aggregation import PREFIX
from fedmoe_pl.algorithms.algorithm import Algorithm, received
from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.backends.failures import check_finite
from fedmoe_pl.backends.optimizers import set_optimizer
from fedmoe_pl.backends.training import LocalTraining, epochs_to_try
from fedmoe_pl.checks import with_article
from fedmoe_pl.data import Batches, FederatedDataModule, PoissonBatches
from fedmoe_pl.seeds import Purpose, derive_seed, generator_of, seed_all
from fedmoe_pl.trees import Tree, changed, of_module, of_parts, with_prefix

TRAINED = "trained/"
"""Name prefix of a tensor's value after the client's local training, before aggregation."""


def begin_client(
    training: LocalTraining,
    module: LightningModule,
    server: Tree,
    client_id: int,
    kept: Mapping[int, Tree],
    round: int,
) -> tuple[Client, dict[str, Any], Tensor]:
    """Seeds the client's random numbers and loads its state into a copy of the phase's module."""
    algorithm = training.algorithm
    seed_all(derive_seed(training.private_seed, Purpose.TRAINING, client_id, training.rounds_before + round))
    client = client_of(training, module, client_id, kept.get(client_id, {}), round)
    sent = received(algorithm, server, client_id, client.state)
    client.loaded = {**training.initial, **sent}
    if training.aggregation is not None:
        client.loaded |= {name: tensor for name, tensor in server.items() if name.startswith(PREFIX)}
    set_optimizer(module, training.learning_rates(round), client.state)
    constants = algorithm.client_init(client, sent)
    return client, constants, algorithm.client_samples(client)


def client_of(training: LocalTraining, module: LightningModule, client_id: int, kept: Tree, round: int) -> Client:
    """The client as hooks see it before it has received anything."""
    return Client(
        id=client_id,
        round=round,
        seed=training.seed,
        module=module,
        samples=training.datamodule.train_samples[client_id],
        state=kept,
        datamodule=training.datamodule,
        loaded=training.initial,
        rounds=training.rounds,
        rounds_before=training.rounds_before,
        participants=training.participants,
    )


def end_client(
    training: LocalTraining, client: Client, constants: dict[str, Any], optimizer: Tree | None = None
) -> Update:
    """The client's update after its training, checked to be finite, with the optimizer state that the client keeps.

    It is processed by the phase's aggregation, and encoded if the server may see only the sum of updates.
    """
    algorithm = training.algorithm
    update = algorithm.client_final(client, constants)
    if not isinstance(update, Update):
        kind, given = type(algorithm).__name__, with_article(type(update).__name__)
        raise TypeError(f"client_final of {kind} returned {given}, but must return an Update")
    if update.weight < 0:
        raise ValueError(f"its weight is {update.weight}, but must be at least 0")
    # the first client has a whole module to itself; here, what it did not change goes back to the shared memory
    sent = training.copies.known(update.sent)
    kept = {name: tensor for name, tensor in update.state.items() if not name.startswith(TRAINED)} | (optimizer or {})
    if training.keep_trained:
        kept_as_trained = () if algorithm.messages.exchanged else update.state
        different = changed(client.module.state_dict(), training.initial, {})
        trained = {name: tensor for name, tensor in different.items() if name not in kept_as_trained}
        if not trained:  # some tensor, as a mark that it was trained although nothing changed
            name, tensor = next(iter(client.module.state_dict().items()))
            trained[name] = tensor.detach().cpu().clone()
        kept |= with_prefix(trained, TRAINED)
    new = {name: tensor for name, tensor in kept.items() if client.state.get(name) is not tensor}
    _check_shapes(training, client, {**new, **sent})
    check_finite((sent, new), update.weight, training.initial)
    update, secure = Update(sent, update.weight, kept), training.secure_aggregation
    update = update if training.aggregation is None else training.aggregation.of_client(client, update)
    start = training.start_of_changes(client.loaded)
    return update if secure is None else secure.encoded(update, start, training.datamodule.num_clients)


def _check_shapes(training: LocalTraining, client: Client, tree: Tree) -> None:
    """Refuses module tensors that training has added or reshaped, because no other copy of the module can load them."""
    for name, tensor in of_module(tree).items():
        if (initial := training.initial.get(name)) is None or initial.shape != tensor.shape:
            found = "is new" if initial is None else f"had shape {tuple(initial.shape)} and has {tuple(tensor.shape)}"
            raise MisconfigurationException(
                f"Phase '{training.phase_name}', client {training.datamodule.client_names[client.id]}: '{name}' "
                f"{found} after its training, but what clients send or keep must be in the model from the start, "
                "with its shape; register it as a buffer with persistent=False."
            )


def given_to_others(algorithm: Algorithm, kept: Tree, parts: Sequence[str], round: int) -> Tree:
    """What a client gives to other clients: the tensors that it keeps of the given parts of its module."""
    return _declared(algorithm, of_parts(kept, parts), f"exchange asks for '{{}}' in round {round + 1}")


def after_exchange(algorithm: Algorithm, client_id: int, kept: Tree, sent: Tree) -> Tree:
    """What a client keeps after an exchange, given what it kept before and what it received."""
    new = sent if algorithm.client_exchange is None else algorithm.client_exchange(client_id, kept, sent)
    return {**kept, **_declared(algorithm, new, "exchange replaces '{}'")}


def _declared(algorithm: Algorithm, tensors: Tree, problem: str) -> Tree:
    """Returns the tensors of an exchange; refuses any that ``messages.exchanged`` does not declare."""
    for name in tensors:
        if not name.startswith(algorithm.messages.exchanged):
            raise MisconfigurationException(
                f"{type(algorithm).__name__}: {problem.format(name)}, but must leave it with its client, because "
                "`messages.exchanged` does not declare it."
            )
    return tensors


def on_device(constants: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The constants of a client's loss, with all tensors in them, nested ones too, on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, constants)


def client_batches(training: LocalTraining, client: Client, samples: Tensor) -> Any:
    """The client's training batches of this round, shuffled and augmented by the client's own generator."""
    is_private = training.sample_privacy is not None
    batches = training.datamodule.batches(
        samples,
        batch_size=training.batch_size,
        generator=_private_generator(training, client, Purpose.PRIVATE_BATCHES)
        if is_private
        else client.generator(Purpose.BATCHES),
        augment=True,
        drop_single=training.has_batch_norm,
        device=training.device,
    )
    if is_private:
        assert isinstance(batches, Batches), "check_private has refused it"
        return PoissonBatches.of(batches)
    own = training.algorithm.client_batches
    return batches if own is None else own(client, batches)


def noise_of_client(training: LocalTraining, client: Client) -> Generator:
    """The generator of a client's DP-SGD noise in this round."""
    return _private_generator(training, client, Purpose.PRIVATE_NOISE)


def _private_generator(training: LocalTraining, client: Client, purpose: int) -> Generator:
    """A generator of random numbers that must stay secret.

    They differ between phases and between sets of samples: equal noise would cancel in the difference of two results.
    """
    samples, round = training.hash_of_samples(client.id), client.rounds_before + client.round
    return generator_of(training.private_seed, purpose, training.phase_name, client.id, round, samples)


def trainable_names(training: LocalTraining, module: nn.Module, round: int, epoch: int | None = None) -> list[str]:
    """Names of the parameters that are trained in a local epoch, or in any epoch of the round if ``epoch`` is None."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if epoch is not None:
        return [name for name in names if name in training.trainable_in(round, epoch)]
    pairs, all_known = epochs_to_try(training.algorithm, range(round, round + 1), training.max_epochs)
    sets = {training.trainable_in(*pair) for pair in pairs}
    return [name for name in names if not all_known or any(name in trained for trained in sets)]


def data_on(datamodule: FederatedDataModule, device: torch.device) -> FederatedDataModule:
    """The data module with its samples on a GPU if they fit into half of its free memory; otherwise unchanged."""
    if device.type != "cuda" or datamodule.reader is not None:
        return datamodule
    if datamodule.x.nbytes > torch.cuda.mem_get_info(device)[0] // 2:
        return datamodule
    placed = copy.copy(datamodule)
    placed.x = datamodule.x.to(device)
    return placed
