"""Runs a new mixture once, which sizes its lazy layers and shows whether its parts fit together."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl.models.layers import to_channels_last
from fedmoe_pl.models.mixtures.mixture import MixtureOfExperts


def run_once(module: MixtureOfExperts, expert: nn.Module) -> None:
    """Mixes one sample of zeros, to size lazy layers and to check that the parts fit together.

    Args:
        module: the mixture.
        expert: has the sample's ``input_shape``, or nothing happens, and its ``input_dtype`` if that is an integer.

    Raises:
        MisconfigurationException: if a part cannot compute with what it gets; the message names the part.
    """
    if (input_shape := getattr(expert, "input_shape", None)) is None:
        return
    module.eval()  # batch normalization cannot train on one sample, and its statistics must not change
    parameter = next(module.parameters())
    dtype = getattr(expert, "input_dtype", parameter.dtype)
    entered: list[str] = []  # the layers that began, the last one is where an error arose
    with torch.no_grad(), ExitStack() as hooks:
        for name, layer in module.named_modules():
            hooks.enter_context(layer.register_forward_pre_hook(lambda *_, name=name: entered.append(name)))
        try:
            module.mix(torch.zeros(1, *input_shape, dtype=dtype, device=parameter.device))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if not entered:
                raise
            part, reason = entered[-1].partition(".")[0], " ".join(str(error).split())
            raise MisconfigurationException(
                f"{type(module).__name__}: {part} is a {type(getattr(module, part)).__name__}, but must fit the other "
                f"parts for an input of shape {tuple(input_shape)} ({type(error).__name__}: {reason})."
            ) from error
    module.train()
    if module.channels_last:
        to_channels_last(module)  # lazy layers are sized now
