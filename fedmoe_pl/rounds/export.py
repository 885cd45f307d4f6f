"""Exports a client's model for use without this package, and checks it on real samples."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedmoe_pl.rounds.outputs import has_trained_gate
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.rounds.writing import replacing

Format = Literal["onnx", "torch_export"]
SUFFIXES = {"onnx": ".onnx", "torch_export": ".pt2"}
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_SAMPLES = 256  # that the exported model is checked on
_TOLERANCE = 1e-3  # relative and absolute, of scores and weights

Function = Callable[[Tensor], tuple[Tensor, ...]]


def export_client(
    run: Run, method: str | None = None, client: int = 0, format: Format = "onnx", output: str | None = None
) -> str:
    """Writes a client's model, with its gate, to one file, and compares its outputs with the module's.

    The exported model has the input ``x``, a batch of any size, and the outputs ``scores`` (B, C) and, if it has a
    trained gate, ``gate_weights`` (B, experts). It is checked on the client's own samples: on a batch of at most 256,
    and on the first sample alone.

    Args:
        run: a run from a checkpoint.
        method: a row of the table.
        client: the client's id.
        format: ``onnx``, checked with onnxruntime, or ``torch_export``, a file for ``torch.export.load``.
        output: the file; None for ``exported/<method>/client_<id>`` in the run's folder.

    Returns:
        What was written, and how far the outputs are from the module's.

    Raises:
        MisconfigurationException: if an argument is wrong, a library is missing, the model cannot be exported, or the
            exported one computes something else.
    """
    method = _check(run, method, client, format)
    module = _Outputs(run.client_module(method, client)).eval()
    samples = run.datamodule.test_samples[client]
    samples = (samples if len(samples) else run.datamodule.train_samples[client])[:_SAMPLES]
    ((x, _),) = run.datamodule.batches(samples, batch_size=len(samples))
    x = x.cpu()
    try:
        content, exported = (_onnx if format == "onnx" else _torch_export)(module, x)
    except Exception as error:  # whatever torch's exporters raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise MisconfigurationException(
            f"Federation: method is '{method}', but must be one whose model {format} can export ({reason[0]})."
        ) from error
    difference = max(_difference(module, exported, batch) for batch in (x, x[:1]))
    if not difference <= _TOLERANCE:
        raise MisconfigurationException(
            f"Federation: format is {format}, but must be one in which the model computes the same; its outputs differ "
            f"by {difference:.1e} from the module's."
        )
    default = run.folder / "exported" / method / f"client_{client:03d}{SUFFIXES[format]}"
    path = Path(output) if output else default
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    names = " and ".join(module.names)
    return (
        f"Client {client} of {method}: {path} ({len(content):,} bytes; {names} for x)\n"
        f"On {len(x)} of its samples, the outputs differ by at most {difference:.1e} from the module's."
    )


def _check(run: Run, method: str | None, client: int, format: str) -> str:
    """The method, if everything can be exported so."""
    rows = [evaluation for state in run.states.values() for evaluation in state.evaluations]
    methods = [evaluation.method for evaluation in rows]
    if method is None or method not in methods:
        raise MisconfigurationException(
            f"Federation: method is {method if method is None else repr(method)}, but must be one of the finished "
            f"{', '.join(methods) or '(none)'}."
        )
    if not 0 <= client < run.datamodule.num_clients:
        raise MisconfigurationException(
            f"Federation: client is {client}, but must be from 0 to {run.datamodule.num_clients - 1}."
        )
    if format not in get_args(Format):
        raise MisconfigurationException(
            f"Federation: format is '{format}', but must be {' or '.join(get_args(Format))}."
        )
    algorithm = run.phase_and_moment(method)[0].algorithm
    if algorithm.has_predictor or not run.datamodule.has_pairs:
        reason = f"{type(algorithm).__name__} predicts with more than a model"
        if not run.datamodule.has_pairs:
            reason = "the batches of its data are no pairs of inputs and targets"
        raise MisconfigurationException(
            f"Federation: method is '{method}', but must be one whose model maps a tensor to scores; {reason}."
        )
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if format == "onnx" and missing:
        raise MisconfigurationException(
            f"Federation: format is 'onnx', but must be torch_export, because {', '.join(missing)} is not installed: "
            'pip install "fedmoe-pl[export]".'
        )
    return method


class _Outputs(nn.Module):
    """A client's module, whose outputs are its scores and, if it has a trained gate, the weights of the experts."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.names = ("scores", "gate_weights") if has_trained_gate(module) else ("scores",)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.module.mix(x) if len(self.names) > 1 else (self.module(x),)  # pyright: ignore[reportCallIssue]


def _torch_export(module: _Outputs, x: Tensor) -> tuple[bytes, Function]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own functions
        program = torch.export.export(module, _example(x), dynamic_shapes=_any_size())
        content = io.BytesIO()
        torch.export.save(program, content)
        content.seek(0)
        loaded = torch.export.load(content).module()
    return content.getvalue(), loaded


def _onnx(module: _Outputs, x: Tensor) -> tuple[bytes, Function]:
    import onnxruntime  # pyright: ignore[reportMissingImports]  optional

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            module,
            _example(x),
            dynamo=True,
            dynamic_shapes=_any_size(),
            input_names=["x"],
            output_names=[*module.names],
            verbose=False,
        )
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(array) for array in session.run(None, {"x": x.numpy()}))

    return content, run


def _example(x: Tensor) -> tuple[Tensor]:
    """An input of two samples or more, because an exporter takes a batch of one for a constant."""
    return (x if len(x) > 1 else torch.cat((x, x)),)


def _any_size() -> dict[str, dict[int, Any]]:
    return {"x": {0: torch.export.Dim("batch")}}


def _difference(module: _Outputs, exported: Function, x: Tensor) -> float:
    """The largest difference of two outputs, as a share of the module's where that is above 1; infinite for nan."""
    with torch.no_grad():
        pairs = [*zip(module(x), exported(x), strict=True)]
    differences = [((theirs - ours).abs() / ours.abs().clamp(min=1)).max() for ours, theirs in pairs]
    return max(float(difference.nan_to_num(nan=float("inf"))) for difference in differences)
