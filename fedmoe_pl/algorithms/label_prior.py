"""The federated model corrected for each client's class shares, a baseline that personalization should beat.

If clients differ only in how often they have each class, Bayes' rule turns a model of one distribution of classes into
that of another: it adds the logarithm of the ratio of both frequencies to the score of each class (Saerens, Latinne and
Decaestecker 2002, Neural Computation 14(1), 21-41). A federated model has seen all classes, in most benchmarks about
equally often, so that the client's own shares are left. The factor ``tau`` is that of the logit adjustment of Menon et
al., ICLR 2021 (https://arxiv.org/abs/2007.07314), which goes the other way, towards equal classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedmoe_pl.algorithms.algorithm import Algorithm, Parts
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.parts import evaluation_copy, expert_prefix, pairs_of, summed_loss
from fedmoe_pl.checks import InvalidArgumentError, check_number
from fedmoe_pl.models.inputs import Inputs, logits_of
from fedmoe_pl.trees import Tree, load_tree

_TAU = "prior/tau"  # a client's tau, which it has as soon as its biases are corrected
_GRID = [step / 10 for step in range(21)]


class LabelPrior(Algorithm):
    """Each client adds the logarithm of its class shares to the federated model's scores; nothing is trained.

    The scores are ``z(x) + tau * log((n_c + 1) / (n + C))`` for a client with n training samples, n_c of them in class
    c of C. A client keeps them as another bias of the expert's last linear layer. Its model is therefore an ordinary
    one, and can be an expert of a later mixture: ``start: {global_expert: label prior, local_expert: PFL-FB}``. A
    ``FineTuning`` that starts from this phase copies the corrected expert; by default, it starts from the
    federated phase.

    Args:
        tau: factor of the logarithm, at least 0: 1 is Bayes' rule, 0 the federated model. With ``auto``, each client
            takes that of 0, 0.1, ..., 2 with which the phase's model has the lowest loss on its validation samples;
            without such samples, it takes 1.
        expert: name of the expert, such as ``global_expert``, or ``global_experts.0`` in a list; the name of a list,
            such as ``global_experts``, is that of all its experts, and an empty name that of the module itself.
    """

    federated = False
    needs = ("all_clients", "classes")  # a phase that starts from this one gets the models that clients have corrected

    def __init__(self, tau: float | Literal["auto"] = 1.0, expert: str = "global_expert") -> None:
        if tau != "auto":
            check_number(self, "tau", tau, least=0, allowed="auto or a finite number of at least 0")
        super().__init__(trainable=[])
        self.tau: float | Literal["auto"] = tau
        self.expert = expert
        if tau == "auto":
            self.needs += ("validation_samples",)
        self.parts = Parts(needed=(expert.split(".")[0],))

    def missing_start(self, earlier: Sequence[Algorithm], part: str = "") -> str:
        """A federated model whose expert has not been corrected since."""
        expert = expert_prefix(self.expert)
        for other in takewhile(lambda other: not other.federated, earlier):
            before = expert_prefix(other.expert) if isinstance(other, LabelPrior) else None
            if before is not None and (before.startswith(expert) or expert.startswith(before)):
                return f"a phase in which '{self.expert}' has no label prior yet"
        return super().missing_start(earlier)

    def server_init(self, module: LightningModule) -> Tree:
        """Nothing; refuses an expert without a last bias. The first client finds out whether it shifts the scores."""
        last_biases(self, module, self.expert)
        return super().server_init(module)

    @torch.no_grad()
    def client_final(self, client: Client, constants: Constants) -> Update:
        """Corrects the biases, unless an earlier round has done so, and keeps them and tau."""
        tau = client.state.get(_TAU)
        if tau is None:
            batches = client.batches(client.samples[:2])
            for x, _ in pairs_of(client.module, batches):
                check_shifts(self, evaluation_copy(client, batches), self.expert, x)
            tau = self._tau(client)
            load_tree(client.module, self._corrected(client, tau))
            tau = torch.tensor([tau], dtype=torch.float64)
        update = super().client_final(client, constants)
        return Update(update.sent, update.weight, {**update.state, _TAU: tau})

    @torch.no_grad()
    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The corrected model, also of a client that has missed the round."""
        tensors = super().personal_tensors(client, server)
        if _TAU in client.state:
            return tensors
        load_tree(client.module, tensors)
        return {**tensors, **self._corrected(client, self._tau(client))}

    def _corrected(self, client: Client, tau: float) -> Tree:
        """The corrected biases (C,) of the client's experts, by name."""
        corrected, labels = {}, client.datamodule.y[client.samples].cpu()
        for name in last_biases(self, client.module, self.expert).values():
            bias = client.module.get_parameter(name).detach().cpu()
            counts = torch.bincount(labels, minlength=len(bias)).double() + 1
            corrected[name] = (bias.double() + tau * (counts / counts.sum()).log()).to(bias.dtype)
        return corrected

    def _tau(self, client: Client) -> float:
        """The tau that is given, or that with the lowest loss of the module on the client's validation samples."""
        if self.tau != "auto":
            return self.tau
        samples = client.datamodule.validation_samples[client.id]
        if not len(samples):
            return 1.0
        batches = client.batches(samples)
        module, losses = evaluation_copy(client, batches), []
        for tau in _GRID:
            load_tree(module, self._corrected(client, tau))
            losses.append(sum(summed_loss(module, module(x), y).item() for x, y in pairs_of(module, batches)))
        return _GRID[losses.index(min(losses))]


def last_biases(algorithm: Algorithm, module: LightningModule, expert: str) -> dict[str, str]:
    """The name of the bias of the last linear layer of an expert, or of each in a list, by the expert's name."""
    part, biases = module.get_submodule(expert), {}
    for member, one in part.named_children() if isinstance(part, nn.ModuleList) else [("", part)]:
        linear = [name for name, layer in one.named_modules() if isinstance(layer, nn.Linear)]
        if not linear or one.get_submodule(linear[-1]).bias is None:
            raise _no_bias(algorithm, expert)
        name = ".".join(filter(None, (expert, member)))
        biases[name] = ".".join(filter(None, (name, linear[-1], "bias")))
    return biases


@torch.no_grad()
def check_shifts(algorithm: Algorithm, module: LightningModule, expert: str, x: Inputs) -> None:
    """Refuses experts to whose scores something else is added than to their last bias; changes the biases."""
    biases = last_biases(algorithm, module, expert)
    outputs: dict[str, list[Tensor]] = {name: [] for name in biases}
    for name in biases:
        module.get_submodule(name).register_forward_hook(
            lambda part, inputs, output, name=name: outputs[name].append(logits_of(output, part))
        )
    shifts = {}
    module(x)
    for name, bias_name in biases.items():
        bias = module.get_parameter(bias_name)
        shifts[name] = torch.linspace(-100, 100, len(bias)).to(bias)  # both signs, because a ReLU may follow
        bias += shifts[name]
    module(x)
    for name, shift in shifts.items():
        before, after = outputs[name] or (torch.zeros_like(shift[None]), shift[None])
        rounding = 4 * torch.finfo(after.dtype).eps
        if before.shape[1:] != shift.shape or not torch.allclose(after, before + shift, rtol=rounding, atol=0.01):
            raise _no_bias(algorithm, expert)


def _no_bias(algorithm: Algorithm, expert: str) -> InvalidArgumentError:
    allowed = "a part with a last Linear layer whose bias is added to the scores"
    return InvalidArgumentError(algorithm, "expert", expert, allowed)
