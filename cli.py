"""Runs ``fedmoe`` from a clone: ``python cli.py fit --config configs/quickstart.yaml``."""

from fedmoe_pl.cli import main

if __name__ == "__main__":
    main()
