"""What algorithms have in common whose clients train two models: a global and a personal one."""

from __future__ import annotations

from fedmoe_pl.algorithms.algorithm import Algorithm, Messages, Parts, Weighting
from fedmoe_pl.algorithms.client import Client, Constants
from fedmoe_pl.algorithms.shared.parts import copy_of_global_expert
from fedmoe_pl.trees import Tree, copies_of_parts, load_tree, of_parts


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

    needs = ("loss_of_outputs", "fixed_gate")
    parts = Parts(copied={"local_expert": "global_expert"}, local_expert_predicts=True)
    messages = Messages(per_client=("local_expert.",))

    def __init__(self, weighting: Weighting) -> None:
        super().__init__("global_expert.*", ["global_expert.*", "local_expert.*"], weighting)

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """``w``; new clients, for whom the server holds no ``v``, also receive a copy of it as the start of theirs."""
        w, start = (of_parts(server, [part]) for part in ("global_expert", "local_expert"))
        return w if start else w | copies_of_parts(w, PersonalModel.parts.copied)

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads ``w`` and the client's ``v``; before its first training, ``v`` is a copy of the phase's first ``w``."""
        load_tree(client.module, copy_of_global_expert(client.module))
        return super().client_init(client, sent)

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """``w`` and the client's ``v``; before its first training, ``v`` is what the server holds."""
        return {**of_parts(server, ["local_expert"]), **super().personal_tensors(client, server)}
