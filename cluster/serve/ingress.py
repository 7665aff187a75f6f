"""The middleware around Serve's HTTP proxy and around replicas, for what Serve itself gets wrong.

- A request for another replica is refused. HAProxy addresses a replica by its port, which another
  one, even of another model or server, may take after the replica's death before HAProxy notices.
  So HAProxy names the intended replica in a header, in health checks too, and overwrites what a
  client sends there.
- If a replica is lost before it has sent anything, the same request goes to another one. A stream
  that has started ends with an error event, so that its client can retry.
- Serve's router does not see bodies. If applications have prefix_routing, the middleware in Serve's
  proxy reads the body first and derives a session id from the prefix. HAProxy chooses by itself.
- Serve answers 404 while it does not know its routes: at startup, after a fault, and during
  shutdown. Clients do not retry after 404, so paths of models answer 503 instead.
"""

import asyncio
import json
import logging
import os
import re
from typing import Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffray.cluster.api.errors import ApiError, unavailable
from diffray.cluster.api.http import event, refusal
from diffray.cluster.serve.environment import ROUTES
from diffray.cluster.serve.haproxy import PREFIX_ROUTED, SERVER_HEADER
from diffray.cluster.serve.prefix_routing import prefix_key

log = logging.getLogger("ray.serve")

TRIES: Final = 4  # attempts per request; each may lose a replica
_LARGEST: Final = 32 << 20  # bytes of a request that is kept for a retry
_WORTH_READING: Final = 1 << 20  # bytes of a body that are read for its prefix
_READ_S: Final = 10.0  # seconds to read them
_HEADER: Final = SERVER_HEADER.encode()
NOT_READY: Final = "The model is not being served at the moment; try again."


def middlewares() -> list[Middleware]:
    """Return the middleware for RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(Ingress, name=own_name())]


def own_name() -> bytes | None:
    """Return HAProxy's name of this process; None without HAProxy."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return None
    import ray

    return server_name(ray.get_runtime_context().get_actor_name() or "").encode()


def server_name(actor_name: str) -> str:
    """Return an actor's name in the HAProxy configuration that Serve writes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", actor_name.replace("#", "-").replace("/", "."))


def no_such_path() -> ApiError:
    return ApiError(404, "There is nothing at this path.", code="not_found")


class Ingress:
    """ASGI middleware of the process that HAProxy calls `name`; it removes the name's header.

    Without HAProxy there is no name, and a header that a client sends is ignored.
    """

    def __init__(self, app: ASGIApp, name: bytes | None = None) -> None:
        self._app, self._name = app, name
        self._by_prefix = name is None and bool(os.environ.get(PREFIX_ROUTED))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        intended = {value for name, value in scope["headers"] if name == _HEADER}
        scope = {**scope, "headers": [each for each in scope["headers"] if each[0] != _HEADER]}
        is_misrouted = self._name is not None and not intended <= {self._name}
        if kind == "websocket":
            if is_misrouted:
                await send({"type": "websocket.close"})
            else:
                await self._app(scope, receive, send)
        elif is_misrouted:
            error = unavailable("The replica that was to answer is gone; try again.")
            await refusal(error, scope["path"])(scope, receive, send)
        elif scope["path"] == "/-/routes":  # would list the applications for everyone
            await refusal(no_such_path(), scope["path"])(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, answer = _Request(receive), _Answer(send, scope["path"])
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
            is_unknown = await self._is_unknown(scope["path"])
            error = no_such_path() if is_unknown else unavailable(NOT_READY)
        elif not answer.started and not request.gone:
            error = unavailable("No replica could answer; try again.")
        elif not answer.complete and not request.gone:
            await answer.end()
        if error is not None:
            await refusal(error, scope["path"])(scope, receive, send)

    async def _is_unknown(self, path: str) -> bool:
        """Return whether no model has this path, even if Serve knows no routes at the moment."""
        routes = os.environ.get(ROUTES, "").split()
        if routes:
            return not any(path == r or path.startswith(r.rstrip("/") + "/") for r in routes)
        return await self._knows_routes()

    async def _knows_routes(self) -> bool:
        """Return whether Serve is healthy, which it is not before it knows its routes."""
        found = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            found.append(message.get("status"))

        scope = {
            "type": "http", "method": "GET", "path": "/-/healthz", "raw_path": b"/-/healthz",
            "root_path": "", "query_string": b"", "headers": [],
        }  # fmt: skip
        await self._app(scope, receive, send)
        return 200 in found


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
    """The messages to the client, without Serve's own 404."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path = send, path
        self.started = self.complete = self.is_serves_404 = False
        self._streams = False
        self._held: Message | None = (
            None  # a 404's start, until its body shows whether it is Serve's
        )

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = {name.lower(): value for name, value in message.get("headers", [])}
            self._streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            if message["status"] == 404:
                self._held = message
                return
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
            if self._held is not None:
                held, self._held = self._held, None
                body = message.get("body", b"")
                self.is_serves_404 = (
                    body.startswith(b"Path '") and b"' not found. Ping http" in body
                )
                if not self.is_serves_404:
                    await self._send(held)
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
