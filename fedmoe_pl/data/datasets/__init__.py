"""Data sets, each a data module."""
