"""Your own algorithm: FedAvg in which every client keeps the model close to the one that it received.

Run it with ``python examples/own_algorithm.py``; it takes seconds. From YAML, run in the folder of this file, the
algorithm is ``class_path: own_algorithm.Close``.
"""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl import Algorithm, Client, Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.data import Digits, Dirichlet
from fedmoe_pl.models import GlobalOnly, SmallMLP
from fedmoe_pl.trees import Tree


class Close(Algorithm):
    """FedAvg with mu / 2 ||w - received||^2 in the loss of each client.

    Args:
        mu: weight of the distance.
        shared: patterns of the parameters that clients share.
    """

    def __init__(self, mu: float = 0.1, shared: str = "global_expert.*") -> None:
        super().__init__(shared)
        self.mu = mu

    def client_init(self, client: Client, sent: Tree) -> dict[str, Any]:
        """Loads what was sent; what is returned comes back with every batch."""
        super().client_init(client, sent)
        return {name: sent[name] for name, _ in client.module.named_parameters() if name in sent}

    def client_loss(self, module: LightningModule, batch: Any, constants: dict[str, Any]) -> Tensor:
        """The loss of a batch; without side effects, so that many clients can be trained at once."""
        parameters = dict(module.named_parameters())
        distance = sum((parameters[name] - tensor).square().sum() for name, tensor in constants.items())
        return super().client_loss(module, batch, constants) + self.mu / 2 * distance


def main() -> None:
    """Compares the algorithm with FedAvg: both start from the same weights and draw the same clients."""
    torch.manual_seed(0)
    federation = Federation(
        phases=[
            Phase("FedAvg", FedAvg("global_expert.*"), rounds=5, clients_per_round=0.5, gate=GlobalOnly()),
            Phase("Close", Close(), rounds=5, clients_per_round=0.5, gate=GlobalOnly(), start="initial"),
        ],
        trainer={"max_epochs": 2, "accelerator": "cpu"},
        name="own_algorithm",
    )
    model = PersonalizedMoE(SmallMLP(), optimizer=partial(torch.optim.SGD, lr=0.1))
    federation.fit(model, Digits(num_clients=10, partitioner=Dirichlet(0.3)))


if __name__ == "__main__":
    main()
