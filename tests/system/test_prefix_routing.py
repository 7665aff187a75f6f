"""Three replicas: the turns of a conversation go to the one that holds its prefix."""

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from ray import serve
from ray.serve.context import _set_request_context

from diffray.cluster.serve.address import PREFIX_ROUTED
from diffray.cluster.serve.config_file import applications
from diffray.cluster.serve.prefix_routing import SLACK
from diffray.cluster.serve.server import remove
from tests.helpers.nodes import serving, start
from tools.local_ray import local_cluster

pytestmark = pytest.mark.long

MODEL, NUM = "demo-llada2", 18  # conversations
BLOCK = 32  # of which whole ones are shared
WORDS = "red green blue grey black white brown pink gold silver".split()
Json = dict[str, Any]


def conversations(seed: int) -> list[list[Json]]:
    drawn = random.Random(seed)
    system = {"role": "system", "content": "Answer in one word."}
    return [
        [system, {"role": "user", "content": " ".join(drawn.choices(WORDS, k=120))}]
        for _ in range(NUM)
    ]


def hit_rate(ask: Any, seed: int) -> float:
    """Return the share of the tokens stored for the first turns that the second turns read.

    By chance it would be a third. Turns come in any order and some at once, but fewer than the
    replica that holds the prefix may have more than the others: a handle still counts a call for a
    moment after its answer is there.
    """
    chats = conversations(seed)
    drawn, stored, cached = random.Random(seed), [0] * NUM, 0
    with ThreadPoolExecutor(SLACK - 1) as pool:
        for turn in range(2):
            order = drawn.sample(range(NUM), NUM)
            answers = pool.map(ask, [chats[number] for number in order])
            for number, answer in zip(order, answers, strict=True):
                usage = answer["usage"]
                if turn:
                    found = usage["prompt_tokens_details"]["cached_tokens"]
                    assert found <= usage["prompt_tokens"]
                    cached += min(found, stored[number])
                else:
                    stored[number] = usage["prompt_tokens"] // BLOCK * BLOCK
                    chats[number] += [
                        answer["choices"][0]["message"],
                        {"role": "user", "content": "And which of them comes first?"},
                    ]
    return cached / sum(stored)


def body(messages: list[Json]) -> Json:
    return {"model": MODEL, "messages": messages, "max_tokens": 8}


def asking(url: str) -> Any:
    def ask(messages: list[Json]) -> Json:
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body(messages), timeout=120)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    return ask


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    wanted = applications(
        {
            "model_loading_config": {"model_id": MODEL},
            "engine_kwargs": {"device": "cpu", "cpu_threads": 1, "max_num_seqs": 8},
            "deployment_config": {"num_replicas": 3, "prefix_routing": True},
        },
        "the test",
    )
    with local_cluster([{"num_cpus": 8}], {PREFIX_ROUTED: MODEL}), serving() as url:
        start(wanted)
        yield url
        remove(wanted)


def test_turns_find_their_prefix(url: str) -> None:
    assert hit_rate(asking(url), seed=5) > 0.9


def test_turns_find_their_prefix_through_handles(url: str) -> None:
    handle: Any = serve.get_app_handle(MODEL)

    def ask(messages: list[Json]) -> Json:
        return dict(handle.chat.remote(body(messages)).result(timeout_s=120))

    def ask_as_an_ingress_does(messages: list[Json]) -> Json:
        _, answer = handle.options(stream=True).ask.remote("chat", body(messages))
        return dict(answer)

    assert hit_rate(ask, seed=6) > 0.9
    assert hit_rate(ask_as_an_ingress_does, seed=7) > 0.9


async def test_calls_on_behalf_of_one_request_all_find_a_replica(url: str) -> None:
    """They share the id by which Serve finds the calls that wait for a replica."""
    handle: Any = serve.get_app_handle(MODEL)  # a new one, which waits to be told of replicas
    asked = [conversation[1:] for conversation in conversations(seed=8)[:8]]
    _set_request_context(_internal_request_id="the same")
    answers = [handle.chat.remote(body(messages)) for messages in asked]
    async with asyncio.timeout(120):
        found: list[Json] = list(await asyncio.gather(*answers))
    assert all(answer["choices"] for answer in found)
