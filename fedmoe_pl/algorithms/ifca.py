"""IFCA, with epsilon-greedy exploration: a model for every cluster of clients.

IFCA: Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020, Algorithm 1 with model averaging (https://arxiv.org/abs/2006.04088).
Exploration and early stopping by cluster: Isaksson et al. 2022 (https://arxiv.org/abs/2206.07832; METHODS 7.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Generator, Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Client, Update
from fedmoe_pl.data import Batches
from fedmoe_pl.models import ClusteredMoE, FixedGate
from fedmoe_pl.seeds import derive_seed
from fedmoe_pl.trees import Tree, changed, copy_module, load_tree, mean_of_two

Schedule = Literal["constant", "inverse", "power", "by_clusters"]
"""How epsilon changes with the round t, counted from 0 (METHODS section 7.3): not at all, ``1 / (t + 1)``,
``1 / (t + 1)^b`` with the b that reaches epsilon after ``decay_rounds``, and ``1 / (t + 1)^(2 / J)``."""

PICKS = "clusters/picks"
"""Name of the server's record of how many clients picked each cluster, int64 (rounds so far, J)."""

_ACTIVE, _BEST_LOSS, _WAITED = "clusters/active", "clusters/best_loss", "clusters/checks_without_improvement"
_BEST, _TALLY = "clusters/best/", "clusters/tally/"
_CHOICE = 73  # tells a client's choice of a cluster from its other streams of random numbers


class EpsilonGreedyIFCA(Algorithm):
    """Clients train one cluster's model each, most of them the one that fits their data best, some a random one.

    The client trains the chosen model in the place of ``global_experts.0``, the only one that is trained, and the
    phase's gate is held at it. It is evaluated with the model that fits its training data best. A cluster that nobody
    picked stays as it is.

    Args:
        epsilon: probability of a random choice; 0 is IFCA, without its redrawing of initial models.
        schedule: how epsilon changes from round to round, see :data:`Schedule`.
        decay_rounds: round, counted from 0, in which ``power`` reaches epsilon: an eighth of all in the official code.
        weighting: ``samples`` weighs a client by its number of training samples, ``uniform`` (IFCA) all alike.
        patience: checks without a lower validation loss after which a cluster is out of play: it goes back to its best
            weights, and is neither sent nor picked any more. None for never. Where all are out, nothing is trained.
        check_every_n_rounds: rounds from check to check; each participant then validates the model that it picked as
            it received it.

    Raises:
        MisconfigurationException: if an argument is out of range.
    """

    def __init__(
        self,
        epsilon: float = 0.33,
        schedule: Schedule = "constant",
        decay_rounds: int | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        patience: int | None = None,
        check_every_n_rounds: int = 10,
    ) -> None:
        key = "algorithm.init_args"
        if not 0 <= epsilon <= 1:
            raise MisconfigurationException(f"{key}.epsilon is {epsilon}, but must be from 0 to 1.")
        if schedule not in get_args(Schedule):
            allowed = ", ".join(get_args(Schedule))
            raise MisconfigurationException(f"{key}.schedule is '{schedule}', but must be one of {allowed}.")
        if schedule == "power" and (not epsilon or decay_rounds is None or decay_rounds < 1):
            raise MisconfigurationException(
                f"{key}.schedule is 'power', but epsilon is {epsilon} and decay_rounds {decay_rounds}; epsilon must be "
                "above 0 and decay_rounds at least 1."
            )
        for name, value in (("patience", patience), ("check_every_n_rounds", check_every_n_rounds)):
            if value is not None and value < 1:
                raise MisconfigurationException(f"{key}.{name} is {value}, but must be at least 1.")
        self.epsilon = epsilon
        self.schedule = schedule
        self.decay_rounds = decay_rounds
        self.weighting = weighting
        self.patience = patience
        self.needs_validation = patience is not None
        self.check_every_n_rounds = check_every_n_rounds

    def check(self, module: LightningModule) -> None:
        """Refuses another model, and a gate that is not held at the place that is trained."""
        check_first_place(self, module)

    def is_shared(self, name: str) -> bool:
        """The clusters' models."""
        return name.startswith("global_experts.")

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """The chosen model, in its place."""
        return name.startswith("global_experts.0.")

    def epsilon_of(self, round: int, num_clusters: int) -> float:
        """Probability of a random choice in a round, counted from 0."""
        if self.schedule == "constant":
            return self.epsilon
        exponent = 1.0 if self.schedule == "inverse" else 2 / num_clusters
        if self.decay_rounds is not None and self.schedule == "power":
            exponent = -math.log(self.epsilon) / math.log(self.decay_rounds + 1)
        return (round + 1) ** -exponent

    def server_init(self, module: LightningModule) -> Tree:
        """The clusters' models, and which are in play, were picked and were how good."""
        clusters = len(experts_of(module))
        return super().server_init(module) | {
            PICKS: torch.zeros(0, clusters, dtype=torch.int64),
            _ACTIVE: torch.ones(clusters, dtype=torch.bool),
            _BEST_LOSS: torch.full((clusters,), math.inf, dtype=torch.float64),
            _WAITED: torch.zeros(clusters, dtype=torch.int64),
        }

    def server_send(self, server: Tree, client_id: int) -> Tree:
        """The models of all clusters in play."""
        active = server[_ACTIVE].tolist()
        return {name: tensor for name, tensor in server.items() if self.is_shared(name) and active[_cluster(name)]}

    def client_init(self, client: Client, sent: Tree) -> dict[str, Any]:
        """Picks a cluster, validates it if it is time for it, and loads it into its place."""
        super().client_init(client, sent)
        active = sorted({_cluster(name) for name in sent})
        if not active:
            client.samples = client.samples[:0]
            return {}
        generator = choice_generator(client)
        explores = torch.rand((), generator=generator).item() < self.epsilon_of(
            client.round, len(experts_of(client.module))
        )
        if explores:
            cluster = active[int(torch.randint(len(active), (), generator=generator))]
        else:
            cluster = best_cluster(client, active, generator)
        validations = self._validated(client, cluster)
        load_tree(client.module, moved(sent, cluster, 0))
        return {"cluster": torch.tensor(cluster), "validations": validations}

    def _validated(self, client: Client, cluster: int) -> Tensor:
        """The mean loss of a cluster on the client's validation samples, and 1; twice 0 for none: float64 (2,)."""
        none = torch.zeros(2, dtype=torch.float64)
        if not self.patience:
            return none
        assert client.datamodule is not None
        samples = client.datamodule.validation_samples[client.id]
        if (client.round + 1) % self.check_every_n_rounds or not len(samples):
            return none
        loss = _mean_loss(client.module, cluster, client.batches(samples))
        return torch.stack((loss, torch.ones_like(loss)))

    def client_final(self, client: Client, const: dict[str, Any]) -> Update:
        """Sends the trained model under its cluster's name, and what the server counts."""
        kept = changed(client.module, client.loaded, client.kept)
        kept = {name: tensor for name, tensor in kept.items() if not self.is_shared(name)}
        if not const:
            return Update({}, 0, kept)
        cluster = int(const["cluster"])
        trained = moved(client.module.state_dict(), 0, cluster)
        sent = {name: tensor.detach().cpu().clone() for name, tensor in trained.items()}
        weight = len(client.samples) if self.weighting == "samples" else 1
        counts = torch.tensor([weight, 1], dtype=torch.float64)
        return Update({**sent, f"{_TALLY}{cluster}": torch.cat((counts, const["validations"].cpu()))}, weight, kept)

    def combine(self, a: Update, b: Update) -> Update:
        """Weighted mean of the updates of each cluster (METHODS section 7.3, step 4)."""
        sent = {**a.sent, **b.sent}
        for name in a.sent.keys() & b.sent.keys():
            if name.startswith(_TALLY):
                cluster = name.removeprefix(_TALLY)
                own = [key for key in a.sent if key.startswith(f"global_experts.{cluster}.")]
                trees = [{key: update.sent[key] for key in own} for update in (a, b)]
                weights = [update.sent[name][0].item() for update in (a, b)]
                sent |= mean_of_two(trees[0], weights[0], trees[1], weights[1])
                sent[name] = a.sent[name] + b.sent[name]
        return Update(sent, a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """Replaces the models that were trained, counts the picks, and takes clusters out of play."""
        tally = torch.zeros(len(server[_ACTIVE]), 4, dtype=torch.float64)  # samples, picks, sum of losses, validations
        for name, tensor in combined.sent.items():
            if name.startswith(_TALLY):
                tally[int(name.removeprefix(_TALLY))] = tensor
        trained = {name: tensor for name, tensor in combined.sent.items() if self.is_shared(name)}
        picks = torch.cat((server[PICKS], tally[None, :, 1].long()))
        updated = {**server, **trained, PICKS: picks}
        return self._stopped_early(server, updated, tally) if self.patience else updated

    def _stopped_early(self, server: Tree, updated: Tree, tally: Tensor) -> Tree:
        """Remembers the models that validated best, as they were validated, and goes back to them in the end."""
        assert self.patience is not None
        validated = tally[:, 3] > 0
        losses = (tally[:, 2] / tally[:, 3]).where(validated, math.inf)
        better = losses < server[_BEST_LOSS]
        waited = (server[_WAITED] + validated).where(~better, 0)
        stopped = server[_ACTIVE] & (waited >= self.patience)
        names = [name for name in server if self.is_shared(name)]
        updated |= {_BEST + name: server[name] for name in names if better[_cluster(name)]}
        updated |= {name: updated.get(_BEST + name, updated[name]) for name in names if stopped[_cluster(name)]}
        return updated | {
            _ACTIVE: server[_ACTIVE] & ~stopped,
            _BEST_LOSS: losses.where(better, server[_BEST_LOSS]),
            _WAITED: waited,
        }

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The cluster with the lowest loss on the client's training samples changes places with the first one."""
        clusters = {name: tensor for name, tensor in server.items() if self.is_shared(name)}
        load_tree(client.module, clusters)
        best = best_cluster(client, range(len(server[_ACTIVE])), choice_generator(client))
        return {**clusters, **moved(clusters, 0, best), **moved(clusters, best, 0), **client.kept}


def experts_of(module: LightningModule) -> Sequence[torch.nn.Module]:
    """The clusters' models."""
    if not isinstance(module, ClusteredMoE):
        raise MisconfigurationException(f"model is a {type(module).__name__}, but must be a ClusteredMoE.")
    return [*module.global_experts]


def check_first_place(algorithm: Algorithm, module: LightningModule) -> None:
    """Refuses a module that does not compute ``global_experts.0`` alone.

    Raises:
        MisconfigurationException: with one sentence.
    """
    experts_of(module)
    gate = module.gate
    if not (isinstance(gate, FixedGate) and gate.active == [0]):
        raise MisconfigurationException(
            f"gate is a {type(gate).__name__}, but {type(algorithm).__name__} uses one cluster's model at a time; it "
            "must be GlobalOnly."
        )


def _cluster(name: str) -> int:
    """The cluster of a tensor ``global_experts.<cluster>...``."""
    return int(name.split(".")[1])


def moved(tree: Mapping[str, Tensor], source: int, target: int) -> Tree:
    """The tensors of one cluster under the names of another one."""
    prefix = f"global_experts.{source}."
    return {
        f"global_experts.{target}.{name.removeprefix(prefix)}": tensor
        for name, tensor in tree.items()
        if name.startswith(prefix)
    }


def choice_generator(client: Client) -> Generator:
    """A stream of its own, so that the client's dropout and batches do not depend on how it chose."""
    return Generator().manual_seed(derive_seed(client.seed, _CHOICE, client.id, client.round))


def best_cluster(client: Client, clusters: Sequence[int], generator: Generator) -> int:
    """The one with the lowest mean loss on the client's training samples; ties are drawn, nan is never the lowest."""
    if len(clusters) == 1:
        return clusters[0]
    batches = client.batches(client.samples)
    losses = torch.stack([_mean_loss(client.module, cluster, batches) for cluster in clusters])
    losses = losses.where(~losses.isnan(), math.inf)
    lowest = (losses == losses.min()).nonzero().flatten()
    return clusters[int(lowest[torch.randint(len(lowest), (), generator=generator)])]


@torch.no_grad()
def _mean_loss(module: LightningModule, cluster: int, batches: Batches) -> Tensor:
    """Mean loss of a cluster's model in eval mode, where the data are: float64 (), on the CPU."""
    assert isinstance(module, ClusteredMoE)
    expert = copy_module(module.global_experts[cluster]).to(batches.x.device).eval()
    sums = [module.loss_of(module.scores_of(expert(x)), y, reduction="none").double().sum() for x, y in batches]
    return torch.stack(sums).sum().cpu() / len(batches.samples)
