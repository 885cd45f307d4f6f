"""Single adapters of a mixture: in the files of peft, or folded into the base's weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from fedmoe_pl.checks import InvalidArgumentError, shown, tried
from fedmoe_pl.models.adapters import HEADS, LoRA, paths_to_save, silent_peft, unlike_weight
from fedmoe_pl.models.gates import FixedGate
from fedmoe_pl.models.mixtures.adapter_moe import AdapterMoE, LayerwiseAdapterMoE
from fedmoe_pl.trees import Tree, names_of_same_tensors, same_values

_PREFIX = "base_model.model."  # of all names in peft's files
_FACTOR = re.compile(r"\.lora_(?:embedding_)?([AB])(?:\.weight)?$")
_TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS", "ForCausalLM": "CAUSAL_LM"}
_INITIAL = (True, False, "gaussian", "orthogonal", "eva", "mica")  # ways to draw factors that leave the base as it is
# keys of an adapter's configuration whose values do not matter, or that the names and shapes of its tensors show
_ANY = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "rank_pattern"),
    *("lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # of ways to draw factors
)


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
    """What a mixture computes with one of its experts alone, with the experts' common head if they have one."""
    state, names, first = module.state_dict(), _names(module, expert), _names(module, module.weighed_parts[0])
    outside = tuple(f"{_PREFIX}{path}." for path in module.layers_outside_blocks)
    names |= {name: own for name, own in first.items() if name.startswith(outside)}
    return Adapter(module.lora, {name: state[own] for name, own in names.items()})


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
    return Adapter(lora, {name: _joined(name, [a.tensors for a in adapters], weights) for name in adapters[0].tensors})


def peft_model(base: nn.Module, adapter: Adapter) -> Any:
    """Peft's model of a base with an adapter, in eval mode; it has the base itself, with other layers in it."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    config = adapter.lora.config()
    # paths, because peft takes each name for the end of others
    config.modules_to_save = paths_to_save(base, adapter.lora) or None
    config.task_type = _task_type(base, adapter)
    with silent_peft():
        model = get_peft_model(base, config, autocast_adapter_dtype=adapter.lora.autocast_adapter_dtype)
    # also that of other layers with such an end, such as pre_classifier
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    set_peft_model_state_dict(model, own | adapter.tensors)
    return model.eval()


def merged(base: nn.Module, adapter: Adapter) -> nn.Module:
    """The base with an adapter in its weights, which are changed.

    Raises:
        MisconfigurationException: if weights are quantized, or also those of another layer, or cannot do the same.
    """
    layers = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in adapter.tensors if _FACTOR.search(name)}
    for layer in sorted(layers):
        part = base.get_submodule(layer)
        weight = getattr(part, "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.itemsize < 2:
            because = f"adapters are added to {layer}.weight, whose values would be rounded"
            raise InvalidArgumentError(base, "base", base, "without quantized weights", because)
        if because := unlike_weight(layer, part):
            allowed = "without this layer"
            raise InvalidArgumentError(adapter.lora, "target_modules", adapter.lora.target_modules, allowed, because)
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
    _check_config(folder, given, module.lora)
    names, state = _names(module, "global_expert"), module.state_dict()
    for name in sorted(names.keys() | tensors.keys()):
        base = f"base.{name.removeprefix(_PREFIX).replace('.base_layer.', '.')}"
        if name not in names and base in state and same_values(tensors[name], state[base]):
            del tensors[name]  # peft's files may have embeddings of the base
        elif name not in names or name not in tensors:
            where = f"the folder '{folder}'" if name in tensors else "the model"
            _refuse_tensors(f"Only {where} has", name, given, module.lora)
        elif tensors[name].shape != state[names[name]].shape:
            _refuse_tensors(f"The folder '{folder}' has another shape of", name, given, module.lora)
    return {names[name]: tensor.to(state[names[name]].dtype) for name, tensor in tensors.items()}


def _refuse_tensors(problem: str, name: str, given: Any, lora: LoRA) -> None:
    """Refuses a folder for one of its tensors, or of the model's, with the argument that makes the difference."""
    argument = "modules_to_save"
    if _FACTOR.search(name):
        ours = {"target_modules": lora.target_modules, "exclude_modules": lora.exclude_modules}
        others = {**ours, "layers_to_transform": None, "rank_pattern": {}}
        differ = (key for key, value in others.items() if _listed(getattr(given, key)) != _listed(value))
        argument = next(differ, "target_modules")
    theirs, own = (shown(_listed(getattr(each, argument, None))) for each in (given, lora))
    name = name.removeprefix(_PREFIX)
    raise MisconfigurationException(f"{problem} {name}: its {argument} is {theirs}, and that of the model {own}.")


def _check_config(folder: Path, given: Any, lora: LoRA) -> None:
    """Refuses an adapter that computes something else than the model's, by the first key that says so."""
    expected, path = lora.config(), folder / "adapter_config.json"
    written = json.loads(path.read_text())
    for key in dict.fromkeys(("peft_type", *vars(given), *written)):
        value, own, because = getattr(given, key, written.get(key)), getattr(expected, key, None), ""
        if key == "init_lora_weights":
            own = value if value in _INITIAL else own
            because = "others change the base's weights, unless the adapter is saved by save_pretrained with "
            because += "path_initial_model_for_weight_conversion"
        if value == own or key in _ANY or key.startswith("_"):
            continue
        if hasattr(lora, key):
            raise InvalidArgumentError(lora, key, own, f"{value}, as in '{folder}'")
        if value:
            allowed = "left out" if not own else f"one of {_INITIAL}" if because else getattr(own, "value", own)
            raise InvalidArgumentError(f"'{path}'", key, written.get(key, value), allowed, because)


def _read_config(folder: Path) -> Any:
    if not (path := folder / "adapter_config.json").is_file():
        raise MisconfigurationException(f"'{folder}' has no {path.name}, as folders of peft have.")
    from peft import PeftConfig

    with tried(f"'{path}' cannot be read"):
        return PeftConfig.from_pretrained(str(folder))


def _listed(names: Any) -> Any:
    """Names in their order; an empty list is none."""
    return sorted(names) or None if isinstance(names, (set, list)) else names


def _names(module: AdapterMoE, expert: str) -> dict[str, str]:
    """The names of an expert's tensors, and of a common head's, by their names in peft's files."""
    names, prefixes = [*module.state_dict()], (f"{expert}.", "head.")
    return {_PREFIX + name.removeprefix(own): name for own in prefixes for name in names if name.startswith(own)}


def _joined(name: str, adapters: list[Tree], weights: list[float]) -> Tensor:
    """The factor of an adapter that is a weighted sum of adapters, from theirs; other tensors are the same in all.

    Of a convolution in groups, the rows of A that a group reads stay together.
    """
    tensors = [adapter[name] for adapter in adapters]
    if (factor := _FACTOR.search(name)) is None:
        return tensors[0]
    if factor[1] == "A":
        groups = len(tensors[0]) // adapters[0]["B".join(name.rsplit("A", 1))].shape[1]
        return torch.cat([tensor.unflatten(0, (groups, -1)) for tensor in tensors], dim=1).flatten(0, 1)
    return torch.cat([weight * tensor for weight, tensor in zip(weights, tensors, strict=True)], dim=1)


def _task_type(base: nn.Module, adapter: Adapter) -> str | None:
    """Peft's task of a model of transformers; None where peft would train more as a whole than the adapter does."""
    from transformers import PreTrainedModel

    if not isinstance(base, PreTrainedModel):
        return None
    task = next((task for ending, task in _TASKS.items() if type(base).__name__.endswith(ending)), None)
    heads = [(name, part) for name, part in base.named_modules() if name.rpartition(".")[2] in HEADS]
    tensors = [f"{_PREFIX}{name}.{own}" for name, part in heads for own in part.state_dict()]
    return task if task == "CAUSAL_LM" or adapter.tensors.keys() >= {*tensors} else None
