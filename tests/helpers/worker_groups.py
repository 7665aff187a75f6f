"""Requests to a worker group on a real Ray, and what one process answers to them."""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager
from typing import Any

from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.llm import DiffusionLLM
from diffray.cluster.control.remote import RemoteEngine
from diffray.components.grammar.automaton import Automaton
from diffray.components.grammar.compile import compile_regex, vocabulary_of
from diffray.components.params import SamplingParams
from diffray.workers.admission import check_request
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_engine
from tests.helpers.toy import run

LONG: dict[str, Any] = {
    "max_tokens": 96,
    "ignore_eos": True,
    "diffusion": {"decoder": {"kind": "fixed", "steps": 64}},
}


@asynccontextmanager
async def engine(
    model: str = "demo", ranks: int = 1, **options: Any
) -> AsyncIterator[RemoteEngine]:
    config = EngineConfig(
        tensor_parallel_size=ranks, dtype="float64", cpu_threads=1, check_every=1, **options
    )
    running = await RemoteEngine.start(model, config, [{"CPU": 1}] * (ranks + 1))
    try:
        yield running
    finally:
        await running.close()


def automaton_of(model: str, regex: str) -> Automaton:
    with DiffusionLLM(model) as llm:
        assert llm.tokenizer is not None
        limits, vocabulary = llm.engine.limits, vocabulary_of(llm.tokenizer.fast)
    return compile_regex(regex, vocabulary, limits.eos_token_ids, limits.spec.vocab_size)


async def answer(
    engine: RemoteEngine, uid: int, prompt: list[int], params: SamplingParams, grammar: bytes = b""
) -> list[int]:
    request = Request(uid, tuple(prompt), params, grammar=grammar)
    updates = engine.submit(check_request(request, engine.limits))
    return [token async for update in updates for token in update.ids]


def answers(
    engine: RemoteEngine, asked: Items[list[int]], *each: Items[Any]
) -> list[asyncio.Task[list[int]]]:
    """Begin to ask; `each` are the prompts' parameters, and their grammars."""
    numbered = enumerate(zip(asked, *each, strict=True))
    return [asyncio.create_task(answer(engine, uid, *given)) for uid, given in numbered]


async def under_way(running: RemoteEngine) -> None:
    while (load := await running.load()).rounds < 10:
        assert load.rounds == 0 or load.running
        await asyncio.sleep(0.01)


def in_process(model: str, asked: Items[list[int]], *each: Items[Any]) -> list[list[int]]:
    """What the engine in this process answers, one after the other."""
    engine = build_engine(model, EngineOptions(dtype="float64"))
    found = []
    for prompt, params, *grammar in zip(asked, *each, strict=True):
        request = Request(0, tuple(prompt), params, grammar=b"".join(grammar))
        found.append(run(engine, [request])[0])
    return found


def prompts(model: str, count: int) -> list[list[int]]:
    with DiffusionLLM(model) as llm:
        assert llm.tokenizer is not None
        return [
            llm.tokenizer.encode_chat([{"role": "user", "content": f"Add {n} and {n + 3}."}])
            for n in range(count)
        ]
