"""Phases, their rounds, and the state of a run."""
