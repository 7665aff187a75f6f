"""One streamed request to an OpenAI-compatible server, with the time of each piece of text."""

import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx2

from diffray.cluster.cli.endpoint import complaint, json_of


@dataclass(slots=True)
class Reply:
    """What came back; times are in seconds, of the clock of `start`.

    `pieces` tells when each chunk with text came and how many characters it had: chunks without
    text, as a chat's first, are no tokens. `queued` is how long the request waited here for its
    turn under --max-concurrency. `prompt_tokens` and `output_tokens` are the server's usage.
    """

    arrival: float
    start: float = 0.0
    latency: float = 0.0
    pieces: list[tuple[float, int]] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""

    @property
    def success(self) -> bool:
        return not self.error

    @property
    def queued(self) -> float:
        return self.start - self.arrival

    @property
    def ttft(self) -> float:
        """Time to the first text; where there was none, to the end."""
        return self.pieces[0][0] - self.start if self.pieces else self.latency

    @property
    def itl(self) -> list[float]:
        """Times between chunks: a diffusion model's carry many tokens."""
        times = [moment for moment, _ in self.pieces]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def tpot(self) -> float:
        """Time per token after the first; 0 where there is no second."""
        tokens = self.output_tokens or 0
        return (self.latency - self.ttft) / (tokens - 1) if tokens > 1 else 0.0


async def ask(
    client: httpx2.AsyncClient,
    path: str,
    body: dict[str, Any],
    *,
    arrival: float,
    headers: dict[str, str],
) -> Reply:
    """Send it and read the stream to its end; what goes wrong is in the reply."""
    reply = Reply(arrival)
    reply.start = time.perf_counter()
    try:
        async with client.stream("POST", path, json=body, headers=headers) as response:
            if response.status_code == 200:
                await _read(response, reply)
            else:
                await response.aread()
                reply.error = complaint(json_of(response), response.status_code)
    except httpx2.HTTPError as error:
        reply.error = str(error) or type(error).__name__
    except ValueError as error:
        reply.error = f"the stream is no server-sent JSON: {error}"
    reply.latency = time.perf_counter() - reply.start
    return reply


async def _read(response: httpx2.Response, reply: Reply) -> None:
    done = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        content = line[5:].strip()
        if content == "[DONE]":
            done = True
            continue
        chunk = json.loads(content)
        if error := chunk.get("error"):
            reply.error = complaint({"error": error}, response.status_code)
            return
        if usage := chunk.get("usage"):
            reply.prompt_tokens = usage.get("prompt_tokens")
            reply.output_tokens = usage.get("completion_tokens")
        for choice in chunk.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                reply.pieces.append((time.perf_counter(), len(text)))
                reply.text += text
    if not done:
        reply.error = "the stream broke off"
