"""Sets up the data of a run, and checks them against model and metrics."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torchmetrics import Metric

from fedmoe_pl.checkpoints.checkpoint import is_of_run
from fedmoe_pl.checkpoints.files import DamagedFileError, read_json, write_json
from fedmoe_pl.checks import InvalidArgumentError, check_kind, naming, shown, tried, with_article
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.class_names import hint_of_values
from fedmoe_pl.data.map_style import leaves_of
from fedmoe_pl.data.own_client import add_clients
from fedmoe_pl.data.partitioners.given import AllToOne
from fedmoe_pl.evaluation.measure import predict
from fedmoe_pl.evaluation.metrics import check_values, measures_loss, names_of, predicts_classes
from fedmoe_pl.evaluation.outputs import described_batches, has_task, labelled_batches, mixture_of
from fedmoe_pl.evaluation.results import ACCURACIES, SPLITS
from fedmoe_pl.models import FixedGate, MixtureOfExperts
from fedmoe_pl.models.inputs import inputs_and_targets, inputs_of
from fedmoe_pl.models.layers import evaluating
from fedmoe_pl.models.mixtures.tasks import fits, range_problem
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.trees import copy_module

_OWN_CLIENT = "client.json"


def set_up(datamodule: FederatedDataModule, phases: Sequence[Phase], seed: int) -> None:
    """Sets up the data so that preprocessing learns only from training samples that opt in to every phase.

    If no sample opts out, preprocessing learns from all training samples, as without a federation. Data that are
    already set up stay as they are.
    """
    hint = ", such as FromDatasets or FromDataModule, which deal the samples of any others"
    if isinstance(datamodule, LightningDataModule):
        hint = f", such as FromDataModule({type(datamodule).__name__}(...), num_clients=10), which deals its samples"
    check_kind("Federation", "datamodule", datamodule, FederatedDataModule, hint)
    try:
        datamodule.prepare_data()
        datamodule.deal()
    except OSError as error:  # such as a missing file
        raise MisconfigurationException(f"{type(datamodule).__name__} cannot be read: {error}.") from error
    samples = _opted_in_everywhere(datamodule, phases, seed)
    if not datamodule.is_set_up:
        datamodule.learn_from = samples
    datamodule.setup()
    if not datamodule.has_learned or samples is None:
        return
    learned_from = datamodule.learn_from
    if not len(samples):
        problem, remedy = "no sample opts in in every phase", "run these phases in federations of their own"
    elif learned_from is None or not torch.isin(learned_from, samples).all():
        problem = "it was computed from samples that opt out, because setup was called before the federation"
        remedy = "leave setup to the federation"
    else:
        return
    what = "vocabulary" if datamodule.normalization is None else "normalization"
    remedy = remedy if what == "vocabulary" else f"give mean and std, or {remedy}"
    raise MisconfigurationException(f"{type(datamodule).__name__}: {what}: {problem}; {remedy}.")


def _opted_in_everywhere(datamodule: FederatedDataModule, phases: Sequence[Phase], seed: int) -> Tensor | None:
    """The training samples that opt in to every phase, shape (n,); None if no sample opts out of any phase.

    Phases whose result comes from a checkpoint do not count, because nothing leaves their clients.
    """
    train, validation = datamodule.train_samples, datamodule.validation_samples
    samples, number = train.indices, len(train.indices) + len(validation.indices)
    all_opt_in = True
    for opt_out in (phase.algorithm.opt_out for phase in phases if not phase.ckpt_path):
        chosen = opt_out.opted_in_of_all(train, seed).indices
        if len(chosen) + len(opt_out.opted_in_of_all(validation, seed, validation=True).indices) < number:
            samples, all_opt_in = samples[torch.isin(samples, chosen)], False
    return None if all_opt_in else samples


def write_own_client(folder: Path, client: int, datamodule: FederatedDataModule) -> None:
    """Writes into the run of a deployed federation's client which one it is, and what it knows of the federation."""
    known = {"num_clients": datamodule.num_clients, "num_classes": datamodule.num_classes}
    write_json(folder / _OWN_CLIENT, {"id": client, **known})


def set_up_as_saved(
    datamodule: FederatedDataModule, checkpoint: Path, phases: Sequence[Phase], seed: int
) -> int | None:
    """Sets up the data for a checkpoint's run; returns the client's id if the run was a single client's, else None."""
    path, own = checkpoint.parent.parent / _OWN_CLIENT, None
    if is_of_run(checkpoint) and path.is_file():
        try:
            own = read_json(path)
        except DamagedFileError as error:
            raise MisconfigurationException(
                f"ckpt_path is '{checkpoint}', a client's, but '{path}' is damaged; it must be as the run wrote it."
            ) from error
    if own is not None and not datamodule.is_set_up:
        datamodule.partitioner = AllToOne(own["id"])
    set_up(datamodule, phases, seed)
    if own is None:
        return None
    add_clients(datamodule, own["num_clients"], own["num_classes"])
    return own["id"]


_TRIED_SAMPLES = 8
_TRIED_OF_READER = 2
_TRIED_OF_GATE = 3
_MOST_TEXTS = 32  # texts that are searched for one that shows whether the model reads later tokens


class TooManyClassesError(InvalidArgumentError):
    """The data have more classes than the model has outputs."""


def check_task(
    phase: Phase, module: LightningModule, datamodule: FederatedDataModule, metrics: Mapping[str, Metric]
) -> None:
    """Refuses a module or metrics that do not fit the targets."""
    if datamodule.y.dim() > 2 and (datamodule.augmentation or datamodule.rotations):
        argument = "augmentation" if datamodule.augmentation else "rotations"
        because = f"targets of shape {tuple(datamodule.y.shape[1:])} would not be changed with the images"
        raise InvalidArgumentError(datamodule, argument, "given", "left out", because)
    if isinstance(module, MixtureOfExperts):
        with naming(phase):
            _check_batches(module, datamodule)
            _check_gate(module, datamodule)
    has_classes = predicts_classes(module, datamodule)
    needs_metrics = not (has_classes or isinstance(module, MixtureOfExperts))
    if not phase.evaluate and (has_classes or needs_metrics):
        return
    if needs_metrics and datamodule.reader is not None and not datamodule.reader.has_targets:
        because = (
            f"the data have {described_batches(datamodule)} without classes, so that no targets are known; let "
            "collate_fn make pairs of inputs and targets, or targets name a key of dicts"
        )
        raise InvalidArgumentError(str(phase), "evaluate", phase.evaluate, "False", because)
    if needs_metrics and not metrics:
        because = f"the targets of {type(datamodule).__name__} are not classes"
        raise InvalidArgumentError(
            "Federation", "metrics", None, f"given for {with_article(type(module).__name__)}", because
        )
    only_shape = has_classes and not metrics
    number = 1 if has_task(module, "causal_lm") else _TRIED_SAMPLES  # outputs of language models are large
    samples = datamodule.train_samples.indices[:1] if only_shape else datamodule.global_test[:number]
    who, whose = with_article(type(module).__name__), type(datamodule).__name__
    of_others = "" if isinstance(module, MixtureOfExperts) else " alone; with evaluate: false, a phase only trains it"
    with tried(f"{phase}: {who} does not accept the {described_batches(datamodule)} of {whose}{of_others}"):
        try:
            with evaluating(module):
                outputs = predict(module, datamodule, samples)[0]
                if only_shape:
                    predict(module, datamodule, datamodule.global_test[:1])
        except Exception as error:
            if datamodule.reader is None:
                _check_sizes(module, datamodule, error)
            raise
        targets = torch.cat([targets.cpu() for _, targets in labelled_batches(datamodule, samples, mixture_of(module))])
    if has_classes and (outputs.ndim != 2 or outputs.shape[1] < datamodule.num_classes):
        allowed = f"one that gives a score for each of {datamodule.num_classes} classes"
        because = f"its outputs have shape {tuple(outputs.shape[1:])} for a sample"
        if not (datamodule.y == 0).any():
            because += ", and no sample has class 0, with which labels begin"
        kind = TooManyClassesError if outputs.ndim == 2 else InvalidArgumentError
        part, arguments = _sized(module)
        if outputs.ndim == 2 and "num_classes" in arguments:
            allowed = f"at least {datamodule.num_classes}, as the data have"
            raise kind(part, "num_classes", outputs.shape[1], allowed, because)
        raise kind(str(phase), "model", module, allowed, because)
    if not has_classes and isinstance(module, MixtureOfExperts):
        _check_targets(module, datamodule, outputs, targets)
        _check_causal(phase, module, datamodule)
    if isinstance(module, MixtureOfExperts) and module.criterion is not None:
        _check_loss(phase, module, outputs, targets)
    check_values(metrics, module, outputs, targets)


def _sized(module: LightningModule) -> tuple[Any, Collection[str]]:
    """The network that sizes a mixture, and its constructor's arguments; empty if the network does not record sizes."""
    part = getattr(module, getattr(module, "sized_by", None) or "", None)
    return part, inspect.signature(type(part)).parameters if hasattr(part, "input_shape") else ()


def _check_sizes(module: LightningModule, datamodule: FederatedDataModule, error: Exception) -> None:
    """Refuses a network of the package that is not for the samples: all sizes at once, or the network if none help."""
    (part, arguments), shape = _sized(module), tuple(datamodule.x.shape[1:])
    sizes, size = {"in_features": (0, math.prod(shape))}, getattr(part, "input_shape", ())[1:]
    if len(shape) == 3:
        sizes |= {"in_channels": (0, shape[0]), "image_size": (1, shape[1])}
    wrong = {
        argument: needed
        for argument, (index, needed) in sizes.items()
        if argument in arguments and part.input_shape[index] != needed
    }
    if len(shape) == 3 and shape[0] == shape[1] != shape[2]:
        allowed = f"{(shape[2], *shape[:2])}, with the channels first, as x.permute(0, 3, 1, 2) gives"
        raise InvalidArgumentError(datamodule, "shape of a sample", shape, allowed) from error
    if len(shape) == 3 and size and size != shape[1:]:
        because = f"it takes {'square images' if 'image_size' in wrong else _pixels(size)}"
        is_sizable = "image_size" in wrong and shape[1] == shape[2]
        try:
            if is_sizable:
                type(part)(**{name: getattr(part, name) for name in arguments if hasattr(part, name)} | wrong)
        except InvalidArgumentError as refusal:
            is_sizable, because = False, f"its {refusal.argument} must be {refusal.allowed}"
        if not is_sizable:
            other = "TwoConvCNN with this image_size" if 16 <= shape[1] == shape[2] else "SmallMLP"
            allowed = f"a network for {_pixels(shape[1:])}, such as {other}"
            raise InvalidArgumentError(module, str(module.sized_by), part, allowed, because) from error
    if not wrong:
        return
    (argument, needed), *others = wrong.items()
    outputs = getattr(part, "num_classes", datamodule.num_classes)
    others += [("num_classes", datamodule.num_classes)] if outputs < datamodule.num_classes else []
    allowed = f"{needed}{', with ' if others else ''}{' and '.join(f'{name} {value}' for name, value in others)}"
    because = f"the samples of {type(datamodule).__name__} have shape {shape}"
    raise InvalidArgumentError(part, argument, part.input_shape[sizes[argument][0]], allowed, because) from None


def _pixels(size: Sequence[int]) -> str:
    return f"images of {' x '.join(map(str, size))} pixels"


def _check_batches(module: MixtureOfExperts, datamodule: FederatedDataModule) -> None:
    """Refuses batches of a reader in which a mixture would find the wrong targets, or none."""
    if (reader := datamodule.reader) is None:
        return
    is_text = module.task == "causal_lm"  # texts: enough of them to have different lengths
    indices = [*range(min(_TRIED_SAMPLES if is_text else _TRIED_OF_READER, len(datamodule.y)))]
    for source in (reader.training, reader.evaluation):
        batch, key, of_data = source[indices, 0], module.target_key, reader.data.target_key
        if isinstance(batch, Mapping) and of_data in batch and of_data != key:
            because = f"it is the key of the targets of {type(datamodule).__name__}"
            raise InvalidArgumentError(module, "target_key", key, f"'{of_data}'", because)
        if source is reader.evaluation and datamodule.num_classes:
            continue  # the classes are known
        x, y = inputs_and_targets(batch, key, module.task)
        mask = x.get("attention_mask") if isinstance(x, Mapping) and is_text else None
        if isinstance(mask, Tensor) and bool((mask[:, 0] == 0).any()):
            raise MisconfigurationException(
                f"{type(datamodule).__name__}: collate_fn pads texts on the left, but must pad them on the right, "
                "because their first token would be predicted from padding."
            )
        if texts := [leaf for leaf in leaves_of(y) if isinstance(leaf, str)]:
            raise MisconfigurationException(
                f"{type(datamodule).__name__}: the targets of a batch are {texts}, but must be numbers; let the "
                "dataset or collate_fn make them."
            )
        expected = datamodule.y[indices]
        are_classes = datamodule.num_classes and isinstance(y, Tensor) and not y.is_floating_point()
        if are_classes and not torch.equal(y, expected.to(y.dtype)):
            allowed = f"the key of the classes, {expected.tolist()} for the first samples"
            raise InvalidArgumentError(module, "target_key", key, allowed, f"batches have {y.tolist()} there")


def _check_gate(module: MixtureOfExperts, datamodule: FederatedDataModule) -> None:
    """Refuses a gate whose weights for some samples are not valid."""
    samples = datamodule.train_samples.indices[:_TRIED_OF_GATE]
    if isinstance(getattr(module, "gate", None), FixedGate | None) or not len(samples):
        return
    who, whose = with_article(type(module).__name__), type(datamodule).__name__
    with tried(f"{who} does not accept the {described_batches(datamodule)} of {whose}"):
        for batch, _ in labelled_batches(datamodule, samples, module):
            module.check_gate(move_data_to_device(inputs_of(batch, module.target_key), module.device))


def _check_causal(phase: Phase, module: MixtureOfExperts, datamodule: FederatedDataModule) -> None:
    """Refuses a language model whose scores for a token depend on this token or later ones."""
    samples = datamodule.train_samples.indices[: _MOST_TEXTS if module.task == "causal_lm" else 0]
    for batch in (batch for each in samples.split(1) for batch, _ in labelled_batches(datamodule, each, module)):
        x, y = inputs_and_targets(move_data_to_device(batch, module.device), module.target_key, module.task)
        ids = x.get("input_ids") if isinstance(x, Mapping) else x
        if not isinstance(ids, Tensor) or ids.shape != y.shape or not (y[0, 1:] != -100).any():
            continue
        last = int((y[0, 1:] != -100).nonzero()[0])
        if (ids[0, last:] == ids[0, last]).all():  # nothing would change
            continue
        ids = torch.cat((ids[:, : last + 1], ids[:, last : last + 1].expand_as(ids[:, last + 1 :])), dim=1)
        other = {**x, "input_ids": ids} if isinstance(x, Mapping) else ids
        with torch.no_grad(), evaluating(module):
            scores, others = (module(each)[:, last] for each in (x, other))
        rounding = min(100 * torch.finfo(scores.dtype).eps, 0.1)
        if (scores - others).abs().max() > rounding * scores.abs().max():
            because = "the task is 'causal_lm', and its scores for a token change with this token"
            raise InvalidArgumentError(str(phase), "model", module, "one that reads no later tokens", because)
        return


def _check_targets(module: MixtureOfExperts, datamodule: FederatedDataModule, outputs: Tensor, targets: Tensor) -> None:
    """Refuses a mixture's task if its loss cannot compare the outputs with the targets."""
    known = datamodule.y if datamodule.y.numel() else targets  # from a reader, only a few are known
    if module.task == "regression" and datamodule.num_classes and datamodule.classes:
        hint = hint_of_values(datamodule.classes) or "; floating-point targets are values"
        because = f"these are the numbers of classes, 0 for '{datamodule.classes[0]}'{hint}"
    elif module.task == "multiclass" and targets.is_floating_point():
        because = f"its targets are {targets.dtype}, but classes must be integers, as from y.argmax(1) or y.astype(int)"
    elif not fits(module.task, outputs, targets):
        shapes = tuple(outputs.shape[1:]), tuple(targets.shape[1:])
        because = f"outputs of shape {shapes[0]} do not fit targets of shape {shapes[1]} for this task"
        if module.task == "multiclass" and len(shapes[1]) == 1:
            because += f"; classes are y.{'squeeze' if shapes[1] == (1,) else 'argmax'}(1)"
    elif problem := range_problem(module.task, module.criterion, outputs, known):
        because = f"they have {problem}"
    else:
        return
    allowed = f"one that fits the targets of {type(datamodule).__name__}"
    raise InvalidArgumentError(module, "task", module.task, allowed, because)


def _check_loss(phase: Phase, module: MixtureOfExperts, outputs: Tensor, targets: Tensor) -> None:
    """Refuses a loss that fails, and one that gives no mean: without it, Lightning trains nothing."""
    twice = torch.cat((outputs, outputs)), torch.cat((targets, targets))  # of one sample, any loss is the mean
    with tried(f"{phase}: the loss of {with_article(type(module).__name__)} fails"):
        loss: Any = copy_module(module).loss_of(*twice)  # it may note something
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        because = f"it gives {f'values of shape {tuple(loss.shape)}' if isinstance(loss, Tensor) else shown(loss)}"
        raise InvalidArgumentError(module, "loss", module.criterion, "one that gives the mean, as a tensor", because)


def check_metric(
    owner: object,
    argument: str,
    metric: str | None,
    datamodule: FederatedDataModule,
    metrics: Mapping[str, Metric],
    modules: Iterable[LightningModule],
) -> None:
    """Refuses a metric that would be NaN for all clients."""
    known = [] if metric is None else measured(datamodule, metrics, modules)
    if metric is not None and metric not in known:
        allowed, because = f"one of {', '.join(known)}" if known else "left out", "no client has another metric"
        if metric in datamodule.withheld:
            because = "clients report no other metric; see federation.reports.metrics"
        elif not len(datamodule.validation_samples.indices):
            of_validation = "a validation metric, such as validation_accuracy, with a validation_fraction of the data"
            allowed = f"{of_validation}, or {allowed}"
        raise InvalidArgumentError(owner, argument, metric, allowed, because)


def measured(
    datamodule: FederatedDataModule, metrics: Mapping[str, Metric], modules: Iterable[LightningModule]
) -> list[str]:
    """The names of the metrics that at least one client has, or may have where this machine knows one client alone."""
    modules, alone = [*modules], isinstance(datamodule.partitioner, AllToOne)
    has_classes = any(predicts_classes(module, datamodule) for module in modules)
    has_loss = any(measures_loss(module, datamodule) for module in modules)
    known = [*(ACCURACIES if has_classes else ()), *names_of(metrics, has_loss)]
    known += ["validation_loss"] if has_classes or has_loss else []
    lacking = {
        "validation": not (alone or len(datamodule.validation_samples.indices)),
        "local_test": not (alone or len(datamodule.test_samples.indices)),
        "reweighted_test": datamodule.rotations is not None,
    }
    lacking = [split for split, lacks in lacking.items() if lacks]
    return [name for name in known if not name.startswith((*lacking,)) and name not in datamodule.withheld]


def check_direction(owner: object, argument: str, monitor: str | None, metrics: Mapping[str, Metric]) -> None:
    """Refuses a metric that does not say whether a higher value is better."""
    for name, metric in metrics.items():
        if monitor in [f"{split}_{name}" for split in SPLITS] and metric.higher_is_better is None:
            allowed = "a metric whose higher_is_better is true or false"
            raise InvalidArgumentError(owner, argument, monitor, allowed)
