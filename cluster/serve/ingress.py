"""Middleware around Serve's HTTP proxy and around replicas, for lost replicas.

If nothing has been sent, the same request goes to another replica. A stream that has started ends
with an error event, so that its client knows that the answer is incomplete and can retry.
"""

import json
import logging
from typing import Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffray.cluster.api.errors import unavailable
from diffray.cluster.serve.misrouted import RefuseMisrouted, own_name
from diffray.cluster.serve.not_found import NotFound

log = logging.getLogger("ray.serve")

TRIES: Final = 4  # lost replicas per request
_LARGEST: Final = 32 << 20  # bytes of a request that are kept for a retry


def middlewares() -> list[Middleware]:
    """Return the middlewares for RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, outermost last."""
    return [
        Middleware(SecondTry),
        Middleware(NotFound),
        Middleware(RefuseMisrouted, name=own_name()),
    ]


class SecondTry:
    """ASGI middleware that retries a request when Serve's proxy loses the replica."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        heard, answer = _Heard(receive), _Answer(send)
        for _ in range(TRIES):
            asked = dict(scope)  # the proxy changes its path
            await self.app(asked, heard.from_the_start(), answer.send)
            if answer.started or heard.gone or not heard.complete:
                break
            log.warning("a replica was lost before it answered; trying another one")
        if not answer.complete and not heard.gone:
            await answer.end()


class _Heard:
    """The client's messages, kept for a retry."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self._size = 0
        self.gone = False  # the client
        self.complete = True  # all of it is kept

    def from_the_start(self) -> Receive:
        kept = iter(list(self._messages))

        async def receive() -> Message:
            message = next(kept, None)
            return message if message is not None else await self._next()

        return receive

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
    """The messages sent to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self.complete = False
        self._streams = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = {name.lower(): value for name, value in message.get("headers", [])}
            self._streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    async def end(self) -> None:
        """Report the lost answer; outside a stream the connection can only be closed."""
        if not self.started:
            error = unavailable("No replica could answer; try again.")
            headers = {"content-type": "application/json"} | error.headers
            raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            start = {"type": "http.response.start", "status": error.status, "headers": raw}
            await self._send(start)
            await self._body(json.dumps(error.body).encode())
        elif self._streams:
            error = unavailable(
                "The replica was lost, so this answer is incomplete; send the request again."
            )
            await self._body(b"data: " + json.dumps(error.body).encode() + b"\n\n")

    async def _body(self, content: bytes) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": False})
