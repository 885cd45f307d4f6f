"""FedDPA: Yang, Long, Shen, Jiang, Blumenstein, NeurIPS 2024 (https://arxiv.org/abs/2403.19211).

================  ============================  =====================================  ===============================
topic             paper                         official code                          here
================  ============================  =====================================  ===============================
weight in use     of each sample                answers all samples first, with the    of each sample
                                                global adapter alone
which adapter     similarity to the client's    the global one, so that the local one  ``weighted_expert`` of
has it            data favours the local one    has at least 1/2                       ``SimilarityGate``
client's samples  5, drawn at random            drawn again for each sample            drawn once and kept
frozen adapter    not mentioned                 no gradient passes through its output  only its parameters are frozen
                                                to earlier layers either
features          not mentioned                 the last layer's, of the last token    those of the head or of the
                                                                                       output layer; ``pooling``, by
                                                                                       default their mean over tokens
text to answer    the prompt has one weight     the same                               in ``causal_lm``, each token's
                                                                                       is of the text up to it
================  ============================  =====================================  ===============================

``pooling: last`` of the model is the code's. FedDPA-F needs no code of its own: a phase of ``FedAvg`` of the global
expert with the gate ``GlobalOnly``, then one of ``FineTuning`` with a ``SimilarityGate``, which notes the samples too.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.func import functional_call

from fedmoe_pl.algorithms.algorithm import Algorithm, Weighting
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.parts import expert_loss, note_references, pair_of
from fedmoe_pl.checks import InvalidArgumentError, check_number
from fedmoe_pl.models import LayerwiseAdapterMoE
from fedmoe_pl.models.inputs import batch_size_of, first_tensor
from fedmoe_pl.trees import Tree, of_parts


class FedDPA(Algorithm):
    """FedDPA-T: clients average the global adapter, and from the second round on train a local one beside it.

    In a step, the global adapter is trained alone, and the local one with the weight ``local_weight`` inside the layers
    beside the global one as the client received it; the steps do not see each other. A client keeps its local adapter
    and, in a ``SimilarityGate``, the features of a few of its samples.

    Args:
        shared: glob patterns of the parameters that are averaged.
        local_weight: the local adapter's weight in its training, from 0 to 1.
        weighting: ``uniform`` gives all clients the same weight, as in the paper; ``samples`` weighs a client by its
            number of training samples.
    """

    needs = ("plain_steps",)

    def __init__(
        self,
        shared: str | list[str] = "global_expert.*",
        local_weight: float = 0.5,
        weighting: Weighting = "uniform",
    ) -> None:
        check_number(self, "local_weight", local_weight, least=0, most=1)
        super().__init__(shared, weighting=weighting)
        self.local_weight = local_weight

    def server_init(self, module: LightningModule) -> Tree:
        """What is averaged; refuses another module than one that mixes adapters inside its layers."""
        if not isinstance(module, LayerwiseAdapterMoE):
            raise InvalidArgumentError(self, "model", type(module).__name__, "a LayerwiseAdapterMoE")
        return super().server_init(module)

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors; from the phase's second round on, the loss needs the global adapter as it was received.

        A client that was not drawn in the first round trains both in its own first one. Clients that cannot train the
        global adapter, as newcomers, train the local one in the first round, too.
        """
        super().client_init(client, sent)
        parameters = client.module.get_submodule("global_expert").parameters()
        trains_both = client.round or not any(parameter.requires_grad for parameter in parameters)
        received = of_parts(client.module.state_dict(), ["global_expert"]) if trains_both else {}
        return {"received": {name: tensor.detach().clone() for name, tensor in received.items()}}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The loss of the global adapter and, from the second round on, of the local one beside the received one."""
        loss = expert_loss(module, "global_expert", batch)
        if received := constants["received"]:
            assert isinstance(module, LayerwiseAdapterMoE)
            x, y = pair_of(module, batch)
            weight = first_tensor(x).new_tensor([1 - self.local_weight, self.local_weight], dtype=loss.dtype)
            scores = functional_call(module, received, (x, weight.expand(batch_size_of(x), -1)))
            loss = loss + module.loss_of(scores, y)
        return loss

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Notes the features of a few samples with the local adapter, if the gate compares samples with them."""
        note_references(client)
        return super().client_final(client, constants)
