"""The files of a run: checkpoints, what clients keep, and locks."""
