"""Modules that need Flower, or what comes with it, imported only where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException


def module_of_flower(command: str, name: str) -> Any:
    """A module of this part that uses Flower, or what comes with it."""
    try:
        return importlib.import_module(f"fedmoe_pl.deployment.{name}")
    except ImportError as error:
        raise MisconfigurationException(
            f"{command}: Flower is missing ({error}); install it into an environment of its own with Python 3.11 or "
            'newer: pip install ".[flower]" in the repository.'
        ) from error
