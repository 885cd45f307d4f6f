"""What methods have in common whose clients' low-rank adapters differ in rank."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Algorithm, Parts, Weighting, received
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.low_rank import factor_names, set_corner
from fedmoe_pl.checks import InvalidArgumentError, check_at_least
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.trees import Tree, of_module, problem_of_shapes, subtree, with_prefix

CUT = "cut/"
"""Prefix of the name of a factor that is cut to a client's rank."""


class UnequalRanks(Algorithm):
    """Clients train, send and receive adapters of their own ranks.

    The module's adapters have the highest rank; a client's are cut to its rank and padded with zeros. They train as if
    they had only that rank: where A has a row of zeros and B a column of zeros, both have a gradient of 0. All ranks
    have the module's scaling; a scaling alpha / r of each rank's own would make the factors' means depend on it.

    Args:
        ranks: the clients' ranks; client k has the one at k modulo their number.
        shared: glob patterns of the parameters and buffers that clients send to the server, adapters among them.
        trainable: glob patterns of the parameters that are trained.
        weighting: what updates weigh in averages.
    """

    parts = Parts(computed=("global_expert",))

    def __init__(
        self,
        ranks: list[int],
        shared: str | list[str] = "global_expert.*",
        trainable: str | list[str] = "*",
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(shared, trainable, weighting)
        if not isinstance(ranks, list | tuple) or not ranks:
            raise InvalidArgumentError(self, "ranks", ranks, "a list of at least one rank")
        for rank in ranks:
            check_at_least(self, "ranks", rank, 1)
        self.ranks = ranks

    def server_init(self, module: LightningModule) -> Tree:
        """What is shared; refuses ranks that are higher than those of the module's adapters."""
        server = super().server_init(module)
        pairs = factor_names(server).values()
        highest = min((len(server[name]) for name, _ in pairs), default=0)
        if not pairs:
            raise InvalidArgumentError(self, "model", module, f"an AdapterMoE with adapters in {self.shared.patterns}")
        for name_of_a, name_of_b in pairs:
            if len(server[name_of_a]) != server[name_of_b].shape[1]:
                allowed = "one whose adapters have no groups"
                because = (
                    f"{name_of_b} is that of a convolution in groups, of which no single rows and columns are a rank"
                )
                raise InvalidArgumentError(self, "model", module, allowed, because)
        if max(self.ranks) > highest:
            because = "the module's adapters have this rank"
            raise InvalidArgumentError(self, "ranks", self.ranks, f"at most {highest}", because)
        return server

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """The server's state, with factors cut to the client's rank."""
        return self._cut(server, client_id)

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors, with factors padded to the module's rank."""
        return super().client_init(client, _padded(sent, client))

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends the factors cut to the client's rank."""
        update = super().client_final(client, constants)
        return replace(update, sent=self._cut(update.sent, client.id))

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """The shared tensors, with factors of the client's rank."""
        shared = {name: tensor for name, tensor in initial.items() if self.is_shared(name)}
        shapes = {name: tensor.shape for name, tensor in self._cut(shared, client_id).items()}
        return problem_of_shapes(update.sent, shapes)

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The client's own tensors and those of the server, at the client's rank."""
        sent = _padded(received(self, server, client.id, client.state), client)
        return of_module({**sent, **client.state})

    def _cut(self, tree: Tree, client_id: int) -> Tree:
        """The tree, with factors cut to a client's rank under names of the algorithm's own."""
        rank, cut = self.ranks[client_id % len(self.ranks)], Tree()
        for name_of_a, name_of_b in factor_names(tree).values():
            cut[name_of_a], cut[name_of_b] = tree[name_of_a][:rank].clone(), tree[name_of_b][:, :rank].clone()
        return {name: tensor for name, tensor in tree.items() if name not in cut} | with_prefix(cut, CUT)


def _padded(sent: Tree, client: Client) -> Tree:
    """What a client received, with factors padded with zeros to the shapes of its module."""
    shapes = {name: tensor.shape for name, tensor in client.module.state_dict().items()}
    cut = subtree(sent, CUT).items()
    return of_module(sent) | {name: set_corner(tensor.new_zeros(shapes[name]), tensor) for name, tensor in cut}
