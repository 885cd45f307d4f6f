"""Exports clients' models: for use without this package, checked on real samples, as adapters, or for Lightning."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning import __version__
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.parsing import clean_namespace
from torch import Tensor, nn

from fedmoe_pl.checkpoints.files import replacing, replacing_files, write_file
from fedmoe_pl.checks import InvalidArgumentError, check_choice, with_article
from fedmoe_pl.data import FederatedDataModule, TimeSeriesDataModule
from fedmoe_pl.evaluation.client_models import have_one_model
from fedmoe_pl.evaluation.measure import pieces_of
from fedmoe_pl.evaluation.outputs import ScoresAndWeights, own_batch
from fedmoe_pl.models import AdapterMoE
from fedmoe_pl.models.adapter_files import adapter_of, adapter_of_mixture, merged, peft_model, save_base
from fedmoe_pl.models.description import configured_arguments, hyperparameters_of
from fedmoe_pl.models.inputs import call, inputs_of, rows_of
from fedmoe_pl.models.mixtures.sparse import dense_experts
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.trees import same_values, subtree

Format = Literal["onnx", "torch_export", "lightning", "peft", "merged"]
SUFFIXES = {"onnx": ".onnx", "torch_export": ".pt2", "lightning": ".ckpt", "peft": "", "merged": ""}
ABOUT = "data.json"
"""What a file for use without this package says of its data under this name, as JSON; see :func:`export_clients`."""
_OF_ONNX = ("onnx", "onnxruntime", "onnxscript")
_SAMPLES, _SAMPLES_OF_ADAPTERS = 256, 64  # that the exported model is checked on
_TOLERANCE = 1e-3  # relative and absolute, of outputs
_HALF_TOLERANCE = 32  # in its place for a base in half precision: times the step from 1 to the next number
_ANY_SIZE: Any = {"x": {0: torch.export.Dim("batch")}}

Function = Callable[[Tensor], tuple[Tensor, ...]]


def write_lightning(run: Run, method: str, paths: Mapping[int, Path]) -> list[Path]:
    """Writes the models of clients as checkpoints of Lightning; one for all if several have the same model.

    The arguments of PyTorch's and this package's modules are known, and those of all classes and functions that a
    configuration names; of your own classes in Python, the numbers, texts, functions and modules that they gave to
    ``save_hyperparameters()``. Pass others to ``load_from_checkpoint``.
    """
    phase, evaluation_point = run.phase_and_point(method)
    training, state, clients = run.training(phase), run.states[phase.name], [*paths]
    if len(paths) > 1 and have_one_model(training, state.server, state.clients, clients, evaluation_point):
        client, path = next(iter(paths.items()))
        paths = {client: path.with_name("all_clients.ckpt")}
    for path, module in zip(paths.values(), run.client_modules(method, paths), strict=True):
        with replacing(path) as temporary:
            torch.save(lightning_checkpoint(module), temporary)
    return [*paths.values()]


def lightning_checkpoint(module: LightningModule) -> dict[str, Any]:
    """What ``Trainer.save_checkpoint`` writes of a module; from a configuration, with the arguments in it."""
    key, hyperparameters = module.CHECKPOINT_HYPER_PARAMS_KEY, dict(module.hparams)
    clean_namespace(hyperparameters)
    checkpoint = {"pytorch-lightning_version": __version__, "state_dict": module.state_dict(), key: hyperparameters}
    if arguments := configured_arguments(module):
        checkpoint[key] = hyperparameters_of(module, arguments)
    elif hyperparameters:  # the name of the constructor's argument that holds all of them, if there is one
        checkpoint[module.CHECKPOINT_HYPER_PARAMS_NAME] = getattr(module, "_hparams_name", None)
    module.on_save_checkpoint(checkpoint)
    return checkpoint


def export_clients(
    run: Run,
    method: str,
    client: str | int = 0,  # a text first: on the command line, 2 may be a name
    format: Format = "onnx",
    output: str | None = None,
) -> str:
    """Writes a client's model, with its gate, to one file; or those of all clients.

    For use without this package, the model has the input ``x``, a batch of any size, and the outputs ``scores`` (B, C)
    and, if it has a trained gate, ``gate_weights`` (B, experts). Its outputs are compared with the module's on the
    client's own samples: on a batch of at most 256, and on the first sample alone. The file has none of them. It says
    what the numbers mean in ``data.json``, an extra file of ``torch.export.load`` and an entry of the metadata of ONNX:
    ``classes``, their names in the order of the scores, ``mean`` and ``std``, by which images in [0, 1] were
    normalized, and ``image_size``, to which the shorter side was resized (bilinear, with antialiasing) before the
    square centre was cut out; what the data do not know is left out. Of time series, ``mean`` and ``std`` are those of
    the client's variables, if all its windows are of one client's series in the data. ``vocabulary`` are the words of
    texts in the order of their ids, as the data module numbers them (of ``AGNews``, from 2), and ``columns`` the names
    of a table's columns in their order in ``x``.

    Args:
        run: a run from a checkpoint.
        method: a row of the table.
        client: the client's number or name, or ``all``.
        format: ``onnx``, checked with onnxruntime; ``torch_export``, a file for ``torch.export.load``; or
            ``lightning``, a checkpoint for ``load_from_checkpoint``, a single one for all clients with the same model,
            also of a method that predicts with more, as kNN-Per and FedProto with ``prediction: prototype`` do;
            ``peft``, folders for ``PeftModel.from_pretrained``; or ``merged``, a folder for ``from_pretrained``.
        output: the file or, for all clients, the folder; None for ``exported/<method>`` in the run's folder.

    Returns:
        What was written, and how far the outputs are from the module's.

    Raises:
        MisconfigurationException: if an argument is wrong, the model cannot be exported, or the exported one computes
            something else.
    """
    names = run.datamodule.client_names
    clients = [*run.clients] if client == "all" else [names.number("Federation", client)]
    if run.only_client not in (None, *clients):
        raise InvalidArgumentError("Federation", "client", client, f"{run.only_client}, whose machine it is")
    check_choice("Federation", "format", format, get_args(Format))
    if format == "onnx" and (missing := [name for name in _OF_ONNX if find_spec(name) is None]):
        raise MisconfigurationException(
            f'format onnx needs {", ".join(missing)}: pip install ".[export]" in the repository.'
        )
    algorithm, data = run.phase_and_point(method)[0].algorithm, run.datamodule
    if format in ("onnx", "torch_export") and (
        algorithm.predictor is not None
        or not (data.has_pairs and isinstance(own_batch(data, clients[0], 1)[1][0], Tensor))
    ):
        allowed = "one whose model maps a tensor to scores"
        because = f"{type(algorithm).__name__} predicts with more than a model, or its data are no pairs of tensors"
        raise InvalidArgumentError("Federation", "method", method, allowed, because)
    folder = run.folder / "exported" / method if output is None else Path(output)
    paths = {each: folder / f"{names.file(each)}{SUFFIXES[format]}" for each in clients}
    if output is not None and client != "all":
        paths = {clients[0]: folder}
    if format == "lightning":
        return "\n".join(f"{method}: {path}" for path in write_lightning(run, method, paths))
    if format in ("peft", "merged"):
        write = _write_adapters if format == "peft" else _write_merged
        return "\n".join(line for each, path in paths.items() for line in write(run, method, each, path))
    return "\n".join(_export(run, method, each, format, path) for each, path in paths.items())


def _export(run: Run, method: str, client: int, format: Format, path: Path) -> str:
    module = ScoresAndWeights(run.client_module(method, client)).eval()
    x = own_batch(run.datamodule, client, _SAMPLES)[1][0].cpu()
    content, difference = _exported(module, x, method, format, json.dumps(_about(run.datamodule, client)))
    if not difference <= _TOLERANCE:
        because = f"its outputs differ by {difference:.1e} from the module's"
        raise InvalidArgumentError("Federation", "format", format, "one in which the model computes the same", because)
    write_file(path, content)
    name = run.datamodule.client_names[client]
    return (
        f"Client {name} of {method}: {path} ({len(content):,} bytes; {' and '.join(module.names)} for x)\n"
        f"On {len(x)} of its samples, the outputs differ by at most {difference:.1e} from the module's."
    )


def _about(datamodule: FederatedDataModule, client: int) -> dict[str, Any]:
    """What somebody who has only the client's model needs to know of its data."""
    mean, std = datamodule.normalization or (None, None)
    if isinstance(datamodule, TimeSeriesDataModule):
        mean, std = _scale(datamodule, client)
    size = getattr(datamodule, "image_size", None)
    known = {"classes": datamodule.classes, "mean": mean, "std": std, "image_size": size}
    known |= {"vocabulary": datamodule.vocabulary, "columns": datamodule.columns}
    return {name: value for name, value in known.items() if value is not None}


def _scale(datamodule: TimeSeriesDataModule, client: int) -> list[Any]:
    """Mean and standard deviation of a client's variables; None for both if it has windows of several clients' series.

    Neither its name nor its number says whose series they are: a deployed client is called by a number.
    """
    parts = datamodule.train_samples, datamodule.validation_samples, datamodule.test_samples
    owners = np.unique(datamodule.owners[torch.cat([part[client] for part in parts]).numpy()])
    return [*datamodule.scales.values()][owners[0]].tolist() if len(owners) == 1 else [None, None]


def _exported(module: ScoresAndWeights, x: Tensor, method: str, format: str, about: str) -> tuple[bytes, float]:
    """The content of the file, and the largest difference of its outputs from the module's."""
    try:
        # which samples an expert receives depends on the data, which an exporter cannot follow
        with dense_experts(), _silent():
            # the file keeps the example, and an exporter takes a batch of one for a constant
            example = x.new_zeros(2, *x.shape[1:])
            content, exported = (_onnx if format == "onnx" else _torch_export)(module, example, about)
        return content, max(_difference(module, exported, batch) for batch in (x, x[:1]))
    except Exception as error:  # whatever torch's exporters raise
        allowed = f"one whose model {format} can export ({_reason(error)})"
        raise InvalidArgumentError("Federation", "method", method, allowed) from error


def _reason(error: BaseException) -> str:
    """The first line of the message of an exception's first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[\d*m", "", str(error)).strip()  # colors
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


@contextmanager
def _silent() -> Iterator[None]:
    """Drops what torch's exporters print, log and warn: graphs, steps, and their own functions' deprecations."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _torch_export(module: ScoresAndWeights, x: Tensor, about: str) -> tuple[bytes, Function]:
    program = torch.export.export(module, (x,), dynamic_shapes=_ANY_SIZE, strict=False)
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={ABOUT: about})
    content.seek(0)
    return content.getvalue(), torch.export.load(content).module()


def _onnx(module: ScoresAndWeights, x: Tensor, about: str) -> tuple[bytes, Function]:
    import onnxruntime  # pyright: ignore[reportMissingImports]  optional

    program: Any = torch.onnx.export(
        module,
        (x,),
        dynamo=True,
        dynamic_shapes=_ANY_SIZE,
        input_names=["x"],
        output_names=[*module.names],
        verbose=False,
    )
    model = program.model_proto
    model.metadata_props.add(key=ABOUT, value=about)
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(array) for array in session.run(None, {"x": x.numpy()}))

    return content, run


def _difference(module: ScoresAndWeights, exported: Function, x: Tensor) -> float:
    with torch.no_grad():
        return max(_relative_difference(ours, theirs) for ours, theirs in zip(module(x), exported(x), strict=True))


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two outputs, as a share of ours where that is above 1; infinite for nan."""
    return float(((theirs - ours).abs() / ours.abs().clamp(min=1)).max().nan_to_num(nan=float("inf")))


def _write_adapters(run: Run, method: str, client: int, folder: Path) -> Iterator[str]:
    """Writes each of a client's experts as a folder of peft, with the layers that are trained as a whole.

    They are ``global_expert`` and ``local_expert``, or of clusters ``global_experts.<place>``, and, where a single
    adapter can compute what the mixture does, ``mixture``. Yields what was written.
    """
    module = _adapter_moe(run, method, client)
    _check_base(run, method, module)
    parts = {part: adapter_of(module, part) for part in module.weighed_parts}
    if (adapter := adapter_of_mixture(module)) is not None:
        parts["mixture"] = adapter
    x = _inputs(run, client, module)
    for part, adapter in parts.items():
        model = peft_model(module.plain_base(), adapter)
        expected = module if part == "mixture" else module.get_submodule(part)
        compared = _compared(module, expected, model, x)
        with replacing_files(folder / part) as temporary:
            # the base's embedding is no part of an adapter, also where it has one
            model.save_pretrained(str(temporary), save_embedding_layers=False)
        yield f"Client {run.datamodule.client_names[client]} of {method}: {folder / part} ({compared})"


def _write_merged(run: Run, method: str, client: int, folder: Path) -> Iterator[str]:
    """Writes a copy of the base with a client's mixture in its weights, and yields what was written."""
    module = _adapter_moe(run, method, client)
    if (adapter := adapter_of_mixture(module)) is None:
        allowed = "one whose gate uses one expert, or mixes inside of layers with constant weights"
        because = "no weights of the base compute this mixture; the format peft has its experts"
        raise InvalidArgumentError("Federation", "method", method, allowed, because)
    base = merged(module.plain_base(), adapter)
    compared = _compared(module, module, base, _inputs(run, client, module))
    with replacing_files(folder) as temporary:
        save_base(base, temporary)
    yield f"Client {run.datamodule.client_names[client]} of {method}: {folder} ({compared})"


def _adapter_moe(run: Run, method: str, client: int) -> AdapterMoE:
    """A client's module; refuses one without adapters."""
    module: Any = run.client_module(method, client)
    if not isinstance(module, AdapterMoE):
        because = f"only this model has adapters, and that of '{method}' is {with_article(type(module).__name__)}"
        raise InvalidArgumentError("Federation", "method", method, "one whose model is an AdapterMoE", because)
    return module


def _check_base(run: Run, method: str, module: AdapterMoE) -> None:
    """Refuses adapters of a base that is no longer the one that others have."""
    base = subtree(run.initial_model(run.phase_and_point(method)[0]).state_dict(), "base.")
    changed = (name for name, tensor in module.base.state_dict().items() if not same_values(base[name], tensor))
    if (name := next(changed, None)) is not None:
        because = f"it has changed {name}, so that the adapters are not those of your base; the format merged has it"
        raise InvalidArgumentError("Federation", "method", method, "one that leaves the base as it is", because)


def _inputs(run: Run, client: int, module: AdapterMoE) -> Any:
    """Inputs of a client's test samples or, if it has none, of its training samples."""
    batch = own_batch(run.datamodule, client, _SAMPLES_OF_ADAPTERS)[1]
    return move_data_to_device(inputs_of(batch, module.target_key), torch.device("cpu"))


def _compared(module: AdapterMoE, expected: nn.Module, model: nn.Module, x: Any) -> str:
    """How far a model's outputs are from those of the module, or of its expert, in words; refuses too much of it."""
    differences = []
    with torch.no_grad():
        for piece in (rows_of(x, rows) for rows in pieces_of(module, x)):
            ours, theirs = expected(piece), call(model, module.prepared(piece))
            theirs = module.scores_of(theirs) if expected is module else theirs
            differences.append(_relative_difference(ours, theirs))
    largest = max(differences)
    types = {tensor.dtype for tensor in module.base.parameters() if tensor.dtype in (torch.float16, torch.bfloat16)}
    if not largest <= max([_TOLERANCE, *(_HALF_TOLERANCE * torch.finfo(dtype).eps for dtype in types)]):
        because = f"its outputs differ by {largest:.1e} from the module's"
        raise InvalidArgumentError("LoRA", "lora", module.lora, "one that peft computes in the same way", because)
    return f"outputs differ by at most {largest:.1e} from the module's"
