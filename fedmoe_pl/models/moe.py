"""A client's personalized mixture of a global and a local expert, as a LightningModule."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy

from fedmoe_pl.models.gates import ConstantGate, Gate

Batch = tuple[Tensor, Tensor]


class PersonalizedMoE(LightningModule):
    """Mixes the logits of a global and a local expert with the weights that a gate gives every sample.

    ``y = g(x) * global_expert(x) + (1 - g(x)) * local_expert(x)`` (PFL-MoE, Guo et al. 2021, Algorithm 2;
    https://arxiv.org/abs/2012.15589). Works in any ``Trainer``; a federation decides which parts a client shares.

    Args:
        global_expert: maps a batch of inputs to logits (B, C).
        local_expert: maps the same inputs to logits of the same shape; None takes a copy of the global expert.
        gate: weighs the experts; None is the equal-weight mixture ``ConstantGate(0.5)``.
        optimizer: makes the optimizer from the parameters.
        lr_scheduler: makes a scheduler, stepped once an epoch, from the optimizer; None for a constant rate.

    Raises:
        MisconfigurationException: if the gate reads features and the global expert has no ``extractor`` and
            ``classifier``, or if the experts differ in their number of outputs.

    Example:
        >>> import torch
        >>> from fedmoe_pl.models import FeatureGate, LeNet5, PersonalizedMoE
        >>> module = PersonalizedMoE(LeNet5(), gate=FeatureGate())
        >>> logits, gate_weights = module.mix(torch.zeros(4, 1, 32, 32))
        >>> logits.shape, gate_weights.shape
        (torch.Size([4, 10]), torch.Size([4, 2]))
    """

    def __init__(
        self,
        global_expert: nn.Module,
        local_expert: nn.Module | None = None,
        gate: Gate | None = None,
        optimizer: OptimizerCallable = torch.optim.SGD,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.global_expert = global_expert
        self.local_expert = copy.deepcopy(global_expert) if local_expert is None else local_expert
        self.gate = ConstantGate(0.5) if gate is None else gate
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.check_parts()

    def check_parts(self) -> None:
        """Refuses parts that do not fit together, and sizes a lazy gate where the expert tells its input's shape."""
        global_expert = self.global_expert
        if self.gate.reads_features and not (
            hasattr(global_expert, "extractor") and hasattr(global_expert, "classifier")
        ):
            raise MisconfigurationException(
                f"model.init_args.gate is a {type(self.gate).__name__}, which reads features, but the global expert "
                f"{type(global_expert).__name__} has no `extractor` and `classifier`; LinearGate reads the input."
            )
        input_shape = getattr(global_expert, "input_shape", None)
        if input_shape is not None:
            self.eval()  # batch normalization cannot train on one sample, and its statistics must stay
            with torch.no_grad():
                parameter = next(self.parameters())
                self.mix(torch.zeros(1, *input_shape, dtype=parameter.dtype, device=parameter.device))
            self.train()

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture's logits and the gate's weights of every sample.

        Args:
            x: inputs (B, ...).

        Returns:
            Logits (B, C) and weights (B, 2), index 0 for the global, 1 for the local expert. An expert whose weight a
            ``ConstantGate`` holds at 0 is not computed.
        """
        if isinstance(self.gate, ConstantGate) and self.gate.weight in (0, 1):
            expert = self.global_expert if self.gate.weight else self.local_expert
            return expert(x), self.gate(x)
        if self.gate.reads_features:
            features = self.global_expert.extractor(x)  # pyright: ignore[reportCallIssue]
            weights = self.gate(features)
            global_logits = self.global_expert.classifier(features)  # pyright: ignore[reportCallIssue]
        else:
            weights = self.gate(x)
            global_logits = self.global_expert(x)
        local_logits = self.local_expert(x)
        if global_logits.shape != local_logits.shape:
            raise MisconfigurationException(
                f"model.init_args.local_expert gives {local_logits.shape[-1]} outputs and "
                f"model.init_args.global_expert {global_logits.shape[-1]}; both must give one output per class."
            )
        return weights[:, :1] * global_logits + weights[:, 1:] * local_logits, weights

    def forward(self, x: Tensor) -> Tensor:
        """The mixture's logits (B, C) for inputs (B, ...)."""
        return self.mix(x)[0]

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of the mixture: pure, so that it can be differentiated and vmapped.

        Args:
            batch: inputs (B, ...) and labels (B,).

        Returns:
            The mean loss, and ``logits`` (B, C) and ``gate_weights`` (B, 2).
        """
        x, y = batch
        logits, weights = self.mix(x)
        return F.cross_entropy(logits, y), {"logits": logits, "gate_weights": weights}

    def _step(self, batch: Batch, stage: str) -> Tensor:
        loss, metrics = self.loss(batch)
        accuracy = multiclass_accuracy(metrics["logits"], batch[1], metrics["logits"].shape[1], average="micro")
        values = {"loss": loss, "accuracy": accuracy, "gate/global_expert": metrics["gate_weights"][:, 0].mean()}
        self.log_dict({f"{stage}_{name}": value for name, value in values.items()}, batch_size=len(batch[1]))
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Logs ``train_loss``, ``train_accuracy`` and ``train_gate/global_expert``; returns the loss."""
        return self._step(batch, "train")

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Logs the same with ``validation_``."""
        return self._step(batch, "validation")

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Logs the same with ``test_``."""
        return self._step(batch, "test")

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> dict[str, Tensor]:
        """``logits`` (B, C) and ``gate_weights`` (B, 2) of a batch of inputs, with or without labels."""
        logits, weights = self.mix(batch if isinstance(batch, Tensor) else batch[0])
        return {"logits": logits, "gate_weights": weights}

    def configure_optimizers(self) -> Any:
        """The optimizer over all parameters (those without a gradient are skipped), and the scheduler if any."""
        optimizer = self.optimizer(self.parameters())
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Describes experts and gate in the checkpoint, so that ``load_from_checkpoint(path)`` rebuilds them."""
        parts = {name: _describe(getattr(self, name)) for name in ("global_expert", "local_expert", "gate")}
        checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = {
            "_class_path": f"{type(self).__module__}.{type(self).__qualname__}",
            "_instantiator": "lightning.pytorch.cli.instantiate_module",
            **{name: part for name, part in parts.items() if part is not None},
        }


def _describe(module: nn.Module) -> dict[str, Any] | None:
    """Class path and arguments of a module that keeps its constructor's arguments as attributes, else None."""
    if "<locals>" in type(module).__qualname__:  # nothing could import it again
        return None
    names = list(inspect.signature(type(module)).parameters)
    arguments = {name: getattr(module, name, inspect.Parameter.empty) for name in names}
    if not all(isinstance(value, (int, float, str, bool, type(None))) for value in arguments.values()):
        return None
    return {"class_path": f"{type(module).__module__}.{type(module).__qualname__}", "init_args": arguments}
