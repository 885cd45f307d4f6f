"""Single adapters of a mixture: in the files of peft, or folded into the base's weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from fedmoe_pl.checks import InvalidArgumentError, tried
from fedmoe_pl.models.adapters import LoRA, silent_peft
from fedmoe_pl.models.gates import FixedGate
from fedmoe_pl.models.mixtures.adapter_moe import AdapterMoE, LayerwiseAdapterMoE
from fedmoe_pl.trees import Tree, names_of_same_tensors

_PREFIX = "base_model.model."  # of all names in peft's files
_FACTOR = re.compile(r"\.lora_(?:embedding_)?([AB])(?:\.weight)?$")
_TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS", "ForCausalLM": "CAUSAL_LM"}
_HEADS = ("classifier", "score")  # layers that peft trains as a whole wherever the task is to classify
_ARGUMENTS = ("r", "lora_alpha", "use_rslora", "alpha_pattern")  # the tensors show whether the others are the same


@dataclass
class Adapter:
    """An adapter and the layers that were trained with it as a whole.

    Attributes:
        lora: the adapter's arguments.
        tensors: its tensors, with their names in peft's files.
    """

    lora: LoRA
    tensors: Tree


def adapter_of(module: AdapterMoE, expert: str) -> Adapter:
    """One of a mixture's experts, with the experts' common head if they have one."""
    state = module.state_dict()
    return Adapter(module.lora, {name: state[own] for name, own in _names(module, expert).items()})


def adapter_of_mixture(module: AdapterMoE) -> Adapter | None:
    """The adapter that computes what a mixture does; None if there is none.

    The weights must be constant, and either those of one expert alone or inside of layers. The adapter then has the sum
    of the ranks: ``s sum_e g_e B_e A_e = s [g_1 B_1, g_2 B_2] [A_1; A_2]``.
    """
    gate = module.gate
    if not isinstance(gate, FixedGate):
        return None
    adapters = [adapter_of(module, module.weighed_parts[index]) for index in gate.active]
    if len(adapters) == 1:
        return adapters[0]
    if not isinstance(module, LayerwiseAdapterMoE) or module.blocks:
        return None
    weights = [float(gate.weights[index]) for index in gate.active]
    r = sum(adapter.lora.r for adapter in adapters)
    lora = replace(module.lora, r=r, lora_alpha=module.scaling * r, use_rslora=False)
    return Adapter(
        lora, {name: _joined(name, [a.tensors[name] for a in adapters], weights) for name in adapters[0].tensors}
    )


def peft_model(base: nn.Module, adapter: Adapter) -> Any:
    """Peft's model of a base with an adapter, in eval mode; it has the base itself, with other layers in it."""
    from peft import get_peft_model, set_peft_model_state_dict

    config = adapter.lora.config()
    config.modules_to_save = [*(adapter.lora.modules_to_save or ())] or None
    config.task_type = _task_type(base, adapter)
    with silent_peft():
        model = get_peft_model(base, config)
    set_peft_model_state_dict(model, adapter.tensors)
    return model.eval()


def merged(base: nn.Module, adapter: Adapter) -> nn.Module:
    """The base with an adapter in its weights, which are changed.

    Raises:
        MisconfigurationException: if weights are quantized, or also those of another layer.
    """
    layers = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in adapter.tensors if _FACTOR.search(name)}
    for layer in sorted(layers):
        weight = getattr(base.get_submodule(layer), "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.itemsize < 2:
            because = f"adapters are added to {layer}.weight, whose values would be rounded"
            raise InvalidArgumentError(base, "base", base, "without quantized weights", because)
    own = {name.removeprefix(_PREFIX) for name in adapter.tensors} | {f"{layer}.weight" for layer in layers}
    for name, *others in names_of_same_tensors(base):
        if own & {name, *others}:
            because = f"{name} is also {others[0]}, which would change with it"
            raise InvalidArgumentError(base, "base", base, "without tied weights", because)
    return peft_model(base, adapter).merge_and_unload(safe_merge=True)


def save_base(base: nn.Module, folder: Path) -> None:
    """Writes a base to a folder, with ``save_pretrained`` if it has this method, otherwise as ``model.safetensors``."""
    if callable(save := getattr(base, "save_pretrained", None)):
        save(folder)
    else:
        save_model(base, str(folder / "model.safetensors"))


def read_adapter(folder: Path, module: AdapterMoE) -> Tree:
    """The tensors of a mixture's global expert, and of its head, from a folder that peft has written.

    Raises:
        MisconfigurationException: if the folder has no adapter, or one of other arguments or layers.
    """
    path = folder / "adapter_model.safetensors"
    try:
        given, tensors = _read_config(folder), load_file(path)
    except (OSError, SafetensorError) as error:
        raise MisconfigurationException(f"'{path}' is missing or damaged.") from error
    expected, names = module.lora.config(), _names(module, "global_expert")
    for argument in _ARGUMENTS:
        if (value := getattr(given, argument, None)) != getattr(expected, argument):
            allowed = f"{value}, as in '{folder}'"
            raise InvalidArgumentError(module.lora, argument, getattr(expected, argument), allowed)
    state = module.state_dict()
    for name in sorted(names.keys() | tensors.keys()):
        if name not in names or name not in tensors:
            because = f"only the {'folder' if name in tensors else 'model'} has {name.removeprefix(_PREFIX)}"
        elif tensors[name].shape != state[names[name]].shape:
            because = f"{name.removeprefix(_PREFIX)} has another shape in it"
        else:
            continue
        argument = "target_modules" if ".lora_" in name else "modules_to_save"
        allowed = f"{_listed(getattr(given, argument))}, as in '{folder}'"
        raise InvalidArgumentError(module.lora, argument, getattr(module.lora, argument), allowed, because)
    return {names[name]: tensor.to(state[names[name]].dtype) for name, tensor in tensors.items()}


def _read_config(folder: Path) -> Any:
    """The configuration of an adapter in a folder."""
    if not (path := folder / "adapter_config.json").is_file():
        raise MisconfigurationException(f"'{folder}' has no {path.name}, as folders of peft have.")
    from peft import PeftConfig

    with tried(f"'{path}' cannot be read"):
        return PeftConfig.from_pretrained(str(folder))


def _listed(names: Any) -> Any:
    return sorted(names) if isinstance(names, (set, list)) else names


def _names(module: AdapterMoE, expert: str) -> dict[str, str]:
    """The names of an expert's tensors, and of a common head's, by their names in peft's files."""
    prefixes = (f"{expert}.", "head.")
    return {_PREFIX + name.partition(".")[2]: name for name in module.state_dict() if name.startswith(prefixes)}


def _joined(name: str, tensors: list[Tensor], weights: list[float]) -> Tensor:
    """The factor of an adapter that is a weighted sum of adapters, from theirs; other tensors are the same in all."""
    if (factor := _FACTOR.search(name)) is None:
        return tensors[0]
    if factor[1] == "A":
        return torch.cat(tensors)
    return torch.cat([weight * tensor for weight, tensor in zip(weights, tensors, strict=True)], dim=1)


def _task_type(base: nn.Module, adapter: Adapter) -> str | None:
    """Peft's task of a model of transformers; None where peft would train more as a whole than the adapter does."""
    from transformers import PreTrainedModel

    if not isinstance(base, PreTrainedModel):
        return None
    task = next((task for ending, task in _TASKS.items() if type(base).__name__.endswith(ending)), None)
    heads = [name for name, _ in base.named_modules() if name.rpartition(".")[2] in _HEADS]
    are_trained = all(f"{_PREFIX}{head}." in " ".join(adapter.tensors) for head in heads)
    return task if task == "CAUSAL_LM" or are_trained else None
