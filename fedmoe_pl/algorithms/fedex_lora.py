"""FedEx-LoRA: Singhal, Ponkshe, Vepakomma, 2024 (https://arxiv.org/abs/2410.09432).

The product of two means is not the mean of products. The server therefore averages both factors and adds what is
missing, the residual, to the frozen weights.

==================  =================================  ===================================  ============================
topic               paper                              official code (CERT-Lab/fedex-lora)  here
==================  =================================  ===================================  ============================
residual            ``W + s (mean B A - mean B mean    always added transposed: right for   transposed where the layer
                    A)``                               ``Conv1D``, wrong for ``Linear``,    stores its weight so
                                                       of which square ones hide it
average             uniform                            uniform                              ``weighting``, the same for
                                                                                            factors and products
FFA-LoRA            A is frozen                        frozen before there are adapters:    ``FedAvg``, which trains and
(a baseline)                                           A is trained and then dropped        shares ``*lora_B*``, heads
classification      the same                           the models are indexed, which fails  the same as other tasks
==================  =================================  ===================================  ============================
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import nn

from fedmoe_pl.algorithms.algorithm import Algorithm, Weighting
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.shared.low_rank import factor_names, mean_of_products, product
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models.adapters import unlike_weight
from fedmoe_pl.trees import Tree, mean_of_two, names_of_same_tensors, of_module, subtree, with_prefix

_EXPERT = "global_expert."
_PRODUCTS = "products/"  # prefix of the name of a factor: the factors of the mean of products
_SCALING = "adapters/scaling"  # s, shape ()
_LOST = "lost/"  # prefix of the name of a weight in half precision: what its rounding has left out, for the next round
_TRANSPOSED = "transposed/"  # prefix of the name of a weight that is stored as (in, out); tensors of no size


class FedExLoRA(Algorithm):
    """Averages low-rank adapters exactly: what the product of mean factors lacks is added to the frozen weights.

    The adapters are those of the ``global_expert`` of an ``AdapterMoE``. The server's state has the weights of the
    layers that they adapt, because these change, and sends them to clients; clients send adapters only. All experts of
    a client's mixture then have the changed weights. With one client in a round, it is FedIT, which is ``FedAvg`` of
    the adapters.

    Args:
        shared: glob patterns of the parameters and buffers that clients send to the server, adapters among them.
        trainable: glob patterns of the parameters that are trained.
        weighting: ``uniform`` gives all clients the same weight, as in the paper; ``samples`` weighs a client by its
            number of training samples.
    """

    needs = ("own_server_step",)

    def __init__(
        self,
        shared: str | list[str] = "global_expert.*",
        trainable: str | list[str] = "*",
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(shared, trainable, weighting)

    def server_init(self, module: LightningModule) -> Tree:
        """What is shared, and the weights that will change; refuses weights to which nothing can be added."""
        server = super().server_init(module)
        layers = factor_names(name for name in server if name.startswith(_EXPERT))
        if not layers or not hasattr(module, "scaling"):
            raise InvalidArgumentError(self, "model", module, f"an AdapterMoE with adapters in {self.shared.patterns}")
        server[_SCALING] = torch.tensor(module.scaling, dtype=torch.float64)
        tied = {name: names for names in names_of_same_tensors(module) for name in names}
        for name in map(_weight_of, layers):
            layer, weight = module.get_submodule(name.removesuffix(".weight")), module.get_parameter(name)
            because = f"{type(self).__name__} adds to {name}"
            if not weight.is_floating_point():
                raise InvalidArgumentError(module, "base", module.base, "without quantized weights", because)
            if problem := unlike_weight(name, layer):
                raise InvalidArgumentError(
                    module, "lora", module.lora, "without this layer", f"{because}, but {problem}"
                )
            if name in tied:
                because += f", which is also {next(other for other in tied[name] if other != name)}"
                raise InvalidArgumentError(module, "base", module.base, "without tied weights", because)
            server[name] = weight.detach().clone()
            if _is_transposed(layer):
                server[f"{_TRANSPOSED}{name}"] = torch.empty(0)
        return server

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """The shared tensors and the changed weights."""
        return of_module(server)

    def combine(self, a: Update, b: Update) -> Update:
        """The means of what is shared, and of the products of factors, with the same weights."""
        means = mean_of_two(of_module(a.sent), a.weight, b.sent, b.weight)
        products = mean_of_products(_factors(a.sent), a.weight, _factors(b.sent), b.weight)
        return Update(means | with_prefix(products, _PRODUCTS), a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """The means, and the weights with the residual; one client alone leaves none."""
        means, products = of_module(combined.sent), subtree(combined.sent, _PRODUCTS)
        new = {**server, **means}
        for layer, (a, b) in factor_names(products).items():
            name = _weight_of(layer)
            residual = server[_SCALING] * (product(products[a], products[b]) - product(means[a], means[b]))
            residual = residual.T if f"{_TRANSPOSED}{name}" in server else residual
            exact = server[name] + (residual.reshape(server[name].shape) + server.get(f"{_LOST}{name}", 0))
            new[name] = exact.to(server[name])
            if new[name].itemsize < 4:
                new[f"{_LOST}{name}"] = (exact - new[name]).float()
        return new


def _factors(sent: Tree) -> Tree:
    """The factors of the mean of products that was folded, or those of one client."""
    folded = subtree(sent, _PRODUCTS)
    return folded or {name: tensor for name, tensor in sent.items() if name.startswith(_EXPERT)}


def _weight_of(layer: str) -> str:
    """The name of the frozen weight below the adapter of a layer."""
    return f"base.{layer.removeprefix(_EXPERT)}.weight"


def _is_transposed(layer: nn.Module) -> bool:
    """Whether a layer stores its weight as (in, out): transformers' Conv1D, embeddings, and what says so itself."""
    known = isinstance(layer, nn.Embedding) or type(layer).__name__ == "Conv1D"
    return known or bool(getattr(layer, "fan_in_fan_out", False))
