"""Partitioners, which decide which client holds which samples."""
