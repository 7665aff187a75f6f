"""Which replica a prefix's requests go to: the same one, unless it is much busier than others."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

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
        other = prefix_key(chat(SYSTEM, user("Bye"), temperature=0))
        assert other != first, "what only the system says alike"

    def test_the_end_of_a_long_text_does_not_count(self) -> None:
        text = "x" * HEAD
        assert prefix_key(chat(user(text + "a"))) == prefix_key(chat(user(text + "b")))
        assert prefix_key(text + "a") == prefix_key(text + "b") != prefix_key(text[1:])
        ids = list(range(HEAD))
        assert prefix_key({"prompt": [*ids, 1]}) == prefix_key({"prompt": [*ids, 2]})

    def test_who_shares_no_kv_shares_no_key(self) -> None:
        bodies = [{}, {"model": "adapter"}, {"cache_salt": "mine"}, {"cache_salt": "yours"}]
        assert len({prefix_key(chat(user("Hello"), **each)) for each in bodies}) == len(bodies)

    def test_without_a_text_there_is_no_key_and_nonsense_is_refused_elsewhere(self) -> None:
        nothing: list[Any] = [None, 7, {}, {"messages": []}, {"prompt": 7}, "", []]
        assert {*map(prefix_key, nothing)} == {None}
        given = {"messages": ["x"]}, {"input": "x"}, {"messages": [{"role": ["x"]}]}
        for nonsense in (*given, ["\ud800"], [[1]]):
            assert prefix_key(nonsense) is not None, nonsense


class TestChoice:
    def test_keys_are_spread_evenly_and_only_those_of_a_lost_replica_move(self) -> None:
        before = {key: choose(key, idle(4)) for key in KEYS}
        assert min(Counter(before.values()).values()) > 0.75 * len(KEYS) / 4
        after = {key: choose(key, idle(3)) for key in KEYS}
        moved = Counter(before[key] for key in KEYS if after[key] != before[key])
        assert set(moved) == {"replica 3"}
        heirs = Counter(after[key] for key in KEYS if before[key] == "replica 3")
        assert min(heirs.values()) > 0.2 * heirs.total(), "all others inherit"

    def test_none_is_much_busier_than_others_in_whatever_order(self) -> None:
        drawn = random.Random(0)
        for key in KEYS:
            loads = {
                f"replica {number}": drawn.randrange(drawn.choice((3, 20, 200)))
                for number in range(drawn.randint(1, 12))
            }
            chosen = choose(key, loads)
            assert chosen == choose(key, dict(reversed(loads.items())))
            mean = (sum(loads.values()) + 1) / len(loads)
            assert loads[chosen] < max(FACTOR * mean + 1, min(loads.values()) + SLACK)

    def test_one_key_stays_within_the_bounds_and_fills_all_replicas_beyond(self) -> None:
        loads = idle(3)
        first = choose("the same", loads)
        for number in range(300):
            chosen = choose("the same", loads)
            assert chosen == first or number >= SLACK
            loads[chosen] += 1
        assert max(loads.values()) == FACTOR * 100 and min(loads.values()) >= 50


async def test_calls_of_a_handle_go_by_their_prompts() -> None:
    """An ingress's calls name a method first, which is none."""
    from ray.serve._private.common import (
        DeploymentHandleSource,
        DeploymentID,
        ReplicaID,
        RequestMetadata,
    )
    from ray.serve.request_router import PendingRequest

    from diffray.cluster.serve.prefix_routing import PrefixRouter

    make: Any = PrefixRouter  # Ray's constructor has no types
    deployment = DeploymentID("some", "app")
    ids = [ReplicaID(f"replica {number}", deployment) for number in range(8)]
    replicas: list[Any] = [SimpleNamespace(replica_id=each) for each in ids]

    async def candidates(method: str, *given: object) -> list[str]:
        router = make(deployment, DeploymentHandleSource.UNKNOWN)
        call = PendingRequest([*given], {}, RequestMetadata("1", "1", method))
        first, *_ = await router.choose_replicas(replicas, call)
        return [each.replica_id.unique_id for each in first]

    for text in ("one", "two", "three", "four"):
        body = chat(user(text))
        expected = [choose(str(prefix_key(body)), idle(8))]
        assert await candidates("chat", body) == expected
        assert await candidates("ask", "chat", body) == expected
        assert await candidates("ask", "ask", "/tokenize", body) == expected
    assert await candidates("ask", "ask", "/tokenizer_info", {"model": None}) == [*idle(8)]


def idle(count: int) -> dict[str, int]:
    return {f"replica {number}": 0 for number in range(count)}
