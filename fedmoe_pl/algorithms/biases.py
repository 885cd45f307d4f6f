"""The bias of an expert's last linear layer, to which an algorithm adds a correction of the expert's scores."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.trees import copy_module


def last_biases(algorithm: Algorithm, module: LightningModule, expert: str) -> dict[str, str]:
    """Where experts have the bias of their last linear layer.

    Args:
        algorithm: the algorithm, for messages.
        module: the module with the experts.
        expert: name of an expert, or of a list of experts, in the module; empty for the module itself.

    Returns:
        The bias's name in the module, by the expert's name.

    Raises:
        MisconfigurationException: if there is no such part, or an expert in it has no such bias.
    """
    try:
        part = module.get_submodule(expert)
    except AttributeError as error:
        parts = ", ".join(name for name, _ in module.named_children())
        raise MisconfigurationException(
            f"{type(algorithm).__name__}: expert is '{expert}', but must be a part of the {type(module).__name__}: "
            f"{parts}."
        ) from error
    biases = {}
    for member, one in part.named_children() if isinstance(part, nn.ModuleList) else [("", part)]:
        linear = [name for name, layer in one.named_modules() if isinstance(layer, nn.Linear)]
        if not linear or one.get_submodule(linear[-1]).bias is None:
            raise _refusal(algorithm, module, expert)
        name = ".".join(filter(None, (expert, member)))
        biases[name] = ".".join(filter(None, (name, linear[-1], "bias")))
    return biases


def check_last_biases(algorithm: Algorithm, module: LightningModule, expert: str) -> None:
    """Refuses experts whose last bias does not shift their scores, as far as the module tells its input's shape.

    Args:
        algorithm: the algorithm, for messages.
        module: the module with the experts; arguments are those of :func:`last_biases`.
        expert: name of an expert, or of a list of experts.

    Raises:
        MisconfigurationException: if there is no such part, or an expert's last bias does not shift its scores.
    """
    last_biases(algorithm, module, expert)
    like = next(module.parameters())
    parts = [(part, shape) for part in module.children() if (shape := getattr(part, "input_shape", None))]
    for part, shape in parts[:1]:
        x = torch.ones(2, *shape, dtype=getattr(part, "input_dtype", like.dtype), device=like.device)
        check_shifts(algorithm, copy_module(module).eval(), expert, x)


@torch.no_grad()
def check_shifts(algorithm: Algorithm, module: LightningModule, expert: str, x: Tensor) -> None:
    """Refuses experts to whose scores nothing is added, or something else, by adding it to their last bias.

    Args:
        algorithm: the algorithm, for messages.
        module: a module in eval mode, whose biases are changed; experts that its gate leaves out are not checked.
        expert: name of an expert, or of a list of experts.
        x: inputs of the module (B, ...).

    Raises:
        MisconfigurationException: if the scores of an expert are others than the old ones and what was added.
    """
    biases = last_biases(algorithm, module, expert)
    outputs: dict[str, list[Tensor]] = {name: [] for name in biases}
    for name in biases:
        module.get_submodule(name).register_forward_hook(lambda *call, name=name: outputs[name].append(call[-1]))
    shifts = {}
    module(x)
    for name, bias_name in biases.items():
        bias = module.get_parameter(bias_name)
        shifts[name] = torch.linspace(-100, 100, len(bias)).to(bias)  # both signs, because a ReLU may follow
        bias += shifts[name]
    module(x)
    for name, shift in shifts.items():
        before, after = outputs[name] or (torch.zeros_like(shift[None]), shift[None])
        if before.shape[1:] != shift.shape or not torch.allclose(after, before + shift, atol=0.01):
            raise _refusal(algorithm, module, expert)


def _refusal(algorithm: Algorithm, module: LightningModule, expert: str) -> MisconfigurationException:
    kind = type(module.get_submodule(expert)).__name__
    return MisconfigurationException(
        f"{type(algorithm).__name__}: expert is '{expert}', a {kind}, but must have a last Linear layer whose bias is "
        "added to the scores."
    )
