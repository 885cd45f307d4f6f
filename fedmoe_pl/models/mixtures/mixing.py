"""What the experts' outputs are mixed as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmoe_pl.models.mixtures.tasks import SIGMOIDS, Task
from fedmoe_pl.trees import precise

Mixing = Literal["logits", "probabilities", "log_probabilities", "probabilities_without_log"]
"""What is mixed, and the loss of a sample.

``logits``: the weighted sum of the experts' outputs: of logits (PFL-MoE) or, in regression, of values. Their loss is
cross-entropy, or that of the task. ``probabilities``: negative logarithm of the weighted sum of probabilities (Adaptive
Expert Models; the paper of the mixture with opt-out); each label has its own probability where labels do not exclude
each other. The other two are in the official code of the mixture with opt-out, for the task ``multiclass`` only.
``log_probabilities``: the negative weighted sum of log-probabilities, which is not normalized again.
``probabilities_without_log``: the negative weighted sum of probabilities.
"""


def mix_outputs(outputs: Sequence[Tensor], weights: Tensor, mixing: Mixing, task: Task = "multiclass") -> Tensor:
    """Mixes the outputs (B, ...) of the experts by weights (B, experts), which add up to 1.

    Logits (B, T, V) of tokens may also have weights (B, T, experts). The result is what the outputs are, of the same
    shape; if probabilities of classes are mixed, log-probabilities.

    Example:
        >>> outputs = [torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]).log()]  # probabilities 1/2, 1/2 and 3/4, 1/4
        >>> mix_outputs(outputs, torch.tensor([[0.5, 0.5]]), "probabilities").exp()
        tensor([[0.6250, 0.3750]])
    """
    ones = [1] * (outputs[0].dim() - weights.dim() + 1)
    if mixing == "logits":
        shape = (-1, *weights.shape[1:-1], *ones)
        terms = [weights[..., index].reshape(shape) * logits for index, logits in enumerate(outputs)]
        return sum(terms[1:], terms[0])
    weights = precise(weights).reshape(*weights.shape, *ones)  # (B, experts, 1, ...)
    outputs = [precise(logits) for logits in outputs]  # half precision would round probabilities
    smallest = torch.finfo(weights.dtype).tiny  # the logarithm of 0 has no gradient
    if task in SIGMOIDS:
        logits, log_weights = torch.stack([*outputs], dim=1), weights.clamp_min(smallest).log()
        log_on, log_off = ((log_weights + F.logsigmoid(sign * logits)).logsumexp(1) for sign in (1, -1))
        return log_on - log_off  # the logit of the mixed probability
    log_probabilities = torch.stack([logits.log_softmax(1) for logits in outputs], dim=1)  # (B, experts, C, ...)
    if mixing == "log_probabilities":
        return (weights * log_probabilities).sum(1)
    return (weights.clamp_min(smallest).log() + log_probabilities).logsumexp(1)
