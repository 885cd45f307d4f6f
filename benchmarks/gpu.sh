#!/usr/bin/env bash
# Checks and measures on this machine's GPU, and writes one page of Markdown:
#     benchmarks/gpu.sh [--only STEP]... [--cifar10 FOLDER] [PAGE]
# `benchmarks/gpu.sh --help` lists all options. PYTHON is the interpreter, by default python3.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" "$root/benchmarks/gpu_page.py" "$@"
