"""Loss and gradients of one client without stacking, for comparison with the stacked ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.backends.client import on_device
from fedmoe_pl.backends.frozen_parts import looked_up
from fedmoe_pl.backends.rounding import equal_to_rounding
from fedmoe_pl.backends.stacked.batches import TRIED_SAMPLES, Share, StackedData
from fedmoe_pl.backends.stacked.members import Member
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.trees import load_tree


def plain_gradients(
    training: LocalTraining, module: LightningModule, member: Member, share: Share, names: Sequence[str]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of one client's share.

    Args:
        training: the local training of the phase's clients.
        module: a module on the device of the share; the client's tensors are loaded into it.
        member: the client.
        share: a share of this client only.
        names: the parameters to differentiate by.

    Returns:
        The loss, and the gradients by name; None if the loss does not depend on the parameter.
    """
    load_tree(module, member.state)
    const = on_device(member.const, share.y.device)
    parameters = dict(module.named_parameters())
    with looked_up(module, tuple(share.rows), {name: rows[0] for name, rows in share.rows.items()}):
        loss = training.algorithm.client_loss(module, (share.x[0], share.y[0]), const)[0]
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return loss.detach(), dict(zip(names, gradients, strict=True))


def ignores_padding(
    training: LocalTraining, module: LightningModule, member: Member, data: StackedData, names: Sequence[str]
) -> bool:
    """Whether samples without a label change neither loss nor gradients, so that all batches can have one size.

    Args:
        training: the local training of the phase's clients.
        module: a module in eval mode, on the training's device.
        member: the first client of the stack.
        data: the samples of the stack's clients.
        names: the parameters that the loss depends on.
    """
    if bool((data.sizes[data.sizes > 0] == data.batch_size).all()):
        return True
    share = data.first_share(0, 2 * TRIED_SAMPLES)
    half = share.y.shape[1] // 2
    if training.has_batch_norm or not half:
        return False
    # on a CPU, because a GPU becomes unusable if a loss uses the label -100 as an index
    module.cpu()
    try:
        fewer = share.cut(half, unlabelled=0).cpu()
        padded = share.cut(share.y.shape[1], unlabelled=share.y.shape[1] - half).cpu()
        with torch.autocast("cpu", enabled=False):
            (loss, gradients), (expected, expected_gradients) = (
                plain_gradients(training, module, member, batch, names) for batch in (padded, fewer)
            )
    except (RuntimeError, IndexError, ValueError):
        return False
    finally:
        module.to(training.device)
    pairs = [(loss, expected), *((gradients[name], expected_gradients[name]) for name in names)]
    return all(a is not None and b is not None and equal_to_rounding(a, b) for a, b in pairs)
