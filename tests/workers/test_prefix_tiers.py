"""Prefixes that leave the device come back from the host, and nobody's tokens change for it."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from diffray import DiffusionLLM
from diffray.cluster.api.metrics import Metrics
from diffray.cluster.control.driver import Driver
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.scheduler import Scheduler
from diffray.components.params import SamplingParams
from diffray.workers.admission import CheckedRequest, check_request
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request, Round
from diffray.workers.prefix_memory import host_pages_for
from tests.helpers import sharing
from tests.helpers.paths import GOLDEN
from tests.helpers.sharing import BLOCK
from tests.helpers.toy import CountingModel, prompt_of, toy_engine

PAGE = 8
NUM_PAGES = 1 + 20  # a request takes 14; six blocks of it, 12 pages, stay
PROMPTS = [prompt_of(100, seed=seed) for seed in range(4)]


request = partial(sharing.request, max_tokens=12)


def engine_of(**options: Any) -> Engine:
    return toy_engine(CountingModel(), **{"num_pages": NUM_PAGES, "host_pages": 100} | options)


def cached(engine: Engine, each: Request, now: float = 0.0) -> int:
    engine.run(Round(1, [], [], 0, now=now), engine.check)
    return sharing.cached(engine, each)


def test_what_the_device_has_no_room_for_comes_back_from_the_host() -> None:
    engine, small = engine_of(), engine_of(host_pages=0)
    for turn in range(3):
        for prompt in PROMPTS:
            assert cached(engine, request(0, prompt)) == (6 * BLOCK if turn else 0)
            assert cached(small, request(0, prompt)) == 0
    assert small.model.positions - engine.model.positions == 2 * 4 * 6 * BLOCK  # type: ignore[attr-defined]
    found, page = engine.stats().prefixes, engine.kv.page_bytes
    assert found.loaded_bytes == 2 * 4 * 12 * page
    assert found.host_hits == 2 * 4 * 6 * BLOCK
    assert found.host_queries == 3 * 4 * 100
    # Of four times 12 pages, those that are not on the device.
    assert found.host_bytes == 48 * page - found.device_bytes
    assert found.stored_bytes == found.loaded_bytes + found.host_bytes
    assert small.stats().prefixes.host_queries == 0


def test_the_host_forgets_the_longest_unused_first_and_ends_before_beginnings() -> None:
    engine = engine_of(host_pages=12)
    for prompt in PROMPTS[:3]:
        cached(engine, request(0, prompt))

    def found(prompt: tuple[int, ...]) -> int:
        return len(engine.kv.prefixes.find(engine.check(request(0, prompt))))

    # Of 36 pages 18 are on the device: 2 of 20 stay free.
    assert [found(prompt) for prompt in PROMPTS[:3]] == [3, 6, 6]
    assert engine.kv.prefixes.num_host == 12
    assert cached(engine, request(0, PROMPTS[0])) == 3 * BLOCK
    small = engine_of(host_pages=BLOCK // PAGE)  # for one block
    for prompt in PROMPTS[:2]:
        cached(small, request(0, prompt))
    assert small.kv.prefixes.num_host == BLOCK // PAGE


def test_what_nobody_uses_for_long_is_forgotten_in_both_tiers() -> None:
    engine = engine_of(prefix_ttl=10.0)
    assert cached(engine, request(0, PROMPTS[0]), now=100.0) == 0
    assert cached(engine, request(0, PROMPTS[1]), now=105.0) == 0
    assert engine.kv.prefixes.num_host > 0
    assert cached(engine, request(0, PROMPTS[0]), now=109.0) == 6 * BLOCK
    assert cached(engine, request(0, PROMPTS[1]), now=118.0) == 0
    assert cached(engine, request(0, PROMPTS[0]), now=118.5) == 6 * BLOCK
    engine.run(Round(1, [], [], 0, now=130.0), engine.check)
    assert engine.kv.prefixes.num_host == engine.kv.prefixes.num_device == 0
    assert engine.kv.num_free == len(engine.kv.unused) == NUM_PAGES - 1


def test_new_weights_and_sleep_leave_nothing_on_the_host() -> None:
    engine = engine_of()
    for prompt in PROMPTS:
        cached(engine, request(0, prompt))
    engine.kv.give_back()
    assert engine.kv.host.nbytes == engine.kv.prefixes.num_host == 0
    engine.kv.take_back()
    assert cached(engine, request(0, PROMPTS[0])) == 0
    assert engine.kv.host.num_pages == 100


class Alike(int):
    """A token id whose hash is that of all others."""

    def __hash__(self) -> int:
        return 0


def test_prefixes_of_one_hash_are_told_apart() -> None:
    """In the engine's tree, and where the scheduler counts pages of common prefixes."""
    engine = engine_of()
    asked = [
        replace(request(uid, tuple(map(Alike, prompt))), cache_salt="")
        for uid, prompt in enumerate([*PROMPTS, *PROMPTS])
    ]
    assert len({hash(each.prompt) for each in asked}) == 1
    driver = Driver(Scheduler(8, NUM_PAGES - 1, 99, page_size=PAGE), steps=1)
    tokens = served(driver, engine, [check_request(each, engine.limits) for each in asked])
    assert tokens == {each.uid: sharing.alone(engine, each) for each in asked}
    assert engine.stats().prefixes.host_hits > 0


def served(driver: Driver, engine: Engine, asked: list[CheckedRequest]) -> dict[int, list[int]]:
    """Run requests through a scheduler."""
    tokens: dict[int, list[int]] = {each.uid: [] for each in asked}
    for each in asked:
        driver.scheduler.submit(each, each.footprint)
    while (order := driver.next()) is not None:
        for event in driver.take(engine.run(order, CheckedRequest.new_sequence)):
            if event.update is not None:
                tokens[event.uid] += event.update.ids
    return tokens


def test_metrics_tell_of_both_tiers() -> None:
    engine = engine_of()
    driver = Driver(Scheduler(8, NUM_PAGES - 1, 99, page_size=PAGE), steps=1)
    for turn in range(2):
        asked = [request(uid, prompt) for uid, prompt in enumerate(PROMPTS, 4 * turn)]
        served(driver, engine, [check_request(each, engine.limits) for each in asked])
    kept, page = engine.stats().prefixes, engine.kv.page_bytes
    families = Metrics("toy").families(driver.load(), engine.limits)
    found = {
        (sample.name.removeprefix("diffray:"), sample.labels.get("tier")): sample.value
        for family in families
        for sample in family.samples
    }
    assert found["prefix_cache_bytes", "device"] == engine.kv.prefixes.num_device * page > 0
    assert found["prefix_cache_bytes", "host"] == kept.host_bytes > 0
    assert found["kv_offload_cpu_cache_usage_perc", None] == kept.host_bytes / (100 * page)
    assert found["external_prefix_cache_queries_total", None] == kept.host_queries > 0
    assert found["external_prefix_cache_hits_total", None] == kept.host_hits > 0
    assert found["kv_offload_store_bytes_total", None] == kept.stored_bytes > 0
    assert found["kv_offload_load_bytes_total", None] == kept.loaded_bytes > 0


def test_a_checkpoint_gives_equal_tokens_with_and_without_the_host() -> None:
    # 16 pages of the cache: a prompt and its answer take 8.
    options: dict[str, Any] = {"max_num_seqs": 2, "kv_cache_memory": 16 * 24576}
    options |= {"dtype": "float64", "mask_token_id": 510, "eos_token_id": 511}
    prompts = [[(7 * number + at) % 500 for at in range(100)] for number in range(4)] * 2
    found = []
    for swap_space, cached in ((0, 0), ("1MiB", 96)):
        with DiffusionLLM(str(GOLDEN / "llada2_moe"), swap_space=swap_space, **options) as llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=8))
        found.append([output.outputs[0].token_ids for output in outputs])
        assert [output.cached_tokens for output in outputs[4:]] == [cached] * 4
    assert found[0] == found[1]


def test_sizes_have_units_and_options_an_effect() -> None:
    for given, gibibytes in ((4, 4.0), ("4", 4.0), ("0.5", 0.5), ("512MiB", 0.5)):
        assert EngineOptions(swap_space=given).swap_space == gibibytes
    with pytest.raises(ValueError, match="swap_space has no effect without enable_prefix_caching"):
        EngineConfig(swap_space=1, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="not an amount of memory"):
        EngineOptions(swap_space="4 gigs")
    for options in ({"swap_space": 1}, {"prefix_cache_ttl": 60}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} needs block-causal attention"):
            DiffusionLLM(str(GOLDEN / "llada"), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="free; lower it"):
        host_pages_for(1 << 30, 4096)
    with pytest.raises(ValueError, match="less than a K/V page"):
        host_pages_for(2**-30, 4096)
