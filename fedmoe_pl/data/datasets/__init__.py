"""Data sets, each as a data module."""
