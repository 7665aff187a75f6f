"""Bodies for a server: prompts, their lengths by its own tokenizer, and what all of them ask."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import httpx2

from diffray.cluster.cli.bench.prompts import RANDOM, Ask, random_text

COMPLETIONS, CHAT = "openai", "openai-chat"
ENDPOINTS: Final = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
OUTPUT_LEN: Final = 128
_AT_ONCE: Final = 16

X = TypeVar("X")
Y = TypeVar("Y")


class Tokens(Protocol):
    """Who can cut and count texts in the model's tokens."""

    async def encode(self, text: str) -> list[int]: ...
    async def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class ServerTokens:
    """The server's own tokenizer, through /tokenize and /detokenize."""

    client: httpx2.AsyncClient
    model: str

    async def encode(self, text: str) -> list[int]:
        wish = {"prompt": text, "add_special_tokens": False}
        return list((await self._ask("/tokenize", wish))["tokens"])

    async def decode(self, ids: list[int]) -> str:
        return str((await self._ask("/detokenize", {"tokens": ids}))["prompt"])

    async def _ask(self, path: str, wish: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await self.client.post(path, json={"model": self.model} | wish)
            response.raise_for_status()
            return dict(response.json())
        except (httpx2.HTTPError, ValueError) as error:
            raise ValueError(
                f"the server has no {path} to count tokens with ({error}); give --tokenizer"
            ) from None


class LocalTokens:
    """A checkpoint's tokenizer, in this process."""

    def __init__(self, name: str) -> None:
        from transformers import PreTrainedTokenizerFast

        from diffray.components.checkpoints.checkpoint import resolve

        self._fast = PreTrainedTokenizerFast.from_pretrained(resolve(name))

    async def encode(self, text: str) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=False))

    async def decode(self, ids: list[int]) -> str:
        return str(self._fast.decode(ids))


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a server: the prompt's part of the body, and how many tokens to write."""

    prompt: str | list[int]
    max_tokens: int
    task: str

    def body(self, backend: str, model: str, common: dict[str, Any]) -> dict[str, Any]:
        said: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens}
        if backend == CHAT:
            said["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            said["prompt"] = self.prompt
        return said | {"stream": True, "stream_options": {"include_usage": True}} | common


async def wishes(
    name: str,
    asks: list[Ask],
    tokens: Tokens,
    *,
    backend: str,
    count: int,
    input_len: int,
    prefix_len: int,
    output_len: int | None,
    seed: int,
    run: int,
) -> list[Wish]:
    """Return the prompts of a data set; random ones have exactly `input_len` tokens, as ids.

    These come after `prefix_len` with which all begin. A chat takes no ids: there it is the text of
    so many tokens, and the template comes on top. Each run has others, lest a server that remembers
    prompts finds those of the run before.
    """
    if name != RANDOM:
        return [Wish(a.prompt, output_len or a.max_tokens or OUTPUT_LEN, a.task) for a in asks]
    draws = random.Random(seed)
    prefix = await tokens.encode(random_text(prefix_len, draws)) if prefix_len else []
    if run:
        draws = random.Random(f"{seed}, run {run}")
    asks = [Ask(name, random_text(input_len, draws)) for _ in range(count)]

    async def cut(ask: Ask) -> Wish:
        ids = prefix[:prefix_len] + (await tokens.encode(ask.prompt))[:input_len]
        prompt: str | list[int] = ids if backend == COMPLETIONS else await tokens.decode(ids)
        return Wish(prompt, output_len or OUTPUT_LEN, name)

    return await each(cut, asks)


async def each(act: Callable[[X], Awaitable[Y]], items: list[X]) -> list[Y]:
    """Return what `act` makes of each, some at once."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(item: X) -> Y:
        async with gate:
            return await act(item)

    return list(await asyncio.gather(*(one(item) for item in items)))
