"""What every request passes first (keys, headers for browsers), and the page at /."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.http import refusal
from diffray.cluster.api.operations import OPERATED
from diffray.cluster.api.settings import is_known

FILES: Final = "/page/"  # the path of all files except index.html
_FOLDER: Final = Path(__file__).parent / "page"
_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Cache-Control": "no-cache",
    # Trusted types: the browser refuses to turn a text, such as an answer, into markup or code.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
}


def page_router() -> APIRouter:
    """Return the page's routes; its files are read once."""
    router = APIRouter(include_in_schema=False)
    files = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index() -> Response:
        return await file("index.html")

    @router.get(FILES + "{name}")
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        kind = _TYPES[Path(name).suffix]
        return Response(files[name], headers=_HEADERS, media_type=kind)

    return router


def lacks_slash(request: Request) -> bool:
    """Return whether a request for the page below a model's own path lacks the final slash.

    The page's links are relative; without the slash they would lead to the folder above.
    """
    path: str = request.scope["path"]
    root: str = request.scope.get("root_path", "")
    return path == root != ""


_OPEN: Final = ("/health", "/ping", "/metrics", "/version", "/docs", "/openapi.json", "", "/")
_SAFE: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_NO_KEY: Final = ApiError(
    401,
    "Incorrect API key provided; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
_NO_OPERATORS: Final = ApiError(
    403,
    "This server has no operator's key, so nobody may use this path; start it with "
    "--operator-key KEY.",
    code="no_operator",
)
_NOT_AN_OPERATOR: Final = ApiError(
    403, "This path needs an operator's key, and this API key is not one.", code="not_an_operator"
)


class Gate:
    """ASGI middleware: every path except the open ones needs a key, even one that does not exist.

    Paths that change the engine need an operator's key, which opens the others as well.

    It adds the security headers that an answer has not set itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str] = (),
        operators: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._digests, self._operators = tuple(keys), tuple(operators)  # digests, as in ApiSettings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SAFE.items():
                    headers.setdefault(name, value)
            await send(message)

        refused = self._refused(scope, Headers(scope=scope))
        app = self._app if refused is None else refusal(refused, scope["path"])
        await app(scope, receive, send_with_headers)

    def _refused(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Return the error for a request that may not pass."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        is_open = path in _OPEN or path.startswith(FILES)
        if scope["method"] == "OPTIONS" or is_open:
            return None
        shown = _shown(headers)
        if any([is_known(each, self._operators) for each in shown]):
            return None
        is_client = any([is_known(each, self._digests) for each in shown])
        if self._digests and not is_client:
            return _NO_KEY
        if path not in OPERATED:
            return None
        if not self._operators:
            return _NO_OPERATORS
        return _NOT_AN_OPERATOR if is_client else _NO_KEY


def _shown(headers: Headers) -> list[str]:
    """Return the keys that a request sends."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    shown = [key.strip()] if scheme.lower() == "bearer" else []
    return shown + headers.getlist("x-api-key")[:1]  # Anthropic's header
