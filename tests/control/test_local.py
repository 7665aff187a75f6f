"""The engine of this process: requests give way and share, and what ends them is told."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any
from unittest.mock import Mock

import pytest

from diffray.cluster.control.engine_client import DeadlineExceeded, EngineFailed
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.local import LocalEngine, WaitingEngine, load_local
from diffray.components.params import SamplingParams
from diffray.workers.admission import check_request
from diffray.workers.messages import Request, Round, Update
from tests.helpers.toy import ScriptedModel, ToyModel, run, toy_engine

LONG = SamplingParams(max_tokens=400, ignore_eos=True, diffusion={"block_length": 8})
SHORT = SamplingParams(max_tokens=16, ignore_eos=True, diffusion={"block_length": 8})


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(
        toy_engine(ToyModel(), num_slots=2), EngineConfig(steps_per_round=2)
    ) as engine:
        yield engine


async def rest(updates: AsyncGenerator[Update]) -> list[Update]:
    async with aclosing(updates):
        return [update async for update in updates]


async def finish(engine: LocalEngine, request: Request, **options: Any) -> list[Update]:
    return await rest(engine.submit(check_request(request, engine.limits), **options))


def ids_of(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.ids]


async def until_all_is_free(engine: LocalEngine) -> None:
    async with asyncio.timeout(60):
        while (load := await engine.load()).running or load.free_pages < load.num_pages:
            await asyncio.sleep(0.002)


async def test_leaving_frees_all_and_the_same_checked_request_may_run_again(
    engine: LocalEngine,
) -> None:
    checked = check_request(Request(1, (1, 2), LONG), engine.limits)
    whole = ids_of(await rest(engine.submit(checked)))
    stream = engine.submit(checked)
    part = (await anext(stream)).ids
    load = await engine.load()
    assert load.running == 1 and load.free_pages < load.num_pages
    with pytest.raises(ValueError, match="another uid"):
        await rest(engine.submit(checked))
    await stream.aclose()
    await until_all_is_free(engine)
    # One round may have been running, and its news on their way.
    assert (await engine.load()).rounds <= load.rounds + 2
    assert len(whole) == 400 and part == whole[: len(part)]
    assert ids_of(await rest(engine.submit(checked))) == whole


async def test_a_deadline_or_the_end_of_the_engine_ends_a_request(engine: LocalEngine) -> None:
    request = Request(1, (1, 2), LONG)
    with pytest.raises(DeadlineExceeded):
        await finish(engine, request, deadline=0.01)
    await until_all_is_free(engine)
    stream = engine.submit(check_request(request, engine.limits))
    await anext(stream)
    await asyncio.to_thread(engine.close)
    with pytest.raises(EngineFailed, match="closed"):
        await rest(stream)


def test_several_ranks_need_a_cluster() -> None:
    with pytest.raises(ValueError, match="needs a cluster"):
        load_local("demo", EngineConfig(tensor_parallel_size=2))


async def test_a_broken_engine_tells_everyone() -> None:
    inner = toy_engine(ToyModel())
    engine = LocalEngine(inner)

    inner.step = Mock(side_effect=RuntimeError("no memory left"))  # type: ignore[method-assign]
    with pytest.raises(EngineFailed, match="not been started"):
        await engine.check_health()
    engine.start()
    await engine.check_health()
    for _ in range(2):  # the one that found out, and one that came later
        with pytest.raises(EngineFailed, match="no memory left"):
            await finish(engine, Request(1, (1, 2), SHORT))
    with pytest.raises(EngineFailed, match="no memory left"):
        await engine.check_health()
    engine.close()


@pytest.mark.parametrize(("same", "together"), [(True, 4), (False, 1)])
def test_pages_of_a_shared_prefix_are_counted_once(same: bool, together: int) -> None:
    """25 pages: 20 of the prompt, and one for each request's own block."""
    inner = toy_engine(ToyModel(block_causal=True), num_slots=8, num_pages=26)
    params = SamplingParams(max_tokens=8, ignore_eos=True, diffusion={"block_length": 8})
    step, counts = inner.step, list[int]()

    def counted(steps: int = 1) -> list[Update]:
        updates = step(steps)
        counts.append(len(inner.running) + sum(bool(u.finish_reason) for u in updates))
        return updates

    inner.step = counted  # type: ignore[method-assign]
    engine = WaitingEngine(inner, steps_per_round=4)
    for uid in range(4):  # all are queued before the first round
        request = Request(uid, (1 if same else 1 + uid,) * 160, params)
        engine.submit(check_request(request, engine.limits))
    while engine.open:
        engine.advance()
    assert max(counts) == together


async def test_forwards_never_fall_where_a_request_gives_way_before_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The best tokens come first at the right, so none is final before the whole block is.
    model = ScriptedModel(lambda position: {1 + position % 9: 5.0 + position})
    inner = toy_engine(model, num_slots=2)

    def asks(uid: int, length: int) -> Request:
        policy = {"block_length": length, "decoder": {"kind": "fixed", "steps": length}}
        params = SamplingParams(max_tokens=length, ignore_eos=True, diffusion=policy)
        return Request(uid, (1, 2, 3), params, watch=True)

    run_round = Mock(wraps=inner.run)
    monkeypatch.setattr(inner, "run", run_round)
    with LocalEngine(inner, EngineConfig(time_slice=1, steps_per_round=1)) as engine:
        asked = [asks(0, 32), *(asks(uid, 16) for uid in range(1, 5))]
        answers = await asyncio.gather(*(finish(engine, request) for request in asked))
        assert (await engine.load()).preemptions
    orders: list[Round[Any]] = [call.args[0] for call in run_round.call_args_list]
    admitted = Counter(request.uid for order in orders for request in order.add)
    assert max(admitted.values()) > 1, "a request gave way and was resumed"
    for request, updates in zip(asked, answers, strict=True):
        assert ids_of(updates) == run(toy_engine(model), [request])[request.uid]
        forwards = [update.forwards for update in updates]
        assert forwards == sorted(forwards)
        assert updates[-1].finish_reason == "length"
