"""The middleware that every request passes first: it checks keys and assigns ids."""

import re
from collections.abc import Iterable
from typing import Final
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.keys import is_known

_OPEN: Final = ("/health", "/ping", "/metrics", "/version", "/docs", "/openapi.json")
_USABLE_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
# A page that needs more, such as the style of /docs, overrides this.
_SAFE: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class RequestIds:
    """ASGI middleware: every answer has its request's id, or a new one.

    Not used behind Ray Serve, which does the same: an answer would have two ids.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Gate:
    """ASGI middleware: every path needs a key unless it is open, also paths that do not exist."""

    def __init__(self, app: ASGIApp, keys: Iterable[str] = ()) -> None:
        self._app = app
        self._digests = tuple(keys)  # as ApiSettings holds them

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in _SAFE.items():
                    answer.setdefault(name, value)
            await send(message)

        app = self._app if self._may_pass(scope, Headers(scope=scope)) else _REFUSAL
        await app(scope, receive, send_safely)

    def _may_pass(self, scope: Scope, headers: Headers) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not self._digests or scope["method"] == "OPTIONS" or path in _OPEN:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return is_known(key.strip(), self._digests) and scheme.lower() == "bearer"


_REFUSAL: Final = JSONResponse(
    ApiError(
        401,
        "Incorrect API key provided; send one as `Authorization: Bearer KEY`.",
        code="invalid_api_key",
    ).body,
    status_code=401,
    headers={"WWW-Authenticate": "Bearer"},
)
