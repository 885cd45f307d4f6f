"""Flower does what this package expects of it without its being documented; needs the extra `flower`.

When a test here fails with a newer Flower, read ``flower_inside.py`` beside that Flower's source.
"""

import asyncio
import importlib
import inspect
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

flwr = pytest.importorskip("flwr", reason="needs the extra `flower`")

INSIDE = "fedmoe_pl.deployment.flower_inside"
TLS, KEY = [Path("ca.pem"), Path("server.pem"), Path("server.key")], Path("client_0")
CALLS = {
    "ControlHttpClient.from_server_address": (
        ["a:1"],
        {"insecure": True, "root_certificates": None, "interceptors": []},
    ),
    "ControlHttpClient.RegisterNode": ([None, None], {}),
    "ControlHttpClient.StartRun": ([None, None], {}),
    "Fab": (["hash", b"", {}], {}),
    "HeartbeatSender": ([lambda: True], {}),
    "HttpGrid": (["a:1", True, None], {"token": "t"}),
    "ObjectPullError": (["id", "reason"], {}),
    "RetryInvoker": ([None, (), None, 1.0], {"jitter": None, "should_giveup": None}),
    "RuntimeHttpClient.AcquireTask": ([None, None], {}),
    "RuntimeHttpClient.PullObject": ([None, None], {}),
    "RuntimeHttpClient.PullTaskInput": ([None, None], {}),
    "RuntimeHttpClient.PushTaskOutput": ([None, None], {}),
    "RuntimeHttpClient.SendTaskHeartbeat": ([None, None], {}),
    "SuperExecAuthHttpInterceptor": ([], {"master_secret": b"", "protected_methods": frozenset()}),
    "build_fab_from_files": ([{}], {}),
    "constant": ([0.5], {}),
    "pull_task_input": ([None], {}),
    "push_message": ([None, None, None], {}),
    "push_task_output": ([None, None, "status", ""], {}),
}


@contextmanager
def contract(what):
    """Makes any failure the one sentence that whoever tries a newer Flower has to read."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        sentence = f"Flower {flwr.__version__} has changed what flower_inside.py uses, {what} ({reason})"
        pytest.fail(sentence, pytrace=False)


def parser_of(name):
    return getattr(importlib.import_module(f"flwr.{name}.cli.flower_{name}"), f"_parse_args_run_{name}")()


def test_what_is_called_takes_the_same_arguments():
    with contract("a module or a name"):
        inside = importlib.import_module(INSIDE)
    for name, (arguments, named) in CALLS.items():
        with contract(name):
            owner, _, method = name.partition(".")
            found = getattr(inside, owner)
            inspect.signature(getattr(found, method) if method else found).bind(*arguments, **named)
    with contract("HttpGrid's retries"):
        assert hasattr(inside.HttpGrid("127.0.0.1:1", True, None, token="t"), "_retry_invoker")
    with contract("the arguments of flower-superlink"):
        command = inside.superlink_command("127.0.0.1", 1, Path("state.db"), Path("secret"), TLS, True)
        parser_of("superlink").parse_args(command[3:])
    with contract("the arguments of flower-supernode"):
        command = inside.supernode_command("127.0.0.1:1", 2, TLS[0], KEY)
        parser_of("supernode").parse_args(command[1:])


@pytest.mark.parametrize(
    ("path", "host", "is_allowed"),
    [
        ("/v1/control/start-run", "127.0.0.1", True),
        ("/v1/fleet/pull-messages", "10.0.0.9", True),
        ("/v1/control/start-run", "10.0.0.9", False),
        ("/v1/runtime/acquire-task", "10.0.0.9", False),
        ("/v1/fleet/../control/start-run", "10.0.0.9", False),
    ],
)
def test_other_machines_reach_what_is_for_clients_only(path, host, is_allowed):
    assert importlib.import_module(INSIDE).is_allowed(path, (host, 1)) is is_allowed


@pytest.mark.parametrize(
    ("peer", "claimed", "status"),
    [("10.0.0.9", "127.0.0.1", 403), ("127.0.0.1", "10.0.0.9", 403), ("127.0.0.1", "127.0.0.1", 200)],
)
def test_a_header_makes_no_other_machine_this_one(peer, claimed, status, monkeypatch):
    async def answer_all(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def note(message):
        sent.append(message)

    def configure(app, log_config, **named):
        made.append(uvicorn.Config(app, log_config=None, ws="none", **named))

    made, sent, settings = [], [], {"host": "0.0.0.0", "port": 1, "ssl_keyfile": None, "ssl_certfile": None}
    names = "uvicorn", "flwr.superlink.cli.flower_superlink", "flwr.superlink.main"
    uvicorn, of_command, of_app = map(importlib.import_module, names)
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    monkeypatch.setattr(of_command, "_parse_superlink_lifespan_config", lambda: SimpleNamespace(**settings))
    monkeypatch.setattr(of_app, "create_app", lambda *_: answer_all)
    monkeypatch.setattr(uvicorn, "run", configure)
    importlib.import_module(INSIDE).main()
    made[0].load()
    request = {"type": "http", "path": "/v1/control/start-run", "client": (peer, 1)}
    request["headers"] = [(b"x-forwarded-for", claimed.encode())]
    asyncio.run(made[0].loaded_app(request, None, note))
    assert sent[0]["status"] == status
