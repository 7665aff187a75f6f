"""Three replicas: the turns of a conversation go to the one that holds its prefix."""

import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx2
import pytest
from ray import serve
from ray.serve.context import _set_request_context

from benchmarks.local_ray import local_cluster
from benchmarks.serve_process import ServeProcess, serve_process
from diffray.cluster.serve.config_file import applications
from diffray.cluster.serve.haproxy import PREFIX_ROUTED
from diffray.cluster.serve.prefix_routing import SLACK
from diffray.cluster.serve.server import remove
from tests.helpers.nodes import serving, start

pytestmark = pytest.mark.long

MODEL, NUM = "demo-llada2", 18  # conversations
BLOCK = 32  # of which whole ones are shared
WORDS = "red green blue grey black white brown pink gold silver".split()
Json = dict[str, Any]


class Rate(NamedTuple):
    """Of the tokens that a replica had stored for the first turns, those the second turns read."""

    cached: int
    possible: int
    read: int  # of all tokens that all turns read, also those of other conversations

    @property
    def hit(self) -> float:
        return self.cached / self.possible


def conversations(seed: int) -> list[list[Json]]:
    """Return first turns that have the system's message in common, and long questions."""
    drawn = random.Random(seed)
    system = {"role": "system", "content": "Answer in one word."}
    return [
        [system, {"role": "user", "content": " ".join(drawn.choices(WORDS, k=120))}]
        for _ in range(NUM)
    ]


def rate_of(ask: Any, seed: int) -> Rate:
    """Ask all first turns, then all second ones, each time in another order and some at once.

    They are fewer at once than the replica that holds the prefix may have more than the others:
    a handle still counts a call for a moment after its answer is there.
    """
    chats = conversations(seed)
    drawn, before = random.Random(seed), [0] * NUM
    cached = possible = read = 0
    with ThreadPoolExecutor(SLACK - 1) as pool:
        for turn in range(2):
            order = drawn.sample(range(NUM), NUM)
            answers = pool.map(ask, [chats[number] for number in order])
            for number, answer in zip(order, answers, strict=True):
                usage = answer["usage"]
                found = usage["prompt_tokens_details"]["cached_tokens"]
                assert found <= usage["prompt_tokens"]
                read += found
                if turn:
                    possible += before[number]
                    cached += min(found, before[number])
                before[number] = usage["prompt_tokens"] // BLOCK * BLOCK
                chats[number] += [
                    answer["choices"][0]["message"],
                    {"role": "user", "content": "And which of them comes first?"},
                ]
    return Rate(cached, possible, read)


def body(messages: list[Json]) -> Json:
    return {"model": MODEL, "messages": messages, "max_tokens": 8}


def asking(url: str, **headers: Any) -> Any:
    """Return a function that asks over HTTP; `headers` are functions."""

    def ask(messages: list[Json]) -> Json:
        told = {name.replace("_", "-"): each() for name, each in headers.items()}
        answer = httpx2.post(
            f"{url}/v1/chat/completions", json=body(messages), headers=told, timeout=120
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    return ask


def counted(url: str) -> Counter[str]:
    """Return what the replicas count: tokens of prompts, and how many of them they shared."""
    text = httpx2.get(f"{url}/metrics").text
    found = Counter[str]()
    for name, number in re.findall(r"^diffray:prefix_cache_(\w+)_total{.*} (\S+)", text, re.M):
        found[name] += int(float(number))
    return found


@pytest.fixture(scope="module")
def served() -> Iterator[ServeProcess]:
    flags = "--replicas 3 --prefix-routing --max-num-seqs 8 --cpu-threads 1 --device cpu"
    with serve_process(MODEL, *flags.split()) as running:
        running.wait_for(" is ready at ", 1)
        yield running


def test_turns_find_their_prefix_behind_haproxy(served: ServeProcess) -> None:
    before = counted(served.url)
    alone = rate_of(asking(served.url, x_session_id=lambda: str(random.random())), seed=1)
    together = rate_of(asking(served.url), seed=2)
    print(f"without prefix routing {alone.hit:.2f}, with it {together.hit:.2f}")
    assert alone.hit < 0.75 and together.hit > 0.9  # without it a third hits by chance
    end = time.monotonic() + 60
    while (counted(served.url) - before)["hits"] != alone.read + together.read:
        assert time.monotonic() < end, "a replica that answers late is left out"
        time.sleep(0.2)


def test_a_lost_replica_takes_its_prefixes_along_and_no_answer(served: ServeProcess) -> None:
    name = f"ray::ServeReplica:{MODEL}:Replica"
    ask, turn = asking(served.url), conversations(seed=3)[:6]
    for messages in turn:
        ask(messages)
    os.kill(served.busiest(name), signal.SIGKILL)
    for messages in turn:
        assert ask(messages)["choices"]
    # The replica that replaces it takes its share of the prefixes whenever it comes.
    found, end = [0], time.monotonic() + 60
    while min(found) == 0:
        assert time.monotonic() < end, found
        found = [ask(m)["usage"]["prompt_tokens_details"]["cached_tokens"] for m in turn]


@pytest.fixture(scope="module")
def behind_python() -> Iterator[str]:
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


def test_turns_find_their_prefix_behind_serves_own_proxy(behind_python: str) -> None:
    alone = rate_of(asking(behind_python, x_session_id=lambda: str(random.random())), seed=4)
    together = rate_of(asking(behind_python), seed=5)
    print(f"without prefix routing {alone.hit:.2f}, with it {together.hit:.2f}")
    assert alone.hit < 0.75 and together.hit > 0.9  # without it a third hits by chance


def test_turns_find_their_prefix_through_handles(behind_python: str) -> None:
    handle: Any = serve.get_app_handle(MODEL)

    def ask(messages: list[Json]) -> Json:
        return dict(handle.chat.remote(body(messages)).result(timeout_s=120))

    def ask_as_doors_do(messages: list[Json]) -> Json:
        return dict(handle.ask.remote("chat", body(messages)).result(timeout_s=120))

    assert rate_of(ask, seed=6).hit > 0.9
    assert rate_of(ask_as_doors_do, seed=7).hit > 0.9


async def test_calls_on_behalf_of_one_request_all_find_a_replica(behind_python: str) -> None:
    """They share the id by which Serve finds the calls that wait for a replica."""
    handle: Any = serve.get_app_handle(MODEL)  # a new one, which waits to be told of replicas
    asked = [conversation[1:] for conversation in conversations(seed=8)[:8]]
    _set_request_context(_internal_request_id="the same")
    answers = [handle.chat.remote(body(messages)) for messages in asked]
    async with asyncio.timeout(120):
        found: list[Json] = list(await asyncio.gather(*answers))
    assert all(answer["choices"] for answer in found)
