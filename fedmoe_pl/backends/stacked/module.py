"""A stack of clients as a LightningModule, for one Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedmoe_pl.backends.optimizers import optimizer_and_scheduler, with_strides_of
from fedmoe_pl.backends.stacked.batches import Share
from fedmoe_pl.backends.stacked.stack import Stack
from fedmoe_pl.trees import Tree


class StackedModule(LightningModule):
    """A stack as a LightningModule, whose optimizer steps the stacked parameters, a whole epoch in a training step.

    An optimizer counts the steps of each parameter. Therefore each run of neighbours with equal numbers of steps per
    epoch has its own parameters: views of its part of the stacked ones.
    """

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.automatic_optimization = False
        arguments = stack.training.trainer
        self.clip_val, self.clip_algorithm = (arguments.get(f"gradient_clip_{name}") for name in ("val", "algorithm"))
        self.stack = stack
        self.module = stack.module
        self.names: list[str] = []
        self.leaves: list[tuple[Share, Tree]] = []
        self.gradients: Tree = {}
        self.views = [
            (run, {name: nn.Parameter(stack.stacked[name][run]) for name in stack.trained})
            for run in _runs_of_equal_steps(stack.data.steps)
        ]

    def configure_optimizers(self) -> Any:
        """The optimizer of the clients' module, with views of the stacked parameters in place of the module's."""
        configured = self.module.configure_optimizers()
        optimizer, _ = optimizer_and_scheduler(configured)
        assert optimizer is not None, "try_to_stack has refused it"
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for group in optimizer.param_groups:
            stepped = [names[parameter] for parameter in group["params"]]
            group["params"] = [view[name] for _, view in self.views for name in stepped if name in view]
        return configured

    def on_train_epoch_start(self) -> None:
        """Finds the parameters that are trained in this epoch, which ``Freezing`` has already set."""
        skip_idle_dropout(self.module)
        parameters = dict(self.module.named_parameters())
        self.names = [name for name in self.stack.trained if parameters[name].requires_grad]

    def training_step(self, batches: Iterable[list[Share]], batch_idx: int) -> None:
        """Trains one epoch."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        mixed = torch.is_autocast_enabled(self.device.type)
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        for batch in batches:
            loss = self.loss(batch)
            # automatic optimization also leaves autocast before the backward pass
            with torch.autocast(self.device.type, enabled=False) if mixed else nullcontext():
                self.differentiate(loss, optimizer)
                self.clip()
                optimizer.step()
            progress.completed += 1  # global_step counts it
            if mixed:
                torch.clear_autocast_cache()  # it holds half-precision copies of the parameters before the step

    def on_train_epoch_end(self) -> None:
        """Steps the scheduler, because the Trainer does not in manual optimization."""
        scheduler = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]

    def loss(self, batch: list[Share]) -> Tensor:
        """The sum of the clients' losses; each depends on its own client's parameters only."""
        of_shares = [self.stack.losses(share, self.names) for share in batch]
        self.leaves = [(share, trained) for share, (_, trained) in zip(batch, of_shares, strict=True)]
        return torch.stack([losses.sum() for losses, _ in of_shares]).sum()

    def differentiate(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Sets the gradients of clients that have a batch; the others get None and are not stepped."""
        gradients = iter(torch.autograd.grad(loss, [leaf for _, leaves in self.leaves for leaf in leaves.values()]))
        of_shares = [(share.clients, {name: next(gradients) for name in leaves}) for share, leaves in self.leaves]
        active = sum(len(share.y) for share, _ in self.leaves)
        self.gradients = of_shares[0][1] if len(of_shares) == 1 else _in_one(of_shares, active)
        if any(group.get("fused") for group in optimizer.param_groups):
            stacked = self.stack.stacked
            self.gradients = {name: with_strides_of(stacked[name], values) for name, values in self.gradients.items()}
        for run, view in self.views:
            for name, parameter in view.items():
                has_batch = run.stop <= active and name in self.gradients
                parameter.grad = self.gradients[name][run] if has_batch else None

    def clip(self) -> None:
        """Clips each client's gradients by their norm or value, as ``torch.nn.utils`` does."""
        if not self.clip_val or self.clip_val < 0:
            return
        if str(self.clip_algorithm).lower().endswith("value"):  # Lightning accepts any case, and its own enumeration
            for gradient in self.gradients.values():
                gradient.clamp_(-self.clip_val, self.clip_val)
            return
        norms = [
            torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1) for gradient in self.gradients.values()
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)  # (clients,)
        factor = (self.clip_val / (norm + 1e-6)).clamp(max=1)
        for gradient in self.gradients.values():
            gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))


def _in_one(of_shares: list[tuple[slice | Tensor, Tree]], active: int) -> Tree:
    """The gradients of several shares as one tree; each tensor has shape (active clients, ...)."""
    whole = {name: gradient.new_empty(active, *gradient.shape[1:]) for name, gradient in of_shares[0][1].items()}
    for clients, gradients in of_shares:
        for name, gradient in gradients.items():
            whole[name][clients] = gradient
    return whole


def _runs_of_equal_steps(steps: Sequence[int]) -> Iterator[slice]:
    """Slices of neighbours with equal numbers of steps per epoch."""
    start = 0
    for client in range(1, len(steps) + 1):
        if client == len(steps) or steps[client] != steps[start]:
            yield slice(start, client)
            start = client


def skip_idle_dropout(module: nn.Module) -> None:
    """Puts dropout of probability 0 into eval mode, because vmap counts every call of dropout as random."""
    for part in module.modules():
        if isinstance(part, _DropoutNd) and part.p == 0:
            part.eval()
