"""HetLoRA: Cho, Liu, Xu, Fahrezi, Joshi, EMNLP 2024 (https://arxiv.org/abs/2401.06432).

No code by the authors is known. Two other repositories have copies of the method:

=======================  ==========================  ====================================  =========================
topic                    paper                       others' code                          here
=======================  ==========================  ====================================  =========================
weight of a client       norm of B A, in each layer  FlexLoRA's: number of samples;        norm of B A, in each layer
                                                     CoMiGS's: norms of A and of B apart
rows of A that no        zeros, which are never      -                                     stay as they are
client of a round has    trained again
all norms are 0          not mentioned               -                                     equal weights
self-pruning             a penalty on the last rows  FlexLoRA's: a penalty without a       none, ranks are given
                         lowers the rank             gradient; ranks below 50 stay
=======================  ==========================  ====================================  =========================
"""

from __future__ import annotations

from torch import Tensor

from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.shared.low_rank import factor_names, product, set_corner
from fedmoe_pl.algorithms.shared.unequal_ranks import CUT, UnequalRanks
from fedmoe_pl.trees import Tree, mean_of_two, of_module, subtree, with_prefix

_NORM = "norm/"  # prefix of a layer's name: the sum of the clients' norms of B A, shape ()


class HetLoRA(UnequalRanks):
    """Averages low-rank adapters of unequal ranks, padded with zeros to the highest, weighted by their norms.

    The weight of a client's factors A and B of a layer is the Frobenius norm of B A. Other shared tensors are averaged
    with the same weight for all clients. The server sends a client the first rows of A and the first columns of B.

    Args:
        ranks: the clients' ranks; client k has the one at k modulo their number. The module's adapters have at least
            the highest of them.
        shared: glob patterns of the parameters and buffers that clients send to the server, adapters among them.
        trainable: glob patterns of the parameters that are trained.
    """

    def __init__(
        self,
        ranks: list[int],
        shared: str | list[str] = "global_expert.*",
        trainable: str | list[str] = "*",
    ) -> None:
        super().__init__(ranks, shared, trainable, "uniform")

    def combine(self, a: Update, b: Update) -> Update:
        """The means, and the sum of each layer's norms, by which its factors are weighted."""
        sent = mean_of_two(of_module(a.sent), a.weight, b.sent, b.weight)
        (cut_a, norms_a), (cut_b, norms_b) = _factors_and_norms(a.sent), _factors_and_norms(b.sent)
        for layer, names in factor_names(cut_a).items():
            norm_a, norm_b = norms_a[layer], norms_b[layer]
            weights = (norm_a, norm_b) if norm_a + norm_b > 0 else (a.weight, b.weight)
            pair_a, pair_b = ({name: cut[name] for name in names} for cut in (cut_a, cut_b))
            pair_a, pair_b = _of_one_shape(pair_a, pair_b), _of_one_shape(pair_b, pair_a)
            mean = mean_of_two(pair_a, float(weights[0]), pair_b, float(weights[1]))
            sent |= {**with_prefix(mean, CUT), f"{_NORM}{layer}": norm_a + norm_b}
        return Update(sent, a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """The means; of factors, those rows of A and columns of B that a client of the round has."""
        factors = subtree(combined.sent, CUT).items()
        means = {name: set_corner(server[name], tensor) for name, tensor in factors}
        return {**server, **of_module(combined.sent), **means}


def _factors_and_norms(sent: Tree) -> tuple[Tree, dict[str, Tensor]]:
    """The factors, and by layer the norm of one client's B A, or the sum of norms of a group."""
    cut, norms = subtree(sent, CUT), subtree(sent, _NORM)
    return cut, norms or {layer: product(cut[a], cut[b]).norm() for layer, (a, b) in factor_names(cut).items()}


def _of_one_shape(tree: Tree, other: Tree) -> Tree:
    """The tensors of a tree, padded with zeros to the shapes in another one where these are larger."""
    shapes = {name: [*map(max, tensor.shape, other[name].shape)] for name, tensor in tree.items()}
    return {name: set_corner(tensor.new_zeros(shapes[name]), tensor) for name, tensor in tree.items()}
