"""Kills the server of a deployed federation again and again, and compares the result with that of a simulation.

    python benchmarks/kills_deployed.py --kills 20

Server and clients talk over Flower, with TLS and keys, through a proxy that accepts connections while the server is
down, and closes them. SIGKILL ends the server and Flower's SuperLink at a random moment; the server is started again
with ``last`` as checkpoint. Nobody starts the clients again. Needs Linux and an environment with the extra `flower`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deployment import write_inputs
from kills import end, forked, same

from fedmoe_pl import ClientFailures, Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.checkpoints.checkpoint import CLIENT_STATES, ROWS, load_federation
from fedmoe_pl.checkpoints.client_state import RemoteStates
from fedmoe_pl.data import NpzFile
from fedmoe_pl.deployment.connection import free_port, module_of_flower
from fedmoe_pl.deployment.participant import read_own
from fedmoe_pl.models import LocalOnly, SmallMLP

CLIENTS, NAME, PHASE = 2, "killed", "FedPer"


def parts(folder: Path, root: str, path: str, rounds: int) -> tuple[Federation, PersonalizedMoE, NpzFile]:
    """Settings, model and data, the same for everybody but for the folder and the file of samples."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shared = FedAvg("local_expert.extractor.*", trainable="local_expert.*")
    federation = Federation(
        [Phase(PHASE, shared, gate=LocalOnly(), rounds=rounds)],
        {"max_epochs": 1, "accelerator": "cpu"},
        backend=TrainerBackend(),
        logger=False,
        default_root_dir=str(folder / root),
        name=NAME,
        failures=ClientFailures(min_clients=CLIENTS),
        enable_progress_bar=False,
    )
    model = PersonalizedMoE(SmallMLP(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    return federation, model, NpzFile(str(folder / path), batch_size=10)


def serve(folder: Path, rounds: int, address: str) -> None:
    """Runs the server, from its last checkpoint if it has one."""
    federation, model, data = parts(folder, "server", "all.npz", rounds)
    begun = any((folder / "server").rglob("last.ckpt"))
    federation.serve(model, data, CLIENTS, address, str(folder / "keys/server"), ckpt_path="last" if begun else None)


def join(folder: Path, rounds: int, address: str, client: int) -> None:
    """Runs a client."""
    federation, model, data = parts(folder, f"client_{client}", f"{client}.npz", rounds)
    federation.join(model, data, client, address, str(folder / f"keys/client_{client}"))


def fit(folder: Path, rounds: int) -> None:
    """Runs the simulation."""
    federation, model, data = parts(folder, "simulation", "all.npz", rounds)
    federation.fit(model, data)


def proxy(port: int, server: int) -> None:
    """Passes bytes between a port and the server's; accepts connections also while the server is down."""

    def passed(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(2**16):
                target.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, target):
                each.close()

    with socket.create_server(("127.0.0.1", port)) as listening:
        while True:
            client, _ = listening.accept()
            try:
                other = socket.create_connection(("127.0.0.1", server))
            except OSError:
                client.close()
                continue
            for pair in ((client, other), (other, client)):
                threading.Thread(target=passed, args=pair, daemon=True).start()


def content(folder: Path, root: str) -> dict[str, Any]:
    """What the server and the clients have at the end."""
    (path,) = (folder / root).glob(f"{NAME}/version_0/checkpoints/last.ckpt")
    state = load_federation(path)["phases"][PHASE]
    kept = state.clients
    if isinstance(kept, RemoteStates):
        kept = {client: kept_at_client(folder, client, files) for client, files in kept.files.items()}
    return {"server": state.server, "kept": dict(kept)}


def kept_at_client(folder: Path, client: int, files: Any) -> dict[str, torch.Tensor]:
    """The tensors that a client keeps, from the files on its machine."""
    (run,) = (path.parent for path in (folder / f"client_{client}").glob(f"{NAME}/client_{client}/*/checkpoints"))
    return {
        name: tensor
        for phase, number, names in files
        for name, tensor in read_own(run / CLIENT_STATES, phase, client, number, names).items()
    }


def measure(folder: Path, kills: int, rounds: int, seconds: float, rng: random.Random) -> tuple[int, str]:
    """Runs a deployment whose server is killed at most so often; returns how often it was, and what came of it."""
    write_inputs(folder, CLIENTS, rounds)
    module_of_flower("provision", "flower_keys").provision(folder / "keys", CLIENTS, ["localhost"], 1)
    port, behind = free_port(), free_port()
    address = f"127.0.0.1:{behind}"
    simulation = forked(fit, folder, rounds)
    between = forked(proxy, port, behind)
    joined = [forked(join, folder, rounds, f"127.0.0.1:{port}", client) for client in range(CLIENTS)]
    done, status = 0, None
    while status is None:
        server, until = forked(serve, folder, rounds, address), time.monotonic() + rng.uniform(0, seconds)
        while True:
            ended, code = os.waitpid(server, os.WNOHANG)
            if ended:
                status = code
                break
            if done < kills and time.monotonic() > until:
                end(server)
                done += 1
                break
            time.sleep(0.1)
    ends = [os.waitpid(client, 0)[1] for client in joined]
    end(between)
    os.waitpid(simulation, 0)
    if status or any(ends):
        return done, f"the server ended with {status}, the clients with {ends}"
    rows = [json.loads(line) for line in next((folder / "server").rglob(ROWS)).read_text().splitlines()]
    failed = sum(row["failed"] for row in rows)
    is_same = same(content(folder, "server"), content(folder, "simulation"))
    return done, f"{len(rows)} rounds, {failed} failures of clients, {'same' if is_same else 'OTHER'} bits"


def main() -> None:
    """Kills as often as asked for, in as many runs as that takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20, help="of each run")
    parser.add_argument("--seconds", type=float, default=60, help="the longest time to a kill")
    options = parser.parse_args()
    rng, done = random.Random(0), 0
    while done < options.kills:
        with tempfile.TemporaryDirectory() as name:
            killed, text = measure(Path(name), options.kills - done, options.rounds, options.seconds, rng)
        done += killed
        print(f"{killed} kills: {text}", flush=True)


if __name__ == "__main__":
    main()
