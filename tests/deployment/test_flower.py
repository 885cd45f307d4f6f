"""A federation over Flower, with TLS and keys, in processes and folders of its own; needs the extra `flower`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedmoe_pl.aggregation import SecureAggregation
from fedmoe_pl.backends import local_client
from fedmoe_pl.checkpoints.checkpoint import CLIENT_STATES, FILE, ROWS, load_federation
from fedmoe_pl.checkpoints.files import read_tensors
from fedmoe_pl.cli import main
from fedmoe_pl.deployment.connection import free_port
from fedmoe_pl.deployment.participant import read_own
from fedmoe_pl.deployment.private_rounds import PrivateRounds

pytest.importorskip("flwr", reason="needs the extra `flower`")
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CLIENTS = 3
WITHIN = 900  # seconds; a machine may be busy


class Deployment:
    """A folder with data, certificates and the processes that run in it."""

    def __init__(self, folder: Path, clients: int, config: Path):
        self.folder = folder
        self.clients = clients
        self.config = config
        self.address = f"127.0.0.1:{free_port()}"
        self.processes: dict[str, subprocess.Popen] = {}
        digits = load_digits()
        x, y = (digits.images / 16).astype(np.float32)[:, None], digits.target.astype(np.int64)
        x = x.repeat(2, axis=2).repeat(2, axis=3)  # room for two convolutions
        test = {"x_test": x[:200], "y_test": y[:200]}
        x, y = x[200:], y[200:]
        owner = np.random.default_rng(0).integers(0, clients, len(y))
        np.savez(folder / "all.npz", x_train=x, y_train=y, client_train=owner, **test)
        for client in range(clients):
            own = owner == client
            np.savez(folder / f"{client}.npz", x_train=x[own], y_train=y[own], **test)
        self.run("provision", "--clients", clients)

    def run(self, *arguments: object) -> None:
        assert self.start("run", *arguments).wait(timeout=WITHIN) == 0, self.log("run")

    def start(self, name: str, *arguments: object) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "fedmoe_pl", *map(str, arguments)]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.processes[name] = process
        return process

    def serve(self, *arguments: object) -> subprocess.Popen:
        own = ["--num_clients", self.clients, "--address", self.address, "--keys", "keys/server"]
        return self.start("server", "serve", "--config", self.config, *own, *arguments)

    def join(self, client: int, *arguments: str, name: str = "") -> subprocess.Popen:
        own = ["--client", str(client), "--data.init_args.path", f"{client}.npz", "--address", self.address]
        own += ["--federation.default_root_dir", f"folder of {name}" if name else f"client {client}"]
        keys = arguments or ["--keys", f"keys/client_{client}"]
        return self.start(name or f"client {client}", "join", "--config", self.config, *own, *keys)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def wait_for(self, name: str, text: str) -> None:
        end = time.monotonic() + WITHIN
        while text not in self.log(name):
            assert self.processes[name].poll() is None, self.log(name)
            assert time.monotonic() < end, self.log(name)
            time.sleep(0.3)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WITHIN
        while not condition():
            assert self.processes["server"].poll() is None, self.log("server")
            assert time.monotonic() < end, self.log("server")
            time.sleep(0.3)

    def rows(self, name: str = "killed") -> list[dict]:
        """A row for each round that is in the server's checkpoint."""
        path = self.folder / "runs" / name / "version_0" / ROWS
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=60)

    def states(self, root: str) -> dict:
        (path,) = (self.folder / root).glob("*/version_0/checkpoints/last.ckpt")
        return load_federation(path)["phases"]


@pytest.fixture
def deployment(tmp_path):
    made: list[Deployment] = []

    def make(clients: int, config: Path) -> Deployment:
        made.append(Deployment(tmp_path, clients, config))
        return made[0]

    yield make
    for each in made:
        each.end()


def assert_same_as_simulation(deployed: Deployment, *arguments: str, tolerance: float = 0.0) -> None:
    own = ["--config", deployed.config, "--federation.default_root_dir", "simulation"]
    simulation = deployed.start("simulation", "fit", *own, *arguments)
    assert simulation.wait(timeout=WITHIN) == 0, deployed.log("simulation")
    there, same = deployed.states("runs"), partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for phase, simulated in deployed.states("simulation").items():
        same(there[phase].server, simulated.server)
        for client in range(deployed.clients):
            (folder,) = deployed.folder.glob(f"client {client}/*/client_{client}/*/{CLIENT_STATES}")
            kept = {}
            for of_phase, number, names in there[phase].clients.files.get(client, []):
                kept |= read_own(folder, of_phase, client, number, names)
            same(kept, dict(simulated.clients.get(client, {})))


def test_five_methods_end_with_the_bits_of_a_simulation(deployment):
    deployed = deployment(CLIENTS, HERE / "five_methods.yaml")
    server = deployed.serve()
    joined = [deployed.join(client) for client in range(CLIENTS)]
    assert server.wait(timeout=2 * WITHIN) == 0, deployed.log("server")
    assert [process.wait(timeout=WITHIN) for process in joined] == [0] * CLIENTS
    assert_same_as_simulation(deployed)


def test_a_client_trains_in_two_processes_as_in_one_and_logs_once(deployment, tmp_path):
    config = tmp_path / "two_rounds.yaml"
    config.write_text((HERE / "killed.yaml").read_text().replace("rounds: 500", "rounds: 2"))
    deployed = deployment(2, config)
    server = deployed.serve()
    logged = ["--trainer.log_every_n_steps", "1", "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir"]
    together = ["--trainer.strategy", "ddp", "--trainer.devices", "2", *logged, "two"]
    joined = [deployed.join(0), deployed.join(1, "--keys", "keys/client_1", *together)]
    assert server.wait(timeout=WITHIN) == 0, deployed.log("server")
    assert [process.wait(timeout=WITHIN) for process in joined] == [0, 0], deployed.log("client 1")
    assert_same_as_simulation(deployed, *logged, "one", tolerance=1e-5)
    for round in (1, 2):
        files = [[*(tmp_path / name).rglob(f"client_001/round_{round:04}/metrics.csv")] for name in ("one", "two")]
        one, two = (np.genfromtxt(file, delimiter=",", names=True) for (file,) in files)
        assert one.dtype.names == two.dtype.names and "train_loss" in one.dtype.names and len(one) == len(two)
        for name in one.dtype.names:
            np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-4)


def children_of(process: subprocess.Popen) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return [*map(int, listed.stdout.split())]


def test_server_and_clients_that_are_killed_go_on_and_strangers_are_refused(deployment):
    deployed = deployment(2, HERE / "killed.yaml")
    server = deployed.serve()
    deployed.join(0)
    deployed.wait_for("server", "waiting for 2 clients")
    deployed.run("provision", "--client", "1", "--folder", "stranger")
    shutil.copy(deployed.folder / "keys/server/ca.pem", deployed.folder / "stranger")
    refused = {
        "no TLS": (deployed.join(1, "--insecure", "true", name="no TLS"), "the server at"),
        "stranger": (
            deployed.join(1, "--keys", "stranger", name="stranger"),
            "does not take this client: [code: 2004]",
        ),
    }
    for name, (process, sentence) in refused.items():
        assert process.wait(timeout=WITHIN) == 2, deployed.log(name)
        assert sentence in deployed.log(name)
    client = deployed.join(1)
    deployed.wait_until(lambda: len(deployed.rows()) >= 2)
    server.send_signal(signal.SIGKILL)
    server.wait()
    server = deployed.serve("--ckpt_path", "last")
    deployed.wait_for("server", "Resumed from")
    before = len(deployed.rows())
    deployed.wait_until(lambda: len(deployed.rows()) >= before + 2)
    client.send_signal(signal.SIGKILL)
    client.wait()
    deployed.wait_until(lambda: deployed.rows()[-1]["failed"] > 0)
    (superlink,) = children_of(server)
    os.kill(superlink, signal.SIGTERM)
    assert server.wait(timeout=60) == 2, "Flower would try again for ever"
    assert "serve: Flower's SuperLink, which carries all messages, has ended (SIGTERM)" in deployed.log("server")
    deployed.serve("--ckpt_path", "last")
    deployed.join(1)
    away = len(deployed.rows())
    kept = f"client 1/killed/client_1/*/{CLIENT_STATES}/FedPer/*.safetensors"
    deployed.wait_until(lambda: any(int(path.stem.split("_")[1]) >= away for path in deployed.folder.glob(kept)))
    rounds = [row["round"] for row in deployed.rows()]
    assert rounds == [*range(1, len(rounds) + 1)], "no round is lost or repeated"


def pieces_of(tensors) -> list[bytes]:
    """Parts of tensors' bytes that stand nowhere by accident; whoever stores a tensor may divide it."""
    contents = (tensor.numpy().tobytes() for tensor in tensors)
    pieces = (content[i : i + 64] for content in contents for i in range(0, len(content) - 63, 512))
    return [piece for piece in pieces if len({*piece}) > 24]


def has_one_of(pieces: set[bytes], content: bytes) -> bool:
    """In one pass for each length: there are ten thousands of pieces."""
    lengths = {len(piece) for piece in pieces}
    return any(content[i : i + length] in pieces for length in lengths for i in range(len(content)))


def memory_of(process: int):
    """What the process has written into its memory, part by part."""
    with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb") as memory:
        for line in maps:
            (start, end), (rights, *_) = (int(each, 16) for each in line.split()[0].split("-")), line.split()[1:]
            if rights.startswith("rw") and "[v" not in line:
                memory.seek(start)
                try:
                    yield memory.read(end - start)
                except OSError:  # it was given back meanwhile
                    continue


def simulate_in_this_process(deployed: Deployment, root: str) -> None:
    own = ["--federation.default_root_dir", root, "--trainer.devices", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(deployed.folder)
        patch.setattr(sys, "argv", ["fedmoe", "fit", "--config", str(deployed.config), *own])
        main()


@pytest.mark.skipif(find_spec("opacus") is None, reason="needs Opacus")
@pytest.mark.skipif(sys.platform != "linux", reason="reads another process's memory")
def test_five_clients_whose_updates_are_masked_and_private_end_with_the_bits_of_a_simulation(deployment, monkeypatch):
    """The server sees no update, no secret and no private part, in its memory or its files.

    With noise from the clients' own secrets, a simulation ends with the bits of the private phase, too.
    """
    deployed, encode, secret = deployment(5, HERE / "secure.yaml"), SecureAggregation.encoded, []

    def note(self, update, start, num_clients):
        encoded = encode(self, update, start, num_clients)
        known, plain = {*pieces_of(start.values())}, pieces_of(update.sent.values())
        secret.append((pieces_of(encoded.sent.values()), [piece for piece in plain if piece not in known]))
        return encoded

    monkeypatch.setattr(SecureAggregation, "encoded", note)
    simulate_in_this_process(deployed, "simulation")
    assert len(secret) == 5 * 2 + 4 + 5 and all(len(pieces) > 10 for of_client in secret for pieces in of_client)

    def in_server() -> list[bytes]:
        return [*memory_of(server.pid), *(path.read_bytes() for path in deployed.folder.glob("runs/flower/*.db*"))]

    def private_parts() -> list[list[bytes]]:
        files = deployed.folder.glob(f"client */secure/client_*/*/{CLIENT_STATES}/PFL-FT/1_*.safetensors")
        trees = [read_tensors(file) for file in files]
        known = {*pieces_of(deployed.states("runs")["private"].server.values())} if trees else set()
        return [[piece for piece in pieces_of(tree.values()) if piece not in known] for tree in trees]

    server = deployed.serve()
    joined = [deployed.join(client) for client in range(5)]
    found, looks, looks_for_parts = [], 0, 0
    while server.poll() is None:
        state = deployed.states("runs").get("FedAvg") if deployed.rows("secure") else None
        if state is not None and looks < state.round:
            looks, known, parts = state.round, pieces_of(state.server.values()), in_server()
            sought = [piece for of_client in secret[5 * (looks - 1) :][:5] for each in of_client for piece in each[:2]]
            found += [piece for piece in sought if any(piece in part for part in parts)]
            assert any(piece in part for piece in known[:4] for part in parts), "it looks where tensors are"
        if not looks_for_parts and len(kept := private_parts()) == 5:
            looks_for_parts, parts = 1, in_server()
            assert all(len(of_client) > 10 for of_client in kept)
            sought = [piece for of_client in kept for piece in of_client[:4]]
            sought += [path.read_bytes()[:32] for path in deployed.folder.glob("client */secure/client_*/secret")]
            found += [piece for piece in sought if any(piece in part for part in parts)]
        time.sleep(0.2)
    assert server.wait() == 0, deployed.log("server")
    assert [process.wait(timeout=WITHIN) for process in joined] == [0] * 5
    assert looks and looks_for_parts and not found

    there, secret_seeds, checkpoints = deployed.states("runs"), {}, []
    for client in range(5):
        (path,) = deployed.folder.glob(f"client {client}/secure/client_{client}/secret")
        (own,) = path.parent.glob("*/private_rounds.json")
        checkpoints.append(own.parent / FILE)
        rounds = PrivateRounds(path.parent, own.parent.name, client)
        secret_seeds[client] = rounds.begin(SimpleNamespace(phase_name="private", rounds_before=0))
        secret.append(([path.read_bytes()[:32]], [f"{secret_seeds[client]}".encode()]))
    of_seed = local_client._private_generator

    def of_secret(training, client, purpose):
        return of_seed(replace(training, secret_seed=secret_seeds[client.id]), client, purpose)

    secret += [([], of_client) for of_client in private_parts()]
    monkeypatch.setattr(local_client, "_private_generator", of_secret)
    simulate_in_this_process(deployed, "with secrets")
    simulated, with_secrets = deployed.states("simulation"), deployed.states("with secrets")
    for phase in simulated:
        torch.testing.assert_close(there[phase].server, with_secrets[phase].server, rtol=0, atol=0)
        differ = any(not torch.equal(simulated[phase].server[name], each) for name, each in there[phase].server.items())
        assert differ == (phase in ("private", "PFL-FT")), "noise changes its phase and the one that starts from it"
    accounts = [load_federation(path)["phases"]["private"] for path in checkpoints]
    spent = [account.sample_epsilon for account in accounts]
    assert len(spent) == 5 and max(spent) == pytest.approx(there["private"].sample_epsilon, rel=1e-9)
    assert 0 < min(spent) and max(spent) <= 4 and there["private"].counted_steps == simulated["private"].counted_steps
    files = [path.read_bytes() for path in deployed.folder.glob("runs/**/*") if path.is_file()]
    assert len(secret) == 2 * (5 * 2 + 4 + 5) + 5 + 5
    sought = {piece for of_client in secret for each in of_client for piece in each}
    assert not any(has_one_of(sought, content) for content in files)
    assert has_one_of(sought, b"any" + min(sought) + b"any"), "it finds what is there"
