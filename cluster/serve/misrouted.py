"""Refuses requests that were meant for another replica.

HAProxy addresses a replica by its port. After a replica's death, a replica of another model or
server may take the port before HAProxy notices. So HAProxy names the intended replica in a header,
also in health checks, and overwrites what a client sends there.
"""

import os
import re
from typing import Final

import ray
from starlette.types import ASGIApp, Receive, Scope, Send

from diffray.cluster.api.errors import unavailable
from diffray.cluster.api.http import refusal
from diffray.cluster.serve.haproxy import SERVER_HEADER

_HEADER: Final = SERVER_HEADER.encode()


class RefuseMisrouted:
    """ASGI middleware around a replica or a proxy of Serve; it removes the header.

    Without HAProxy the header comes from clients and is ignored.
    """

    def __init__(self, app: ASGIApp, name: bytes | None) -> None:
        self.app, self._name = app, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        meant = {value for name, value in scope["headers"] if name == _HEADER}
        if self._name is None or meant <= {self._name}:
            headers = [each for each in scope["headers"] if each[0] != _HEADER]
            await self.app({**scope, "headers": headers}, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            error = unavailable("The replica that was to answer is gone; try again.")
            await refusal(error)(scope, receive, send)


def own_name() -> bytes | None:
    """Return HAProxy's name of this process; empty without HAProxy."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return None
    return server_name(ray.get_runtime_context().get_actor_name() or "").encode()


def server_name(actor_name: str) -> str:
    """Return an actor's name in the HAProxy configuration that Serve writes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", actor_name.replace("#", "-").replace("/", "."))
