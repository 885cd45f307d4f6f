"""FedALT: Bian, Wang, Zhang, Xu, AAAI 2026 (https://arxiv.org/abs/2503.11880).

================  ==============================  =====================================  ==============================
topic             paper                           official code                          here
================  ==============================  =====================================  ==============================
first adapters    not mentioned                   A drawn by each client                 one draw for all
fewer clients     not mentioned                   all clients train in every round       the others' last uploads
a single client   not mentioned                   ends with an error                     the rest of the world is empty:
                                                                                         its adapter stays as it is
================  ==============================  =====================================  ==============================
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Algorithm, Messages, Parts, check_copied_parts, shapes_of_shared
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.uploads import IDS, TENSORS, joined, problem_of_upload, upload
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.trees import Tree, mean_of_two, of_module, subtree, with_prefix

_SUM, _MEAN = "uploads/sum/", "mean/"  # of the clients' last experts; the sum in double precision


class FedALT(Algorithm):
    """Each client trains its own expert and the gate beside the frozen rest of the world: the mean of others' experts.

    The client's own expert is the ``local_expert``, the rest of the world the ``global_expert``. In the paper they are
    adapters in the layers of a ``LayerwiseAdapterMoE`` with a ``TokenGate``; their factors A and B are averaged apart.
    Clients keep their experts and gates, and send copies of their experts to the server, which keeps the last one of
    each client. A client outside the federation gets the mean of all.

    Args:
        shared: glob patterns of other parameters that are averaged, with uniform weights, such as ``head.*``; None for
            none.
    """

    parts = Parts(computed=("global_expert",))
    messages = Messages(per_client=("uploads/",))
    needs = ("own_server_step",)

    def __init__(self, shared: str | list[str] | None = None) -> None:
        super().__init__(shared=shared or [], weighting="uniform")

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """All but the rest of the world."""
        return not name.startswith("global_expert.")

    def server_init(self, module: LightningModule) -> Tree:
        """What is averaged; refuses a module whose experts have different tensors."""
        check_copied_parts(module, {"global_expert": "local_expert"})
        return super().server_init(module)

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """What is averaged and, as the global expert, the uniform mean of the other clients' experts."""
        sent, mean = of_module(server), subtree(server, _MEAN)
        ids = server.get(IDS, torch.empty(0, dtype=torch.int64))
        own = subtree(server, TENSORS)
        row = (ids == client_id).nonzero().flatten().tolist()
        if row and len(ids) == 1:
            return sent  # there is no rest of the world
        if row:
            total = subtree(server, _SUM)
            mean = {name: (total[name] - own[name][row[0]]).div(len(ids) - 1).to(mean[name]) for name in mean}
        return sent | with_prefix(mean, "global_expert.")

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends a copy of its expert and what is averaged; keeps its expert and gate."""
        update = super().client_final(client, constants)
        expert = client.module.get_submodule("local_expert").state_dict()
        return Update(update.sent | upload(client.id, expert), update.weight, update.state)

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """What is averaged, and the client's own expert."""
        expert, others = subtree(initial, "local_expert."), shapes_of_shared(self, initial)
        return problem_of_upload(update.sent, client_id, expert, others)

    def combine(self, a: Update, b: Update) -> Update:
        """The mean of what is averaged, and the experts of all clients."""
        mean = mean_of_two(of_module(a.sent), a.weight, of_module(b.sent), b.weight)
        return Update(mean | joined(a.sent, b.sent), a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """The newest expert of each client, their sum and their mean."""
        new = {**server, **combined.sent}
        ids, before = combined.sent[IDS], server.get(IDS, torch.empty(0, dtype=torch.int64))
        kept = ~torch.isin(before, ids)
        new[IDS], order = torch.cat((before[kept], ids)).sort()
        for name, experts in subtree(combined.sent, TENSORS).items():
            earlier = server.get(TENSORS + name, experts[:0])[kept]
            new[TENSORS + name] = stacked = torch.cat((earlier, experts))[order]
            new[_SUM + name] = total = stacked.double().sum(0)
            new[_MEAN + name] = (total / len(order)).to(stacked)
        return new
