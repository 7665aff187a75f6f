"""Chat requests and the client that sends them, for every comparison with servers."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias, TypeVar

import httpx2

Json = dict[str, Any]
T = TypeVar("T")
Send: TypeAlias = Callable[[httpx2.AsyncClient, Json], Coroutine[Any, Any, T]]
CHAT = "/v1/chat/completions"
TIMEOUT_S = 600.0


class Reply(NamedTuple):
    """A streamed answer: its text, and the seconds until each chunk with text."""

    text: str
    chunks_s: list[float]


async def chat(http: httpx2.AsyncClient, body: Json) -> Json:
    response = await http.post(CHAT, json=body)
    response.raise_for_status()
    return dict(response.json())


async def streamed(http: httpx2.AsyncClient, body: Json) -> Reply:
    """Send a chat and read its stream to the end; raise ValueError if it fails or breaks off."""
    begin = time.perf_counter()
    text, chunks, done = "", list[float](), False
    async with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            done = done or line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"an error in the stream: {event['error']}")
            for choice in event.get("choices", ()):
                if piece := choice["delta"].get("content"):
                    chunks.append(time.perf_counter() - begin)
                    text += piece
    if not done:
        raise ValueError("the stream broke off")
    return Reply(text, chunks)


def answers(url: str, bodies: list[Json], at_once: int, send: Send[T]) -> list[T]:
    """Return what `send` makes of all bodies, with up to `at_once` requests in flight."""

    async def every() -> list[T]:
        gate = asyncio.Semaphore(at_once)
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:

            async def one(body: Json) -> T:
                async with gate:
                    return await send(http, body)

            return list(await asyncio.gather(*map(one, bodies)))

    return asyncio.run(every())
