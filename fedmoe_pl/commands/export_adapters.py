"""Exports the adapters of clients: in peft's files, or in the weights of their base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn

from fedmoe_pl.checkpoints.files import replacing_files
from fedmoe_pl.checks import InvalidArgumentError, with_article
from fedmoe_pl.evaluation.outputs import own_batch
from fedmoe_pl.models import AdapterMoE
from fedmoe_pl.models.adapter_files import adapter_of, adapter_of_mixture, merged, peft_model, save_base
from fedmoe_pl.models.inputs import call, inputs_of
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.trees import same_values, subtree

_SAMPLES = 64  # on which outputs are compared
TOLERANCE = 1e-3  # relative and absolute, of outputs


def write_adapters(run: Run, method: str, client: int, folder: Path) -> Iterator[str]:
    """Writes each of a client's experts as a folder of peft, with the layers that are trained as a whole.

    They are ``global_expert``, ``local_expert`` and, where a single adapter can compute what the mixture does,
    ``mixture``. Yields what was written.
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


def write_merged(run: Run, method: str, client: int, folder: Path) -> Iterator[str]:
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
    base = subtree(run.initial_model(run.phase_and_point(method, 0)[0]).state_dict(), "base.")
    changed = (name for name, tensor in module.base.state_dict().items() if not same_values(base[name], tensor))
    if (name := next(changed, None)) is not None:
        because = f"it has changed {name}, so that the adapters are not those of your base; the format merged has it"
        raise InvalidArgumentError("Federation", "method", method, "one that leaves the base as it is", because)


def _inputs(run: Run, client: int, module: AdapterMoE) -> Any:
    """Inputs of a client's test samples or, if it has none, of its training samples."""
    batch = own_batch(run.datamodule, client, _SAMPLES)[1]
    return move_data_to_device(inputs_of(batch, module.target_key), torch.device("cpu"))


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two outputs, as a share of ours where that is above 1; infinite for nan."""
    return float(((theirs - ours).abs() / ours.abs().clamp(min=1)).max().nan_to_num(nan=float("inf")))


def _compared(module: AdapterMoE, expected: nn.Module, model: nn.Module, x: Any) -> str:
    """How far a model's outputs are from those of the module, or of its expert, in words; refuses too much of it."""
    with torch.no_grad():
        ours, theirs = expected(x), call(model, module.prepared(x))
    if expected is module:
        theirs = module.scores_of(theirs)
    largest = relative_difference(ours, theirs)
    if not largest <= TOLERANCE:
        because = f"its outputs differ by {largest:.1e} from the module's"
        raise InvalidArgumentError("LoRA", "lora", module.lora, "one that peft computes in the same way", because)
    return f"outputs differ by at most {largest:.1e} from the module's"
