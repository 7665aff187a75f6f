"""Clients that know the right answers in advance, and check every token as it comes."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from diffray import SamplingParams
from diffray.cluster.cli.endpoint import json_of, retry_after
from diffray.cluster.control.llm import DiffusionLLM

Json = dict[str, Any]

SILENCE_S = 120.0  # a stream that says nothing for so long is lost
WORDS = ["red", "green", "blue"]  # of which answers with a schema are lists
_AGAIN_S = 0.3  # before a client asks again
_BLOCK = 8  # tokens come a block at a time: long blocks would hide how long a fault lasts


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and the tokens that a quiet engine gives."""

    body: Json
    ids: list[int]


def questions(model: str, count: int, tokens: int, seed: int) -> list[Question]:
    """Return greedy and seeded questions, each answered alone by an engine of this process.

    Every third is asked with a schema, which its answer follows; so does one of equal tokens.
    """
    draw = random.Random(seed)
    found = []
    with DiffusionLLM(model, dtype="float64", max_num_seqs=1) as llm:
        for number in range(count):
            a, b = draw.randint(2, 99), draw.randint(2, 99)
            prompt = f"<role>HUMAN</role>What is {a} plus {b}?<|role_end|><role>ASSISTANT</role>"
            wishes: Json = {
                "max_tokens": tokens - number % 4,
                "ignore_eos": True,
                "diffusion": {
                    "block_length": _BLOCK,
                    "decoder": {"kind": "fixed", "steps": 3 * tokens // 4},
                },
            }
            if number % 2:
                wishes |= {"temperature": 0.8, "seed": draw.randrange(2**40)}
            if number % 3 == 2:
                words = {"type": "array", "items": {"enum": WORDS}, "minItems": tokens // 12}
                wishes |= {"ignore_eos": False, "structured_outputs": {"json": words}}
            (alone,) = llm.generate(prompt, SamplingParams(**wishes), use_tqdm=False)
            if number % 3 == 2:
                answer = alone.outputs[0].text
                assert {*json.loads(answer)} <= {*WORDS}, answer
            body = {"prompt": prompt, "stream": True, "return_token_ids": True} | wishes
            found.append(Question({"temperature": 0.0} | body, list(alone.outputs[0].token_ids)))
    return found


@dataclass(slots=True)
class Tally:
    """What came of all requests."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)  # when, seconds
    begin: float = field(default_factory=time.monotonic)

    def bad(self, kind: str, why: str) -> None:
        self.counts[kind] += 1
        self.wrong.append(f"{kind} after {time.monotonic() - self.begin:.1f} s: {why}")

    def check(self, client: int, ids: list[int], new: list[int], right: list[int]) -> None:
        """Add new tokens to those that a client has, and compare them with the right ones."""
        at = len(ids)
        ids += new
        if new != right[at : len(ids)]:
            kind = "duplicated" if new == right[max(0, at - len(new)) : at] else "altered"
            self.bad(kind, f"client {client} at token {at}: {new}")


class Broken(Exception):
    """The stream has ended before its answer was complete."""


class Client:
    """Asks one question after the other until it is stopped."""

    def __init__(
        self,
        number: int,
        http: httpx2.AsyncClient,
        model: str,
        asked: list[Question],
        tally: Tally,
        may_break: Callable[[float], bool],
    ) -> None:
        self.number, self.http, self.model = number, http, model
        self.asked, self.tally = asked, tally
        self.may_break = may_break  # whether a fault has cut connections since then
        self.heard = 0.0  # when the last token came
        self._draw = random.Random(f"client {number}")

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            question = self._draw.choice(self.asked)
            self.tally.counts["asked"] += 1
            begin = time.monotonic()
            while not await self._answered(question):
                await asyncio.sleep(_AGAIN_S)
            now = time.monotonic()
            self.tally.latencies.append((now, now - begin))

    async def _answered(self, question: Question) -> bool:
        """Ask once; whether that is settled, for good or bad."""
        begin, ids = time.monotonic(), list[int]()
        try:
            await self._stream(question, ids)
        except Broken as error:
            if self.may_break(begin):
                self.tally.counts["cut"] += 1
                return False
            told = f"client {self.number} after {len(ids)} tokens, {time.monotonic() - begin:.1f} s"
            self.tally.bad("lost", f"{told}: {error}")
            return True
        except Refused:
            return False
        if ids == question.ids:
            self.tally.counts["right"] += 1
        return True

    async def _stream(self, question: Question, ids: list[int]) -> None:
        done = False
        try:
            async with self.http.stream("POST", "/v1/completions", json=question.body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    self._refused(answer)
                async for line in answer.aiter_lines():
                    if line.startswith("data: [DONE]"):
                        done = True
                    elif line.startswith("data:"):
                        chunk = json.loads(line[5:])
                        if error := chunk.get("error"):
                            raise Broken(error["message"])
                        self._check(chunk, question, ids)
        except httpx2.TransportError as error:
            raise Broken(f"{type(error).__name__} {error}") from None
        if not done:
            raise Broken("no [DONE]")
        if len(ids) < len(question.ids):
            self.tally.bad("altered", f"{len(ids)} of {len(question.ids)} tokens and no error")

    def _check(self, chunk: Json, question: Question, ids: list[int]) -> None:
        if chunk["model"] != self.model:
            self.tally.bad("mixed", f"client {self.number} was answered by {chunk['model']}")
        for choice in chunk["choices"]:
            new = choice.get("token_ids") or []
            if not new:
                continue
            self.heard = time.monotonic()
            self.tally.check(self.number, ids, new, question.ids)

    def _refused(self, answer: httpx2.Response) -> None:
        status = answer.status_code
        if status in (429, 503):
            self.tally.counts["refused"] += 1
            if retry_after(answer) is None:
                self.tally.bad("rude", f"{status} without Retry-After: {json_of(answer)}")
            raise Refused
        if status == 401:
            self.tally.bad("mixed", f"client {self.number} was asked for a key: {json_of(answer)}")
        raise Broken(f"status {status}: {json_of(answer)}")


class Refused(Exception):
    """The server is full; nothing was sent."""
