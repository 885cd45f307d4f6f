"""Gates of mixtures inside the layers of a base: two weigh every token, one compares samples with a client's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_choice, check_number
from fedmoe_pl.models.gates import Gate
from fedmoe_pl.models.layers import plant


class TokenGate(Gate):
    """Weighs the experts of a ``LayerwiseAdapterMoE`` in each layer for every token: ``g = softmax(R x)``.

    x is the layer's input before dropout, R a matrix without bias, computed in single precision. FedALT (AAAI 2026)
    uses the defaults, CoMiGS (ICML 2025) ``top_k=2, init_std=0.02``. Its tensors are ``gate.routers.<path of the
    layer>.weight``, shape (experts, features).

    Args:
        top_k: number of experts that a token uses, those with the largest weights: the softmax is over them; with 1, it
            is over all experts, and the weight of the chosen one is below 1. None for all.
        init_std: standard deviation of the initial R, whose mean is 0; None for the distribution of ``nn.Linear``.
    """

    def __init__(self, top_k: int | None = None, init_std: float | None = None) -> None:
        super().__init__()
        check_at_least(self, "top_k", top_k, 1)
        check_number(self, "init_std", init_std, least=0)
        self.top_k, self.init_std = top_k, init_std
        self.routers = nn.Module()

    def fit_to_layers(self, owner: object, widths: Mapping[str, int], num_experts: int) -> None:
        """Draws a router for each of the layers, given their numbers of input features, unless there are some."""
        if self.top_k is not None and self.top_k > num_experts:
            raise InvalidArgumentError(self, "top_k", self.top_k, f"at most the number of experts, {num_experts}")
        if any(True for _ in self.routers.parameters()):
            return
        for path, width in widths.items():
            if not width:
                reason = f"it weighs experts by the inputs of {path}, which is no linear layer"
                raise InvalidArgumentError(owner, "gate", self, "another gate than TokenGate", reason)
            plant(self.routers, path, nn.Linear(width, self.num_outputs(num_experts), bias=False))
        self.reset_parameters()

    def num_outputs(self, num_experts: int) -> int:
        """Number of rows of R."""
        return num_experts

    def reset_parameters(self) -> None:
        """Draws all routers anew."""
        for router in self.routers.modules():
            if isinstance(router, nn.Linear):
                router.reset_parameters()
                if self.init_std is not None:
                    nn.init.normal_(router.weight, std=self.init_std)

    def weights(self, path: str, x: Tensor) -> Tensor:
        """Weights (B, ..., experts) in a layer, given its path and its inputs (B, ..., features)."""
        logits = self._logits(path, x)
        if self.top_k is None or self.top_k == logits.shape[-1]:
            return logits.softmax(-1)
        values, chosen = logits.topk(self.top_k, dim=-1)
        shares = logits.softmax(-1).gather(-1, chosen) if self.top_k == 1 else values.softmax(-1)
        return torch.zeros_like(logits).scatter(-1, chosen, shares)

    def _logits(self, path: str, x: Tensor) -> Tensor:
        router: Any = self.routers.get_submodule(path)
        with torch.autocast(x.device.type, enabled=False):
            return router(x.to(router.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Raises an error, because there are no weights of whole samples."""
        allowed, reason = "another one unless the model is a LayerwiseAdapterMoE", "it weighs tokens, not samples"
        raise InvalidArgumentError("model", "gate", self, allowed, reason)


def balance_loss(weights: Tensor, mask: Tensor, top_k: int | None, importance: float) -> Tensor:
    """CoMiGS's balance loss of a layer, of shape (), see :class:`~fedmoe_pl.algorithms.CoMiGS`.

    Args:
        weights: the experts' weights for each token (B, T, E), 0 for those that it does not use.
        mask: which tokens are no padding, shape (B, T).
        top_k: number of experts that a token uses; None for all.
        importance: the importance of the first expert.
    """
    number = weights.shape[-1]
    k = number if top_k is None else top_k
    chosen = torch.zeros_like(weights).scatter(-1, weights.topk(k).indices, 1 / k)
    share = mask.to(weights.dtype)[..., None] / mask.sum().clamp_min(1)
    factors = weights.new_full((number,), (number - 1) / ((1 - importance) * number))
    factors[0] = 1 / (importance * number)
    return number * ((share * weights).sum((0, 1)) * (share * chosen).sum((0, 1)) * factors).sum()


class AdaptiveTokenGate(TokenGate):
    """Lets every token use up to K of the experts of K clusters: with the first one several times, fewer others.

    FedLEASE (NeurIPS 2025): ``p = softmax(R x)`` has an output for each of the K experts, and K - 1 more of the first
    one. The K largest are divided by their sum, and those of the first expert are added. Of M experts of a
    ``ClusteredAdapterMoE``, those in the first K places are used; R has 2 M - 1 rows, the additional ones last.

    Attributes:
        num_clusters: K, an integer of shape (); 1 until :class:`~fedmoe_pl.algorithms.FedLEASE` has found the clusters.
    """

    num_clusters: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_clusters", torch.tensor(1))

    def num_outputs(self, num_experts: int) -> int:
        """Number of rows of R: one for each expert, and one less for the first expert again."""
        return 2 * num_experts - 1

    def weights(self, path: str, x: Tensor) -> Tensor:
        """Weights (B, ..., M) in a layer, given its path and its inputs (B, ..., features)."""
        logits = self._logits(path, x)
        experts = (logits.shape[-1] + 1) // 2
        places = torch.arange(logits.shape[-1], device=logits.device)
        is_used = torch.where(places < experts, places, places - experts + 1) < self.num_clusters
        p = logits.masked_fill(~is_used, -torch.inf).softmax(-1)
        rank = p.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        largest = p * (rank < self.num_clusters)
        shares = largest / largest.sum(-1, keepdim=True)
        of_first = shares[..., :1] + shares[..., experts:].sum(-1, keepdim=True)
        return torch.cat((of_first, shares[..., 1:experts]), -1)


class SimilarityGate(Gate):
    """Weighs experts by how similar a sample is to a few of the client's own (FedDPA, NeurIPS 2024).

    The weight of one expert is ``factor`` times the mean cosine of the sample's features and those of the references,
    between 0 and 1. Nothing of it is trained: :class:`~fedmoe_pl.algorithms.FedDPA` and, as FedDPA-F,
    :class:`~fedmoe_pl.algorithms.FineTuning` of a ``LayerwiseAdapterMoE`` draw the references, and the client keeps
    them; with other algorithms, a phase is refused that starts from none of these. Without references, such as of a
    client that has not trained, the mean is 0. FedDPA's code takes the features of a text's last token, ``pooling:
    last`` of the model, which is not the default.

    Args:
        in_features: number of features, those of the local expert.
        num_references: number of the client's samples to compare with.
        factor: lambda, at least 0.
        weighted_expert: the expert that gets the weight: the local one, or the global one, as in the official code.

    Attributes:
        references: features of the client's samples, shape (num_references, in_features); rows of zeros are none.
    """

    reads_features = True
    references: Tensor

    def __init__(
        self,
        in_features: int,
        num_references: int = 5,
        factor: float = 0.5,
        weighted_expert: Literal["local_expert", "global_expert"] = "local_expert",
    ) -> None:
        super().__init__()
        check_at_least(self, "num_references", num_references, 1)
        check_number(self, "factor", factor, least=0)
        check_choice(self, "weighted_expert", weighted_expert, ("local_expert", "global_expert"))
        self.in_features, self.num_references = in_features, num_references
        self.factor = factor
        self.weighted_expert = weighted_expert
        self.register_buffer("references", torch.zeros(num_references, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Weights (B, 2), the local expert's last, of features (B, F)."""
        known = self.references.abs().sum(1) > 0
        cosines = F.cosine_similarity(x[:, None], self.references[None].to(x), dim=2) * known
        weight = (self.factor * cosines.sum(1) / known.sum().clamp_min(1)).clamp(0, 1)
        both = torch.stack((1 - weight, weight), dim=1)
        return both if self.weighted_expert == "local_expert" else both.flip(1)
