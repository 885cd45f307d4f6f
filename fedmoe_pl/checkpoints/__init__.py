"""The files of a run: checkpoints, the tensors that clients keep, and locks."""
