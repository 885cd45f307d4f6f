"""Mixtures: models with several experts and a gate."""
