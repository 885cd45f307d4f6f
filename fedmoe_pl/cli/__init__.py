"""The command ``fedmoe``."""

from fedmoe_pl.cli.cli import FederationCLI, main

__all__ = ["FederationCLI", "main"]
