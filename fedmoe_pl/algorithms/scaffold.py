"""SCAFFOLD: Karimireddy et al., ICML 2020, Algorithm 1 with option II (https://arxiv.org/abs/1910.06378)."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Messages, shapes_of_shared
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.parts import learning_rate
from fedmoe_pl.checks import check_number
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.trees import Tree, difference, inner_product, of_algorithm, problem_of_shapes, subtree, with_prefix

_CONTROL = "control/"  # prefix of a parameter's name: its control variate, c on the server and c_i on a client


class Scaffold(Algorithm):
    """FedAvg whose local steps are corrected by control variates: ``y - lr (g(y) - c_i + c)``.

    The correction is the gradient of the term ``<c - c_i, y>`` in the loss. The server holds the parameters ``x`` and
    ``c``, a client keeps ``c_i``; ``c`` and ``c_i`` start at 0. All clients have the same weight. The formula of
    ``c_i`` holds only for plain SGD with a constant learning rate, without momentum and weight decay.

    Args:
        shared: glob patterns of the parameters and buffers that are averaged.
        server_lr: the server's step along the mean update, above 0.
    """

    needs = ("plain_steps", "step_of_each_batch")
    messages = Messages(changes=True)

    def __init__(self, shared: str | list[str] = "*", server_lr: float = 1.0) -> None:
        check_number(self, "server_lr", server_lr, above=0)
        super().__init__(shared, weighting="uniform")
        self.server_lr = server_lr

    def server_init(self, module: LightningModule) -> Tree:
        """The shared tensors, and ``c = 0`` for the parameters among them; refuses optimizers other than plain SGD."""
        learning_rate(self, module)
        server = super().server_init(module)
        zeros = {name: torch.zeros_like(server[name]) for name, _ in module.named_parameters() if name in server}
        return {**server, **with_prefix(zeros, _CONTROL)}

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Line 5: receives ``x`` and ``c``."""
        super().client_init(client, sent)
        correction = {name: c - client.state.get(name, torch.zeros_like(c)) for name, c in of_algorithm(sent).items()}
        return {"correction": subtree(correction, _CONTROL)}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """Line 10: the gradient is ``g(y) - c_i + c``."""
        correction = inner_product(constants["correction"], dict(module.named_parameters()))
        return super().client_loss(module, batch, constants) + correction

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Lines 12 to 14: ``c_i+ = c_i - c + (x - y) / (K lr)``; sends ``y - x`` and its part of the change of ``c``.

        A client that took no steps, or steps with a learning rate of 0, keeps its ``c_i``.
        """
        update = super().client_final(client, constants)
        sent = difference(update.sent, client.loaded)
        length = client.steps * learning_rate(self, client.module)  # K lr
        scale = 1 / length if length else 0.0
        for name, correction in constants["correction"].items():
            c = client.loaded[_CONTROL + name]
            change = -sent[name] * scale - c if length else torch.zeros_like(c)  # c_i+ - c_i
            update.state[_CONTROL + name] = c - correction + change
            sent[_CONTROL + name] = change / len(client.participants)
        return Update(sent, update.weight, update.state)

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """The change of every shared tensor, and that of ``c`` for parameters."""
        shapes = shapes_of_shared(self, initial)
        of_control = {_CONTROL + name: shape for name, shape in shapes.items() if _CONTROL + name in update.sent}
        return problem_of_shapes(update.sent, shapes | of_control)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """Lines 16 and 17: ``x + lr_g mean(dy)``, ``c + |S| / N mean(dc)`` for N clients that take part."""
        new = dict(server)
        for name, mean in combined.sent.items():
            step = combined.weight if name.startswith(_CONTROL) else self.server_lr
            new[name] = server[name] + step * mean if mean.is_floating_point() else server[name] + mean
        return new
