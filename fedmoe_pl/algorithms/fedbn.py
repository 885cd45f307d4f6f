"""FedBN: Li, Jiang, Zhang, Kamp, Dou, ICLR 2021, Algorithm 1 (https://arxiv.org/abs/2102.07623)."""

from __future__ import annotations

from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Algorithm, Patterns, Weighting
from fedmoe_pl.algorithms.client import Client, Constants
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models.layers import batch_norm_names
from fedmoe_pl.trees import Tree


class FedBN(Algorithm):
    """FedAvg of all but batch normalization, whose weights, biases and running statistics each client keeps.

    The layers are found by their type, not by their names, which may be ``downsample.1``. A client outside the
    federation trains its own, with the rest as the server has it. One that never takes part is evaluated with the
    initial ones, whose running statistics are not those of any data.

    Args:
        shared: glob patterns of the parameters and buffers that are averaged, unless they belong to batch
            normalization.
        weighting: ``uniform`` gives all clients the same weight, as in the paper and its code; ``samples`` weighs a
            client by its number of training samples.
    """

    def __init__(self, shared: str | list[str] = "*", weighting: Weighting = "uniform") -> None:
        super().__init__(shared, weighting=weighting)

    def server_init(self, module: LightningModule) -> Tree:
        """The shared tensors; refuses a module without batch normalization in what is shared, which would be FedAvg."""
        names = self._find(module)
        if not any(name in Patterns(self.shared.patterns) for name in names):
            because = f"without it this is FedAvg; {type(module).__name__} has {len(names)} such tensors"
            raise InvalidArgumentError(self, "shared", self.shared.patterns, "of batch normalization, too", because)
        return super().server_init(module)

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors; a worker of a resumed phase has no ``server_init`` of this phase's module."""
        self._find(client.module)
        return super().client_init(client, sent)

    def _find(self, module: LightningModule) -> frozenset[str]:
        """The names of all layers' tensors, which are not shared; they follow from the module, and are no state."""
        names = batch_norm_names(module)
        self.shared = Patterns(self.shared.patterns, excluded=names)
        return names
