"""Seconds of whole runs of configurations, perhaps beside another checkout of this repository.

    python benchmarks/configurations.py
    python benchmarks/configurations.py --against DIR --configs configs/quickstart.yaml

Each run is a process of its own, ``cli.py fit``, so that imports, set-up, evaluation and files count. Both checkouts
take turns. The configurations are those of this checkout; by default, those whose data need no download. At the end of
a line stands the largest difference of any number in the two ``summary.csv``.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(checkout: Path, config: Path) -> tuple[float, list[float]]:
    """Seconds of a run with a checkout's code, and all numbers of the summary that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(checkout / "cli.py"), "fit", "--config", str(config)]
        options = ["--federation.default_root_dir", folder, "--federation.enable_progress_bar", "false"]
        start = time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        ended = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"{checkout}: {config} has failed; the end of what it said:\n{ended.stderr[-2000:]}")
        seconds = time.perf_counter() - start
        (summary,) = Path(folder).rglob("summary.csv")
        with summary.open() as file:
            return seconds, [
                number for row in csv.reader(file) for value in row if (number := as_number(value)) is not None
            ]


def as_number(value: str) -> float | None:
    """The number in a field of the summary; None for words."""
    try:
        return float(value)
    except ValueError:
        return None


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quick = [ROOT / "configs" / "quickstart.yaml", *sorted((ROOT / "configs").glob("*_digits.yaml"))]
    parser.add_argument("--configs", type=Path, nargs="+", default=quick)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, whose runs are the first column")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each")
    options = parser.parse_args()
    checkouts = [checkout.resolve() for checkout in (options.against, ROOT) if checkout]
    for config in options.configs:
        seconds: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
        summaries: list[list[float]] = []
        for _ in range(options.repeats):
            for checkout in checkouts:
                took, summary = run(checkout, config.resolve())
                seconds[checkout].append(took)
                summaries.append(summary)
        medians = [statistics.median(runs) for runs in seconds.values()]
        line = "  ".join(f"{median:7.1f} s" for median in medians)
        ratio = f"  {medians[0] / medians[1]:.2f} times as fast" if len(medians) > 1 else ""
        first = summaries[0]
        difference = max(abs(a - b) for numbers in summaries for a, b in zip(first, numbers, strict=True))
        compared = f"  differ by {difference:.0e}" if len(summaries) > 1 else ""
        print(f"{config.stem:32s} {line}{ratio}{compared}", flush=True)


if __name__ == "__main__":
    main()
