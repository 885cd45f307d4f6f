"""The base of all mixtures of experts."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from argparse import ArgumentError
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from io import BytesIO
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.data import AttributeDict
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import Tensor, nn
from torch.func import functional_call
from torchmetrics.functional.classification import multiclass_accuracy
from typing_extensions import Self

from fedmoe_pl.checks import InvalidArgumentError, check_number, reason_of
from fedmoe_pl.models.description import (
    UndescribedError,
    configured_arguments,
    describe,
    differ,
    hyperparameters_of,
    not_described,
    stand_in,
)
from fedmoe_pl.models.gates import FixedGate
from fedmoe_pl.models.inputs import Inputs, batch_size_of, inputs_and_targets, inputs_of, rows_of
from fedmoe_pl.models.layers import evaluating, to_channels_last
from fedmoe_pl.models.mixtures.mixing import Mixing, mix_outputs
from fedmoe_pl.models.mixtures.tasks import (
    SIGMOIDS,
    Loss,
    Task,
    aligned,
    checked_task,
    ignored_class,
    loss_weight,
    num_labelled,
    usual_loss,
)
from fedmoe_pl.trees import copy_module, precise


class Absent(nn.Module):
    """Stands in for a local expert that a client does not have."""

    def __init__(self) -> None:  # without arguments, so that a checkpoint can rebuild it
        super().__init__()


class Architectures(nn.ModuleList):
    """The local experts of all architectures, by index; a client's module has only one of them.

    It computes that one, and a module with all of them the first one. Tensors are named ``<index>.<name>``, so that
    those of different shapes have different names.
    """

    @property
    def present(self) -> dict[int, nn.Module]:
        """The experts of this module by index: all of them in the initial model, one in a client's module."""
        return {index: part for index, part in enumerate(self) if not isinstance(part, Absent)}

    @property
    def expert(self) -> nn.Module:
        """The first expert that is present: in a client's module, the client's own."""
        return next(iter(self.present.values()))

    @property
    def extractor(self) -> nn.Module:
        """The extractor of ``expert``."""
        return self.expert.extractor  # pyright: ignore[reportReturnType]

    @property
    def classifier(self) -> nn.Module:
        """The classifier of ``expert``."""
        return self.expert.classifier  # pyright: ignore[reportReturnType]

    def keep(self, index: int) -> None:
        """Removes all experts except this one, which keeps its name."""
        for other in range(len(self)):
            if other != index:
                self[other] = Absent()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The output of ``expert``."""
        return self.expert(*inputs, **options)


Batch = tuple[Inputs, Tensor] | Mapping[str, Any]
"""Pairs of inputs and targets, or dicts with the targets under ``target_key``."""

_TRIED_SAMPLES = 4
_OF_TRAINING = ("optimizer", "lr_scheduler")  # arguments that checkpoints do not have: a phase may have others
_FROZEN = "frozen_parameters"  # of a checkpoint: their names
_UNDESCRIBED = "undescribed_arguments"  # of a checkpoint: the classes of arguments that it cannot describe itself


class MixtureOfExperts(LightningModule, ABC):
    """A model with several experts and a gate that weighs them for every sample.

    It works in any ``Trainer``; a federation decides which parts a client shares. To write your own mixture, derive
    from this class and implement ``mix``.

    Args:
        optimizer: makes the optimizer from the parameters.
        lr_scheduler: makes a scheduler, stepped once per epoch, from the optimizer; None for a constant rate.
        mixing: what is mixed, see :data:`~fedmoe_pl.models.mixtures.mixing.Mixing`.
        gate_lr: the gate's learning rate, also with the optimizer of a phase; None for the optimizer's.
        channels_last: whether the weights of 2-D convolutions and all other 4-D tensors of the module are in PyTorch's
            channels-last memory format, in which convolutions then compute. Results are the same up to rounding, except
            that dropout of images draws other random numbers. Max pooling is faster on a CPU.
        task: what is predicted, see :data:`~fedmoe_pl.models.mixtures.tasks.Task`; None for what the loss is made for,
            or ``multiclass``.
        loss: a module or function from outputs and targets to the mean loss, such as ``torch.nn.HuberLoss``; None for
            the usual one of the task: cross-entropy, binary cross-entropy of logits, or the mean squared error.
        target_key: the key of the targets in batches that are dicts; the other values are arguments of the experts.

    Attributes:
        task: what is predicted.
        criterion: the loss; None for the usual one.
        lr: the learning rate in place of the optimizer's, which Lightning's ``Tuner.lr_find`` sets; None for that one.
        gate: weighs the experts.
        gate_width: number of experts that the gate weighs; None if a subclass does not set it.
        has_global_expert: whether all experts except the last are global. The sum of their weights then shows how
            personalized a client's model is. Otherwise all experts have the same role.
        mixes_logits: whether nothing but logits can be mixed.
        sized_by: name of the module whose ``input_shape`` is that of a sample, which sizes lazy layers; None for none.

    Raises:
        MisconfigurationException: if ``mixing`` is not one of the four or does not fit the task, if ``gate_lr`` is
            below 0, or if ``task`` and ``loss`` do not fit each other.
    """

    gate: Any
    gate_width: int | None = None
    has_global_expert: bool = True
    mixes_logits: bool = False
    sized_by: str | None = None

    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.SGD,
        lr_scheduler: LRSchedulerCallable | None = None,
        mixing: Mixing = "logits",
        gate_lr: float | None = None,
        channels_last: bool = False,
        task: Task | None = None,
        loss: Loss | None = None,
        target_key: str = "labels",
    ) -> None:
        super().__init__()
        self._log_hyperparams = True
        check_number(self, "gate_lr", gate_lr, least=0)
        if not callable(optimizer):
            allowed = "a function of the parameters, such as partial(torch.optim.SGD, lr=0.01)"
            raise InvalidArgumentError(self, "optimizer", optimizer, allowed)
        self.optimizer = optimizer
        self.lr: float | None = None
        self.lr_scheduler = lr_scheduler
        self.mixing: Mixing = mixing
        self.gate_lr = gate_lr
        self.channels_last = channels_last
        self.task: Task
        self.task = checked_task(self, task, loss)
        if loss is not None and not callable(loss):
            allowed = "a function of outputs and targets, such as torch.nn.CrossEntropyLoss()"
            raise InvalidArgumentError(self, "loss", loss, allowed)
        self.criterion = loss
        self.target_key = target_key

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses a module as ``loss``, which the method of this name would hide."""
        if name == "loss" and isinstance(value, nn.Module):
            allowed = "given to the constructor, as its argument loss=, or a function of a batch"
            raise InvalidArgumentError(self, "loss", value, allowed, "the method of this name would be called")
        super().__setattr__(name, value)

    @abstractmethod
    def mix(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mixture's scores and the gate's weights of every sample.

        Args:
            x: inputs (B, ...), or a dict of them if batches are dicts.

        Returns:
            Scores (B, C) and weights (B, experts). The scores of classes are logits if logits are mixed, else
            log-probabilities; the class with the largest one is the prediction. The scores of labels are logits, those
            of regression are values. The weights of global experts come first, the local expert's last.
        """

    def check_parts(self) -> None:
        """Refuses parts that do not fit together, sizes lazy layers and sets the memory format.

        Called by the constructor, and again when a phase of a federation has replaced a part or layers were sized.

        Raises:
            MisconfigurationException: if the gate weighs another number of experts, or it or ``mixing`` does not fit
                the task.
        """
        self._check_mixing()
        if self.task == "causal_lm" and not self.gate_is_causal:
            allowed = "a fixed one or, in a mixture of adapters, one that reads features or a TokenGate inside layers"
            because = "a gate that reads a whole text weighs experts for a token by what follows it"
            raise InvalidArgumentError(self, "gate", self.gate, allowed, because)
        if isinstance(self.gate, FixedGate) and self.gate_width is not None:
            self.gate.fit_to(self.gate_width)
            self.check_gate_width(len(self.gate.weights))
            self.check_shares(torch.as_tensor(self.gate.weights)[None])
        self._run_once()
        if self.channels_last:
            to_channels_last(self)

    def _check_mixing(self) -> None:
        """Refuses to mix what the experts' outputs are not, or what the loss cannot read."""
        allowed: tuple[str, ...] = get_args(Mixing)
        if self.mixes_logits or self.task in ("regression", "causal_lm"):
            allowed = ("logits",)
        elif self.task in SIGMOIDS or self.criterion is not None:
            allowed = ("logits", "probabilities")
        if self.mixing not in allowed:
            of_loss = "" if self.criterion is None else " and a loss of its own"
            reason = f"the task is '{self.task}'{of_loss}"
            raise InvalidArgumentError(self, "mixing", self.mixing, " or ".join(allowed), reason)

    def check_gate_width(self, width: int) -> None:
        """Refuses a gate that weighs another number of experts than the mixture has."""
        if width != self.gate_width:
            order = ", the local expert last" if self.has_global_expert else ""
            allowed = f"one that weighs {self.gate_width} experts{order}"
            raise InvalidArgumentError(self, "gate", self.gate, allowed, f"it weighs {width}")

    def check_gate(self, x: Inputs) -> None:
        """Mixes some inputs, and refuses a gate whose weights of them are not what :class:`Gate` says."""
        hook = self.gate.register_forward_pre_hook(lambda gate, inputs: self._check_weights(*inputs))
        try:
            with torch.no_grad(), evaluating(self):
                self.mix(x)
        finally:
            hook.remove()

    def _check_weights(self, x: Inputs) -> None:
        """Refuses weights of another shape, and such as are no shares, or depend on the other samples of a batch."""
        size = batch_size_of(x)
        try:
            weights = self.gate.forward(x)
            alone = [self.gate.forward(rows_of(x, slice(row, row + 1))) for row in range(min(size, _TRIED_SAMPLES))]
        except InvalidArgumentError:
            raise
        except Exception as error:  # whatever the user's raises
            allowed = f"one that reads {'features' if self.gate.reads_features else 'inputs'} of shape {_shape(x)}"
            because = f"it fails with: {reason_of(error)}"
            raise InvalidArgumentError(self, "gate", self.gate, allowed, because) from error
        if not isinstance(weights, Tensor) or weights.dim() != 2 or len(weights) != size:
            allowed = f"one that returns weights of shape (samples, experts), here ({size}, {self.gate_width})"
            raise InvalidArgumentError(self, "gate", self.gate, allowed, f"they have shape {_shape(weights)}")
        self.check_shares(weights)
        for together, by_itself in zip(weights, alone, strict=False):
            if by_itself.shape != (1, len(together)) or not _is_near(by_itself[0], together):
                allowed = "one that weighs each sample by itself"
                because = f"a sample has the weights {_shown(by_itself)} alone and {_shown(together)} among others"
                raise InvalidArgumentError(self, "gate", self.gate, allowed, because)

    def check_shares(self, weights: Tensor) -> None:
        """Refuses weights (B, experts) below 0 or whose sums are not 1."""
        for each in weights:
            if not (each >= 0).all() or not _is_near(each.sum(), torch.ones_like(each.sum())):
                allowed = "one whose weights are at least 0 and add up to 1 for each sample"
                raise InvalidArgumentError(self, "gate", self.gate, allowed, f"those of a sample are {_shown(each)}")

    def check_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Refuses outputs of the local expert, the last ones, of another shape than those of the global ones."""
        first, last = outputs[0], outputs[-1]
        if first.shape != last.shape:
            allowed = f"one with outputs of shape {tuple(first.shape[1:])}, as global_expert's"
            reason = f"its outputs have shape {tuple(last.shape[1:])}"
            raise InvalidArgumentError(self, "local_expert", self.local_expert, allowed, reason)

    def _run_once(self) -> None:
        """Mixes a few random samples, which sizes lazy layers and shows whether the parts fit together."""
        part = getattr(self, self.sized_by) if self.sized_by else None
        if (input_shape := getattr(part, "input_shape", None)) is None:
            return
        for experts in self.children():  # the clients' local experts, if they differ: each is tried in a copy
            if isinstance(experts, Architectures) and len(experts.present) > 1:
                for index in [*experts.present]:
                    one = copy_module(self)
                    one.keep_architecture(index)
                    one._run_once()
        parameter = next(self.parameters())
        dtype = getattr(part, "input_dtype", parameter.dtype)
        shape, generator = (_TRIED_SAMPLES, *input_shape), torch.Generator().manual_seed(0)
        # from 0 to 1, or of integers 0 and 1, which any table of embeddings has
        x = torch.rand(shape, generator=generator).mul(1 if dtype.is_floating_point else 2)
        self.check_gate(x.to(parameter.device, dtype))

    @property
    def gate_is_causal(self) -> bool:
        """Whether the weights for a token of a text depend on no later token; ``causal_lm`` takes no other gate."""
        return isinstance(self.gate, FixedGate)

    @property
    def weighed_parts(self) -> Sequence[str]:
        """Names of the modules that the gate weighs, in its order; none if a subclass does not say."""
        return ()

    @property
    def idle_parts(self) -> list[str]:
        """Those of ``weighed_parts`` that the gate leaves out, because it is fixed and gives them no weight."""
        parts, gate = self.weighed_parts, self.gate
        return [part for index, part in enumerate(parts) if isinstance(gate, FixedGate) and index not in gate.active]

    def client_architecture(self, client_id: int) -> int:
        """The number of the client's architecture; 0 if all clients have the same one."""
        return 0

    def keep_architecture(self, architecture: int) -> None:
        """Removes the parts that clients of this architecture lack, in place; the others keep their names."""

    def forward(self, x: Inputs) -> Tensor:
        """The mixture's scores (B, C) for inputs (B, ...)."""
        return self.mix(x)[0]

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mixture's loss, a pure function that can be differentiated and used with ``vmap``.

        Args:
            batch: inputs (B, ...) and labels (B,), or a dict of the inputs with the labels under ``target_key``.

        Returns:
            The mean loss, and ``logits`` (B, C) and ``gate_weights`` (B, experts).
        """
        x, y = inputs_and_targets(batch, self.target_key, self.task)
        scores, weights = self.mix(x)
        return self.loss_of(scores, y), {"logits": scores, "gate_weights": weights}

    def loss_of(self, scores: Tensor, y: Tensor, reduction: Literal["mean", "none"] = "mean") -> Tensor:
        """The loss of the scores that ``mix`` returns.

        Args:
            scores: shape (B, C), or (B, ...).
            y: labels, shape (B,), or other targets (B, ...), such as probabilities of classes (B, C) from a collate
                function that mixes samples; samples with the label -100 do not count.
            reduction: "mean" over the samples, or "none" for the loss of each, shape (B,).
        """
        if self.criterion is not None:
            if reduction == "none":
                return torch.stack([self.loss_of(*one) for one in zip(scores.split(1), y.split(1), strict=True)])
            outputs, targets = aligned(self.task, scores, y, ignored_class(self.criterion))
            if self.task == "causal_lm":
                outputs, targets = outputs.flatten(0, 1), targets.flatten()
            return _called(self.criterion, outputs, targets)
        if self.mixing == "logits" or self.task != "multiclass":
            return usual_loss(self.task, *aligned(self.task, scores, y), reduction)
        scores = scores.exp() if self.mixing == "probabilities_without_log" else scores
        scores, y = aligned(self.task, scores, y)
        if y.is_floating_point():  # probabilities of classes
            losses = -(y.to(scores.dtype) * scores).sum(1)
        else:
            losses = F.nll_loss(scores, y, reduction=reduction)
        losses = losses.mean() if reduction == "mean" else losses
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses

    def counted(self, y: Tensor) -> float:
        """What the mean loss of targets (B, ...) counts in a mean over batches, such as the number of labels."""
        return loss_weight(self.task, self.criterion, y)

    def scores_of(self, logits: Tensor) -> Tensor:
        """The scores (B, C) of a single expert, from its logits (B, C)."""
        return logits if self.mixing == "logits" or self.task != "multiclass" else precise(logits).log_softmax(1)

    def mix_outputs(self, outputs: Sequence[Tensor], weights: Tensor) -> Tensor:
        """The scores (B, ...) of a mixture, from the outputs (B, ...) of the experts and their weights (B, experts)."""
        return mix_outputs(outputs, weights, self.mixing, self.task)

    def _step(self, batch: Batch, stage: str) -> Tensor:
        loss, outputs = self.loss(batch)
        if loss is None:  # an override's; Lightning then leaves the batch out
            return loss
        weight: Any = self.counted(inputs_and_targets(batch, self.target_key, self.task)[1])
        # processes wait for one another with each name, so all of them log it; Lightning would round means of integers
        is_shared = stage != "train" and getattr(self._trainer, "world_size", 1) > 1
        for name, (mean, count) in {f"{stage}_loss": (loss, weight), **self.metrics_of(batch, outputs, stage)}.items():
            if is_shared:
                mean, count = mean if count else torch.zeros_like(mean), float(count)  # a mean over nothing is nan
            if count or is_shared:
                self.log(name, mean, batch_size=count, sync_dist=is_shared)  # pyright: ignore[reportArgumentType]
        return loss

    def metrics_of(self, batch: Batch, outputs: Mapping[str, Tensor], stage: str) -> dict[str, tuple[Tensor, int]]:
        """What steps log of a batch beside its loss: means, such as ``train_accuracy``, and what each is a mean over.

        Args:
            batch: the batch.
            outputs: what :meth:`loss` returns beside the loss.
            stage: the prefix of the names.
        """
        means, y = dict[str, tuple[Tensor, int]](), inputs_and_targets(batch, self.target_key, self.task)[1]
        samples, labels = len(y), num_labelled(self.task, self.criterion, y)
        if self.task == "multiclass":
            ignored = ignored_class(self.criterion)
            scores, y = aligned(self.task, outputs["logits"], y, ignored)
            y = y.argmax(1) if y.is_floating_point() else y  # probabilities of classes
            accuracy = multiclass_accuracy(scores, y, scores.shape[1], average="micro", ignore_index=ignored)
            means[f"{stage}_accuracy"] = accuracy, labels
        if self.has_global_expert:
            means[f"{stage}_gate/global_expert"] = outputs["gate_weights"][:, :-1].sum(dim=1).mean(), samples
        return means

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the loss; logs ``train_loss``, ``train_accuracy`` of classes, and ``train_gate/global_expert``."""
        return self._step(batch, "train")

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Logs the same values with the prefix ``validation_``."""
        return self._step(batch, "validation")

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Logs the same values with the prefix ``test_``."""
        return self._step(batch, "test")

    def predict_step(self, batch: Batch | Tensor, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """``logits`` (B, C) and ``gate_weights`` (B, experts) of a batch of inputs, with or without labels."""
        scores, weights = self.mix(inputs_of(batch, self.target_key))
        return {"logits": scores, "gate_weights": weights}

    def parameter_groups(self) -> Iterable[Any]:
        """All parameters for the optimizer; with a ``gate_lr``, the gate's are a separate group."""
        if self.gate_lr is None or not (gate := [*self.gate.parameters()]):
            return self.parameters()
        gate_ids = {id(parameter) for parameter in gate}
        others = [parameter for parameter in self.parameters() if id(parameter) not in gate_ids]
        return [{"params": others}, {"params": gate, "lr": self.gate_lr}]

    def configure_optimizers(self) -> Any:
        """The optimizer of all parameters, and the scheduler if there is one."""
        optimizer = self.optimizer(self.parameter_groups())
        for group in optimizer.param_groups[: None if self.gate_lr is None else 1]:
            group["lr"] = group["lr"] if self.lr is None else self.lr
        if self.lr_scheduler is None:
            return optimizer
        scheduler = self.lr_scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):  # Lightning's, which has a monitor
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": scheduler.monitor}}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the constructor's arguments, from which ``load_from_checkpoint(path)`` makes the mixture again."""
        checkpoint.pop(self.CHECKPOINT_HYPER_PARAMS_NAME, None)  # each argument has its own name
        arguments, checkpoint[_UNDESCRIBED] = self._described_arguments()
        checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = hyperparameters_of(self, arguments)
        checkpoint[_FROZEN] = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]

    @property
    def hparams_initial(self) -> AttributeDict:
        """What loggers of a plain Trainer show: the arguments, in place of the optimizer's function its numbers.

        Without the numbers if a ``configure_optimizers`` of your own may make another optimizer, and without names that
        the data module's hyperparameters have, which Lightning would refuse.
        """
        if saved := super().hparams_initial:
            return saved
        arguments, undescribed = self._described_arguments()
        shown = arguments | undescribed
        own = vars(self).get("configure_optimizers", type(self).configure_optimizers)
        if own is MixtureOfExperts.configure_optimizers:
            optimizer = self.optimizer(self.parameter_groups())
            shown |= {"optimizer": type(optimizer).__name__} | optimizer.defaults
            shown |= {} if self.lr is None else {"lr": self.lr}
        datamodule = getattr(self._trainer, "datamodule", None)
        of_data = datamodule.hparams_initial if datamodule is not None and datamodule._log_hyperparams else {}
        return AttributeDict({name: value for name, value in shown.items() if name not in of_data})

    def _described_arguments(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The constructor's arguments in the words of a configuration, and the classes of those that have none."""
        configured, saved = configured_arguments(self), self._saved_arguments()
        taken = {*ArgumentParser().add_class_arguments(type(self), fail_untyped=False)}  # also those in **kwargs
        names = _kept_arguments(type(self)) & taken
        words = {name: value for name, value in saved.items() if self._is_word(name, value)}
        arguments, undescribed = dict[str, Any](), dict[str, str]()
        for name in sorted((names | saved.keys()) - {*_OF_TRAINING} | words.keys()):
            made = self._argument(name)
            value = words.get(name, made)
            try:
                arguments[name] = describe(value, configured.get(name))
                if name in words and isinstance(made, nn.Module):
                    undescribed[name] = type(made).__name__  # it may have been replaced since
            except UndescribedError:
                parameter = inspect.signature(type(self)).parameters.get(name)
                if parameter is not None and value is parameter.default:
                    continue
                undescribed[name] = type(made).__name__
                if name in saved and saved[name] is None:  # a subclass of your own makes the part
                    arguments[name] = None
                    continue
                is_needed = parameter is not None and parameter.default is parameter.empty
                if name == "local_expert" and not is_needed:  # without it, a copy of the global one, if of its class
                    is_needed = type(value) is type(first := self._argument("global_expert")) and differ(value, first)
                if is_needed and isinstance(value, nn.Module):
                    arguments[name] = stand_in(type(self).__name__, name, value)
        return arguments, undescribed

    @_restricted_classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Lightning's method, with its arguments, which also says which of the mixture's own it needs.

        It makes the class that was saved or, where there is none under its name, such as ``__main__.Mine`` in another
        script, the class that it is called of.

        Raises:
            MisconfigurationException: if the mixture refuses an argument, or needs one that the checkpoint cannot
                describe. Pass it, as in ``load_from_checkpoint(path, global_expert=...)``.
        """
        # the parser does not take dataclasses, such as LoRA, as objects
        kwargs = {name: vars(value) if is_dataclass(value) else value for name, value in kwargs.items()}
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except (ArgumentError, ValueError) as error:  # of jsonargparse, in many lines, or of Lightning, without a cause
            cause: Any = error
            is_of_class = isinstance(error, ValueError) and error.__cause__ is None
            key = cls.__name__
            while not isinstance(cause, InvalidArgumentError) and (inner := cause.__cause__ or cause.__context__):
                if found := re.match(r'Parser key "(?!module")(.+)":', str(cause)):
                    key = f"{cls.__name__}: {found[1]}"
                cause = inner
            if is_of_class and isinstance(checkpoint_path, BytesIO):
                raise
        if isinstance(cause, InvalidArgumentError):
            raise cause
        if not is_of_class:
            raise MisconfigurationException(f"{key} cannot be used: {reason_of(cause)}.")
        checkpoint, file = torch.load(checkpoint_path, "cpu", weights_only=kwargs.get("weights_only")), BytesIO()
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY].pop("_class_path", None)
        torch.save(checkpoint, file)
        file.seek(0)
        return cls.load_from_checkpoint(file, *args, **kwargs)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Freezes what was frozen; refuses another argument than the one that was not described, or none.

        Raises:
            MisconfigurationException: if ``load_from_checkpoint`` did not get the argument.
        """
        arguments = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})  # also those that were passed
        for name, kind in checkpoint.get(_UNDESCRIBED, {}).items():
            value = self._argument(name)
            # a local expert may be a copy of a global one that was passed; a training that goes on has its own module
            if not (name in arguments or name == "local_expert" or self._trainer is not None):
                raise not_described(self, name, kind)
            if type(value).__name__ != kind:
                raise not_described(self, name, kind, value)
        if _FROZEN in checkpoint and self._trainer is None:  # a training that goes on has its own frozen parameters
            for name, parameter in self.named_parameters():
                parameter.requires_grad = name not in checkpoint[_FROZEN]  # a method is refused by a lazy layer's

    def _saved_arguments(self) -> dict[str, Any]:
        """The arguments in the configuration, and what a subclass of your own gave to ``save_hyperparameters``."""
        saved = dict(self.hparams) if getattr(self, "_hparams_name", None) == "kwargs" else {}
        return configured_arguments(self) | saved

    def _is_word(self, name: str, value: Any) -> bool:
        """Whether a subclass of your own got a value in place of an argument of this package, such as a gate's name."""
        if _is_own(type(self)) or name not in _kept_arguments(type(self)) or _is_part(value):
            return False
        if name in _OF_TRAINING:
            return not callable(value)
        made = self._argument(name)
        # a phase may have replaced a number or text of a configuration, but notes this in hparams
        return value is not None and value is not made and (callable(made) or name in self.hparams)

    def _argument(self, name: str) -> Any:
        """An argument of the constructor; those of this package's classes are attributes."""
        if name not in _kept_arguments(type(self)):
            return self._saved_arguments().get(name)
        return getattr(self, "criterion" if name == "loss" else name)  # ``loss`` itself is a method


def _called(criterion: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss; what it has in half precision, such as weights of classes, is of the outputs' type meanwhile."""
    if isinstance(criterion, nn.Module):
        own = (*criterion.named_parameters(), *criterion.named_buffers())
        if half := {name: precise(tensor) for name, tensor in own if tensor.dtype in (torch.float16, torch.bfloat16)}:
            return functional_call(criterion, half, (outputs, targets))
    return criterion(outputs, targets)


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Whether weights are equal up to the rounding of their type."""
    rounding = torch.finfo(one.dtype).eps if one.is_floating_point() else 0
    return torch.allclose(one.double(), other.double(), rtol=0, atol=1e-4 + 8 * rounding)


def _shown(weights: Tensor) -> list[float]:
    return [round(weight, 4) for weight in weights.flatten().tolist()]


def _shape(value: Any) -> str:
    """The shape of inputs or weights, or of those in a dict, or what they are instead of a tensor."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shape(each)}" for key, each in value.items())
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _is_own(kind: type) -> bool:
    return kind.__module__.startswith("fedmoe_pl.")


def _is_part(value: Any) -> bool:
    """Whether an argument is, or has, a module or a configuration's node of one."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_part, value))
    return isinstance(value, nn.Module) or (isinstance(value, Mapping) and "class_path" in value)


def _kept_arguments(kind: type) -> set[str]:
    """The arguments of a class and its bases that are from this package."""
    named = [inspect.signature(base).parameters for base in kind.__mro__ if _is_own(base)]
    return {name for parameters in named for name in parameters if name != "kwargs"}
