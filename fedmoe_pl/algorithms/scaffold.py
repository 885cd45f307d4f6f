"""SCAFFOLD: Karimireddy et al., ICML 2020, Algorithm 1 with option II (https://arxiv.org/abs/1910.06378); METHODS 8."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Client, Update
from fedmoe_pl.trees import Patterns, Tree, load_tree

_CONTROL = "control."


class Scaffold(Algorithm):
    """FedAvg whose local steps are corrected by control variates: ``y - lr (g(y) - c_i + c)``.

    The correction is the gradient of a term of the loss, ``<c - c_i, y>``. The server holds the parameters and ``c``, a
    client keeps ``c_i``; both start at 0. Clients count alike in the means. It needs plain SGD with a constant rate:
    momentum or weight decay would break the formula of ``c_i``.

    Args:
        shared: glob patterns of the parameters and buffers that are averaged.
        server_lr: the server's step along the mean update.

    Raises:
        MisconfigurationException: if ``server_lr`` is not above 0.
    """

    needs_plain_steps = True

    def __init__(self, shared: str | list[str] = "*", server_lr: float = 1.0) -> None:
        if not server_lr > 0:
            raise MisconfigurationException(f"algorithm.init_args.server_lr is {server_lr}, but must be above 0.")
        self.shared = Patterns(shared)
        self.server_lr = server_lr

    def check(self, module: LightningModule) -> None:
        """Refuses patterns that match nothing, and optimizers other than plain SGD."""
        self.shared.check(module.state_dict(), "algorithm.init_args.shared")
        _learning_rate(module)

    def is_shared(self, name: str) -> bool:
        """Whether ``shared`` matches the name."""
        return name in self.shared

    def server_init(self, module: LightningModule) -> Tree:
        """The shared tensors, and ``c = 0`` for the parameters among them."""
        server = super().server_init(module)
        names = [name for name, _ in module.named_parameters() if name in server]
        return {**server, **{_CONTROL + name: torch.zeros_like(server[name]) for name in names}}

    def client_init(self, client: Client, sent: Tree) -> dict[str, Any]:
        """Line 5: receives x and c."""
        received = {name: tensor for name, tensor in {**sent, **client.kept}.items() if not name.startswith(_CONTROL)}
        load_tree(client.module, received)
        controls = {name: tensor for name, tensor in sent.items() if name.startswith(_CONTROL)}
        own = {name: client.kept.get(name, torch.zeros_like(tensor)) for name, tensor in controls.items()}
        correction = {name.removeprefix(_CONTROL): controls[name] - own[name] for name in controls}
        return {"correction": correction}

    def client_loss(
        self, module: LightningModule, batch: Any, const: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Line 10: the gradient is ``g(y) - c_i + c``."""
        loss, metrics = super().client_loss(module, batch, const)
        parameters = dict(module.named_parameters())
        terms = [(parameters[name] * tensor.to(loss)).sum() for name, tensor in const["correction"].items()]
        return loss + sum(terms), metrics

    def client_final(self, client: Client, const: dict[str, Any]) -> Update:
        """Lines 12 to 14: ``c_i+ = c_i - c + (x - y) / (K lr)``; sends what y and, over all clients, c_i changed by."""
        update = super().client_final(client, const)
        sent = {name: tensor - client.loaded[name] for name, tensor in update.sent.items()}
        assert client.datamodule is not None, "backends give clients their data"
        scale = 1 / (max(client.steps, 1) * _learning_rate(client.module))
        kept = {name: tensor for name, tensor in update.kept.items() if not name.startswith(_CONTROL)}
        for name, correction in const["correction"].items():
            # c_i+ - c_i = (x - y) / (K lr) - c; a client without a step keeps its own
            change = (
                -sent[name] * scale - client.loaded[_CONTROL + name] if client.steps else torch.zeros_like(correction)
            )
            kept[_CONTROL + name] = client.loaded[_CONTROL + name] - correction + change
            sent[_CONTROL + name] = change / client.datamodule.num_clients
        return Update(sent, 1, kept)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """Lines 16 and 17: ``x + lr_g mean(dy)``, ``c + |S| / N mean(dc)``."""
        new = dict(server)
        for name, mean in combined.sent.items():
            step = combined.weight if name.startswith(_CONTROL) else self.server_lr
            new[name] = server[name] + step * mean if mean.is_floating_point() else server[name] + mean
        return new

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The model without control variates."""
        tensors = super().personal_tensors(client, server)
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(_CONTROL)}


def _learning_rate(module: LightningModule) -> float:
    """The rate of plain SGD.

    Raises:
        MisconfigurationException: if the module has another optimizer.
    """
    optimizer = module.configure_optimizers()
    if not isinstance(optimizer, torch.optim.SGD) or len(optimizer.param_groups) > 1:
        raise MisconfigurationException(
            f"algorithm is Scaffold, which needs torch.optim.SGD with one rate and no scheduler, but the optimizer is "
            f"{type(optimizer).__name__}."
        )
    group = optimizer.param_groups[0]
    for name in ("momentum", "weight_decay"):
        if group[name]:
            raise MisconfigurationException(
                f"algorithm is Scaffold, which needs plain SGD, but optimizer.init_args.{name} is {group[name]}, not 0."
            )
    return group["lr"]
