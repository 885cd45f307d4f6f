"""What a deployed round costs beside a simulated one: bytes between the machines, and seconds.

    python benchmarks/deployment.py --clients 2 --rounds 5
    python benchmarks/deployment.py --clients 5 --rounds 5 --secure

It runs FedAvg with the quickstart's model on digits, every round with its evaluation: deployed over Flower, with the
server in one network namespace and all clients in another, and simulated with as many processes as there are clients.
The kernel counts the bytes on the only link between the two namespaces, in both directions, with the headers of
Ethernet, IP and TCP; the ledger counts the tensors that clients and server send each other. There is no TLS. With
``--secure``, updates are masked, so that the server learns only their sum. Needs Linux, `unshare` and `ip`, and an
environment with the extra `flower`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from fedmoe_pl import Phase
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.rounds.run import Run

LINK = "fedmoe"
CONFIG = """
seed_everything: 0
model:
  class_path: PersonalizedMoE
  init_args:
    global_expert: SmallMLP
    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.1, momentum: 0.5}}}}
data: {{class_path: NpzFile, init_args: {{path: all.npz, batch_size: 10}}}}
trainer: {{accelerator: cpu, max_epochs: 2}}
federation:
  name: costs
  backend: TrainerBackend
  logger: false
  callbacks: [{{class_path: deployment.RoundCosts}}]
  phases:
    - name: FedAvg
      algorithm: {{class_path: FedAvg, init_args: {{shared: global_expert.*}}}}
      gate: GlobalOnly
      rounds: {rounds}
      secure_aggregation: {secure}
"""


class RoundCosts(FederationCallback):
    """Notes after each round the time, and the bytes by the kernel and by the ledger."""

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Writes a line."""
        ledger = sum(value for name, value in run.states[phase.name].traffic.items() if name.startswith("bytes"))
        with (run.folder / "costs.csv").open("a") as file:
            file.write(f"{time.monotonic()},{bytes_on_link()},{ledger}\n")


def bytes_on_link() -> int:
    """Bytes that came and went over the link so far, by the kernel; 0 if there is none."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == LINK:
            return int(counts.split()[0]) + int(counts.split()[8])
    return 0


def write_inputs(folder: Path, clients: int, rounds: int, secure: bool = False) -> None:
    """Writes the configuration, everybody's samples, and each client's own."""
    (folder / "run.yaml").write_text(CONFIG.format(rounds=rounds, secure=str(secure).lower()))
    x, y = load_digits(return_X_y=True)
    x, y = (x.reshape(-1, 1, 8, 8) / 16).astype(np.float32), y.astype(np.int64)
    test, x, y = {"x_test": x[:297], "y_test": y[:297]}, x[297:], y[297:]
    owner = np.random.default_rng(0).integers(0, clients, len(y))
    np.savez(folder / "all.npz", x_train=x, y_train=y, client_train=owner, **test)
    for client in range(clients):
        np.savez(folder / f"{client}.npz", x_train=x[owner == client], y_train=y[owner == client], **test)


def run(folder: Path, clients: int) -> None:
    """Runs the simulation, then the deployment; in a network namespace of its own."""

    def start(name: str, kind: str, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        command = [*before, sys.executable, "-m", "fedmoe_pl", kind, "--config", "run.yaml", *arguments]
        with (folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def check(*command: str) -> None:
        subprocess.run(command, check=True)

    check("ip", "link", "set", "lo", "up")
    ends = start("simulation", "fit", "--trainer.devices", str(clients), "--federation.default_root_dir", "simulated")
    if ends.wait():
        raise SystemExit((folder / "simulation.log").read_text())
    with subprocess.Popen(["unshare", "-n", "sleep", "infinity"]) as others:
        time.sleep(1)  # for the new namespace
        there = ("nsenter", "-t", str(others.pid), "-n")
        check("ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", str(others.pid))
        for place, address in (((), "10.9.0.1/24"), (there, "10.9.0.2/24")):
            check(*place, "ip", "addr", "add", address, "dev", LINK)
            check(*place, "ip", "link", "set", LINK, "up")
        check(*there, "ip", "link", "set", "lo", "up")
        arguments = ["--num_clients", str(clients), "--address", "0.0.0.0:8000", "--insecure", "true"]
        server = start("server", "serve", *arguments)
        joined = []
        for client in range(clients):
            own = ["--client", str(client), "--data.init_args.path", f"{client}.npz", "--insecure", "true"]
            own += ["--address", "10.9.0.1:8000", "--federation.default_root_dir", f"client_{client}"]
            joined.append(start(f"client_{client}", "join", *own, before=there))
        ended = server.wait()
        for process in joined:
            process.terminate()
            process.wait()
        others.kill()
    if ended:
        raise SystemExit((folder / "server.log").read_text())


def costs(folder: Path, root: str) -> tuple[float, float, float]:
    """Medians per round after the first: seconds, bytes by the kernel, bytes by the ledger."""
    (path,) = (folder / root).glob("costs/version_0/costs.csv")
    with path.open() as file:
        rows = [[float(value) for value in row] for row in csv.reader(file)]
    seconds, kernel, ledger = (
        statistics.median(b - a for a, b in itertools.pairwise(column)) for column in zip(*rows, strict=True)
    )
    return seconds, kernel, ledger


def main() -> None:
    """Measures, and prints the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--secure", action="store_true", help="with secure aggregation")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        run(arguments.folder, arguments.clients)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, arguments.clients, arguments.rounds, arguments.secure)
        inside = ["unshare", "-rn", sys.executable, __file__, "--clients", str(arguments.clients), "--folder", name]
        if subprocess.run(inside).returncode:
            raise SystemExit("the run failed, see above")
        seconds, kernel, ledger = costs(folder, "runs")
        simulated, *_ = costs(folder, "simulated")
    print(f"{arguments.clients} clients, medians of {arguments.rounds - 1} rounds")
    print(f"bytes per round: {kernel:,.0f} on the link, {ledger:,.0f} by the ledger, ratio {kernel / ledger:.2f}")
    print(f"seconds per round: {seconds:.2f} deployed, {simulated:.2f} simulated, ratio {seconds / simulated:.1f}")


if __name__ == "__main__":
    main()
