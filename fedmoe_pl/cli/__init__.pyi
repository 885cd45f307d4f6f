from .command_line import FederationCLI
from .entry import main

__all__ = ["FederationCLI", "main"]
