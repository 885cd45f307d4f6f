"""Adaptive Expert Models: Isaksson, Listo Zec, Coster, Gillblad, Girdzijauskas 2022 (https://arxiv.org/abs/2206.07832).

IFCA (Ghosh et al., NeurIPS 2020, Algorithm 1, https://arxiv.org/abs/2006.04088) with epsilon-greedy exploration trains
one model per cluster. Every client then mixes all of these models and its local expert. For a ``ClusteredMoE`` of J
clusters, the phases are

======================  ================================================  ========================  ================
method                  algorithm                                         gate                      starts from
======================  ================================================  ========================  ================
Local                   ``Local("local_expert.*")``                       ``LocalOnly``             ``initial``
IFCA, with exploration  ``EpsilonGreedyIFCA``                             ``GlobalOnly``            ``start: Local``
Fine-tuned              ``FineTunedCluster``                              ``GlobalOnly``            IFCA
Ensemble                ``ClusterMixture``, 0 epochs, ``mixing: logits``  ``EqualWeights``          IFCA
the mixture             ``ClusterMixture``                                a network, J + 1 outputs  IFCA
======================  ================================================  ========================  ================

so that clients keep their local experts through the federated phase. Local may also come after it, with
``start: IFCA``; the ensemble and the mixture then have ``start: Local``. Where the paper and the official code differ,
this module follows the paper. Early stopping uses validation samples, never test samples.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Algorithm, Parts, begins
from fedmoe_pl.algorithms.client import Client, Constants
from fedmoe_pl.algorithms.shared.clusters import best_cluster, check_first_place, choice_generator, experts_of, moved
from fedmoe_pl.trees import Tree, load_tree


class FineTunedCluster(Algorithm):
    """Every client fine-tunes the model of the cluster with the lowest loss on its training samples.

    It chooses the cluster in its own first round. A client that never trains is evaluated with its best cluster, too.

    Args:
        trainable: glob patterns of the parameters that are trained; the chosen model replaces ``global_experts.0``.
    """

    federated = False
    parts = Parts(needed=("global_experts",))
    needs = ("all_clients",)  # a phase that starts from this one gets the models that clients have fine-tuned

    def __init__(self, trainable: str | list[str] = "global_experts.0.*") -> None:
        super().__init__(trainable=trainable)

    def server_init(self, module: LightningModule) -> Tree:
        """Nothing; refuses other models, and gates that use more than the first expert."""
        check_first_place(module)
        return super().server_init(module)

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Chooses the cluster before the first round in which the client trains."""
        super().client_init(client, sent)
        if begins(self, client, "global_experts.0."):
            load_tree(client.module, self._choice(client))
        return {}

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """What the client keeps; until it has trained, its best cluster is in the first place."""
        tensors = super().personal_tensors(client, server)
        if any(name.startswith("global_experts.0.") for name in client.state):
            return tensors
        load_tree(client.module, tensors)
        return {**tensors, **self._choice(client)}

    def _choice(self, client: Client) -> Tree:
        """The model of the cluster with the lowest loss, in the first place."""
        best = best_cluster(client, range(len(experts_of(client.module))), choice_generator(client))
        return {name: tensor.clone() for name, tensor in moved(client.module.state_dict(), best, 0).items()}


class ClusterMixture(Algorithm):
    """Every client's gate learns to weigh the frozen models of all clusters and its local expert.

    It starts from a phase that has both (see the table above). Every client draws a new gate.

    Args:
        trainable: glob patterns of the parameters that are trained: only the gate by default; ``"*"`` for gate and
            experts, as in some of the official configurations.
        frozen_train_mode: whether frozen modules stay in train mode, with active dropout, as in the official code.
    """

    federated = False
    parts = Parts(needed=("global_experts",), new_gate=True)

    def __init__(self, trainable: str | list[str] = "gate.*", frozen_train_mode: bool = False) -> None:
        super().__init__(trainable=trainable)
        self.frozen_train_mode = frozen_train_mode
