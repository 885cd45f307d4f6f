"""What a measurement was made with: processor, GPU, versions, revision and date, one "name: value" per line.

python benchmarks/machine.py --accelerator gpu
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import lightning
import torch

import fedmoe_pl


def output(*command: str) -> str:
    """The first line that a command prints, or "unknown" if it fails."""
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return next(iter(printed.splitlines()), "")


def revision() -> str:
    """The checkout's revision, and whether files differ from it."""
    git = "git", "-C", str(Path(__file__).parent)
    changes = output(*git, "status", "--porcelain", "--untracked-files=no")
    return output(*git, "rev-parse", "--short", "HEAD") + (" with changes" if changes not in ("", "unknown") else "")


def main() -> None:
    """Prints the lines; fails if a GPU is asked for and there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    if parser.parse_args().accelerator == "gpu":
        if not torch.cuda.is_available():
            raise SystemExit(f"torch {torch.__version__} finds no CUDA device")
        properties = torch.cuda.get_device_properties(0)
        print(f"GPU: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
        print(f"GPUs here: {torch.cuda.device_count()}, of which one is used")
        print(f"driver: {output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader')}")
        print(f"CUDA: {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    print(f"processor: {platform.machine()}, {len(os.sched_getaffinity(0))} cores")
    print(f"Python: {platform.python_version()}")
    print(f"torch: {torch.__version__}")
    print(f"lightning: {lightning.__version__}")
    print(f"fedmoe_pl: {revision()}, {Path(fedmoe_pl.__file__).parent}")
    print(f"date: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC")


if __name__ == "__main__":
    main()
