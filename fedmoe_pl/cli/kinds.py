"""The package's classes by kind: what completion, suggestions and ``fedmoe list`` know."""

from __future__ import annotations

import inspect
import re
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.optim import Optimizer

import fedmoe_pl.aggregation
import fedmoe_pl.algorithms
import fedmoe_pl.backends
import fedmoe_pl.callbacks
import fedmoe_pl.data
import fedmoe_pl.models
from fedmoe_pl.aggregation import Aggregation, Attack
from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.backends import Backend
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.data import Augmentation, FederatedDataModule, Partitioner
from fedmoe_pl.models import Gate, SwitchNorm1d


def _classes(module: Any, base: type, *but: type) -> list[type]:
    """The public classes of a module that can be made, of one kind but not of another."""
    public = [getattr(module, name) for name in sorted(module.__all__, key=str.lower)]
    classes = [each for each in public if inspect.isclass(each) and issubclass(each, base) and each is not base]
    return [each for each in classes if not issubclass(each, but) and not inspect.isabstract(each)]


KINDS = {
    "algorithms": _classes(fedmoe_pl.algorithms, Algorithm),
    "server_optimizers": _classes(fedmoe_pl.algorithms, Optimizer),
    "models": _classes(fedmoe_pl.models, LightningModule),
    "experts": _classes(fedmoe_pl.models, nn.Module, LightningModule, Gate, SwitchNorm1d),
    "gates": _classes(fedmoe_pl.models, Gate),
    "data": _classes(fedmoe_pl.data, FederatedDataModule),
    "partitioners": _classes(fedmoe_pl.data, Partitioner),
    "augmentations": _classes(fedmoe_pl.data, Augmentation),
    "aggregations": _classes(fedmoe_pl.aggregation, Aggregation),
    "attacks": _classes(fedmoe_pl.aggregation, Attack),
    "backends": _classes(fedmoe_pl.backends, Backend),
    "callbacks": _classes(fedmoe_pl.callbacks, FederationCallback),
    "client_callbacks": _classes(fedmoe_pl.callbacks, Callback),
}
"""What a configuration can name, by kind."""


def listing() -> str:
    """What ``fedmoe list`` prints, which is kept in ``classes.txt``, because imports would take seconds."""
    sections = list[str]()
    for kind, classes in KINDS.items():
        width = max(len(each.__name__) for each in classes)
        sections.append("\n".join([f"{kind}:", *(f"  {each.__name__:<{width}}  {_line(each)}" for each in classes)]))
    return "\n\n".join(sections) + "\n"


def _line(class_type: type) -> str:
    """The first line of a class's docstring, without the marks of Sphinx.

    Example:
        >>> _line(fedmoe_pl.algorithms.FedAdam)
        'The server steps by Adam, v = beta2 v + (1 - beta2) D**2; see AdaptiveServerOptimizer.'
    """
    line = (inspect.getdoc(class_type) or "").partition("\n")[0]
    return re.sub(r"(:class:)?`+~?([^`]*)`+", r"\2", line)


if __name__ == "__main__":
    print(listing(), end="")
