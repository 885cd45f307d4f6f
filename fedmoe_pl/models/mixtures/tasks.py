"""What a mixture predicts, and the loss and the predictions that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from fedmoe_pl.checks import InvalidArgumentError, check_choice
from fedmoe_pl.trees import precise

Task = Literal["multiclass", "binary", "multilabel", "regression", "causal_lm"]
"""What a mixture predicts, in the words of torchmetrics.

``multiclass``: one class of C, for a sample or for each position of it: outputs are logits (B, C, ...), targets classes
(B, ...). ``binary`` and ``multilabel``: outputs are logits of labels that are on or off, each by itself, targets of the
same shape are 0 or 1. ``regression``: outputs and targets are values of the same shape. In these three, an output of
shape (B, 1, ...) also fits targets of shape (B, ...). ``causal_lm``: the next token: outputs are logits (B, T, V),
targets the tokens themselves (B, T), as Hugging Face's ``labels``; the logits at a position are compared with the token
after it. The loss is the mean over tokens, without those that are -100.
"""
Loss = nn.Module | Callable[[Tensor, Tensor], Any]  # a function need not say that it returns a tensor
"""A module or function from outputs and targets to the mean loss."""
SIGMOIDS: tuple[Task, ...] = ("binary", "multilabel")
"""The tasks in which each output is the logit of a probability of its own."""
OF_CLASSES: tuple[Task, ...] = ("multiclass", "causal_lm")
"""The tasks whose targets are classes, of which -100 does not count."""
IGNORED = -100
"""The target that does not count, unless a loss has another one."""

_REGRESSION = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss)
_OF_LOSSES: dict[type, tuple[Task, ...]] = {
    nn.CrossEntropyLoss: ("multiclass", "causal_lm"),
    nn.BCEWithLogitsLoss: ("multilabel", "binary"),
    **dict.fromkeys(_REGRESSION, ("regression",)),
}


def checked_task(owner: object, task: Task | None, loss: Loss | None) -> Task:
    """The task, which may follow from the loss."""
    if task is not None:
        check_choice(owner, "task", task, get_args(Task))
    if loss is None:
        return task or "multiclass"
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", "mean") in ("none", "sum"):
        allowed, reason = "one that gives the mean over the samples", f"its reduction is '{loss.reduction}'"
        raise InvalidArgumentError(owner, "loss", loss, allowed, reason)
    of_loss = _OF_LOSSES.get(type(loss), ())
    if (task is None and not of_loss) or (task is not None and of_loss and task not in of_loss):
        name = type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", repr(loss))
        allowed = " or ".join(of_loss or get_args(Task))
        raise InvalidArgumentError(owner, "task", task, allowed, f"the loss is {name}")
    return task or of_loss[0]


def usual_loss(task: Task, outputs: Tensor, targets: Tensor, reduction: Literal["mean", "none"]) -> Tensor:
    """Cross-entropy, binary cross-entropy or the squared error; arguments as those of :func:`aligned` returns."""
    if task == "causal_lm":
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        counts = targets != IGNORED
        dims = (0, 1) if reduction == "mean" else (1,)
        return losses.view_as(targets).sum(dims) / counts.sum(dims).clamp_min(1)  # no token may count
    if task == "multiclass":
        losses = F.cross_entropy(outputs, targets, reduction=reduction)
    elif task in SIGMOIDS:
        losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction=reduction)
    else:
        losses = F.mse_loss(outputs, targets, reduction=reduction)
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def aligned(task: Task, outputs: Tensor, targets: Tensor, ignored: int = IGNORED) -> tuple[Tensor, Tensor]:
    """Outputs and targets as a loss compares them: of one shape and type, or integers or probabilities of classes.

    Targets that are -100 become ``ignored``, the class that the loss leaves out. Outputs in half precision become
    float32, because half precision would round losses, their sums, and values that outputs are compared with.

    Raises:
        MisconfigurationException: if the shapes differ: a loss would compare each output with several targets.
    """
    outputs = precise(outputs)
    are_probabilities = task == "multiclass" and targets.is_floating_point()
    if task in OF_CLASSES and not are_probabilities:
        targets = targets.long()
        if task == "causal_lm":
            # logits are large, and a part of them would become a copy
            targets = F.pad(targets[:, 1:], (0, 1), value=IGNORED)
        return outputs, targets if ignored == IGNORED else targets.masked_fill(targets == IGNORED, ignored)
    if not are_probabilities:
        outputs, targets = _as_values(outputs, targets)
    if outputs.shape != targets.shape:
        because = f"outputs of shape {tuple(outputs.shape)} do not fit targets of shape {tuple(targets.shape)}"
        raise InvalidArgumentError("MixtureOfExperts", "task", task, "one that fits the targets", because)
    return outputs, targets


def _as_values(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.dim() == targets.dim() + 1 and outputs.shape[1] == 1:
        outputs = outputs.squeeze(1)
    return outputs, targets.to(outputs.dtype)


def num_labelled(task: Task, criterion: Loss | None, targets: Tensor) -> int:
    """The number of samples or, if targets are classes, of those that count."""
    is_of_classes = task == "multiclass" and not targets.is_floating_point()
    return int(_counts(targets, criterion).sum()) if is_of_classes else len(targets)


def loss_weight(task: Task, criterion: Loss | None, targets: Tensor) -> float:
    """What the mean loss of some samples counts in a mean over parts of them: their labels, or the classes' weights."""
    if task == "causal_lm":
        task, targets = "multiclass", targets[:, 1:]
    elif targets.dim() > 1 and not (criterion is None or isinstance(criterion, nn.CrossEntropyLoss)):
        return len(targets)  # a user's may be the mean over images
    if not isinstance(criterion, nn.CrossEntropyLoss) or criterion.weight is None or targets.is_floating_point():
        return num_labelled(task, criterion, targets)
    return criterion.weight.cpu()[targets[_counts(targets, criterion)].long().cpu()].sum().item()


def _counts(targets: Tensor, criterion: Loss | None) -> Tensor:
    """Which classes count in a loss and in metrics; in bytes, -100 would be 156."""
    targets = targets.long()
    return (targets != IGNORED) & (targets != ignored_class(criterion))


def is_mean_over_samples(criterion: Loss | None) -> bool:
    """Whether a mean loss is known to be that over samples or labels, which count as in :func:`loss_weight`."""
    if criterion is None:
        return True
    is_weighted = type(criterion) is not nn.CrossEntropyLoss and getattr(criterion, "weight", None) is not None
    return type(criterion) in _OF_LOSSES and not is_weighted


def weighs_labels(criterion: Loss | None) -> bool:
    """Whether other labels count than those which are not -100, or not all the same."""
    return getattr(criterion, "weight", None) is not None or ignored_class(criterion) != IGNORED


def preds_and_target(task: Task, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What a metric of torchmetrics compares: probabilities and classes or labels, values, or logits and tokens."""
    if task == "multiclass":
        return precise(outputs).softmax(1), targets.long()
    outputs, targets = aligned(task, outputs, targets)
    return (outputs.sigmoid(), targets.round().long()) if task in SIGMOIDS else (outputs, targets)


def fits(task: Task, outputs: Tensor, targets: Tensor) -> bool:
    """Whether outputs and targets have the shapes and the type of the task, see :data:`Task`."""
    if task == "multiclass":
        is_dense = outputs.dim() > 1 and outputs[:, 0].shape == targets.shape
        return is_dense and not targets.is_floating_point()
    if task == "causal_lm":
        return outputs.dim() == 3 and outputs.shape[:2] == targets.shape and not targets.is_floating_point()
    outputs, targets = _as_values(outputs, targets)
    return outputs.shape == targets.shape


def range_problem(task: Task, criterion: Loss | None, outputs: Tensor, targets: Tensor) -> str | None:
    """What is wrong with the values of targets; None if nothing is, or only a loss of the user's could tell."""
    is_usual = criterion is None or type(criterion) in _OF_LOSSES
    if task in OF_CLASSES:
        counted = targets[_counts(targets, criterion)]
        most = outputs.shape[-1 if task == "causal_lm" else 1] - 1
        allowed = f"outputs of {most + 1} classes allow integers from 0 to {most}"
    elif task in SIGMOIDS and is_usual:
        counted, most, allowed = targets, 1, "labels that are on or off are 1 or 0, or probabilities between"
    else:
        return None
    wrong = counted[(counted > most) | (counted < 0) & is_usual]
    return f"the value {wrong[0].item():g}; {allowed}" if wrong.numel() else None


def ignored_class(criterion: Loss | None) -> int:
    """The target of samples or pixels that do not count: that of the loss, if it has one, or that of cross-entropy."""
    ignored = getattr(criterion, "ignore_index", None)
    return IGNORED if ignored is None else ignored
