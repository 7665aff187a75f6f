"""Many different requests at once: each answer is the one that it gets alone."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from diffray import SamplingParams
from tests.helpers.api_server import Served, serve_model

pytestmark = pytest.mark.long

POLICIES: dict[bool, list[dict[str, Any]]] = {
    False: [
        {},
        {"block_length": 8, "decoder": {"kind": "fixed", "steps": 12}},
        {"block_length": 16, "cache": {"kind": "none"}},
        {"block_length": 8, "cache": {"kind": "vicinity", "before": 8, "after": 8}},
        {"decoder": {"kind": "credit"}, "cache": {"kind": "prefix"}},
        {"block_length": 8, "decoder": {"kind": "hierarchy"}},
    ],
    True: [
        {},
        {"block_length": 8, "decoder": {"kind": "fixed", "steps": 12}},
        {"block_length": 16, "cache": {"kind": "none"}},
        {"decoder": {"kind": "edit"}},
        {"block_length": 8, "decoder": {"kind": "factor"}},
    ],
}


@pytest.fixture(scope="module", params=["demo", "demo-llada2"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serve_model(request.param) as served:
        yield served


def mixed(served: Served, count: int) -> list[dict[str, Any]]:
    """Draw requests that differ in everything."""
    draw = random.Random(1)
    policies = POLICIES[served.engine.limits.spec.block_causal]
    return [
        {
            "prompt": f"<role>HUMAN</role>What is {draw.randint(1, 99)} plus {number}?"
            + " Please." * draw.randint(0, 12)
            + "<|role_end|><role>ASSISTANT</role>",
            "max_tokens": draw.choice([5, 16, 24, 40]),
            "temperature": draw.choice([0.0, 0.0, 0.7, 1.3]),
            "top_p": draw.choice([1.0, 0.9]),
            "seed": draw.randrange(2**40),
            "n": draw.choice([1, 1, 1, 2]),
            "stop": draw.choice([[], [], ["1", "is"]]),
            "diffusion": draw.choice(policies),
            "stream": draw.random() < 0.5,
        }
        for number in range(count)
    ]


async def ask(client: AsyncOpenAI, body: dict[str, Any]) -> tuple[list[str], Any, set[str]]:
    """Return the texts, the usage and the ids seen."""
    own = {name: value for name, value in body.items() if name != "diffusion"}
    own |= {"model": "", "extra_body": {"model": None, "diffusion": body["diffusion"]}}
    if not body["stream"]:
        answer = await client.completions.create(**own)
        assert [choice.index for choice in answer.choices] == list(range(body["n"]))
        return [choice.text for choice in answer.choices], answer.usage, {answer.id}
    texts, usage, ids = [""] * body["n"], None, set()
    own["stream_options"] = {"include_usage": True}
    async for chunk in await client.completions.create(**own):
        ids.add(chunk.id)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    return texts, usage, ids


def test_each_of_64_answers_is_its_solo_answer(served: Served) -> None:
    bodies = mixed(served, 64)

    async def all_at_once() -> list[tuple[list[str], Any, set[str]]]:
        async with AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=600
        ) as client:
            return await asyncio.gather(*(ask(client, body) for body in bodies))

    answers = asyncio.run(all_at_once())
    assert len(set().union(*(ids for _, _, ids in answers))) == len(bodies)
    for body, (texts, usage, ids) in zip(bodies, answers, strict=True):
        params = {k: v for k, v in body.items() if k not in ("prompt", "stream")}
        (alone,) = served.llm.generate(body["prompt"], SamplingParams(**params))
        assert texts == [choice.text for choice in alone.outputs], body
        assert usage.prompt_tokens == alone.prompt_tokens
        assert usage.completion_tokens == alone.completion_tokens
        assert len(ids) == 1
