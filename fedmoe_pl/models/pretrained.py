"""Models of transformers, as a configuration names them."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedmoe_pl.checks import InvalidArgumentError, reason_of


def pretrained(
    path: str, auto_class: str = "AutoModelForSequenceClassification", arguments: dict[str, Any] | None = None
) -> nn.Module:
    """A model of transformers, in train mode: ``transformers.<auto_class>.from_pretrained(path, **arguments)``.

    In YAML, it is ``class_path: fedmoe_pl.models.pretrained``. If a folder has a ``config.json`` but no weights, these
    are drawn at random. What the file lacks, such as a new classifier, is drawn at random, too.

    Args:
        path: a folder, or a name on Hugging Face's hub, from where it is downloaded.
        auto_class: one of transformers' ``AutoModel`` classes, or a model's own class.
        arguments: further arguments, such as ``num_labels``.

    Raises:
        MisconfigurationException: if transformers is not installed, or has no such class or model.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MisconfigurationException(
            "pretrained needs the package transformers: pip install '.[adapters]' in the repository."
        ) from error
    kind: Any = getattr(transformers, auto_class, None)
    if kind is None:
        raise InvalidArgumentError("pretrained", "auto_class", auto_class, "a class of transformers")
    is_folder = os.path.isdir(path)
    if not is_folder:
        rank_zero_info(f"pretrained: '{path}' is no folder here, so that it is looked for on Hugging Face's hub.")
    has_weights = not is_folder or any(
        name.endswith((".safetensors", ".bin", ".index.json")) for name in os.listdir(path)
    )
    try:
        if has_weights:
            return kind.from_pretrained(path, **(arguments or {})).train()
        config = transformers.AutoConfig.from_pretrained(path, **(arguments or {}))
    except Exception as error:  # whatever transformers and the hub raise
        reason = f"that says: {reason_of(error)}"
        if arguments and not isinstance(error, OSError):  # which is raised for a model that cannot be found
            allowed = f"those with which transformers makes a model of '{path}'"
            raise InvalidArgumentError("pretrained", "arguments", arguments, allowed, reason) from error
        allowed = "a folder or name of which transformers makes a model"
        raise InvalidArgumentError("pretrained", "path", path, allowed, reason) from error
    return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
