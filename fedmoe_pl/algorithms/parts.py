"""What several algorithms need of a client: an expert of its module by name, its losses, a share of its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, grad

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.data import Batches
from fedmoe_pl.models import FixedGate, MixtureOfExperts, SparseMoE
from fedmoe_pl.trees import Tree, copy_module, load_tree, subtree, with_prefix


def check_expert(algorithm: Algorithm, module: LightningModule, expert: str, splits: bool = False) -> None:
    """Refuses an expert that the module lacks.

    Args:
        algorithm: the algorithm, for the message.
        module: the phase's module.
        expert: name of the expert in the module, such as ``global_expert``; empty for the module itself.
        splits: whether the expert must have an ``extractor``, which computes features (B, F) or (B, ...), and a
            ``classifier``, which maps them to logits.

    Raises:
        MisconfigurationException: if there is no such part, or it must be split and cannot be.
    """
    experts = {name: part for name, part in module.named_children() if not splits or _is_split(part)}
    if not expert and (_is_split(module) or not splits):
        return
    if expert not in experts:
        split = " with an `extractor` and a `classifier`" if splits else ""
        allowed = f"; it has {', '.join(experts)}" if experts else ", and it has none"
        raise MisconfigurationException(
            f"{type(algorithm).__name__}: expert is '{expert}', but must be a part of the "
            f"{type(module).__name__}{split}{allowed}."
        )


def check_both_experts(algorithm: Algorithm, module: LightningModule, splits: bool = False) -> None:
    """Refuses a module without a ``global_expert`` and a ``local_expert``; arguments as in :func:`check_expert`."""
    for expert in ("global_expert", "local_expert"):
        check_expert(algorithm, module, expert, splits)


def check_fixed_gate(algorithm: Algorithm, module: LightningModule) -> None:
    """Refuses a module whose gate has parameters to train, for an algorithm whose loss leaves the gate out.

    Args:
        algorithm: the algorithm, for the message.
        module: the phase's module; one without a ``gate`` is accepted.

    Raises:
        MisconfigurationException: if there is a gate and it is not a ``FixedGate``.
    """
    gate = getattr(module, "gate", None)
    if gate is not None and not isinstance(gate, FixedGate):
        raise MisconfigurationException(
            f"{type(module).__name__}: gate is a {type(gate).__name__}, but must be EqualWeights, GlobalOnly or "
            f"another fixed one, because {type(algorithm).__name__} trains no gate."
        )


def expert_prefix(expert: str) -> str:
    """What the names of an expert's tensors start with; empty if the expert is the module itself."""
    return f"{expert}." if expert else ""


def split_expert(module: LightningModule, expert: str) -> tuple[nn.Module, nn.Module]:
    """The extractor and the classifier of an expert that :func:`check_expert` has accepted."""
    part = module.get_submodule(expert)
    return part.extractor, part.classifier  # pyright: ignore[reportReturnType]


def logits_loss(module: LightningModule, logits: Tensor, y: Tensor) -> Tensor:
    """The mean loss of one expert's logits (B, C): cross-entropy, or what the module's mixture defines for such scores.

    Samples with the label -100 do not count.
    """
    if isinstance(module, MixtureOfExperts):
        return module.loss_of(module.scores_of(logits), y)
    return F.cross_entropy(logits, y)


def expert_loss(module: LightningModule, expert: str, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of one expert, by its name in the module, whatever the gate; and no metrics."""
    x, y = batch
    return logits_loss(module, module.get_submodule(expert)(x), y), {}


def both_logits(module: LightningModule, x: Tensor) -> tuple[Tensor, Tensor]:
    """The logits (B, C) of the local and of the global expert, whatever the gate."""
    return module.get_submodule("local_expert")(x), module.get_submodule("global_expert")(x)


def distillation_loss(logits: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    """The mean divergence KL(softmax(teacher) || softmax(logits)), which trains ``logits`` only.

    Args:
        logits: the student's logits (B, C).
        teacher: the teacher's logits (B, C), which are constants here.
        y: labels (B,); samples with the label -100 do not count.
    """
    constant = teacher.detach().log_softmax(1)
    divergence = constant.exp() * (constant - logits.log_softmax(1))  # vmap is slow with F.kl_div
    return mean_of_labelled(divergence.sum(1), y)


def mean_of_labelled(values: Tensor, y: Tensor) -> Tensor:
    """The mean of one value per sample, shape (B,), over the samples whose label (B,) is not -100."""
    counts = y != -100
    return (values * counts).sum() / counts.sum()


def expert_gradient(module: LightningModule, expert: str, parameters: Tree, batch: Any) -> Tree:
    """The gradient of an expert's mean loss at other parameters than its own; running statistics move as in any step.

    It can be differentiated again, and used with ``vmap``.

    Args:
        module: the module, with the expert's buffers.
        expert: the expert's name in the module; empty for the module itself.
        parameters: the parameters to differentiate by, with the names that they have in the expert. It uses its own in
            place of missing ones.
        batch: inputs (B, ...) and labels (B,).
    """
    part, (x, y) = module.get_submodule(expert), batch
    buffers = dict(part.named_buffers())

    def loss(parameters: Tree) -> tuple[Tensor, Tree]:
        moved = {name: buffer.clone() for name, buffer in buffers.items()}  # grad refuses to change those outside
        return logits_loss(module, functional_call(part, {**parameters, **moved}, (x,)), y), moved

    gradient, moved = grad(loss, has_aux=True)(parameters)
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(moved[name])
    return gradient


def training_gradient(client: Client, expert: str, tensors: Tree) -> Tree:
    """The gradient of an expert's mean loss on all of a client's training samples, in eval mode, on the CPU.

    Args:
        client: the client.
        expert: the expert's name in the client's module; empty for the module itself.
        tensors: the module's tensors to use, by name; its own take the place of missing ones.

    Returns:
        The gradient by the trained parameters, with the names that these have in the expert.
    """
    total: Tree = {}
    with torch.inference_mode(False):  # models are evaluated in inference mode, where nothing can be differentiated
        batches = client.batches(client.samples)
        module = evaluation_copy(client, batches)
        load_tree(module, tensors)
        parameters = trained_parameters(module, expert)
        for batch in batches:
            gradient = expert_gradient(module, expert, parameters, batch)
            for name, tensor in gradient.items():
                total[name] = total.get(name, 0) + tensor.detach().cpu() * (len(batch[1]) / len(client.samples))
    return total


def evaluation_copy(client: Client, batches: Batches) -> LightningModule:
    """A copy of a client's module in eval mode, on the device of the samples, which may be another than the module's.

    Args:
        client: the client.
        batches: the samples.
    """
    return copy_module(client.module).to(batches.x.device).eval()


def trained_parameters(module: LightningModule, expert: str) -> Tree:
    """The parameters of an expert, by their names in it, without those that the user has frozen."""
    parameters = module.get_submodule(expert).named_parameters()
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def learning_rate(algorithm: Algorithm, module: LightningModule) -> float:
    """The learning rate of plain SGD.

    Args:
        algorithm: the algorithm that computes with it, for the message.
        module: a module; that of a client has the learning rate of its round.

    Raises:
        MisconfigurationException: if the module has another optimizer.
    """
    name, optimizer = type(algorithm).__name__, module.configure_optimizers()
    if not isinstance(optimizer, torch.optim.SGD) or len(optimizer.param_groups) > 1:
        raise MisconfigurationException(
            f"{name}: optimizer is {type(optimizer).__name__}, but must be torch.optim.SGD with one learning rate and "
            "no scheduler."
        )
    group = optimizer.param_groups[0]
    for argument in ("momentum", "weight_decay"):
        if group[argument]:
            raise MisconfigurationException(f"{name}: {argument} of the optimizer is {group[argument]}, but must be 0.")
    return group["lr"]


def check_sparse(
    algorithm: Algorithm, module: LightningModule, fits: Callable[[nn.Module], bool], wanted: str
) -> SparseMoE:
    """Refuses other models than a ``SparseMoE`` with a certain kind of gate and the same experts on all clients.

    Args:
        algorithm: the algorithm, for the message.
        module: the phase's module.
        fits: whether the algorithm can use a gate.
        wanted: such gates in words, for the message.

    Returns:
        The module.

    Raises:
        MisconfigurationException: if it is another model, its gate does not fit, clients differ in their experts, or
            it has a balancing loss, which the losses of these algorithms leave out.
    """
    name = type(algorithm).__name__
    sparse = module if isinstance(module, SparseMoE) else None
    if sparse is None or not fits(sparse.gate):
        gate = f" with a {type(sparse.gate).__name__}" if sparse else ""
        raise MisconfigurationException(
            f"{name}: model is a {type(module).__name__}{gate}, but must be a SparseMoE with {wanted}."
        )
    if isinstance(sparse.num_experts, list):
        raise MisconfigurationException(
            f"{name}: num_experts is {sparse.num_experts}, but must be one number, the same for all clients."
        )
    if sparse.load_balancing:
        raise MisconfigurationException(
            f"{name}: load_balancing is {sparse.load_balancing}, but must be 0, because the loss of {name} has no such "
            "term."
        )
    return sparse


def copy_of_global_expert(algorithm: Algorithm, module: LightningModule) -> Tree:
    """The global expert's tensors under the local expert's names.

    Args:
        algorithm: the algorithm that starts local experts as such copies, for the message.
        module: a module with the parts ``global_expert`` and ``local_expert``.

    Raises:
        MisconfigurationException: if the module lacks these experts, or their architectures differ.
    """
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    source, target = (subtree(state, prefix) for prefix in ("global_expert.", "local_expert."))
    shapes = [{name: tensor.shape for name, tensor in tree.items()} for tree in (source, target)]
    if not source or shapes[0] != shapes[1]:
        local_expert = type(module.local_expert).__name__ if target else "missing"
        raise MisconfigurationException(
            f"{type(module).__name__}: local_expert is {local_expert}, but must have the architecture of "
            f"global_expert, because {type(algorithm).__name__} starts it as a copy of global_expert; leave "
            "local_expert out to get this."
        )
    return with_prefix(source, "local_expert.")


def missing_federation(earlier: Sequence[Algorithm]) -> str:
    """Words for ``Algorithm.missing_start`` of an algorithm that needs a federated phase; empty if it has one."""
    return "" if any(other.federated for other in earlier) else "a federated phase"


def trains(algorithm: Algorithm, prefix: str) -> bool:
    """Whether an algorithm trains parameters whose names start with a prefix, as far as its patterns tell."""
    patterns = [pattern for pattern in algorithm.trainable.patterns if pattern.startswith(prefix)]
    names = [f"{prefix}any", *(pattern.replace("*", "any") for pattern in patterns)]
    return any(algorithm.is_trainable(name, 0, 0) for name in names)


def floor_of_share(share: float, number: int) -> int:
    """A share of a number, rounded down as if the share were an exact decimal.

    Example:
        >>> floor_of_share(0.29, 100), int(0.29 * 100)
        (29, 28)
    """
    return int(share * number + 1e-9)  # 0.29 * 100 is 28.999999999999996


def set_aside(client: Client, fraction: float, purpose: int) -> tuple[Tensor, Tensor]:
    """A share of a client's training samples, the same in every phase and round, and all others.

    Args:
        client: the client, with n training samples.
        fraction: the share; floor(n * fraction) samples, but at least one if there are two.
        purpose: a number that tells this share from others.
    """
    samples = client.shuffled_samples(purpose)
    size = max(floor_of_share(fraction, len(samples)), min(1, len(samples) - 1))
    return samples[:size], samples[size:]


def _is_split(part: nn.Module) -> bool:
    return isinstance(getattr(part, "extractor", None), nn.Module) and isinstance(
        getattr(part, "classifier", None), nn.Module
    )
