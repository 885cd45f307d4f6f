"""Reports on runs."""
