"""What several algorithms need of a client: an expert of its module by name, its losses, a share of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.func import functional_call, grad

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.consent import floor_of_share
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import SampleBatches
from fedmoe_pl.models import (
    ConstantGate,
    GlobalOnly,
    LayerwiseAdapterMoE,
    LocalOnly,
    MixtureOfExperts,
    SimilarityGate,
    SparseMoE,
)
from fedmoe_pl.models.experts import check_split
from fedmoe_pl.models.inputs import Inputs, call, inputs_and_targets, inputs_of
from fedmoe_pl.trees import Tree, copies_of_parts, copy_module, load_tree, precise, with_prefix

_REFERENCES = 10  # separates the draw of a client's references from its other random numbers


def expert_prefix(expert: str) -> str:
    """What the names of an expert's tensors start with; empty if the expert is the module itself."""
    return f"{expert}." if expert else ""


def split_expert(module: LightningModule, expert: str) -> tuple[nn.Module, nn.Module]:
    """The extractor and the classifier of an expert; refuses one that lacks them."""
    part = module.get_submodule(expert)
    check_split(module, expert or "model", part, "the algorithm computes with the features in between")
    return part.extractor, part.classifier  # pyright: ignore[reportReturnType]


def pair_of(module: LightningModule, batch: Any) -> tuple[Any, Tensor]:
    """The inputs and targets of a batch; a mixture knows the key of the targets in a dict."""
    return inputs_and_targets(batch, module.target_key, module.task) if isinstance(module, MixtureOfExperts) else batch


def pairs_of(module: LightningModule, batches: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    """The inputs and targets of batches."""
    return (pair_of(module, batch) for batch in batches)


def counted(module: LightningModule, y: Tensor) -> float:
    """What the mean loss of targets (B, ...) counts in a mean over batches, see ``MixtureOfExperts.counted``."""
    return module.counted(y) if isinstance(module, MixtureOfExperts) else len(y)


def logits_loss(module: LightningModule, logits: Tensor, y: Tensor) -> Tensor:
    """The mean loss of one expert's logits (B, C): cross-entropy, or what the module's mixture defines for such scores.

    Samples with the label -100 do not count.
    """
    if isinstance(module, MixtureOfExperts):
        return module.loss_of(module.scores_of(logits), y)
    return F.cross_entropy(precise(logits), y)


def summed_loss(module: LightningModule, scores: Tensor, y: Tensor) -> Tensor:
    """The sum of the losses of a model's scores (B, C) in double precision, by which models are compared.

    A mixture's ``loss`` of the user's gives the mean of a batch, which may weigh its samples; it counts as ``counted``
    says. In ``causal_lm``, it is the sum over tokens.
    """
    if not isinstance(module, MixtureOfExperts):
        return F.cross_entropy(precise(scores), y, reduction="none").double().sum()
    if module.criterion is not None or module.task == "causal_lm":
        loss, number = module.loss_of(scores, y).double(), module.counted(y)
        return loss * number if number else torch.zeros_like(loss)  # the mean over nothing is nan
    return module.loss_of(scores, y, reduction="none").double().sum()


def expert_loss(module: LightningModule, expert: str, batch: Any) -> Tensor:
    """The mean loss of one expert, by its name in the module, whatever the gate."""
    x, y = pair_of(module, batch)
    return logits_loss(module, call(module.get_submodule(expert), x), y)


def both_logits(module: LightningModule, x: Inputs) -> tuple[Tensor, Tensor]:
    """The logits (B, C) of the local and of the global expert, whatever the gate."""
    return call(module.get_submodule("local_expert"), x), call(module.get_submodule("global_expert"), x)


def distillation_loss(logits: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    """The mean of KL(softmax(teacher) || softmax(logits)) over labelled samples, which trains ``logits`` only."""
    constant = precise(teacher).detach().log_softmax(1)
    divergence = constant.exp() * (constant - precise(logits).log_softmax(1))  # vmap is slow with F.kl_div
    return mean_of_labelled(divergence.sum(1), y)


def mean_of_labelled(values: Tensor, y: Tensor) -> Tensor:
    """The mean of one value per sample, shape (B,), over the samples whose label (B,) is not -100."""
    counts = y != -100
    return (values * counts).sum() / counts.sum().clamp_min(1)  # a process's share of a batch may have none


def expert_gradient(module: LightningModule, expert: str, parameters: Tree, batch: Any) -> Tree:
    """The gradient of an expert's mean loss at other parameters than its own; running statistics move as in any step.

    It can be differentiated again, and used with ``vmap``. ``parameters`` have the names that they have in the expert,
    which uses its own in place of missing ones.
    """
    part, (x, y) = module.get_submodule(expert), pair_of(module, batch)
    buffers = dict(part.named_buffers())

    def loss(parameters: Tree) -> tuple[Tensor, Tree]:
        moved = {name: buffer.clone() for name, buffer in buffers.items()}  # grad refuses to change those outside
        return logits_loss(module, call(part, x, {**parameters, **moved}), y), moved

    gradient, moved = grad(loss, has_aux=True)(parameters)
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(moved[name])
    return gradient


def training_gradient(client: Client, expert: str, tensors: Tree) -> Tree:
    """The gradient of an expert's mean loss on all of a client's training samples, in eval mode, on the CPU.

    It is by the trained parameters, with the names that these have in the expert. ``tensors`` take the place of the
    module's own.
    """
    total, number = Tree(), len(client.samples)
    with torch.inference_mode(False):  # models are evaluated in inference mode, where nothing can be differentiated
        batches = client.batches(client.samples)
        module = evaluation_copy(client, batches)
        load_tree(module, tensors)
        parameters, sizes = trained_parameters(module, expert), []
        for batch in batches:
            sizes.append(counted(module, pair_of(module, batch)[1]))
            gradient = expert_gradient(module, expert, parameters, batch)
            for name, tensor in gradient.items():
                total[name] = total.get(name, 0) + tensor.detach().cpu() * (sizes[-1] / number)
    if sum(sizes) not in (0, number):  # such as tokens
        total = {name: tensor * (number / sum(sizes)) for name, tensor in total.items()}
    return total


def computed_with(module: LightningModule, tensors: Tree, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """What a function computes of a module, and of arguments, with other tensors in place of the module's own."""
    renamed = with_prefix(tensors, "module.")
    return functional_call(_Function(module, function), renamed, arguments, tie_weights=False)


class _Function(nn.Module):
    """A function of a module as a module, because ``functional_call`` replaces the tensors of one that it calls."""

    def __init__(self, module: LightningModule, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *arguments: Any) -> Tensor:
        return self.function(self.module, *arguments)


def evaluation_copy(client: Client, batches: SampleBatches) -> LightningModule:
    """A copy of a client's module in eval mode, on the device of the samples."""
    return copy_module(client.module).to(batches.device).eval()


def trained_parameters(module: LightningModule, expert: str) -> Tree:
    """The parameters of an expert, by their names in it, without those that the user has frozen."""
    parameters = module.get_submodule(expert).named_parameters()
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def copy_of_global_expert(module: LightningModule) -> Tree:
    """The global expert's tensors under the local expert's names."""
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    return copies_of_parts(state, {"local_expert": "global_expert"})


def note_references(client: Client) -> None:
    """Notes the features of a few of a client's samples, with the local adapter, in its ``SimilarityGate``, if any."""
    module = client.module
    if not isinstance(module, LayerwiseAdapterMoE) or not isinstance(gate := module.gate, SimilarityGate):
        return
    batches = client.batches(client.shuffled_samples(_REFERENCES)[: len(gate.references)])
    copied: Any = evaluation_copy(client, batches)
    with torch.no_grad():
        features = torch.cat([copied.local_features(inputs_of(batch, module.target_key)) for batch in batches])
    gate.references.zero_()
    gate.references[: len(features)] = features


def set_aside(client: Client, fraction: float, purpose: int) -> tuple[Tensor, Tensor]:
    """A share of a client's training samples, at least one of two, the same in every phase and round; all others."""
    samples = client.shuffled_samples(purpose)
    size = max(floor_of_share(fraction, len(samples)), min(1, len(samples) - 1))
    return samples[:size], samples[size:]


def check_mixing(algorithm: Algorithm, module: LightningModule, mixing: str) -> None:
    """Refuses a mixture that mixes something else than the algorithm."""
    if getattr(module, "mixing", None) != mixing:
        because = f"{type(algorithm).__name__} mixes {mixing}"
        raise InvalidArgumentError(module, "mixing", getattr(module, "mixing", None), f"'{mixing}'", because)


def warn_of_mixture(algorithm: Algorithm, module: LightningModule) -> None:
    """Warns of a gate with which a mixture is evaluated, although the paper's clients predict with one expert."""
    gate = getattr(module, "gate", None)
    one_expert = isinstance(gate, GlobalOnly | LocalOnly) or (isinstance(gate, ConstantGate) and gate.weight in (0, 1))
    if gate is not None and not one_expert:
        rank_zero_warn(
            f"{type(algorithm).__name__}: gate is {type(gate).__name__}, so that a mixture of both experts is "
            "evaluated; with LocalOnly it is the personal model, as in the paper."
        )


def learning_rate(algorithm: Algorithm, module: LightningModule) -> float:
    """The learning rate of the module's plain SGD, which a client's module has of its round; refuses others."""
    optimizer = module.configure_optimizers()
    because = f"{type(algorithm).__name__} computes with its steps"
    if not isinstance(optimizer, torch.optim.SGD) or len(optimizer.param_groups) > 1:
        allowed = "torch.optim.SGD with one learning rate and no scheduler"
        raise InvalidArgumentError(module, "optimizer", optimizer, allowed, because)
    group = optimizer.param_groups[0]
    for argument in ("momentum", "weight_decay"):
        if group[argument]:
            raise InvalidArgumentError("SGD", argument, group[argument], "0", because)
    return group["lr"]


def check_sparse(algorithm: Algorithm, module: LightningModule, fits: Callable[[nn.Module], bool], wanted: str) -> None:
    """Refuses all but a ``SparseMoE`` of the same experts for all clients, such a gate, and no loss but likelihood."""
    if not isinstance(module, SparseMoE) or not fits(module.gate):
        raise InvalidArgumentError(algorithm, "model", module, f"a SparseMoE with {wanted}")
    if isinstance(module.num_experts, list):
        raise InvalidArgumentError(module, "num_experts", module.num_experts, "one number, the same for all clients")
    because = f"{type(algorithm).__name__} trains with the likelihood of the classes"
    if module.criterion is not None:
        raise InvalidArgumentError(module, "loss", module.criterion, "left out", because)
    if module.load_balancing:
        raise InvalidArgumentError(module, "load_balancing", module.load_balancing, "0", because)


def trains(algorithm: Algorithm, prefix: str) -> bool:
    """Whether an algorithm trains parameters whose names start with a prefix, as far as its patterns tell."""
    patterns = [pattern for pattern in algorithm.trainable.patterns if pattern.startswith(prefix)]
    names = [f"{prefix}any", *(pattern.replace("*", "any") for pattern in patterns)]
    return any(algorithm.is_trainable(name, 0, 0) for name in names)
