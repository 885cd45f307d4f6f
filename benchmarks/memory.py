"""Peak memory of a round of many clients that each keep a local expert, for the same data in fewer or more hands.

    python benchmarks/memory.py
    python benchmarks/memory.py --clients 10 1000 --samples 20000

Each number of clients runs in a process of its own. All clients take part in one round, train both experts of a mixture
of two LeNet-5 and send the global one. What has to be in memory is the data, one model and the local experts that the
clients keep; the last column is what came on top of that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable

import torch
from torch import Tensor
from workload import RandomImages, make_model, memory, reset_peak_memory

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.federation import Federation
from fedmoe_pl.phases.phase import Phase

COLUMNS = ("clients", "before data", "data", "peak of set-up", "model", "kept", "peak of round", "on top")


def mebibytes(tensors: Iterable[Tensor]) -> float:
    """Size of the tensors in MiB."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


def measure(clients: int, samples: int) -> None:
    """Run one round and print a row of the table, all in MiB."""
    before = memory("VmRSS")
    reset_peak_memory()
    data = RandomImages(clients, samples // clients, batch_size=10)
    data.setup()
    peak_of_setup = memory("VmHWM")
    model = make_model(gate_weight=0.5)
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            phases=[Phase("FedAvg", FedAvg(shared="global_expert.*"), evaluate=False)],
            trainer={"max_epochs": 1, "accelerator": "cpu", "devices": 1},
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        reset_peak_memory()
        federation.fit(model, data)
        peak_of_round = memory("VmHWM")
    kept = mebibytes(tensor for tree in federation.run.states["FedAvg"].clients.values() for tensor in tree.values())
    size_of_data, size_of_model = mebibytes([data.x, data.y]), mebibytes(model.state_dict().values())
    on_top = peak_of_round - before - size_of_data - size_of_model - kept
    row = (before, size_of_data, peak_of_setup, size_of_model, kept, peak_of_round, on_top)
    print(f"{clients:>14}" + "".join(f"{value:>16.1f}" for value in row), flush=True)


def main() -> None:
    """Measure each number of clients in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--samples", type=int, default=20000, help="training samples of all clients together")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if len(options.clients) == 1:
        measure(options.clients[0], options.samples)
        return
    print("".join(f"{column:>{16 if i else 14}}" for i, column in enumerate(COLUMNS)), "(MiB)", flush=True)
    for clients in options.clients:
        command = [sys.executable, __file__, "--clients", str(clients), "--samples", str(options.samples)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
