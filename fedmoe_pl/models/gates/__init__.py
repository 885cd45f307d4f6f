"""What weighs the experts for every sample."""
