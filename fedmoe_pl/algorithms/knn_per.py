"""kNN-Per: Marfoq, Neglia, Kameni, Vidal, ICML 2022 (https://arxiv.org/abs/2111.09360).

The official code is at https://github.com/omarfoq/knn-per:

==============  ============================  =================================  ====================================
topic           paper                         official code                      here
==============  ============================  =================================  ====================================
kernel          exp of minus the distance     exp(-distance^2 / (F sigma))       ``kernel``
lambda          tuned by each client on       accuracies of all values on test   a grid of 0, 0.1, ..., 1 on 20 % of
                validation samples            samples, for a figure              the training samples
few samples     not mentioned                 distances to absent neighbors      all neighbors that there are
==============  ============================  =================================  ====================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Parts
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.consent import floor_of_share
from fedmoe_pl.algorithms.shared.parts import evaluation_copy, pairs_of, split_expert
from fedmoe_pl.checks import check_at_least, check_choice, check_number
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import Tree, precise

Kernel = Literal["squared", "euclidean"]
_WEIGHT = "knn/weight"  # a client's lambda
_HELD_OUT = 3  # separates the shares of a client's samples from those of other algorithms
_GRID = [step / 10 for step in range(11)]


class KNNPer(Algorithm):
    """Each client mixes the federated model with the nearest neighbors among its own training samples; no training.

    ``lambda * p_kNN(x) + (1 - lambda) * softmax(global(x))``, where ``p_kNN`` is the kernel-weighted histogram of the
    labels of the ``k`` training samples whose features are nearest to those of ``x``. Each client chooses its
    ``lambda`` once, by its accuracy on a fifth of its training samples with the others as neighbors; of equal ones, it
    takes the smallest. Then all its samples become neighbors. The gate is ignored.

    Args:
        k: number of neighbors.
        capacity: share of its training samples, drawn at random, from 0 to 1, among which a client looks for neighbors;
            0 is the federated model.
        kernel: weight of a neighbor at Euclidean distance d of F features: ``squared`` is ``exp(-d^2 / (F * scale))``,
            ``euclidean`` is ``exp(-d / scale)``.
        scale: scale of the kernel, above 0.
        weight: lambda of all clients; None lets each choose its own.
        expert: name of the expert, with an ``extractor`` and a ``classifier``; empty for the module itself.
    """

    federated = False
    needs = ("all_clients", "classes")  # a client chooses a weight once

    def __init__(
        self,
        k: int = 10,
        capacity: float = 1.0,
        kernel: Kernel = "squared",
        scale: float = 1.0,
        weight: float | None = None,
        expert: str = "global_expert",
    ) -> None:
        check_at_least(self, "k", k, 1)
        check_number(self, "capacity", capacity, least=0, most=1)
        check_choice(self, "kernel", kernel, get_args(Kernel))
        check_number(self, "scale", scale, above=0)
        check_number(self, "weight", weight, least=0, most=1)
        super().__init__(trainable=[])
        self.k = k
        self.capacity = capacity
        self.kernel = kernel
        self.scale = scale
        self.weight = weight
        self.expert = expert
        self.parts = Parts(needed=(expert,))

    @torch.no_grad()
    def server_init(self, module: LightningModule) -> Tree:
        """Refuses an expert whose features cannot be computed."""
        split_expert(module, self.expert)
        return super().server_init(module)

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Chooses lambda and keeps it; a client with one sample takes 0."""
        update = super().client_final(client, constants)
        weight = torch.tensor([self._weight(client)], dtype=torch.float64)
        return Update(update.sent, update.weight, {**update.state, _WEIGHT: weight})

    def predictor(self, client: Client, server: Tree) -> Callable[[Tensor], Tensor]:
        """The logarithm of the mixed probabilities; the expert's logits if lambda is 0."""
        module = client.module
        has_weight = _WEIGHT in client.state  # otherwise, it missed the round
        weight = client.state[_WEIGHT].item() if has_weight else self._weight(client)
        if not weight or not self._number(client.samples):
            extractor, classifier = split_expert(module, self.expert)
            return lambda x: classifier(call(extractor, x))
        neighbors = self._neighbors(module, client, client.shuffled_samples(_HELD_OUT))
        smallest = torch.finfo(neighbors[0].dtype).tiny

        @torch.inference_mode()  # like the stored features, which are inference tensors
        def predict(x: Tensor) -> Tensor:
            return torch.lerp(*self._probabilities(module, x, neighbors), weight).clamp_min(smallest).log()

        return predict

    def _weight(self, client: Client) -> float:
        if self.weight is not None:
            return self.weight
        samples = client.shuffled_samples(_HELD_OUT)
        queries, rest = samples.tensor_split([len(samples) // 5 or min(1, len(samples) - 1)])
        if not self._number(rest):
            return 0.0
        module = evaluation_copy(client, client.batches(queries))
        neighbors = self._neighbors(module, client, rest)
        correct = torch.zeros(len(_GRID), dtype=torch.int64)
        for x, y in pairs_of(module, client.batches(queries)):
            both = self._probabilities(module, x, neighbors)
            correct += torch.stack([(torch.lerp(*both, weight).argmax(1) == y).sum() for weight in _GRID]).cpu()
        return _GRID[correct.tolist().index(correct.max())]  # the first of equal ones

    def _number(self, samples: Tensor) -> int:
        return floor_of_share(self.capacity, len(samples))

    def _neighbors(self, module: LightningModule, client: Client, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, F) and labels (n,) of the first of these samples, as many as ``capacity`` says."""
        samples = samples[: self._number(samples)]
        extractor = split_expert(module, self.expert)[0]
        features = [
            call(extractor, move_data_to_device(x, module.device)).flatten(1)
            for x, _ in pairs_of(module, client.batches(samples))
        ]
        return torch.cat(features), client.datamodule.y[samples].to(module.device)

    def _probabilities(
        self, module: LightningModule, x: Tensor, neighbors: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The expert's probabilities (B, C) and those of the neighbors."""
        extractor, classifier = split_expert(module, self.expert)
        features = call(extractor, x)
        probabilities, features = precise(classifier(features)).softmax(1), features.flatten(1)
        stored, labels = neighbors
        # without matrix products, so that a stored sample has the distance 0 from itself
        distances = torch.cdist(precise(features), precise(stored), compute_mode="donot_use_mm_for_euclid_dist")
        nearest = distances.topk(min(self.k, len(stored)), dim=1, largest=False)
        squared, width = self.kernel == "squared", features.shape[1]
        exponents = nearest.values.square() / width if squared else nearest.values
        similarities = ((exponents.min(1, keepdim=True).values - exponents) / self.scale).exp()
        histogram = torch.zeros_like(probabilities).scatter_add(1, labels[nearest.indices], similarities)
        return probabilities, histogram / histogram.sum(1, keepdim=True)
