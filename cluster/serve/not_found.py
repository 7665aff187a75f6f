"""The answers of Serve's HTTP proxy and replicas for paths without an application.

Serve answers 404 while it does not know its routes: at startup, after a fault, and during shutdown.
Clients do not retry after 404, so paths of models answer 503 instead.
"""

import os
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffray.cluster.api.errors import ApiError, unavailable
from diffray.cluster.api.http import refusal
from diffray.cluster.serve.environment import ROUTES

NOT_THERE: Final = "The model is not being served at the moment; try again."
_SERVES_OWN: Final = (b"Path '", b"' not found. Ping http")


class NotFound:
    """ASGI middleware around Serve's application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]  # Serve changes it
        held: list[Message] = []
        is_serves_own = False

        async def send_unless_serves_own(message: Message) -> None:
            nonlocal is_serves_own
            if message["type"] == "http.response.start" and message["status"] == 404:
                held.append(message)
                return
            if held and not is_serves_own:
                body = message.get("body", b"")
                is_serves_own = body.startswith(_SERVES_OWN[0]) and _SERVES_OWN[1] in body
                if not is_serves_own:
                    await send(held.pop())
            if not is_serves_own:
                await send(message)

        if path == "/-/routes":  # would list the applications for everyone
            await refusal(no_such_path())(scope, receive, send)
            return
        await self.app(scope, receive, send_unless_serves_own)
        if is_serves_own:
            gone = no_such_path() if await self._has_no_model(path) else unavailable(NOT_THERE)
            await refusal(gone)(scope, receive, send)

    async def _has_no_model(self, path: str) -> bool:
        routes = os.environ.get(ROUTES, "").split()
        if routes:
            return not any(is_under(path, route) for route in routes)
        return await self._knows_routes()

    async def _knows_routes(self) -> bool:
        """Ask Serve, which is not healthy before it knows its routes."""
        found = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            found.append(message.get("status"))

        scope = {
            "type": "http", "method": "GET", "path": "/-/healthz", "raw_path": b"/-/healthz",
            "root_path": "", "query_string": b"", "headers": [],
        }  # fmt: skip
        await self.app(scope, receive, send)
        return 200 in found


def is_under(path: str, route: str) -> bool:
    return path == route or path.startswith(route.rstrip("/") + "/")


def no_such_path() -> ApiError:
    return ApiError(404, "There is nothing at this path.", code="not_found")
