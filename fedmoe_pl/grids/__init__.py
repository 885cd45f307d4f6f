"""Grids of runs: every combination of some values, and one table over their seeds."""
