"""FedMoE-DA: Zhan, Zhao, Li, Liu, Zhang, Tan, Wu, Guo, Chen 2024 (https://arxiv.org/abs/2411.02115).

No code by the authors is known. Where the paper is unclear, this module does the following:

====================  ==============================================  =============================================
topic                 paper                                           here
====================  ==============================================  =============================================
update rounds         ``t mod I == 1``, never true for I = 1          ``(t - 1) mod I == 0``, t counted from 1
rounds before one     not mentioned                                   no expert is mixed
equal similarities    all that are not below the (P+1)-th largest     the expert itself, then the first P
initial parameters    not mentioned                                   the same for all clients, ``shared_init``
matrix of a round     the previous one, or the round's own            the previous; its own with ``sync_matrix``
evaluation            not mentioned; Algorithm 1's last line,         before the exchange, by which the paper's order
                      "Output: personalized model", is after the      is reproduced (docs/papers/fedmoe_da.md); see
                      exchange                                        ``Evaluate.after``
====================  ==============================================  =============================================
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Messages, Patterns, begins, copies, shapes_of_shared
from fedmoe_pl.algorithms.client import Client, Constants, Exchange, Update
from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_choice, check_number
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models import ProxyGate, SparseMoE
from fedmoe_pl.models.layers import draw_anew
from fedmoe_pl.trees import (
    Tree,
    difference,
    mean_of_two,
    of_algorithm,
    of_module,
    precise,
    problem_of_shapes,
    subtree,
    with_prefix,
    with_types_of,
)

_PROXIES = "proxies/"  # prefix of a client's id: what stands for its experts in an update round, (experts, features)
# The server holds the matrices of the last update round and of the one before. A matrix has one row per expert of each
# client that sent its proxies. It consists of the indices of the experts in each row's mean and of their weights, both
# (rows, P + 1), and of the client and the index of each row's expert, (rows, 2).
_LATEST, _BEFORE = "aggregation/", "aggregation_before/"
_NEIGHBOURS, _WEIGHTS, _OWNERS = "neighbours", "weights", "owners"
# Of the means of a client's experts: client and index of the experts in each, (experts, P + 1, 2), and their weights.
_MEAN_OWNERS, _MEAN_WEIGHTS = "means/owners", "means/weights"


class FedMoEDA(Algorithm):
    """The server averages the embedding; each expert is averaged with experts of all clients that see similar samples.

    The similarity of two experts is the cosine of their proxies in the clients' gates. Every ``interval``-th round is
    an update round, in which clients send the proxies to the server. With ``similarity="updates"``, which is not in the
    paper, the changes of the experts' last layers in the round's training take the place of the proxies. Clients send
    experts to each other, each to those clients whose rows of the matrix need it; gates are never averaged. A round
    averages the experts with the matrix of the update round before it. All clients train in every round. One that fails
    in a round neither sends nor receives experts in it, and the others' means are over the experts that are left. One
    that fails in an update round is not in its matrix, and exchanges no experts in any round that uses this matrix.

    Args:
        top_p: number of other experts that an expert is averaged with; "all" for all, 0 for none.
        interval: number of rounds from one update round to the next.
        temperature: divides the cosines before the softmax over an expert and those that it is averaged with.
        similarity: "proxies" or "updates". Updates of a last layer say more about the client's classes than proxies do,
            to the server as well.
        sync_matrix: whether an update round uses its own matrix in place of the previous one.
        exclude_own_client: whether an expert is never averaged with other experts of its own client.
        shared_init: whether gates and experts start with the same parameters on all clients; otherwise every client
            draws its own.
        trainable: glob patterns of the parameters that are trained. An embedding that is not trained is not sent.
    """

    needs = ("all_clients",)
    evaluated_after = "local_training"

    def __init__(
        self,
        top_p: int | Literal["all"] = 5,
        interval: int = 5,
        temperature: float = 1.0,
        similarity: Literal["proxies", "updates"] = "proxies",
        sync_matrix: bool = False,
        exclude_own_client: bool = False,
        shared_init: bool = True,
        trainable: str | list[str] = "*",
    ) -> None:
        if top_p != "all":
            check_at_least(self, "top_p", top_p, 0)
        check_at_least(self, "interval", interval, 1)
        check_number(self, "temperature", temperature, above=0)
        check_choice(self, "similarity", similarity, ("proxies", "updates"))
        super().__init__(trainable=trainable, weighting="uniform")
        self.shared = Patterns(trainable, within=Patterns("embedding.*"))
        self.top_p: int | Literal["all"] = top_p
        self.interval = interval
        exchanged = () if top_p == 0 else ("experts.",)
        self.messages = Messages(per_client=(_LATEST, _BEFORE), exchanged=exchanged, period=interval)
        self.temperature = temperature
        self.similarity: Literal["proxies", "updates"] = similarity
        self.sync_matrix = sync_matrix
        self.exclude_own_client = exclude_own_client
        self.shared_init = shared_init

    def server_init(self, module: LightningModule) -> Tree:
        """The embedding; refuses a model without proxies, and updates of layers that are not trained."""
        if not isinstance(module, SparseMoE) or not isinstance(module.gate, ProxyGate):
            raise InvalidArgumentError(self, "model", module, "a SparseMoE with its own gate")
        layers = _last_layers(module) if self.similarity == "updates" else {}
        if frozen := [name for name in layers if name not in self.trainable]:
            raise InvalidArgumentError(self, "similarity", "updates", "'proxies'", f"{frozen[0]} is not trained")
        return super().server_init(module)

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Step 1: loads the embedding and the tensors that the client kept; may draw its initial gate and experts."""
        if not self.shared_init and begins(self, client, "experts."):
            client.module.gate.reset_parameters()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            draw_anew(client.module.experts)  # pyright: ignore[reportArgumentType]
        constants = super().client_init(client, sent)
        if self.similarity == "updates" and client.round % self.interval == 0:
            layers = _last_layers(client.module)
            constants["last_layers"] = {name: layer.cpu().clone() for name, layer in layers.items()}
        return constants

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Step 2: sends the embedding, in update rounds also what tells experts apart; keeps gate and experts."""
        update = super().client_final(client, constants)
        state = client.module.state_dict()
        unchanged = [name for name in state if name.startswith(("gate.", "experts.")) and name not in update.state]
        update.state.update(copies(client, unchanged))
        if client.round % self.interval == 0:
            rows = [tensor.flatten() for name, tensor in state.items() if name.startswith("gate.proxies.")]
            if self.similarity == "updates":
                # the signs of all changes are turned, which no cosine sees
                changes = difference(constants["last_layers"], {name: tensor.cpu() for name, tensor in state.items()})
                experts = [_expert(changes, expert) for expert in range(len(rows))]
                rows = [torch.cat([tensor.flatten() for tensor in layer.values()]) for layer in experts]
            update.sent[f"{_PROXIES}{client.id}"] = torch.stack(rows).detach().cpu()
        return update

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """The embedding, in update rounds also a row for each of the client's experts."""
        shapes = shapes_of_shared(self, initial)
        if round % self.interval == 0:
            shapes[f"{_PROXIES}{client_id}"] = (sum(name.startswith("gate.proxies.") for name in initial), None)
        return problem_of_shapes(update.sent, shapes)

    def combine(self, a: Update, b: Update) -> Update:
        """The uniform mean of the embeddings, and the proxies of all clients."""
        mean = mean_of_two(of_module(a.sent), a.weight, b.sent, b.weight)
        return Update({**mean, **of_algorithm(a.sent), **of_algorithm(b.sent)}, a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """Step 4: the new embedding; in update rounds, also a new matrix besides the previous one."""
        new = {name: tensor for name, tensor in server.items() if not name.startswith(_BEFORE)}
        new |= of_module(combined.sent)
        proxies = {int(client): tensor for client, tensor in subtree(combined.sent, _PROXIES).items()}
        if not proxies:
            return new
        rows = torch.cat([proxies[client] for client in sorted(proxies)])  # (rows, features)
        owners = torch.tensor(
            [[client, expert] for client in sorted(proxies) for expert in range(len(proxies[client]))]
        )
        client_of_row = owners[:, 0] if self.exclude_own_client else None
        neighbours, weights = aggregation_rows(rows, self.top_p, self.temperature, client_of_row)
        before = subtree(server, _LATEST) or {
            _NEIGHBOURS: torch.arange(len(rows))[:, None],  # each expert is its own mean
            _WEIGHTS: torch.ones(len(rows), 1, dtype=weights.dtype),
            _OWNERS: owners,
        }
        latest = {_NEIGHBOURS: neighbours, _WEIGHTS: weights, _OWNERS: owners}
        return new | with_prefix(before, _BEFORE) | with_prefix(latest, _LATEST)

    def exchange(self, server: Tree, clients: Collection[int], round: int) -> Exchange:
        """Step 3: the client's rows of the matrix, and the experts of other clients in them, each once."""
        held = _BEFORE if _BEFORE + _NEIGHBOURS in server and not self.sync_matrix else _LATEST
        if held + _NEIGHBOURS not in server or server[held + _NEIGHBOURS].shape[1] == 1:
            return  # every expert is its own mean
        owners = server[held + _OWNERS]
        present = torch.tensor([client in clients for client in owners[:, 0].tolist()])  # others failed in this round
        for client in owners[present, 0].unique().tolist():
            rows = owners[:, 0] == client
            neighbours = server[held + _NEIGHBOURS][rows]
            weights = server[held + _WEIGHTS][rows] * present[neighbours]
            if not present.all():
                weights = weights / weights.sum(1, keepdim=True)
            received: dict[int, list[str]] = {}
            for sender, index in owners[neighbours[weights > 0].unique()].tolist():
                if sender != client:
                    received.setdefault(sender, []).append(f"experts.{index}")
            yield client, {_MEAN_OWNERS: owners[neighbours], _MEAN_WEIGHTS: weights}, received

    def client_exchange(self, client_id: int, state: Tree, sent: Tree) -> Tree:
        """Every expert becomes the weighted mean of experts as they are after this round's training."""
        averaged = {}
        for index, (owners, weights) in enumerate(zip(sent[_MEAN_OWNERS].tolist(), sent[_MEAN_WEIGHTS], strict=True)):
            trees = [
                _expert(state, other) if sender == client_id else subtree(sent, f"{sender}.experts.{other}.")
                for sender, other in owners
            ]
            terms = [(tree, weight) for tree, weight in zip(trees, weights, strict=True) if weight > 0]
            averaged |= with_prefix(_mean(_expert(state, index), terms), f"experts.{index}.")
        return averaged


def aggregation_matrix(server: Tree) -> tuple[Tensor, Tensor] | None:
    """The server's newest matrix: weights of each expert's mean (experts, experts), each one's client (experts,)."""
    if _LATEST + _OWNERS not in server:
        return None
    neighbours, weights = server[_LATEST + _NEIGHBOURS], server[_LATEST + _WEIGHTS]
    matrix = weights.new_zeros(len(weights), len(weights)).scatter(1, neighbours, weights)
    return matrix, server[_LATEST + _OWNERS][:, 0]


def aggregation_rows(
    proxies: Tensor, top_p: int | Literal["all"], temperature: float = 1.0, owners: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts that each expert is averaged with, itself first, and their weights (Eq. 9), both (experts, P + 1).

    ``owners`` are the clients of the experts (experts,), if no other experts of the same client count; weights are 0
    for want of other experts.
    """
    unit = F.normalize(proxies.double(), dim=1)
    # rounded, so that cosines that differ only by the order of their sums are equal
    cosine = (unit @ unit.T).round(decimals=12).fill_diagonal_(1)
    if owners is not None:
        same = owners[:, None] == owners
        cosine = cosine.masked_fill(same.fill_diagonal_(False), -torch.inf)
    others = len(proxies) - 1 if top_p == "all" else min(top_p, len(proxies) - 1)
    ranked = cosine.clone().fill_diagonal_(torch.inf).argsort(dim=1, descending=True, stable=True)
    neighbours = ranked[:, : others + 1]
    return neighbours, (cosine.gather(1, neighbours) / temperature).softmax(dim=1).to(precise(proxies).dtype)


def _last_layers(module: LightningModule) -> Tree:
    """The parameters of every expert's last layer, under their names in the client's module."""
    parameters = {}
    for index, expert in enumerate(module.experts):  # pyright: ignore[reportArgumentType]
        *_, last = (layer for layer in expert.modules() if next(layer.parameters(recurse=False), None) is not None)
        ids = {id(parameter) for parameter in last.parameters(recurse=False)}
        named = expert.named_parameters(prefix=f"experts.{index}")
        parameters |= {name: parameter.detach() for name, parameter in named if id(parameter) in ids}
    return parameters


def _expert(tree: Tree, index: int) -> Tree:
    """An expert's tensors by their names within the expert."""
    return subtree(tree, f"experts.{index}.")


def _mean(expert: Tree, terms: Sequence[tuple[Tree, Tensor]]) -> Tree:
    """An expert's floating-point tensors as the weighted mean of experts, which are given with their weights."""
    means = {
        name: sum((weight * precise(tree[name]) for tree, weight in terms), torch.zeros_like(precise(tensor)))
        for name, tensor in expert.items()
        if tensor.is_floating_point()
    }
    return with_types_of(expert, means)
