"""OpenAI's /v1/files and /v1/batches: what clients upload, and have answered later."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Final, Literal

from fastapi import APIRouter, Request
from pydantic import Field, field_validator
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from diffray.cluster.api.batch_store import BatchStore, is_identifier
from diffray.cluster.api.errors import ApiError, Json, invalid, printable
from diffray.cluster.api.fields import StrictModel, parse
from diffray.cluster.api.http import answer, read_json
from diffray.cluster.api.settings import ApiSettings
from diffray.components.config import shortened

log = logging.getLogger(__name__)

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WINDOW: Final = re.compile(r"[1-9][0-9]{0,3}[smhd]")
_LONGEST_NAME: Final = 200
_FORM_BYTES: Final = 2**16  # of a form around its file
_OFF: Final = "This server keeps no files; start it with --files, a folder or a URL for them."


def _body(kind: str, schema: Json) -> Json:
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}


class BatchBody(StrictModel):
    """Answer the requests of a file."""

    input_file_id: str = Field(description="An uploaded file: a request in each line.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions"] = Field(
        description="The path that all requests of the file name."
    )
    completion_window: str = Field(
        description="After this time the batch ends with the answers it has, such as 24h."
    )
    metadata: dict[str, str] | None = Field(
        None, max_length=16, description="Up to 16 texts of your own."
    )

    @field_validator("completion_window")
    @classmethod
    def _a_time(cls, given: str) -> str:
        if not _WINDOW.fullmatch(given):
            raise ValueError("give a time such as 30m, 24h or 7d")
        return given

    @property
    def seconds(self) -> int:
        return int(self.completion_window[:-1]) * _SECONDS[self.completion_window[-1]]


class ListQuery(StrictModel):
    """Which part of a list to return."""

    after: str | None = Field(None, description="List what follows this identifier.")
    limit: int | None = Field(
        None, ge=1, le=10_000, description="How many to list; default: 20 batches, 10,000 files."
    )
    order: Literal["asc", "desc"] = Field("desc", description="The oldest or the newest first.")
    purpose: Literal["batch", "batch_output"] | None = Field(None, description="Of files alone.")


_UPLOAD: Final[Json] = _body(
    "multipart/form-data",
    {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"const": "batch"},
        },
    },
)
_CREATE: Final[Json] = _body("application/json", BatchBody.model_json_schema())
_LIST: Final[Json] = {
    "parameters": [
        {"name": name, "in": "query", "schema": schema}
        for name, schema in ListQuery.model_json_schema()["properties"].items()
    ]
}


def batch_router(settings: ApiSettings) -> APIRouter:
    """Return the routes; without a place for files they say how to give one."""
    router = APIRouter(tags=["Batches"])
    if settings.files is None:

        @router.api_route("/v1/files{rest:path}", methods=["GET", "POST"], include_in_schema=False)
        @router.api_route(
            "/v1/batches{rest:path}", methods=["GET", "POST"], include_in_schema=False
        )
        async def off(rest: str) -> Response:
            raise ApiError(404, _OFF, code="not_found")

        return router
    store = BatchStore(settings.files)
    _add_files(router, store, settings)
    _add_batches(router, store, settings)
    return router


def _add_files(router: APIRouter, store: BatchStore, settings: ApiSettings) -> None:
    @router.post("/v1/files", openapi_extra=_UPLOAD)
    async def upload(request: Request) -> Response:
        """Store a file of requests for a batch."""
        _refuse_other_pages(request, settings)
        form = await _form(request, settings.max_file_bytes, settings.body_timeout_s)
        try:
            for name in form.keys() - {"file", "purpose"}:
                raise invalid(f"{name} is not supported; leave it out", name)
            if form.get("purpose") != "batch":
                raise invalid("purpose must be batch", "purpose")
            if not isinstance(file := form.get("file"), UploadFile):
                raise invalid("send the file in the field file of a form", "file")
            name = printable(shortened(file.filename or "file", _LONGEST_NAME))
            return await _stored(store.add_file, name, "batch", file.file)
        finally:
            await form.close()

    @router.get("/v1/files", openapi_extra=_LIST)
    async def list_files(request: Request) -> Response:
        """List the files, those of batches' answers too."""
        return await _stored(_listed, request, store.files, store.file, 10_000)

    @router.get("/v1/files/{name}")
    async def show_file(name: str) -> Response:
        """Show a file's description."""
        return await _stored(store.file, name)

    @router.get("/v1/files/{name}/content", response_class=Response)
    async def content(name: str) -> Response:
        """Download a file."""
        chunks = await asyncio.to_thread(store.content, name)
        return StreamingResponse(chunks, media_type="application/octet-stream")

    @router.delete("/v1/files/{name}")
    async def delete_file(name: str) -> Response:
        """Delete a file."""
        return await _stored(store.delete_file, name)


def _add_batches(router: APIRouter, store: BatchStore, settings: ApiSettings) -> None:
    @router.post("/v1/batches", openapi_extra=_CREATE)
    async def create(request: Request) -> Response:
        """Answer the requests of a file, after all others; the answers are another file."""
        given = await read_json(request, settings.max_body_bytes, settings.body_timeout_s)
        body = parse(BatchBody, given)
        return await _stored(store.add_batch, body.model_dump(), body.seconds)

    @router.get("/v1/batches", openapi_extra=_LIST)
    async def list_batches(request: Request) -> Response:
        """List the batches."""
        return await _stored(_listed, request, store.batches, store.batch, 20)

    @router.get("/v1/batches/{name}")
    async def show_batch(name: str) -> Response:
        """Show how far a batch is."""
        return await _stored(store.batch, name)

    @router.post("/v1/batches/{name}/cancel")
    async def cancel(name: str) -> Response:
        """End a batch with the answers it has."""
        return await _stored(store.cancel, name)


def _listed(
    request: Request, names: Callable[[], list[str]], show: Callable[[str], Json], limit: int
) -> Json:
    """Return OpenAI's list of the part that a query asks for."""
    given = {
        name: int(text) if text.isdecimal() and len(text) < 10 else text
        for name, text in request.query_params.items()
    }
    query, found_names = parse(ListQuery, given), names()
    downwards = query.order == "desc"
    if downwards:
        found_names.reverse()
    if (after := query.after) is not None:  # which may be deleted meanwhile
        if not is_identifier(after):
            raise invalid(f"{after[:100]!r} is not the identifier of a file or a batch", "after")
        found_names = [
            each for each in found_names if (each < after if downwards else each > after)
        ]
    found = _shown(found_names, show)
    wanted = (each for each in found if query.purpose in (None, each.get("purpose")))
    data = list(islice(wanted, query.limit or limit))
    return {
        "object": "list",
        "data": data,
        "has_more": next(wanted, None) is not None,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


async def _stored(work: Callable[..., Json], *given: Any) -> Response:
    """Answer with what the store gives; say what is wrong with the store."""
    try:
        return answer(await asyncio.to_thread(work, *given))
    except OSError as error:
        log.exception("the place of --files fails")
        message = f"The server's place for files fails: {error.strerror or error}."
        raise ApiError(507, message, code="storage_failed") from None


def _shown(names: list[str], show: Callable[[str], Json]) -> Iterator[Json]:
    for name in names:
        with suppress(ApiError, ValueError):  # deleted meanwhile, or damaged
            yield show(name)


async def _form(request: Request, most: int, seconds: float) -> FormData:
    """Return the form of a request; refuse a file that is too large, or too slow."""
    size, receive = 0, request.receive

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most + _FORM_BYTES:
            raise ApiError(
                413,
                f"The file is larger than the {most} bytes of api.max_file_bytes; split it.",
                code="request_too_large",
                headers={"Connection": "close"},
            )
        return message

    try:
        async with asyncio.timeout(seconds * max(1, most / 2**23)):
            return await Request(request.scope, counted).form(max_files=1, max_fields=8)
    except TimeoutError:
        raise ApiError(408, "The file did not arrive in time; send it faster.") from None


def _refuse_other_pages(request: Request, settings: ApiSettings) -> None:
    """Browsers send forms to any server, without asking it first."""
    origin, allowed = request.headers.get("origin"), settings.cors_origins
    if origin is None or origin in allowed or "*" in allowed:
        return
    if origin.partition("://")[2] != request.headers.get("host"):
        raise ApiError(
            403, f"{origin} may not upload files; the server's --allowed-origins would let it."
        )
