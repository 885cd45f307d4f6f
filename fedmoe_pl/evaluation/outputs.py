"""A model's outputs for batches of any form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import TypeVar

from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.map_style import is_pair
from fedmoe_pl.models import FixedGate, MixtureOfExperts, MixtureWeights
from fedmoe_pl.models.inputs import inputs_and_targets, inputs_of
from fedmoe_pl.models.layers import modes_of, set_modes
from fedmoe_pl.models.mixtures.tasks import Task
from fedmoe_pl.trees import Tree, load_tree

# a client's module, for type checkers
ClientModule = TypeVar("ClientModule", bound=LightningModule, default=MixtureOfExperts)

_modes = WeakKeyDictionary[nn.Module, list[bool]]()  # modes of a module's parts before its first evaluation


def load_to_evaluate(module: nn.Module, tree: Tree) -> None:
    """Loads tensors into a module and puts it in eval mode, which may change tensors, for example to merge adapters."""
    given = _modes.setdefault(module, [*modes_of(module).values()])
    set_modes(dict(zip(module.modules(), given, strict=False)))  # not strict: a call may have added parts
    load_tree(module, tree)
    module.eval()


class Predictor(LightningModule):
    """A client's module that predicts scores (n, ...) in the algorithm's own way; it has no gate weights."""

    def __init__(self, module: LightningModule, predict: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.predict = predict
        self.to(module.device)

    def forward(self, x: Tensor) -> Tensor:
        """The scores of samples."""
        return self.predict(x)


def mixture_of(module: LightningModule) -> MixtureOfExperts | None:
    """The mixture that defines the outputs' task and loss; None if the module is not a mixture."""
    inner = module.module if isinstance(module, Predictor) else module
    return inner if isinstance(inner, MixtureOfExperts) else None


def has_task(module: LightningModule, task: Task) -> bool:
    """Whether a module is a mixture with this task, or predicts with one."""
    mixture = mixture_of(module)
    return mixture is not None and mixture.task == task


def own_batch(datamodule: FederatedDataModule, client: int, number: int | None = None) -> tuple[Tensor, Any]:
    """Indices of a client's first held-out samples, or if it has none, training samples with a label; their batch."""
    held_out = datamodule.test_samples[client]
    samples = (held_out if len(held_out) else datamodule.labelled(datamodule.train_samples[client]))[:number]
    (batch,) = datamodule.batches(samples, batch_size=len(samples))
    return samples, batch


def labelled_batches(
    datamodule: FederatedDataModule, samples: Tensor, mixture: MixtureOfExperts | None = None
) -> Iterator[tuple[Any, Tensor]]:
    """Large batches of some samples, each with its targets: their classes or, if the data have none, those in it.

    A mixture knows the key of the targets in a dict, and which tokens are padding.
    """
    size = datamodule.evaluated_at_once
    for batch, indices in zip(datamodule.batches(samples, batch_size=size), samples.split(size), strict=False):
        if datamodule.reader is None:
            targets = batch[1]
        elif mixture is not None and not datamodule.num_classes:
            targets = inputs_and_targets(batch, mixture.target_key, mixture.task)[1]
        else:  # if there are classes, batches may hold them in another form, such as probabilities
            targets = None if datamodule.num_classes else datamodule.reader.targets_of(batch)
        found = targets if isinstance(targets, Tensor) else datamodule.y[indices]
        number = len(batch[1] if is_pair(batch) and isinstance(batch[1], Tensor) else found)
        if number != len(indices):
            raise MisconfigurationException(
                f"{type(datamodule).__name__}: collate_fn makes {number} samples of {len(indices)}, but must keep all, "
                "so that each counts for its client; leave some out in the dataset."
            )
        yield batch, found


def outputs_of(module: LightningModule, batch: Any, is_pair: bool) -> tuple[Tensor, Tensor | None]:
    """Scores (b, C), and weights (b, experts) of a gate that is not constant, or None, on the module's device."""
    mixture = mixture_of(module)
    if is_pair or mixture is not None:
        x = batch[0] if mixture is None else inputs_of(batch, mixture.target_key)
        x = move_data_to_device(x, module.device)
        if has_trained_gate(module):
            return module.mix(x)
        if not isinstance(scores := module(x), Tensor):
            raise TypeError(f"its forward must return the scores as one tensor, and not a {type(scores).__name__}")
        return scores, None
    outputs = module.predict_step(move_data_to_device(batch, module.device), 0)
    scores = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    if not isinstance(scores, Tensor):
        raise TypeError("its predict_step must return the scores, or a mapping with the scores as 'logits'")
    return scores, None


def described_batches(datamodule: FederatedDataModule) -> str:
    """Describes the samples or batches of the data, for messages."""
    (batch,) = datamodule.batches(datamodule.train_samples.indices[:1])
    x = batch[0] if datamodule.has_pairs else batch
    return f"samples of shape {tuple(x.shape[1:])}" if isinstance(x, Tensor) else f"batches of {type(x).__name__}"


def has_trained_gate(module: LightningModule) -> TypeGuard[MixtureOfExperts]:
    """Whether the module is a mixture whose weights differ between samples or clients."""
    if not isinstance(module, MixtureOfExperts):
        return False
    return isinstance(module.gate, MixtureWeights) or not isinstance(module.gate, FixedGate)


class ScoresAndWeights(nn.Module):
    """Wraps a module so that it returns scores and, if it has a trained gate, the experts' weights."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.names = ("scores", "gate_weights") if has_trained_gate(module) else ("scores",)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in the order of their names."""
        return self.module.mix(x) if len(self.names) > 1 else (self.module(x),)  # pyright: ignore[reportCallIssue]
