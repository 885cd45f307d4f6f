"""Flower's SuperLink, of which other machines reach only the part for clients.

Flower has one port for clients (``/v1/fleet``), for those who start runs (``/v1/control``) and for the processes that
execute them (``/v1/runtime``). Keys of clients guard the first only: whoever reaches the others can register a key and
start a run with code of his own. So this process answers only its own machine there. A reverse proxy on the same
machine, through which others seem to come from it, must let only paths below ``/v1/fleet/`` through.
"""

from __future__ import annotations

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Flower is not installed where types are checked: it cannot be together with other extras.
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class FleetOnly:
    """Passes on what comes from this machine, and what is for clients.

    Args:
        app: the application.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answers a request; signature of ASGI."""
        if scope["type"] in ("http", "websocket") and not is_allowed(scope["path"], scope["client"]):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"only the server's own machine may do this"})
            return
        await self.app(scope, receive, send)


def is_allowed(path: str, client: tuple[str, int] | None) -> bool:
    """Whether a request may pass.

    Example:
        >>> is_allowed("/v1/control/StartRun", ("127.0.0.1", 1)), is_allowed("/v1/fleet/x", ("10.0.0.9", 1))
        (True, True)
        >>> is_allowed("/v1/control/StartRun", ("10.0.0.9", 1)), is_allowed("/v1/fleet/../control", ("10.0.0.9", 1))
        (False, False)
    """
    if client is not None and ipaddress.ip_address(client[0]).is_loopback:
        return True
    return path.startswith("/v1/fleet/") and ".." not in path


def main() -> None:
    """Runs it; takes the arguments of ``flower-superlink``."""
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    config = _parse_superlink_lifespan_config()
    uvicorn.run(
        FleetOnly(create_app(config, SuperLinkLifespan)),
        host=config.host,
        port=config.port,
        log_config=get_uvicorn_log_config(console_handler.level),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        workers=1,
    )


if __name__ == "__main__":
    main()
