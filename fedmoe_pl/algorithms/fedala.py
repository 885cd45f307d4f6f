"""FedALA: Zhang et al., AAAI 2023, Algorithm 1 (https://arxiv.org/abs/2212.01197).

===================  ==============================================  ==============================================
topic                official code                                   here
===================  ==============================================  ==============================================
first weights        passes until the last batches' losses of ten    the same, but at most ``max_passes``
                     passes have a standard deviation below 0.1
absent clients       mix in every round, and the mixture is their    keep local model and weights; the mixture with
                     local model in the next one                     which they are evaluated is not kept
no local model yet   the initial one, after the first round          none: such a client uses the received model
dropout, batch       as in training, with the statistics of the      as in evaluation, with the received statistics
normalization        local model
===================  ==============================================  ==============================================
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedmoe_pl.algorithms.algorithm import Algorithm, Parts
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.consent import floor_of_share
from fedmoe_pl.algorithms.shared.parts import expert_prefix, logits_loss, pairs_of
from fedmoe_pl.checks import check_at_least, check_number
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import Tree, copy_module, load_tree, subtree, with_prefix

_LOCAL, _WEIGHTS = "ala/local/", "ala/weights/"  # prefixes of a parameter's name: theta_l and W
_SLICE = 75  # separates the random numbers of the slice of samples from others
_RECORDED, _DEVIATION = 10, 0.1  # passes end when as many losses, after the first one, differ by less than this


class FedALA(Algorithm):
    """FedAvg whose clients mix the received model with the one that they trained last, element by element.

    Before its local training, a client replaces the expert's last parameters ``theta_g`` by ``theta_l + (theta_g -
    theta_l) * W``; it learns ``W``, with elements from 0 to 1, on a slice of its samples. A client is evaluated with
    this model, whether it takes part in the next round or not. A new client has no local model and uses the received
    one. Use the gate ``GlobalOnly``.

    Args:
        expert: name of the expert in the module, all of whose tensors are averaged; empty for the module itself.
        last_parameters: number of the expert's last parameters that are mixed, where the weight and the bias of a layer
            count as two; 0 for all. The others are the received ones.
        eta: the rate at which ``W`` is learned, at least 0, with which it is FedAvg.
        sample_share: size of the slice as a share of the client's samples, above 0 and at most 1.
        max_passes: limit of the passes over the slice when ``W`` is learned for the first time; later, there is one.
        batch_size: samples in a step of ``W``; None for the data module's batch size.
    """

    needs = ("loss_of_outputs", "fixed_gate")

    def __init__(
        self,
        expert: str = "global_expert",
        last_parameters: int = 2,
        eta: float = 1.0,
        sample_share: float = 0.8,
        max_passes: int = 100,
        batch_size: int | None = None,
    ) -> None:
        check_at_least(self, "last_parameters", last_parameters, 0)
        check_number(self, "eta", eta, least=0)
        check_number(self, "sample_share", sample_share, above=0, most=1)
        check_at_least(self, "max_passes", max_passes, 1)
        check_at_least(self, "batch_size", batch_size, 1)
        patterns = f"{expert_prefix(expert)}*"
        super().__init__(patterns, patterns)
        self.expert = expert
        self.parts = Parts(computed=(expert.split(".")[0],))
        self.last_parameters = last_parameters
        self.eta = eta
        self.sample_share = sample_share
        self.max_passes = max_passes
        self.batch_size = batch_size

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the mixture of the received and the local model."""
        super().client_init(client, sent)
        mixed, weights = self._mix(client, sent)
        load_tree(client.module, mixed)
        return {"weights": weights}

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Keeps the trained model's last parameters and the weights, if they were learned."""
        update = super().client_final(client, constants)
        local = {name: update.sent[name] for name in constants["weights"]}
        learned = constants["weights"] if subtree(client.state, _LOCAL) else {}
        kept = {**update.state, **with_prefix(local, _LOCAL), **with_prefix(learned, _WEIGHTS)}
        return Update(update.sent, update.weight, kept)

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The mixture with which the client would begin its next training."""
        tensors = super().personal_tensors(client, server)
        return {**tensors, **self._mix(client, tensors)[0]}

    def _mix(self, client: Client, received: Tree) -> tuple[Tree, Tree]:
        """The last parameters of the mixture, and its weights: 1 for a client that has no local model yet."""
        prefix = expert_prefix(self.expert)
        names = [name for name, _ in client.module.get_submodule(self.expert).named_parameters()]
        ones = {prefix + name: torch.ones_like(received[prefix + name]) for name in names[-self.last_parameters :]}
        local, weights = subtree(client.state, _LOCAL), subtree(client.state, _WEIGHTS)
        if local and self.eta:
            with torch.inference_mode(False), torch.enable_grad():  # clients are evaluated without gradients
                weights = self._learned(client, received, local, weights, ones)
        weights = weights or ones
        return _mixed({name: local.get(name, received[name]) for name in ones}, received, weights), weights

    def _learned(self, client: Client, received: Tree, local: Tree, weights: Tree, ones: Tree) -> Tree:
        """The weights after a pass over the slice or, if there are none yet, after several."""
        size = max(floor_of_share(self.sample_share, len(client.samples)), 1)
        start = int(torch.randint(len(client.samples) - size + 1, (), generator=client.generator(_SLICE)))
        batches = client.datamodule.batches(client.samples[start : start + size], batch_size=self.batch_size)
        part = copy_module(client.module.get_submodule(self.expert)).to(batches.device).eval()
        received, local = (
            {name: tensor.to(batches.device) for name, tensor in tree.items()} for tree in (received, local)
        )
        passes = 1 if weights else self.max_passes
        weights = {name: tensor.to(batches.device) for name, tensor in (weights or ones).items()}
        losses: list[float] = []
        while len(losses) < passes and not _have_settled(losses):
            last = 0.0
            for x, y in pairs_of(client.module, batches):
                mixed = {name: tensor.requires_grad_() for name, tensor in _mixed(local, received, weights).items()}
                tensors = subtree({**received, **mixed}, expert_prefix(self.expert))
                loss = logits_loss(client.module, call(part, x, tensors), y)
                gradients = torch.autograd.grad(loss, [*mixed.values()], materialize_grads=True)
                for name, gradient in zip(mixed, gradients, strict=True):
                    step = self.eta * gradient * (received[name] - local[name])
                    weights[name] = (weights[name] - step).clamp(0, 1)
                last = loss.item()
            losses.append(last)
        return {name: tensor.cpu() for name, tensor in weights.items()}


def _mixed(local: Tree, received: Tree, weights: Tree) -> Tree:
    """``theta_l + (theta_g - theta_l) * W``."""
    return {name: tensor + (received[name] - tensor) * weights[name] for name, tensor in local.items()}


def _have_settled(losses: Sequence[float]) -> bool:
    """Whether the standard deviation of the last losses, each of a pass's last batch, is small."""
    return len(losses) > _RECORDED and bool(torch.tensor(losses[-_RECORDED:]).std(correction=0) < _DEVIATION)
