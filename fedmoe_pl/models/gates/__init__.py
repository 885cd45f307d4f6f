"""Gates, which weigh the experts for every sample."""
