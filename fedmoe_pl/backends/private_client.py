"""Trains a client with DP-SGD in a bare loop, and checks before any training that this is possible."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends.dp_sgd import clipped_sum, noisy_mean
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.local_client import begin_client, noise_of_client, on_device, trainable_names
from fedmoe_pl.backends.loop import Learner, Loss, OneStep, needs_every_batch
from fedmoe_pl.backends.optimizers import optimizer_and_scheduler, with_strides_of
from fedmoe_pl.backends.rounding import in_full_precision, is_close, largest_value
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.checks import InvalidArgumentError, reason_of
from fedmoe_pl.data import PoissonBatches
from fedmoe_pl.models.copies import has_hooks
from fedmoe_pl.models.layers import trying
from fedmoe_pl.models.mixtures.sparse import dense_experts
from fedmoe_pl.trees import Tree, copy_module, same_bits

_TRIED_SAMPLES = 4
_REFUSED = WeakSet[LightningModule]()  # modules that vmap refused
_AGAIN = "the optimizer computes the gradients of a batch more than once in a step"


class PrivateClient(Learner):
    """A client whose gradients are clipped sample by sample and get noise.

    Args:
        batches: yields an epoch's batches in each iteration: ``drawn``, or ``LookedUpBatches`` made of it.
        drawn: the batches as they are drawn.
        lookup: the outputs of frozen parts for the samples of the last batch, as set by ``LookedUpBatches``.
    """

    def __init__(
        self,
        training: LocalTraining,
        client: Client,
        constants: dict[str, Any],
        batches: Iterable[Any],
        drawn: PoissonBatches,
        lookup: Tree,
        step: OneStep,
    ) -> None:
        self.training, self.module, self.constants = training, client.module, constants
        self.batches, self.lookup, self.step = batches, lookup, step
        self.clipping = [training.trainer.get(f"gradient_clip_{name}") for name in ("val", "algorithm")]
        assert training.sample_privacy is not None
        self.max_norm = training.sample_privacy.max_grad_norm
        self.noise_multiplier = training.noise_multiplier(client.id)
        self.generator = noise_of_client(training, client)
        self.expected = min(drawn.batch_size, len(drawn.samples))
        names, samples = trainable_names(training, client.module, client.round), drawn.samples[:_TRIED_SAMPLES]
        (batch,) = training.datamodule.batches(samples, batch_size=len(samples), device=training.device)
        with trying(client.module):  # in train mode, because a part may compute something else in eval mode
            # parameters that the loss depends on, whatever the data; all others get neither steps nor noise
            self.used = [*_gradients(training, client.module, constants, batch, names)]
        self.names: list[str] = []
        self.last: Any = None

    def epoch(self) -> Iterable[Any]:
        """The batches of the next epoch."""
        parameters = dict(self.module.named_parameters())
        self.names = [
            name for name in self.used if parameters[name].requires_grad and id(parameters[name]) in self.stepped
        ]
        return self.batches

    def configure_optimizers(self) -> Any:
        """The module's own optimizer; notes which parameters it steps."""
        configured = self.module.configure_optimizers()
        optimizer, _ = optimizer_and_scheduler(configured)
        assert optimizer is not None, "needs_every_batch has refused it"
        self.stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return configured

    def loss(self, batch: Any) -> Tree:
        """The sums of the samples' clipped gradients."""
        if batch is self.last:  # each call draws noise, but the accountant counts one draw per step
            phase, privacy = f"Phase '{self.training.phase_name}'", self.training.sample_privacy
            raise InvalidArgumentError(phase, "sample_privacy", privacy, "left out", _AGAIN)
        self.last = batch
        arguments = self.training, self.module, self.constants, self.names, batch, self.lookup, self.max_norm
        return clipped_gradients(*arguments)

    def backward(self, loss: Tree, optimizer: torch.optim.Optimizer) -> None:
        """Sets the gradients with noise, then clips them as the trainer's arguments say."""
        parameters = dict(self.module.named_parameters())
        noisy = noisy_mean(loss, self.expected, self.max_norm, self.noise_multiplier, self.generator)
        for name, gradient in noisy.items():
            parameters[name].grad = with_strides_of(parameters[name], gradient)
        if self.clipping[0] is not None:
            self.step.clip_gradients(optimizer, *self.clipping)


def clipped_gradients(
    training: LocalTraining,
    module: LightningModule,
    constants: dict[str, Any],
    names: Sequence[str],
    batch: tuple[Tensor, Tensor],
    lookup: Tree,
    max_norm: float,
) -> Tree:
    """The sums of the clipped gradients of a batch's samples by the named parameters."""
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters() if name in names}
    module_loss, samples = Loss(training.algorithm, module), (*batch, {**lookup})

    def loss(parameters: Tree, sample: tuple[Tensor, Tensor, Tree]) -> Tensor:
        x, y, rows = sample
        lookup.update(rows)
        return module_loss.of(parameters, x, y, constants)

    with dense_experts():
        try:
            return clipped_sum(loss, parameters, samples, max_norm, one_by_one=module in _REFUSED)
        except RuntimeError:  # vmap refuses code that reads tensor values, as transformers does
            if module in _REFUSED:
                raise
            _REFUSED.add(module)
            return clipped_sum(loss, parameters, samples, max_norm, one_by_one=True)


def _gradients(
    training: LocalTraining, module: LightningModule, constants: dict[str, Any], batch: Any, names: Sequence[str]
) -> Tree:
    """The gradients of a batch's loss by the named parameters that it depends on."""
    parameters = dict(module.named_parameters())
    with dense_experts():
        loss = training.algorithm.client_loss(module, batch, constants)
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return {name: each for name, each in zip(names, gradients, strict=True) if each is not None}


@in_full_precision()
def check_private(training: LocalTraining) -> None:
    """Refuses what DP-SGD cannot train, by comparing a step's gradients with and without separating the samples."""
    because = needs_every_batch(training) or ("clients validate in their training" if training.validates else "")
    if training.datamodule.reader is not None:
        because = "samples are read one by one and not from a tensor in memory"
    if not because and isinstance(
        optimizer_and_scheduler(training.module.configure_optimizers())[0], torch.optim.LBFGS
    ):
        because = _AGAIN
    if not because and any(map(has_hooks, training.module.parameters())):
        because = "configure_optimizers registers hooks of parameters"
    limited = (name for name, part in training.module.named_modules() if getattr(part, "max_norm", None) is not None)
    if not because and (name := next(limited, None)) is not None:
        because = f"'{name}' shortens the rows of a batch to its max_norm, without noise"
    for clients in training.by_architecture(range(training.datamodule.num_clients)):
        because = because or _problem(training.of(clients[0]), clients)
    if because:
        raise InvalidArgumentError(
            f"Phase '{training.phase_name}'", "sample_privacy", training.sample_privacy, "left out", because
        )


def _problem(training: LocalTraining, clients: Sequence[int]) -> str:
    """Why the gradients of single samples do not add up to the batch's gradient; empty if they do."""
    sizes = training.datamodule.train_samples.sizes
    client_id = max(clients, key=lambda client: int(sizes[client]))
    server = training.algorithm.server_init(training.module)
    for round, epoch in training.trainable.values() if int(sizes[client_id]) else ():
        module = copy_module(training.module)
        _, constants, samples = begin_client(training, module, server, client_id, {}, round)
        module, constants = module.to(training.device), on_device(constants, training.device)
        Freezing(training, module, round).freeze(epoch)
        for part in module.modules():
            if isinstance(part, _DropoutNd):
                part.eval()
        samples = samples[:_TRIED_SAMPLES]
        (batch,) = training.datamodule.batches(samples, batch_size=len(samples), device=training.device)
        names = trainable_names(training, module, round, epoch)
        before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        try:
            whole = _gradients(training, module, constants, batch, names)
            sums = clipped_gradients(training, module, constants, [*whole], batch, {}, math.inf)
        except MisconfigurationException:
            raise
        except Exception as error:  # from the model, the algorithm or PyTorch
            return (
                f"a trial step with a gradient for each sample failed with {type(error).__name__}: {reason_of(error)}"
            )
        for name, tensor in module.state_dict().items():
            if not same_bits(tensor, before[name]):
                return f"a step itself changes '{name}', which gets no noise"
        largest = largest_value(whole.values())
        for name, gradient in whole.items():
            if not is_close(sums[name] / len(samples), gradient, largest):
                return (
                    "the loss of a batch is not the mean of those of its samples, or draws random numbers other than "
                    f"dropout's (by the gradient of '{name}')"
                )
    return ""
