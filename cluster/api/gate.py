"""What every request passes first: it gets an id, and shows its key where one is needed."""

import hmac
import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Final
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffray.cluster.api.errors import ApiError

_OPEN: Final = ("/health", "/metrics", "/version", "/docs", "/openapi.json")
_USABLE_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware; everything that is not open needs a key, what does not exist too."""

    def __init__(self, app: ASGIApp, keys: Iterable[str] = ()) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        app = self._app if self._may_pass(scope, headers) else _REFUSAL
        await app(scope, receive, send_with_id)

    def _may_pass(self, scope: Scope, headers: Headers) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not self._digests or scope["method"] == "OPTIONS" or path in _OPEN:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        shown = _digest(key.strip())
        # All keys are compared, each in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


_REFUSAL: Final = JSONResponse(
    ApiError(
        401,
        "Incorrect API key provided; send one as `Authorization: Bearer KEY`.",
        code="invalid_api_key",
    ).body,
    status_code=401,
    headers={"WWW-Authenticate": "Bearer"},
)
