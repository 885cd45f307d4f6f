"""The command ``fedmoe``."""

from fedmoe_pl.cli.command_line import FederationCLI, main

__all__ = ["FederationCLI", "main"]
