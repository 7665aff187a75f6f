"""HTTP to JSON objects and back: bodies, answers, event streams, disconnected clients."""

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from diffray.cluster.api.errors import ApiError, bug, invalid

log = logging.getLogger(__name__)

Json = dict[str, Any]
T = TypeVar("T")

_DONE: Final = b"data: [DONE]\n\n"
_DEEPEST: Final = 64  # nesting of objects and lists in a body
_MOST_HOLDERS: Final = 2**18
_STALLED_S: Final = 60.0  # a client that reads nothing for this long is assumed gone


def dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, "application/json")


def refusal(error: ApiError) -> Response:
    # ASCII, because a message may quote characters that cannot be encoded.
    text = json.dumps(error.body, separators=(",", ":"))
    return Response(text, error.status, error.headers, "application/json")


async def read_json(request: Request, most: int, seconds: float) -> object:
    """Return a request's body; refuse one that is too large, before reading it, or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Browsers send other types to any server without a preflight request.
        raise ApiError(
            415,
            "The body must be JSON and say so; send the header Content-Type: application/json.",
            code="unsupported_media_type",
        )
    try:
        async with asyncio.timeout(seconds):
            body = await _read(request, most)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body was not complete after {seconds:g} seconds; send it faster.",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    try:
        return parse_json(body.decode())
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
    """Parse JSON, more strictly than json, whose leniency hides mistakes."""
    holders = text.count("[") + text.count("{")
    if holders > _MOST_HOLDERS:  # each takes sixty times its size in the text
        raise ValueError(f"it holds more than {_MOST_HOLDERS} objects and lists")
    value: object = json.loads(
        text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_no_twins
    )
    if holders > _DEEPEST:
        _refuse_depth(value)
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


def _no_twins(pairs: list[tuple[str, object]]) -> Json:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name[:100]!r} occurs twice in one object")
            seen.add(name)
    return made


def _refuse_depth(value: object) -> None:
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [
            each
            for outer in level
            if isinstance(outer, dict | list)
            for each in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(each, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {_DEEPEST} levels")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work; cancel it if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _cancel(task, gone)


class EventStream(Response):
    """Server-sent events; if the client disconnects, the generator of chunks is closed."""

    def __init__(self, first: Json, rest: AsyncGenerator[Json, None]) -> None:
        super().__init__(
            status_code=200,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        sending = gone = None

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_STALLED_S):
                await send(message)

        try:
            await send_in_time(start)
            sending = asyncio.ensure_future(self._send(send_in_time))
            gone = asyncio.ensure_future(_gone(receive))
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:
            pass  # the client disconnected while sending, or no longer reads
        finally:
            await _cancel(*(task for task in (sending, gone) if task is not None))
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        try:
            await send(_body(_event(self._first)))
            async for chunk in self._rest:
                await send(_body(_event(chunk)))
        except ApiError as error:
            await send(_body(_event(error.body)))
        except OSError:
            raise
        except Exception:
            log.exception("a stream broke")
            await send(_body(_event(bug().body)))
        await send(_body(_DONE, more=False))


def _event(value: Json) -> bytes:
    return b"data: " + dump(value) + b"\n\n"


def _body(content: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
