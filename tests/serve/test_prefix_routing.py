"""Which replica a prefix's requests go to: the same one, unless it is much busier than others."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diffray.cluster.serve import haproxy
from diffray.cluster.serve.prefix_routing import FACTOR, HEAD, SLACK, choose, prefix_key

SYSTEM = {"role": "system", "content": "Be brief. " * 300}  # longer than what of others counts
KEYS = [f"key {number}" for number in range(3000)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(*messages: dict[str, str], **options: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages)} | options


class TestKeys:
    def test_all_turns_have_the_key_of_the_first(self) -> None:
        turns = [SYSTEM, user("Hello"), {"role": "assistant", "content": "Hi"}, user("And now?")]
        first = prefix_key(chat(*turns[:2], temperature=0))
        assert first is not None
        assert prefix_key(chat(*turns, stream=True)) == first
        assert prefix_key(turns) == prefix_key(turns[:2]) != first

    def test_what_only_the_system_says_alike_is_no_common_key(self) -> None:
        keys = {prefix_key(chat(SYSTEM, user(text))) for text in ("one", "two", "three")}
        assert len(keys) == 3

    def test_the_end_of_a_long_text_does_not_count(self) -> None:
        text = "x" * HEAD
        assert prefix_key(chat(user(text + "a"))) == prefix_key(chat(user(text + "b")))
        assert prefix_key(text + "a") == prefix_key(text + "b") != prefix_key(text[1:])
        ids = list(range(HEAD))
        assert prefix_key({"prompt": [*ids, 1]}) == prefix_key({"prompt": [*ids, 2]})

    def test_who_shares_no_kv_shares_no_key(self) -> None:
        bodies = [{}, {"model": "adapter"}, {"cache_salt": "mine"}, {"cache_salt": "yours"}]
        assert len({prefix_key(chat(user("Hello"), **each)) for each in bodies}) == len(bodies)

    @pytest.mark.parametrize("asked", [None, 7, {}, {"messages": []}, {"prompt": 7}, "", []])
    def test_without_a_text_there_is_no_key(self, asked: object) -> None:
        assert prefix_key(asked) is None

    @pytest.mark.parametrize(
        "asked",
        [{"messages": ["x"]}, {"input": "x"}, {"messages": [{"role": ["x"]}]}, ["\ud800"], [[1]]],
    )
    def test_nonsense_has_a_key_and_is_refused_elsewhere(self, asked: object) -> None:
        assert prefix_key(asked) is not None


class TestChoice:
    def test_keys_are_spread_evenly(self) -> None:
        for count in (2, 3, 8):
            found = Counter(choose(key, idle(count)) for key in KEYS)
            assert max(found.values()) < 1.25 * len(KEYS) / count
            assert min(found.values()) > 0.75 * len(KEYS) / count

    def test_only_the_keys_of_a_lost_replica_move(self) -> None:
        before = {key: choose(key, idle(4)) for key in KEYS}
        after = {key: choose(key, idle(3)) for key in KEYS}
        moved = Counter(before[key] for key in KEYS if after[key] != before[key])
        assert set(moved) == {"replica 3"}
        heirs = Counter(after[key] for key in KEYS if before[key] == "replica 3")
        assert min(heirs.values()) > 0.2 * heirs.total(), "all others inherit"

    def test_the_order_of_replicas_does_not_matter(self) -> None:
        loads = {"a": 3, "b": 9, "c": 2}
        turned = dict(reversed(loads.items()))
        assert all(choose(key, loads) == choose(key, turned) for key in KEYS[:100])

    def test_none_is_much_busier_than_others(self) -> None:
        drawn = random.Random(0)
        for key in KEYS:
            loads = [
                drawn.randrange(drawn.choice((3, 20, 200))) for _ in range(drawn.randint(1, 12))
            ]
            names = {f"replica {number}": load for number, load in enumerate(loads)}
            mean = (sum(loads) + 1) / len(loads)
            chosen = names[choose(key, names)]
            assert chosen < max(FACTOR * mean + 1, min(loads) + SLACK)

    def test_one_key_alone_fills_all_replicas(self) -> None:
        loads = idle(3)
        for _ in range(300):
            loads[choose("the same", loads)] += 1
        assert max(loads.values()) <= FACTOR * 100 + 1 and min(loads.values()) >= 50


def test_calls_of_a_handle_go_by_their_prompts() -> None:
    """A door's calls name a method first, which is none."""
    from ray.serve._private.common import (
        DeploymentHandleSource,
        DeploymentID,
        ReplicaID,
        RequestMetadata,
    )
    from ray.serve.request_router import PendingRequest

    from diffray.cluster.serve.prefix_router import PrefixRouter

    deployment = DeploymentID("some", "app")
    replicas: list[Any] = [
        SimpleNamespace(replica_id=ReplicaID(f"replica {n}", deployment)) for n in range(8)
    ]

    make: Any = PrefixRouter  # Ray's constructor has no types

    async def candidates(method: str, *given: object) -> list[list[str]]:
        router = make(deployment, DeploymentHandleSource.UNKNOWN)
        call = PendingRequest([*given], {}, RequestMetadata("1", "1", method))
        found = await router.choose_replicas(replicas, call)
        return [[each.replica_id.unique_id for each in several] for several in found]

    async def call_all() -> None:
        for text in ("one", "two", "three", "four"):
            body = chat(user(text))
            first = choose(str(prefix_key(body)), idle(8))
            assert (await candidates("chat", body))[0] == [first]
            assert (await candidates("ask", "chat", body))[0] == [first]
            assert (await candidates("ask_stream", "stream_chat", body))[0] == [first]
        assert await candidates("ask", "tokenizer_info", None) == [[*idle(8)]]

    asyncio.run(call_all())


def test_haproxy_goes_by_the_same_numbers() -> None:
    lua = Path(haproxy.__file__).with_name("prefix.lua").read_text()
    assert f"\nlocal HEAD, SLACK, FACTOR = {HEAD}, {SLACK}, {FACTOR}\n" in lua


def idle(count: int) -> dict[str, int]:
    return {f"replica {number}": 0 for number in range(count)}


@pytest.mark.parametrize("clients", [6, 24, 96])
def test_turns_find_what_earlier_turns_left_though_replicas_are_bounded(clients: int) -> None:
    """Clients ask, read and think; what a replica holds is what it was asked before."""
    drawn = random.Random(clients)
    loads, holds = idle(3), dict[str, int]()
    free: list[tuple[float, int, str | None]] = [(drawn.random(), n, None) for n in range(clients)]
    turns, hits, possible = [0] * clients, 0, 0
    for _ in range(8000):
        now, client, ended = min(free)
        free.remove((now, client, ended))
        if ended is not None:  # an answer, which is read now
            loads[ended] -= 1
            free.append((now + drawn.expovariate(0.5), client, None))
            continue
        key, past = f"{client} {turns[client] // 8}", turns[client] % 8
        chosen = choose(key, loads)
        loads[chosen] += 1
        possible += past
        hits += min(holds.get(key + chosen, 0), past)
        holds[key + chosen] = past + 1
        turns[client] += 1
        took = (0.5 + drawn.random()) * (1 + loads[chosen] / 4)
        free.append((now + took, client, chosen))
    assert hits / possible > 0.9
