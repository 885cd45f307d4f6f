"""Phases and their rounds: what a run is in the middle of."""
