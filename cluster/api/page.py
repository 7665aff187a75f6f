"""The page at /: static files, with a content security policy that lets only them run."""

from pathlib import Path
from typing import Final

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

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

    @router.get("/")
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
