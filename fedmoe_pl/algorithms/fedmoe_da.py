"""FedMoE-DA: Zhan, Zhao, Li, Liu, Zhang, Tan, Wu, Guo, Chen 2024 (https://arxiv.org/abs/2411.02115).

No code of the authors is known; what the paper leaves open is fixed as in METHODS
section 7.5:

====================  ==============================================  ===========================================
topic                 paper                                           here
====================  ==============================================  ===========================================
update rounds         ``t mod I == 1``, never true for I = 1          ``(t - 1) mod I == 0``, t counted from 1
rounds before one     not mentioned                                   no expert is mixed
ties of similarities  as many as are not below the P+1-th largest     the expert itself, then P by stable order
initial parameters    not mentioned                                   the same for all clients, ``shared_init``
matrix of a round     the last one (stale), or the round's own        ``sync_matrix`` for the round's own
====================  ==============================================  ===========================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Client, Update
from fedmoe_pl.models import ProxyGate, SparseMoE
from fedmoe_pl.models.layers import draw_anew
from fedmoe_pl.trees import Patterns, Tree, load_tree, mean_of_two

_PROXIES = "proxies."  # what clients send in update rounds, by client
_LATEST, _BEFORE = "aggregation.", "aggregation_before."
# What the server holds under both: whose expert each row of the matrix is, (rows, 2) of client and expert; and, of
# every row, the experts with a weight and the weights, (rows, P + 1).
_OWNERS, _NEIGHBOURS, _WEIGHTS = "owners", "neighbours", "weights"


class FedMoEDA(Algorithm):
    """The server averages the embedding; every expert is averaged with those of all clients that serve alike samples.

    How alike two experts are is the cosine of their proxies in the clients' gates, which the server sees in every
    ``interval``-th round. Clients send each other experts past the server; gates never change hands. A round mixes the
    experts by the matrix that clients had received before it, which is of the previous update round. All clients train
    in every round.

    Args:
        top_p: number of other experts that an expert is averaged with, at most all there are; 0 for none.
        interval: rounds from one upload of the gates to the next.
        temperature: divides the cosines before the softmax over an expert and those it is averaged with.
        sync_matrix: mix an update round's experts by its own matrix, not by the previous one.
        exclude_own_client: whether an expert is never averaged with others of its own client.
        shared_init: whether gates and experts start the same on all clients; else every client draws its own.
        trainable: glob patterns of the parameters that are trained; an embedding that is not is not sent either.

    Raises:
        MisconfigurationException: if ``top_p``, ``interval`` or ``temperature`` is out of range.
    """

    needs_all_clients = True

    def __init__(
        self,
        top_p: int | Literal["all"] = 5,
        interval: int = 5,
        temperature: float = 1.0,
        sync_matrix: bool = False,
        exclude_own_client: bool = False,
        shared_init: bool = True,
        trainable: str | list[str] = "*",
    ) -> None:
        if top_p != "all" and top_p < 0:
            raise MisconfigurationException(
                f"algorithm.init_args.top_p is {top_p}, but must be a number of at least 0 or 'all'."
            )
        if interval < 1:
            raise MisconfigurationException(f"algorithm.init_args.interval is {interval}, but must be at least 1.")
        if temperature <= 0:
            raise MisconfigurationException(f"algorithm.init_args.temperature is {temperature}, but must be above 0.")
        self.top_p: int | Literal["all"] = top_p
        self.interval = interval
        self.temperature = temperature
        self.sync_matrix = sync_matrix
        self.exclude_own_client = exclude_own_client
        self.shared_init = shared_init
        self.trainable = Patterns(trainable)

    def check(self, module: LightningModule) -> None:
        """Refuses a model without proxies, and patterns that match nothing."""
        if not isinstance(module, SparseMoE) or not isinstance(module.gate, ProxyGate):
            gate = f" with a {type(module.gate).__name__}" if isinstance(module, SparseMoE) else ""
            raise MisconfigurationException(
                f"model is a {type(module).__name__}{gate}, but FedMoEDA needs a SparseMoE with its own gate."
            )
        self.trainable.check(module.state_dict(), "algorithm.init_args.trainable")

    def is_shared(self, name: str) -> bool:
        """The embedding, unless it is frozen."""
        return name.startswith("embedding.") and name in self.trainable

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """Whether ``trainable`` matches the name."""
        return name in self.trainable

    def server_send(self, server: Tree, client_id: int) -> Tree:
        """The embedding; after an update round also the client's rows of the matrix."""
        sent = {name: tensor for name, tensor in server.items() if self.is_shared(name)}
        if _BEFORE + _NEIGHBOURS in server:
            own = server[_LATEST + _OWNERS][:, 0] == client_id
            sent |= {name: server[name][own] for name in (_LATEST + _NEIGHBOURS, _LATEST + _WEIGHTS)}
        return sent

    def client_init(self, client: Client, sent: Tree) -> dict[str, Any]:
        """Step 1: loads the embedding and what the client kept; draws its own initial experts where asked for."""
        if client.round == 0 and not self.shared_init:
            client.module.gate.reset_parameters()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            draw_anew(client.module.experts)  # pyright: ignore[reportArgumentType]
        load_tree(client.module, self._parameters(sent, client))
        return {}

    def client_final(self, client: Client, const: dict[str, Any]) -> Update:
        """Step 2: sends the embedding, in update rounds also the proxies; keeps gate and experts, trained or not."""
        update = super().client_final(client, const)
        state = client.module.state_dict()
        own = [name for name in state if name.startswith(("gate.", "experts.")) and name not in update.kept]
        update.kept.update({name: state[name].detach().cpu().clone() for name in own})
        if client.round % self.interval == 0:
            proxies = [tensor.flatten() for name, tensor in state.items() if name.startswith("gate.proxies.")]
            update.sent[f"{_PROXIES}{client.id}"] = torch.stack(proxies).detach().cpu()  # (experts, features)
        return Update(update.sent, 1, update.kept)

    def combine(self, a: Update, b: Update) -> Update:
        """The uniform mean of the embeddings; proxies stay apart."""
        proxies = {name: tensor for name, tensor in {**a.sent, **b.sent}.items() if name.startswith(_PROXIES)}
        embedding = {name: tensor for name, tensor in a.sent.items() if name not in proxies}
        mean = mean_of_two(embedding, a.weight, b.sent, b.weight)
        return Update({**mean, **proxies}, a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """Step 4: the new embedding, in update rounds a new matrix beside the one that the round's experts wait for."""
        proxies = {
            int(name.removeprefix(_PROXIES)): tensor
            for name, tensor in combined.sent.items()
            if name.startswith(_PROXIES)
        }
        new = {name: tensor for name, tensor in server.items() if not name.startswith(_BEFORE)}
        new |= {name: tensor for name, tensor in combined.sent.items() if not name.startswith(_PROXIES)}
        if not proxies:
            return new
        clients = sorted(proxies)
        rows = torch.cat([proxies[client] for client in clients])  # (rows, features)
        owners = [[client, expert] for client in clients for expert in range(len(proxies[client]))]
        own = torch.tensor(owners)
        client_of_row = own[:, 0] if self.exclude_own_client else None
        neighbours, weights = aggregation_rows(rows, self.top_p, self.temperature, client_of_row)
        none = torch.arange(len(rows))[:, None], torch.ones(len(rows), 1, dtype=rows.dtype)
        for name, latest, identity in zip((_NEIGHBOURS, _WEIGHTS), (neighbours, weights), none, strict=True):
            new |= {_BEFORE + name: server.get(_LATEST + name, identity), _LATEST + name: latest}
        return {**new, _LATEST + _OWNERS: own}

    def exchange(self, server: Tree, kept: Mapping[int, Tree], round: int) -> Iterator[tuple[int, Tree, Tree]]:
        """Step 3: every expert becomes the weighted mean of experts as they are after this round's training.

        Yields:
            A client, what it keeps from now on, and each expert that it received from another client, once.
        """
        held = _BEFORE if _BEFORE + _NEIGHBOURS in server and not self.sync_matrix else _LATEST
        if held + _NEIGHBOURS not in server or server[held + _NEIGHBOURS].shape[1] == 1:
            return  # every expert is its own mean
        owners = server[_LATEST + _OWNERS]
        for client in owners[:, 0].unique().tolist():
            mine = owners[:, 0] == client
            involved = owners[server[held + _NEIGHBOURS][mine].flatten(), 0].unique().tolist()
            trees = {other: kept[other] for other in {client, *involved}}
            mixed, received = {}, {}
            rows = owners[mine, 1], server[held + _NEIGHBOURS][mine], server[held + _WEIGHTS][mine]
            for expert, neighbours, weights in zip(*rows, strict=True):
                places = [(*owners[row].tolist(), weight) for row, weight in zip(neighbours, weights, strict=True)]
                places = [place for place in places if place[2] > 0]
                mixed |= _mean_expert(trees, client, int(expert), places)
                for other, index, _ in places:
                    if other != client:
                        sent = _expert(trees[other], index)
                        received |= {f"{other}.{index}.{name}": tensor for name, tensor in sent.items()}
            yield client, {**trees[client], **mixed}, received

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The embedding, and the client's gate and experts."""
        return self._parameters(server, client)

    def _parameters(self, sent: Tree, client: Client) -> Tree:
        embedding = {name: tensor for name, tensor in sent.items() if self.is_shared(name)}
        return {**embedding, **client.kept}


def aggregation_rows(
    proxies: Tensor, top_p: int | Literal["all"], temperature: float = 1.0, owners: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Which experts each expert is averaged with, and with what weights (FedMoE-DA, Eq. 9; METHODS section 7.5).

    Args:
        proxies: one row per expert, shape (experts, features).
        top_p: number of other experts, those whose proxies have the largest cosine, of equal ones the first.
        temperature: divides the cosines before the softmax over the chosen ones.
        owners: client of every expert, shape (experts,), none of whose other experts are chosen; None for no limit.

    Returns:
        Indices and weights, both of shape (experts, P + 1), each expert itself first; the weights add up to 1 and are
        0 where there are not enough other experts.

    Example:
        >>> aggregation_rows(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]), top_p=1)[0]
        tensor([[0, 2],
                [1, 0],
                [2, 0]])
    """
    unit = F.normalize(proxies.double(), dim=1)
    # rounded, so that cosines that differ by the order of their sums only are equal
    cosine = (unit @ unit.T).round(decimals=12).fill_diagonal_(1)
    if owners is not None:
        same = owners[:, None] == owners
        cosine = cosine.masked_fill(same.fill_diagonal_(False), -torch.inf)
    others = len(proxies) - 1 if top_p == "all" else min(top_p, len(proxies) - 1)
    ranked = cosine.clone().fill_diagonal_(torch.inf).argsort(dim=1, descending=True, stable=True)
    neighbours = ranked[:, : others + 1]
    return neighbours, (cosine.gather(1, neighbours) / temperature).softmax(dim=1).to(proxies.dtype)


def aggregation_matrix(server: Tree) -> tuple[Tensor, Tensor] | None:
    """The server's newest matrix; None where it has none.

    Args:
        server: the server's state.

    Returns:
        Weights of every expert's mean, (experts, experts), and the client of each expert, (experts,).
    """
    if _LATEST + _OWNERS not in server:
        return None
    neighbours, weights = server[_LATEST + _NEIGHBOURS], server[_LATEST + _WEIGHTS]
    matrix = weights.new_zeros(len(weights), len(weights)).scatter(1, neighbours, weights)
    return matrix, server[_LATEST + _OWNERS][:, 0]


def _expert(tree: Tree, index: int) -> Tree:
    """An expert's tensors by their names within it."""
    prefix = f"experts.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in tree.items() if name.startswith(prefix)}


def _mean_expert(trees: Mapping[int, Tree], client: int, expert: int, places: list[tuple[int, int, Tensor]]) -> Tree:
    """The weighted mean of experts at (client, expert), under the names of one of them."""
    terms = [(_expert(trees[other], index), weight) for other, index, weight in places]
    own = {name: tensor for name, tensor in _expert(trees[client], expert).items() if tensor.is_floating_point()}
    return {
        f"experts.{expert}.{name}": sum((weight * tree[name] for tree, weight in terms), torch.zeros_like(own[name]))
        for name in own
    }
