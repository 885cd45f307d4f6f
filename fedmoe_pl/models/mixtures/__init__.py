"""Models of several experts and a gate."""
