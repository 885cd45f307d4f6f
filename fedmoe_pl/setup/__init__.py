"""From settings to a run: sets up data and models, checks them, and makes or resumes a run."""
