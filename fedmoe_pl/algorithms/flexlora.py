"""FlexLoRA: Bai, Chen, Qian, Yao, Li, NeurIPS 2024 (https://arxiv.org/abs/2402.11505).

=====================  =============  =====================================  =======================================
topic                  paper          code                                   here
=====================  =============  =====================================  =======================================
scaling                not mentioned  official: 16 / r, whatever alpha is;   the module's, for all ranks
                                      CoMiGS's copy: trained with
                                      alpha / sqrt(r)
singular values of 0   not mentioned  -                                      their rows of A stay as they are, and
                                                                             columns of B are 0
signs of the factors   not mentioned  -                                      the largest value of a row of A is
                                                                             positive
=====================  =============  =====================================  =======================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.shared.low_rank import factor_names, mean_of_products, set_corner
from fedmoe_pl.algorithms.shared.unequal_ranks import CUT, UnequalRanks
from fedmoe_pl.trees import Tree, mean_of_two, of_module, subtree, with_prefix


class FlexLoRA(UnequalRanks):
    """Averages the products of low-rank adapters, and sends each client their best approximation of its rank.

    With the singular value decomposition U S V' of the mean of B A, a client of rank r receives the first r rows of V'
    as A, and the first r columns of U S as B. Factors may change much from round to round where their product does not,
    so that no optimizer is kept.

    Args:
        ranks: the clients' ranks; client k has the one at k modulo their number. The module's adapters have at least
            the highest of them.
        shared: glob patterns of the parameters and buffers that clients send to the server, adapters among them.
        trainable: glob patterns of the parameters that are trained.
        weighting: ``samples`` weighs a client by its number of training samples; ``uniform`` gives all clients the same
            weight.
    """

    needs = ("fresh_optimizers", "own_server_step")

    def combine(self, a: Update, b: Update) -> Update:
        """The means of products, as factors, and of other tensors."""
        means = mean_of_two(of_module(a.sent), a.weight, b.sent, b.weight)
        products = mean_of_products(subtree(a.sent, CUT), a.weight, subtree(b.sent, CUT), b.weight)
        return Update(means | with_prefix(products, CUT), a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """The means, with the factors of the decomposition."""
        factors, new = subtree(combined.sent, CUT), {**server, **of_module(combined.sent)}
        for name_of_a, name_of_b in factor_names(factors).values():
            old_a, old_b = server[name_of_a], server[name_of_b]
            b, a = decomposed(factors[name_of_a].flatten(1).double(), factors[name_of_b].flatten(1).double())
            rank = min(len(a), len(old_a))
            a = a[:rank].reshape(rank, *old_a.shape[1:]).to(old_a)
            b = b[:, :rank].reshape(len(old_b), rank, *old_b.shape[2:]).to(old_b)
            new |= {name_of_a: set_corner(old_a, a), name_of_b: set_corner(torch.zeros_like(old_b), b)}
        return new


def decomposed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """U S and V' of the singular value decomposition of B A, without singular values of 0.

    It is that of a matrix as small as the rank of the factors A (r, n) and B (m, r) allows.

    Example:
        >>> decomposed(torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0], [0.0]]))
        (tensor([[10.],
                [-0.]]), tensor([[0.6000, 0.8000]]))
    """
    (basis_b, small_b), (basis_a, small_a) = torch.linalg.qr(b), torch.linalg.qr(a.T)
    u, s, v = torch.linalg.svd(small_b @ small_a.T)
    limit = s[0] * max(len(b), a.shape[1]) * torch.finfo(s.dtype).eps  # as in torch.linalg.matrix_rank
    rank = int((s > limit).sum())
    v = v[:rank] @ basis_a.T
    signs = v.gather(1, v.abs().argmax(1, keepdim=True)).sign()
    return basis_b @ (u[:, :rank] * s[:rank]) * signs.T, v * signs
