"""``python -m fedmoe_pl`` is the same as ``fedmoe``."""

from fedmoe_pl.cli import main

if __name__ == "__main__":
    main()
