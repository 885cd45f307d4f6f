"""What algorithms have in common whose clients train two models: a global and a personal one."""

from __future__ import annotations

from types import MappingProxyType

import torch

from fedmoe_pl.algorithms.algorithm import Algorithm, Weighting
from fedmoe_pl.algorithms.client import Client, Constants
from fedmoe_pl.algorithms.shared.parts import copy_of_global_expert
from fedmoe_pl.trees import Tree, load_tree, of_module, subtree, with_prefix

_FOR_NEW_CLIENTS = "new_clients/sends_v"  # name of a tensor: the server sends the start of v, too


class PersonalModel(Algorithm):
    """The base of algorithms with a global model ``w``, which is averaged, and a model ``v`` that each client keeps.

    ``w`` is the module's ``global_expert``, ``v`` its ``local_expert``; other parts are not trained. Every ``v`` starts
    as a copy of the phase's first ``w``, also that of a client whose first round is a later one. The server holds this
    copy, for clients that never take part and for later phases. It is not sent, because every client knows it. For
    clients outside the federation, ``v`` starts as a copy of the last ``w``.

    Args:
        weighting: ``samples`` weighs a client's ``w`` by its number of training samples; ``uniform`` gives all clients
            the same weight.
    """

    predicts_with_local_expert = True
    copied_parts = MappingProxyType({"local_expert": "global_expert"})
    needs = ("loss_of_outputs", "fixed_gate")

    def __init__(self, weighting: Weighting) -> None:
        super().__init__("global_expert.*", ["global_expert.*", "local_expert.*"], weighting)

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """``w``; new clients also receive the start of ``v``."""
        if _FOR_NEW_CLIENTS in server:
            return of_module(server)
        return with_prefix(subtree(server, "global_expert."), "global_expert.")

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads ``w`` and the client's ``v``; before its first training, ``v`` is a copy of the phase's first ``w``."""
        load_tree(client.module, copy_of_global_expert(client.module))
        return super().client_init(client, sent)

    def server_of_new_clients(self, server: Tree) -> Tree:
        """``w``, and a copy of it as the start of every ``v``."""
        start = with_prefix(subtree(server, "global_expert."), "local_expert.")
        return {**server, **start, _FOR_NEW_CLIENTS: torch.tensor(True)}

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """``w`` and the client's ``v``; before its first training, ``v`` is what the server holds."""
        start = with_prefix(subtree(server, "local_expert."), "local_expert.")
        return {**start, **super().personal_tensors(client, server)}
