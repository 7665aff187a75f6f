"""The middleware in Serve's HTTP proxies, for what Serve itself does not do.

- If a replica is lost before it has sent anything, the same request goes to another one. A stream
  that has started ends with an error event, so that its client can retry.
- Serve's router does not see bodies. If applications have prefix_routing, the middleware reads the
  body first and derives a session id from the prefix.
- Serve answers 404 while it does not know its routes: at startup, after a fault, and during
  shutdown. Clients do not retry after 404, so paths of models answer 503 instead.
"""

import asyncio
import json
import logging
import os
from typing import Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffray.cluster.api.errors import ApiError, unavailable
from diffray.cluster.api.http import event, refusal
from diffray.cluster.serve.address import PREFIX_ROUTED, ROUTES
from diffray.cluster.serve.prefix_routing import prefix_key

log = logging.getLogger("ray.serve")

TRIES: Final = 4  # attempts per request; each may lose a replica
_LARGEST: Final = 32 << 20  # bytes of a request that is kept for a retry
_WORTH_READING: Final = 1 << 20  # bytes of a body that are read for its prefix
_READ_S: Final = 10.0  # seconds to read them


def middlewares() -> list[Middleware]:
    """Return the middleware for RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(ProxyMiddleware)]


class ProxyMiddleware:
    """ASGI middleware of Serve's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._routes = [path.rstrip("/") for path in os.environ.get(ROUTES, "").split()]
        self._by_prefix = bool(os.environ.get(PREFIX_ROUTED))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == "/-/routes":  # would list the applications for everyone
            await refusal(_no_such_path(), scope["path"])(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        request, answer = _Request(receive), _Answer(send, path, hold_404=bool(self._routes))
        if self._by_prefix and scope["method"] == "POST":
            scope = await _with_session(scope, request)
        for _ in range(TRIES):
            # A copy, because the proxy changes the path.
            await self._app(dict(scope), request.replayed(), answer.send)
            if answer.started or request.gone or not request.complete:
                break
            log.warning("a replica was lost before it answered; trying another one")
        error = None
        if answer.is_serves_404:
            error = _no_such_path()
            if any(path == route or path.startswith(f"{route}/") for route in self._routes):
                error = unavailable("The model is not being served at the moment; try again.")
        elif not answer.started and not request.gone:
            error = unavailable("No replica could answer; try again.")
        elif not answer.complete and not request.gone:
            await answer.end()
        if error is not None:
            await refusal(error, path)(scope, receive, send)


def _no_such_path() -> ApiError:
    return ApiError(404, "There is nothing at this path.", code="not_found")


async def _with_session(scope: Scope, request: "_Request") -> Scope:
    """Return the scope with a session id derived from the prefix, unless it has one."""
    session = os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id").encode()
    if any(name == session for name, _ in scope["headers"]):
        return scope
    try:
        async with asyncio.timeout(_READ_S):
            key = prefix_key(json.loads(await request.head()))
    except (TimeoutError, ValueError, RecursionError):  # the replica will report the error
        return scope
    if key is None:
        return scope
    return {**scope, "headers": [*scope["headers"], (session, key.encode())]}


class _Request:
    """The client's messages, kept for a retry."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self._size = 0
        self.gone = False  # whether the client has disconnected
        self.complete = True  # whether all messages are kept

    def replayed(self) -> Receive:
        """Return a `receive` that yields the kept messages first."""
        kept = iter(list(self._messages))

        async def receive() -> Message:
            message = next(kept, None)
            return message if message is not None else await self._next()

        return receive

    async def head(self) -> bytes:
        """Read the body, or as much of it as is worth reading before it is passed on."""
        parts = list[bytes]()
        while not self.gone and self._size < _WORTH_READING:
            message = await self._next()
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        return b"".join(parts)

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            return message
        self._size += len(message.get("body", b""))
        if self._size > _LARGEST:
            self.complete = False
            self._messages.clear()
        else:
            self._messages.append(message)
        return message


class _Answer:
    """The messages to the client; `hold_404` holds back Serve's own 404, which is plain text."""

    def __init__(self, send: Send, path: str, *, hold_404: bool) -> None:
        self._send, self._path, self._hold_404 = send, path, hold_404
        self.started = self.complete = self.is_serves_404 = False
        self._streams = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = {name.lower(): value for name, value in message.get("headers", [])}
            kind = headers.get(b"content-type", b"")
            self._streams = kind.startswith(b"text/event-stream")
            is_404 = message["status"] == 404 and kind.startswith(b"text/plain")
            self.is_serves_404 = self._hold_404 and is_404
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
        if not self.is_serves_404:
            await self._send(message)

    async def end(self) -> None:
        """Report the loss in an event stream; any other answer can only be cut off."""
        if self._streams:
            error = unavailable(
                "The replica was lost, so this answer is incomplete; send the request again."
            )
            body = event(error.body_at(self._path))
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
