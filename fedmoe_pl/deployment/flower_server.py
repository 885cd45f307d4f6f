"""The server's side of Flower: its SuperLink as a child process, and this process as the ServerApp of a run in it."""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Flower is not installed where types are checked: it cannot be together with other extras.
import hashlib
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.deployment.connection import Security, split_address, tls_context
from fedmoe_pl.deployment.nodes import LOOK
from fedmoe_pl.deployment.processes import child, reason_in

_LINK_STARTS_WITHIN = 120.0
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
_APP = b"""
[project]
name = "fedmoe-pl"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedmoe-pl"
[tool.flwr.app.components]
serverapp = "fedmoe_pl.cli.flower_app:server"
clientapp = "fedmoe_pl.cli.flower_app:client"
"""


@contextmanager
def superlink(folder: Path, address: str, security: Security, keys: Path | None) -> Iterator[Grid]:
    """Runs a SuperLink as a child process, and gives the grid of a new run in it.

    Args:
        folder: for Flower's database, secrets and log.
        address: host and port to listen on.
        security: certificates; none without TLS.
        keys: folder of the clients' public keys, ``*.pub``; None if clients need none.

    Raises:
        MisconfigurationException: if it does not start.
    """
    folder.chmod(0o700)
    secret = folder / "secret"
    if not secret.is_file():
        secret.touch(mode=0o600)
        secret.write_bytes(secrets.token_bytes(32))
    host, port = split_address(address)
    arguments = ["--host", host, "--port", str(port), "--isolation", "process", "--database", str(folder / "state.db")]
    arguments += ["--superexec-auth-secret-file", str(secret)]
    if security.ca is None:
        arguments += ["--insecure"]
    else:
        arguments += ["--ssl-ca-certfile", str(security.ca), "--ssl-certfile", str(security.certificate)]
        arguments += ["--ssl-keyfile", str(security.key)]
    arguments += ["--enable-supernode-auth"] if keys else []
    log = folder / "superlink.log"
    script = str(Path(__file__).with_name("superlink.py"))  # as a module, it would import PyTorch
    with child([sys.executable, "-P", script, *arguments], log, folder) as process:
        local = f"127.0.0.1:{port}" if host in ("0.0.0.0", "::") else address
        _wait_for_link(process, local, security, log)
        control = ControlHttpClient.from_server_address(**security.connection(local), interceptors=[])
        for key in sorted(keys.glob("*.pub")) if keys else []:
            _register(control, key)
        with _grid(control, local, security, secret.read_bytes()) as grid:
            yield grid


def _wait_for_link(process: subprocess.Popen[bytes], address: str, security: Security, log: Path) -> None:
    url = f"{'http' if security.ca is None else 'https'}://{address}/health"
    end = time.monotonic() + _LINK_STARTS_WITHIN
    while process.poll() is None and time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if httpx.get(url, verify=tls_context(security.ca)).is_success:
                return
        time.sleep(LOOK)
    raise MisconfigurationException(f"serve: Flower's SuperLink does not start at {address}: {reason_in(log)}.")


def _register(control: ControlHttpClient, key: Path) -> None:
    try:
        public = load_ssh_public_key(key.read_bytes())
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        control.RegisterNode(RegisterNodeRequest(public_key=pem))
    except (ValueError, UnsupportedAlgorithm, httpx.HTTPStatusError) as error:
        reason = error.response.text if isinstance(error, httpx.HTTPStatusError) else str(error)
        if "already in use" not in reason:  # a SuperLink with the same database knows it
            raise MisconfigurationException(
                f"serve: client_keys has '{key}', but must have public keys of the type ecdsa in OpenSSH format "
                f"({reason.strip()})."
            ) from error


@contextmanager
def _grid(control: ControlHttpClient, address: str, security: Security, secret: bytes) -> Iterator[Grid]:
    """Starts a run, and takes the place of its ServerApp in this process."""
    fab, _ = build_fab_from_files({"pyproject.toml": _APP})
    control.StartRun(StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))))
    interceptors = [
        RuntimeVersionHttpInterceptor(component_name="SuperExec"),
        SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE),
    ]
    asker = RuntimeHttpClient.from_server_address(**security.connection(address), interceptors=interceptors)
    while not (task := asker.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))).token:
        time.sleep(LOOK)
    grid = HttpGrid(address, insecure=security.ca is None, root_certificates=security.root, token=task.token)
    client = grid._runtime_client
    of_run = client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = of_run.task_id, of_run.run.run_id
    TaskIdentity.node_id = of_run.context.node_id
    grid.set_run(run_from_proto(of_run.run))
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    status, details = SubStatus.FAILED, ""
    try:
        yield grid
        status = SubStatus.COMPLETED
    except BaseException as error:
        details = repr(error)
        raise
    finally:
        with suppress(httpx.HTTPError):
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
        heartbeat.stop()
        grid.close()
