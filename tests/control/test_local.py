"""The engine of this process: same tokens, bounded queue, priorities, deadlines, cancellation."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from diffray.cluster.control.engine_client import DeadlineExceeded, EngineFailed, Overloaded
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import PIECES
from diffray.cluster.control.local import LocalEngine, load_local
from diffray.components.params import SamplingParams
from diffray.workers.admission import check_request
from diffray.workers.messages import Request, Round, Update
from tests.helpers.toy import ScriptedModel, ToyModel, run, toy_engine

LONG = SamplingParams(max_tokens=400, ignore_eos=True, diffusion={"block_length": 8})
SHORT = SamplingParams(max_tokens=16, ignore_eos=True, diffusion={"block_length": 8})


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    inner = toy_engine(ToyModel(), num_slots=2)
    config = EngineConfig(steps_per_round=2, max_queued_requests=3)
    with LocalEngine(inner, config) as engine:
        yield engine


def submit(
    engine: LocalEngine, uid: int, params: SamplingParams, **options: Any
) -> AsyncGenerator[Update]:
    return engine.submit(check_request(Request(uid, (1, 2), params), engine.limits), **options)


async def finish(engine: LocalEngine, request: Request) -> list[Update]:
    async with aclosing(engine.submit(check_request(request, engine.limits))) as updates:
        return [update async for update in updates]


def ids_of(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.ids]


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await true():
            await asyncio.sleep(0.002)


async def all_free(engine: LocalEngine) -> bool:
    load = await engine.load()
    return load.free_pages == load.num_pages and load.running == load.waiting == 0


def test_tokens_are_the_engines_own(engine: LocalEngine) -> None:
    requests = [
        Request(uid, (1 + uid, 2, 3), SHORT.model_copy(update={"temperature": 1.0, "seed": uid}))
        for uid in range(5)
    ]

    async def all_at_once() -> list[list[Update]]:
        return await asyncio.gather(*(finish(engine, request) for request in requests))

    for request, updates in zip(requests, asyncio.run(all_at_once()), strict=True):
        assert ids_of(updates) == run(toy_engine(ToyModel()), [request])[request.uid]
        assert updates[-1].finish_reason == "length"


async def test_a_full_queue_refuses(engine: LocalEngine) -> None:
    streams = [submit(engine, uid, LONG) for uid in range(5)]
    first = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.sleep(0)  # two run, three wait
    with pytest.raises(Overloaded):
        await finish(engine, Request(9, (1, 2), SHORT))
    for task in first:
        task.cancel()
    await asyncio.gather(*first, return_exceptions=True)
    await until(lambda: all_free(engine))
    assert (await finish(engine, Request(9, (1, 2), SHORT)))[-1].finish_reason == "length"


async def test_a_slow_reader_gets_few_pieces_and_every_token(engine: LocalEngine) -> None:
    async with aclosing(submit(engine, 1, LONG)) as stream:
        found = [await anext(stream)]
        await until(lambda: all_free(engine))
        found += [update async for update in stream]
    assert found[-1].finish_reason == "length"
    assert len(found) <= 2 * PIECES
    quick = await finish(engine, Request(2, (1, 2), LONG))
    assert len(quick) > 2 * PIECES, "too few pieces to join"
    assert ids_of(found) == ids_of(quick)


async def test_closing_a_stream_frees_its_pages(engine: LocalEngine) -> None:
    stream = submit(engine, 1, LONG)
    await anext(stream)
    load = await engine.load()
    assert load.running == 1 and load.free_pages < load.num_pages
    await stream.aclose()
    await until(lambda: all_free(engine))
    # One round may have been running, and its news on their way.
    assert (await engine.load()).rounds <= load.rounds + 2


async def test_lower_priority_numbers_run_first(engine: LocalEngine) -> None:
    order: list[int] = []

    async def one(uid: int, priority: int) -> None:
        async for update in submit(engine, uid, SHORT, priority=priority):
            if update.finish_reason:
                order.append(uid)

    await asyncio.gather(*(one(uid, (0, 0, 5, 1, -1)[uid]) for uid in range(5)))  # two run
    assert order.index(4) < order.index(2) == 4


async def test_a_deadline_or_the_end_of_the_engine_ends_a_request(engine: LocalEngine) -> None:
    with pytest.raises(DeadlineExceeded):
        async for _ in submit(engine, 1, LONG, deadline=0.01):
            pass
    await until(lambda: all_free(engine))
    stream = submit(engine, 1, LONG)
    await anext(stream)
    await asyncio.to_thread(engine.close)
    with pytest.raises(EngineFailed, match="closed"):
        async for _ in stream:
            pass


def test_what_cannot_run_is_refused_and_the_rest_goes_on(engine: LocalEngine) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match="empty"):
            await finish(engine, Request(1, (), SHORT))
        stream = submit(engine, 2, LONG)
        await anext(stream)
        with pytest.raises(ValueError, match="another uid"):
            await finish(engine, Request(2, (1, 2), LONG))
        await stream.aclose()
        await until(lambda: all_free(engine))
        assert (await finish(engine, Request(2, (1, 2), SHORT)))[-1].finish_reason

    asyncio.run(scenario())
    with pytest.raises(ValueError, match="needs a cluster"):
        load_local("demo", EngineConfig(tensor_parallel_size=2))


def test_a_broken_engine_tells_everyone() -> None:
    inner = toy_engine(ToyModel())
    engine = LocalEngine(inner)

    def break_down(steps: int = 1) -> list[Update]:
        raise RuntimeError("no memory left")

    inner.step = break_down  # type: ignore[method-assign]

    async def scenario() -> None:
        with pytest.raises(EngineFailed, match="not been started"):
            await engine.check_health()
        engine.start()
        await engine.check_health()
        for _ in range(2):  # the one that found out, and one that came later
            with pytest.raises(EngineFailed, match="no memory left"):
                await finish(engine, Request(1, (1, 2), SHORT))
        with pytest.raises(EngineFailed, match="no memory left"):
            await engine.check_health()

    asyncio.run(scenario())
    engine.close()


EDIT = SamplingParams(
    max_tokens=64,
    ignore_eos=True,
    temperature=1.0,
    seed=5,
    diffusion={"block_length": 32, "decoder": {"kind": "edit", "threshold": 1.0}},
)


@pytest.mark.parametrize(("params", "time_slice"), [(LONG, 8), (EDIT, 2)])
def test_a_long_request_gives_way_here_as_behind_a_coordinator(
    params: SamplingParams, time_slice: int
) -> None:
    """Also before it has reported a token, as under `edit`, which reports whole blocks."""
    long, short = Request(1, (1, 2), params), Request(2, (3, 4), SHORT)
    expected = run(toy_engine(ToyModel()), [long])[1]
    ended: list[int] = []

    async def one(engine: LocalEngine, request: Request) -> list[int]:
        updates = await finish(engine, request)
        ended.append(request.uid)
        return ids_of(updates)

    async def scenario() -> None:
        inner = toy_engine(ToyModel(), num_slots=1)
        with LocalEngine(inner, EngineConfig(time_slice=time_slice)) as engine:
            first = asyncio.ensure_future(one(engine, long))
            while not (await engine.load()).rounds:
                await asyncio.sleep(0)
            await one(engine, short)
            assert await first == expected
            assert (await engine.load()).preemptions

    asyncio.run(scenario())
    assert ended == [2, 1]


@pytest.mark.parametrize(("same", "together"), [(True, 4), (False, 1)])
def test_pages_of_a_shared_prefix_are_counted_once(same: bool, together: int) -> None:
    """25 pages: 20 of the prompt, and one for each request's own block."""
    inner = toy_engine(ToyModel(block_causal=True), num_slots=8, num_pages=26)
    params = SamplingParams(max_tokens=8, ignore_eos=True, diffusion={"block_length": 8})
    prompts = [(1 + (0 if same else uid),) * 160 for uid in range(4)]
    most = 0
    step = inner.step

    def counted(steps: int = 1) -> list[Update]:
        nonlocal most
        updates = step(steps)
        most = max(most, len(inner.running) + sum(bool(u.finish_reason) for u in updates))
        return updates

    inner.step = counted  # type: ignore[method-assign]

    async def scenario() -> None:
        with LocalEngine(inner) as engine:
            await asyncio.gather(
                *(finish(engine, Request(uid, prompts[uid], params)) for uid in range(4))
            )
            assert await all_free(engine)

    asyncio.run(scenario())
    assert most == together


async def test_one_checked_request_may_run_again(engine: LocalEngine) -> None:
    checked = check_request(Request(1, (1, 2), LONG), engine.limits)

    async def tokens(most: int = 400) -> list[int]:
        ids: list[int] = []
        async with aclosing(engine.submit(checked)) as stream:
            async for update in stream:
                ids += update.ids
                if len(ids) >= most:
                    break
        return ids

    first = await tokens()
    part = await tokens(most=20)  # cancelled half way
    assert len(first) == 400 and first[: len(part)] == part
    assert await tokens() == first


def test_forwards_never_fall_where_a_request_gives_way_before_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The best tokens come first at the right, so none is final before the whole block is.
    inner = toy_engine(ScriptedModel(lambda position: {1: 5.0 + position}), num_slots=2)

    def asks(uid: int, length: int) -> Request:
        policy = {"block_length": length, "decoder": {"kind": "fixed", "steps": length}}
        params = SamplingParams(max_tokens=length, ignore_eos=True, diffusion=policy)
        return Request(uid, (1, 2, 3), params, watch=True)

    async def scenario(engine: LocalEngine) -> list[list[Update]]:
        requests = [asks(0, 32), *(asks(uid, 16) for uid in range(1, 5))]
        return await asyncio.gather(*(finish(engine, request) for request in requests))

    run_round, admitted = inner.run, Counter[int]()

    def counted(order: Round[Any], *args: Any) -> Any:
        admitted.update(request.uid for request in order.add)
        return run_round(order, *args)

    monkeypatch.setattr(inner, "run", counted)
    with LocalEngine(inner, EngineConfig(time_slice=1, steps_per_round=1)) as engine:
        answers = asyncio.run(scenario(engine))
    assert max(admitted.values()) > 1, "a request gave way and was resumed"
    for updates in answers:
        forwards = [update.forwards for update in updates]
        assert forwards == sorted(forwards)
        assert updates[-1].finish_reason == "length"
