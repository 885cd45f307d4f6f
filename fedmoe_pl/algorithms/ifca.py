"""IFCA with epsilon-greedy exploration: a model for every cluster of clients.

IFCA: Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020, Algorithm 1 with model averaging (https://arxiv.org/abs/2006.04088).
Exploration and early stopping by cluster: Isaksson et al. 2022 (https://arxiv.org/abs/2206.07832).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, get_args

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Messages, Weighting, private_tensors, weight_of
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.clusters import (
    best_cluster,
    check_first_place,
    choice_generator,
    cluster_of,
    experts_of,
    mean_loss,
    moved,
)
from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_choice, check_number
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models import ClusteredMoE
from fedmoe_pl.seeds import derive_seed
from fedmoe_pl.trees import Tree, load_tree, mean_of_two, of_module, problem_of_shapes, subtree, with_prefix

_PICKS = "clusters/picks"  # the picks of each cluster in each round, which the server counts: int64 (rounds so far, J)
_ACTIVE = "clusters/active"  # which clusters have not stopped, bool (J,)
_BEST = "clusters/best/"  # prefix of a tensor's name: the tensor when its cluster had the lowest validation loss
_BEST_LOSS = "clusters/best_loss"  # these losses, float64 (J,)
_WAITED = "clusters/checks_without_improvement"  # the number of checks since then, int64 (J,)
# Prefix of a cluster's number: its weight, its picks, its sum of validation losses and their number, float64 (4,).
_TALLY = "clusters/tally/"
_DRAWS = 1000  # how often initial models are drawn before ``good_init`` is given up
_DRAW = 74  # separates the random numbers of initial models that are drawn anew from others

Schedule = Literal["constant", "inverse", "power", "by_clusters"]
"""The epsilon of round t, counted from 0, with J clusters: constant, ``1 / (t + 1)``, ``1 / (t + 1)^b`` with the b that
reaches epsilon after ``decay_rounds``, or ``1 / (t + 1)^(2 / J)``."""


class EpsilonGreedyIFCA(Algorithm):
    """Each client trains the model of one cluster: usually the one that fits its data best, sometimes a random one.

    The chosen model replaces ``global_experts.0``, the only expert that is trained and that the phase's gate uses. A
    client is evaluated with the model that fits its training data best. The model of a cluster that no client picked
    does not change.

    Args:
        epsilon: probability of a random choice with the schedules ``constant`` and ``power``; 0 is IFCA, with
            ``good_init`` as in its code.
        schedule: how epsilon changes from round to round, see :data:`~fedmoe_pl.algorithms.ifca.Schedule`.
        decay_rounds: round, counted from 0, in which ``power`` reaches epsilon; None means an eighth of the phase's
            rounds, as in the official code.
        weighting: ``samples`` weighs a client by its number of training samples; ``uniform`` gives all clients the
            same weight, as in IFCA.
        patience: number of checks without a lower validation loss after which a cluster stops: its best parameters are
            restored, and it is no longer sent or picked. Once all clusters have stopped, the phase ends. Clusters that
            have not stopped by the last round get their best parameters then. None never stops a cluster.
        check_every_n_rounds: number of rounds from one check to the next, with ``patience``. In a check, each client of
            the round validates the model that it picked, before training it.
        good_init: smallest share of the first round's clients that must choose each initial model. All models are drawn
            anew until this holds, at most 1000 times. IFCA's code has 0.35 for two clusters and 0.1 for four, and draws
            other clients each time. None never draws anew.
    """

    needs = ("fresh_optimizers",)
    messages = Messages(weights=(_TALLY,))

    def __init__(
        self,
        epsilon: float = 0.33,
        schedule: Schedule = "constant",
        decay_rounds: int | None = None,
        weighting: Weighting = "samples",
        patience: int | None = None,
        check_every_n_rounds: int = 10,
        good_init: float | None = None,
    ) -> None:
        check_choice(self, "schedule", schedule, get_args(Schedule))
        never_0 = schedule == "power"  # no power of a number reaches 0
        check_number(self, "epsilon", epsilon, least=None if never_0 else 0, above=0 if never_0 else None, most=1)
        check_at_least(self, "decay_rounds", decay_rounds, 1)
        check_at_least(self, "patience", patience, 1)
        check_at_least(self, "check_every_n_rounds", check_every_n_rounds, 1)
        check_number(self, "good_init", good_init, above=0, most=1)
        super().__init__("global_experts.*", "global_experts.0.*", weighting)
        self.epsilon = epsilon
        self.schedule = schedule
        self.decay_rounds = decay_rounds
        if schedule == "power" and decay_rounds is None:
            self.needs += ("fixed_rounds",)
        if patience is not None:
            self.needs += ("validation_samples",)
        self.patience = patience
        self.check_every_n_rounds = check_every_n_rounds
        self.good_init = good_init

    def epsilon_of(self, round: int, num_clusters: int, rounds: int) -> float:
        """The probability of a random choice in one of the phase's rounds, counted from 0."""
        if self.schedule == "constant":
            return self.epsilon
        exponent = 1.0 if self.schedule == "inverse" else 2 / num_clusters
        if self.schedule == "power":
            last = rounds / 8 if self.decay_rounds is None else self.decay_rounds
            exponent = -math.log(self.epsilon) / math.log(last + 1)
        return (round + 1) ** -exponent

    def server_init(self, module: LightningModule) -> Tree:
        """The models of the clusters; no cluster is picked or validated yet.

        Refuses other models, and gates that use more than the first expert.
        """
        check_first_place(module)
        clusters = len(experts_of(module))
        return super().server_init(module) | {
            _PICKS: torch.zeros(0, clusters, dtype=torch.int64),
            _ACTIVE: torch.ones(clusters, dtype=torch.bool),
            _BEST_LOSS: torch.full((clusters,), math.inf, dtype=torch.float64),
            _WAITED: torch.zeros(clusters, dtype=torch.int64),
        }

    def server_begin(self, server: Tree, clients: Iterable[Client]) -> Tree:
        """Draws initial models anew until each is chosen by the share ``good_init`` of the clients."""
        if self.good_init is None:
            return server
        first_round = [*clients]
        seed, module = first_round[0].seed, first_round[0].module
        assert isinstance(module, ClusteredMoE)
        clusters = range(len(module.global_experts))
        for draw in range(_DRAWS):
            if draw:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(derive_seed(seed, _DRAW, draw))
                    module.draw_clusters()
            chosen = [best_cluster(client, clusters, choice_generator(client)) for client in first_round]
            if min(chosen.count(cluster) for cluster in clusters) >= self.good_init * len(first_round) - 1e-9:
                models = {name: tensor.clone() for name, tensor in module.global_experts.state_dict().items()}
                return {**server, **with_prefix(models, "global_experts.")}
        because = f"in none of {_DRAWS} draws was every cluster chosen by this share of the first round's clients"
        raise InvalidArgumentError(self, "good_init", self.good_init, "lower for these data", because)

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """The models of all active clusters."""
        active = server[_ACTIVE].tolist()
        return {name: tensor for name, tensor in of_module(server).items() if active[cluster_of(name)]}

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Picks a cluster, validates its model if the round has a check, and loads it as ``global_experts.0``."""
        super().client_init(client, sent)
        active = sorted({cluster_of(name) for name in sent})
        generator = choice_generator(client)
        epsilon = self.epsilon_of(client.round, len(experts_of(client.module)), client.rounds)
        if torch.rand((), generator=generator).item() < epsilon:
            cluster = active[int(torch.randint(len(active), (), generator=generator))]
        else:
            cluster = best_cluster(client, active, generator)
        validation = self._validation(client, cluster)
        load_tree(client.module, moved(sent, cluster, 0))
        return {"cluster": torch.tensor(cluster), "validation": validation}

    def _validation(self, client: Client, cluster: int) -> Tensor:
        """A cluster's mean loss on the client's validation samples and 1; two zeros without a check. Float64 (2,)."""
        none = torch.zeros(2, dtype=torch.float64)
        samples = client.datamodule.validation_samples[client.id]
        if not self._has_check(client.round) or not len(samples):
            return none
        loss = mean_loss(client.module, cluster, client.batches(samples))
        return torch.stack((loss, torch.ones_like(loss)))

    def _has_check(self, round: int) -> bool:
        """Whether clients validate the models that they pick in a round."""
        return bool(self.patience) and (round + 1) % self.check_every_n_rounds == 0

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends the trained model under its cluster's name, and the client's part of the tally."""
        cluster = int(constants["cluster"])
        trained = moved(client.module.state_dict(), 0, cluster)
        sent = {name: tensor.detach().cpu().clone() for name, tensor in trained.items()}
        weight = weight_of(self, client.id, client.samples, client.seed, client.datamodule)
        tally = torch.cat((torch.tensor([weight, 1], dtype=torch.float64), constants["validation"]))
        return Update({**sent, f"{_TALLY}{cluster}": tally}, weight, private_tensors(self, client))

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """One cluster's model and its tally, of one client."""
        cluster = next(map(cluster_of, of_module(update.sent)), 0)
        model = {name: tensor.shape for name, tensor in moved(initial, cluster, cluster).items()}
        if problem := problem_of_shapes(update.sent, {**model, f"{_TALLY}{cluster}": (4,)}):
            return problem
        weight, picks, _, checks = update.sent[f"{_TALLY}{cluster}"].tolist()
        fits = (weight, picks) == (update.weight, 1) and checks in (0, self._has_check(round))
        return "" if fits else "has the tally of other samples"

    def combine(self, a: Update, b: Update) -> Update:
        """The weighted mean of the updates of each cluster."""
        sent = {**a.sent, **b.sent}
        tallies_a, tallies_b = subtree(a.sent, _TALLY), subtree(b.sent, _TALLY)
        for cluster in tallies_a.keys() & tallies_b.keys():
            tally_a, tally_b = tallies_a[cluster], tallies_b[cluster]
            model = moved(a.sent, cluster, cluster)
            sent |= mean_of_two(model, tally_a[0].item(), b.sent, tally_b[0].item())
            sent[_TALLY + cluster] = tally_a + tally_b
        return Update(sent, a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """Replaces the trained models, counts the picks, and stops clusters."""
        tally = torch.zeros(len(server[_ACTIVE]), 4, dtype=torch.float64)
        for cluster, values in subtree(combined.sent, _TALLY).items():
            tally[int(cluster)] = values
        picks = torch.cat((server[_PICKS], tally[None, :, 1].long()))
        updated = {**server, **of_module(combined.sent), _PICKS: picks}
        return updated if self.patience is None else self._stopped(server, updated, tally, self.patience)

    def _stopped(self, server: Tree, updated: Tree, tally: Tensor, patience: int) -> Tree:
        """Stops clusters whose models, those of ``server``, have not improved, and restores their best parameters."""
        validated = tally[:, 3] > 0
        losses = (tally[:, 2] / tally[:, 3]).where(validated, math.inf)
        better = losses < server[_BEST_LOSS]
        waited = (server[_WAITED] + validated).where(~better, 0)
        stopped = server[_ACTIVE] & (waited >= patience)
        models = of_module(server)
        updated |= {_BEST + name: models[name] for name in models if better[cluster_of(name)]}
        updated |= {name: updated.get(_BEST + name, updated[name]) for name in models if stopped[cluster_of(name)]}
        return updated | {
            _ACTIVE: server[_ACTIVE] & ~stopped,
            _BEST_LOSS: losses.where(better, server[_BEST_LOSS]),
            _WAITED: waited,
        }

    def server_final(self, server: Tree, is_last: bool) -> Tree | None:
        """Once all clusters have stopped, or at last, the best parameters of each that was validated."""
        if server[_ACTIVE].any() and not is_last:
            return None
        return {**server, **{name: server.get(_BEST + name, tensor) for name, tensor in of_module(server).items()}}

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """Swaps the first cluster's model and the one with the lowest loss on the client's training samples."""
        models = of_module(server)
        load_tree(client.module, models)
        best = best_cluster(client, range(len(server[_ACTIVE])), choice_generator(client))
        return {**models, **moved(models, 0, best), **moved(models, best, 0), **of_module(client.state)}


def cluster_picks(server: Tree) -> Tensor | None:
    """How many clients picked each cluster, int64 (rounds so far, J); None if the server has no clusters."""
    return server.get(_PICKS)
