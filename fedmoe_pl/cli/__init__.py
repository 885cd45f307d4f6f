"""The command ``fedmoe``."""

from fedmoe_pl.cli.cli import FederationCLI
from fedmoe_pl.cli.commands import main

__all__ = ["FederationCLI", "main"]
