"""CoMiGS: Fan, Messmer, Doikov, Jaggi, ICML 2025 (https://arxiv.org/abs/2409.13931).

==================  =========================  ===================================  ==================================
topic               paper                      official code (epfml/CoMiGS)         here
==================  =========================  ===================================  ==================================
gradients           experts of training,       each optimizer clears its own: a     both cleared in every step
                    routers of validation      router's first step adds those of
                    batches                    30 training batches, an expert's
                                               next those of 10 validation batches
optimizers          two                        two AdamW, kept over rounds          one: what has no gradient is not
                                                                                    stepped; ``keep_optimizer``, and
                                                                                    ``gate_lr`` of the model
expert              a whole MLP with LoRA      the same                             ``blocks`` of the model
balance loss reads  not mentioned              the block's output; logit 0 of what  the block's input; weight 0 of
                                               is not among the top k               what is not among the top k
scale of LoRA       not mentioned              alpha / sqrt(r)                      ``use_rslora``
router steps        in turn with the experts   after every 30th step of the         the same; the batches begin anew
                                               client's life                        in every round
evaluation          not mentioned              before aggregation                   before aggregation
==================  =========================  ===================================  ==================================

With two experts, ``top_k=2`` and ``importance=0.5``, as in the official run with one expert of each kind, the balance
loss is 1 whatever the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Weighting
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.parts import computed_with, pair_of, pairs_of
from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_number
from fedmoe_pl.data import SampleBatches
from fedmoe_pl.models import LayerwiseAdapterMoE, TokenGate
from fedmoe_pl.models.routers import balance_loss
from fedmoe_pl.trees import Tree

_STEPS = "comigs/steps"  # name of the number of steps that a client's experts and routers have taken in all rounds
_ROUTERS = 76  # separates the random numbers of the validation batches from others


class CoMiGS(Algorithm):
    """Clients share the global expert, and train it with their own local expert; routers learn on validation samples.

    After every ``router_every``-th step of a client's experts, counted over all rounds, its routers take
    ``router_steps`` steps on batches of its validation samples. The other part is constant in each kind of step. The
    model is a ``LayerwiseAdapterMoE`` with a ``TokenGate``, for the paper with ``blocks: [mlp]`` and
    ``TokenGate(top_k=2, init_std=0.02)``: adapted layers elsewhere have the global expert alone, and are shared.

    The loss is the model's own plus ``balance`` times the mean over layers of
    ``L = E sum_e p_e d_e f_e``: over the tokens that are no padding, ``p_e`` is the mean weight of expert e, ``d_e``
    the mean of 1 / k where it is among the top k; ``f`` is ``1 / (importance E)`` for the global expert and
    ``(E - 1) / ((1 - importance) E)`` for others.

    Args:
        router_every: number of steps of the experts after which routers are trained.
        router_steps: number of their steps then; 0 leaves them as they are.
        balance: factor of the balance loss.
        importance: the importance of the global expert, between 0 and 1.
        shared: glob patterns of what is averaged. Add ``head.*`` for a head that is trained and not the client's own.
        weighting: how the average weighs clients, as in :class:`~fedmoe_pl.algorithms.FedAvg`.
    """

    evaluated_after = "local_training"
    needs = ("validation_samples_of_each", "step_of_each_batch", "whole_batches")

    def __init__(
        self,
        router_every: int = 30,
        router_steps: int = 10,
        balance: float = 0.01,
        importance: float = 0.5,
        shared: str | list[str] = "global_expert.*",
        weighting: Weighting = "uniform",
    ) -> None:
        check_at_least(self, "router_every", router_every, 1)
        check_at_least(self, "router_steps", router_steps, 0)
        check_number(self, "balance", balance, least=0)
        check_number(self, "importance", importance, above=0, below=1)
        super().__init__(shared, weighting=weighting)
        self.router_every = router_every
        self.router_steps = router_steps
        self.balance = balance
        self.importance = importance

    def server_init(self, module: LightningModule) -> Tree:
        """What is shared; refuses models without routers."""
        if not isinstance(module, LayerwiseAdapterMoE) or not isinstance(module.gate, TokenGate):
            raise InvalidArgumentError(self, "model", module, "a LayerwiseAdapterMoE with a TokenGate")
        return super().server_init(module)

    def client_batches(self, client: Client, batches: SampleBatches) -> Iterable[Any]:
        """Training batches for the experts, and in between validation batches for the routers."""
        samples = client.datamodule.validation_samples[client.id]
        generator, size = client.generator(_ROUTERS), batches.batch_size
        validation = client.datamodule.batches(samples, size, generator, device=batches.device)
        pairs = pairs_of(client.module, chain.from_iterable(repeat(validation)))
        of_routers = (_OfRouters(*pair) for pair in pairs)
        return _Turns(batches, of_routers, self.router_every, self.router_every + self.router_steps, _steps(client))

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The model's loss and the balance loss; only experts, or only routers, have gradients."""
        trains_routers = isinstance(batch, _OfRouters)
        named = module.named_parameters(remove_duplicate=False)
        constant = {name: each.detach() for name, each in named if name.startswith("gate.") != trains_routers}
        return computed_with(module, constant, self._loss, batch)

    def _loss(self, module: Any, batch: Any) -> Tensor:
        x, y = pair_of(module, batch)
        scores, weights = module.mix_layers(x)
        loss = module.loss_of(scores, y)
        if not self.balance:
            return loss
        of_layers = [
            balance_loss(tokens, mask, module.gate.top_k, self.importance)
            for tokens, mask in module.tokens_of(weights, x)
        ]
        return loss + self.balance * torch.stack(of_layers).mean()

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends what is shared; keeps the rest, and the number of its steps."""
        update = super().client_final(client, constants)
        steps, turns = _steps(client) + client.steps, self.router_every + self.router_steps
        if steps % turns >= self.router_every:
            steps += -steps % turns  # routers that were cut short have had their turn
        update.state[_STEPS] = torch.tensor(steps)
        return update


class _OfRouters(NamedTuple):
    """A batch that trains the routers; as any pair to what else sees it."""

    x: Any
    y: Tensor


@dataclass
class _Turns:
    """The batches of an epoch: of ``turns`` steps, the first ``of_experts`` train experts, and the others routers."""

    batches: SampleBatches
    of_routers: Iterator[Any]
    of_experts: int
    turns: int
    steps: int

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield batch
            self.steps += 1
            while self.steps % self.turns >= self.of_experts:
                yield next(self.of_routers)
                self.steps += 1


def _steps(client: Client) -> int:
    return int(client.state[_STEPS]) if _STEPS in client.state else 0
