"""HTTP to JSON objects and back: bodies, answers, event streams, disconnected clients."""

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diffray.cluster.api.errors import ApiError, Json, bug, invalid

log = logging.getLogger(__name__)

T = TypeVar("T")

WARNINGS: Final = "X-Diffray-Warnings"
_DONE: Final = b"data: [DONE]\n\n"
_DEEPEST: Final = 64  # nesting of objects and lists within a body
_MOST_CONTAINERS: Final = 2**18
_STALLED_S: Final = 60.0  # a client that reads nothing for this long is disconnected


def answer(value: object) -> Response:
    return Response(_dump(value), headers=warnings_of(value), media_type="application/json")


def warnings_of(answer: object) -> dict[str, str]:
    """Return the header with the warnings of an answer, or of the first event of one."""
    if not isinstance(answer, dict):
        return {}
    inner = answer.get("message") or answer.get("response") or answer
    found = inner.get("warnings") if isinstance(inner, dict) else None
    return {WARNINGS: "; ".join(found)} if found else {}


def _dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def refusal(error: ApiError, path: str) -> Response:
    return Response(_dump(error.body_at(path)), error.status, error.headers, "application/json")


async def read_json(request: Request, most: int, seconds: float) -> object:
    """Return a request's body; refuse one that is too large, before reading it, or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Browsers send other types to any server without a preflight request.
        raise ApiError(
            415,
            "The body must be JSON; send it with the header Content-Type: application/json.",
            code="unsupported_media_type",
        )
    try:
        async with asyncio.timeout(seconds):
            body = await _read(request, most)
        return parse_json(body.decode())
    except TimeoutError:
        raise ApiError(
            408,
            f"The body was not complete after {seconds:g} seconds; send it faster.",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body is not valid JSON: {error}", code="invalid_json") from None


async def _read(request: Request, most: int) -> bytes:
    too_large = ApiError(
        413,
        f"The request is larger than {most} bytes; send less at a time.",
        code="request_too_large",
    )
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > most:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def parse_json(text: str) -> object:
    """Parse JSON more strictly than the json module."""
    containers = text.count("[") + text.count("{")
    if containers > _MOST_CONTAINERS:  # each takes sixty times its size as text
        raise ValueError(f"it holds more than {_MOST_CONTAINERS} objects and lists")
    value: object = json.loads(
        text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_no_duplicates
    )
    if containers > _DEEPEST and isinstance(value, dict | list):
        _check_depth(value, _DEEPEST)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("unpaired surrogate") from None
    return value


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text[:40])


def _no_duplicates(pairs: list[tuple[str, object]]) -> Json:
    made = dict(pairs)
    if len(made) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name[:100]!r} occurs twice in one object")
    return made


def _check_depth(value: Json | list[Any], levels: int) -> None:
    """Refuse a value that holds more levels of objects and lists."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            if not levels:
                raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
            _check_depth(each, levels - 1)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work; cancel it if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events; if the client disconnects, the generator of chunks is closed.

    `failed` turns an error into an event; `end` is sent last.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Json,
        rest: AsyncGenerator[Json, None],
        failed: Callable[[ApiError], Json] = lambda error: error.body,
        end: bytes = _DONE,
    ) -> None:
        always = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=always | warnings_of(first))
        del self.headers["content-length"]
        self._first, self._rest = first, rest
        self._failed, self._end = failed, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except (OSError, ClientDisconnect):
            pass  # the client has disconnected, or no longer reads
        finally:
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        async def send_body(content: bytes, more: bool = True) -> None:
            async with asyncio.timeout(_STALLED_S):
                await send({"type": "http.response.body", "body": content, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await send_body(event(self._first))
            async for chunk in self._rest:
                await send_body(event(chunk))
        except ApiError as error:
            await send_body(event(self._failed(error)))
        except OSError:
            raise
        except Exception:
            log.exception("a stream failed")
            await send_body(event(self._failed(bug())))
        await send_body(self._end, more=False)


def event(value: Json) -> bytes:
    """Return an event as bytes, named after its type if it has one."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + _dump(value) + b"\n\n"
