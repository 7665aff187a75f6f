"""Handles of requests over an engine of this process: deltas, states, results, ends."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
import torch

from diffray import AsyncDiffusionLLM, DiffusionLLM, SamplingParams
from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.request_handle import Phase, RequestCancelled, RequestHandle, Status
from diffray.cluster.frontend.output import Accepted, Delta, Followed, RequestOutput

MESSAGES = [{"role": "user", "content": "Al buys 3 pens for 4 dollars each. How much does he pay?"}]
OPTIONS: dict[str, Any] = {"dtype": "float64", "max_num_seqs": 2}
# Four blocks of four steps.
SLOW = SamplingParams(
    max_tokens=64,
    ignore_eos=True,
    diffusion={"block_length": 16, "decoder": {"kind": "fixed", "steps": 16}},
)


@pytest.fixture(scope="module")
def plain() -> Iterator[DiffusionLLM]:
    with DiffusionLLM("demo", **OPTIONS) as llm:
        yield llm


async def test_deltas_and_result_are_those_of_a_waiting_model(plain: DiffusionLLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    asked: list[tuple[Any, SamplingParams]] = [
        (MESSAGES, SLOW),
        (MESSAGES, SamplingParams(max_tokens=64, n=3, temperature=0.8, seed=2, logprobs=True)),
        ("Tom", SamplingParams(max_tokens=40, stop=["e"])),
        (MESSAGES, SamplingParams(max_tokens=24, bad_words=["dollars"], presence_penalty=0.5)),
        (torch.tensor([5, 6, 7]), SamplingParams(max_tokens=8, ignore_eos=True)),
        (MESSAGES, SamplingParams(max_tokens=24, structured_outputs={"json": schema})),
    ]
    async with AsyncDiffusionLLM("demo", **OPTIONS) as llm:
        handles = [await llm.submit(prompt, params) for prompt, params in asked]
        for handle, (prompt, params) in zip(handles, asked, strict=True):
            call = plain.chat if prompt is MESSAGES else plain.generate
            (expected,) = call(prompt, params)
            text: dict[int, str] = {}
            async for delta in handle:
                text[delta.index] = text.get(delta.index, "") + delta.text
            assert await handle.result() == expected
            assert [text[n] for n in sorted(text)] == [each.text for each in expected.outputs]
            assert handle.status.phase == Phase.FINISHED and str(handle.status) == "finished"
            stats = handle.stats()
            assert stats.prompt_tokens == expected.prompt_tokens
            assert stats.completion_tokens == expected.completion_tokens
            assert stats.forwards == expected.forwards
            assert stats.tokens_per_forward == expected.tokens_per_forward
            assert 0 < stats.queued <= stats.seconds == handle.stats().seconds


async def endless(end: asyncio.Event) -> AsyncGenerator[Followed, None]:
    await end.wait()
    raise RuntimeError("the engine is gone")
    yield Accepted(1, [1])


async def test_get_gives_up_and_failures_are_raised_where_one_waits() -> None:
    end = asyncio.Event()
    handle = RequestHandle(Accepted(1, [1]), endless(end))
    with pytest.raises(TimeoutError):
        await handle.get(timeout=0.01)
    assert str(handle.status) == "queued"
    end.set()
    for wait in (handle.get, handle.result, handle.__anext__):
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await wait()
    with pytest.raises(RuntimeError, match="the engine is gone"):
        handle.get_nowait()
    assert handle.status == Status(Phase.FAILED, 0, 1)
    await handle.cancel()
    assert handle.status.phase == Phase.FAILED


async def test_the_slowest_choice_gives_the_status() -> None:
    async def several(steps: asyncio.Queue[Followed]) -> AsyncGenerator[Followed, None]:
        while not isinstance(each := await steps.get(), RequestOutput):
            yield each
        yield each

    def delta(index: int, blocks: int, reason: str | None = None) -> Delta:
        return Delta(index, "", [], reason, 1, [], blocks=blocks)

    steps = asyncio.Queue[Followed]()
    handle = RequestHandle(Accepted(1, [4, 4]), several(steps))
    for each, block in (
        (delta(0, 2), 1),
        (delta(1, 1), 2),
        (delta(0, 3, "stop"), 2),
        (delta(1, 3), 4),
        (delta(1, 3, "stop"), 4),
    ):
        steps.put_nowait(each)
        while handle.status != Status(Phase.DENOISING, block, 4):
            await asyncio.sleep(0)
        assert str(handle.status) == f"denoising, block {block} of 4"
    steps.put_nowait(RequestOutput("p", [1], []))
    await handle.result()
    assert handle.status == Status(Phase.FINISHED, 4, 4)


async def test_cancelling_frees_the_place_of_a_request() -> None:
    async with AsyncDiffusionLLM("demo", **OPTIONS) as llm:
        long = SamplingParams(max_tokens=400, ignore_eos=True, diffusion=SLOW.diffusion)
        handles = [await llm.submit("Tom", long) for _ in range(2)]
        assert handles[0].get_nowait() is None and await handles[0].get() is not None
        waiting = await llm.submit("Tom", max_tokens=4, ignore_eos=True)
        for handle in handles:
            await handle.cancel()
            assert handle.status.phase == Phase.CANCELLED
            with pytest.raises(RequestCancelled, match="was cancelled"):
                await handle.result()
            while handle.get_nowait() is not None:  # what became final can still be read
                pass
            assert await handle.get() is None and await handle.get(timeout=0) is None
        at_once = await llm.submit("Tom", SLOW)
        await at_once.cancel()
        assert at_once.status == Status(Phase.CANCELLED, 0, 4)
        assert await at_once.get() is None
        assert (await waiting.result()).completion_tokens == 4
        assert repr(waiting) == "RequestHandle(finished, 4 tokens)"
        await waiting.cancel()
        assert waiting.status.phase == Phase.FINISHED


async def test_what_is_wrong_is_refused_when_it_is_submitted() -> None:
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"items": deep}
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("Tom", {"max_tokens": 10**6}, ApiError, "max_tokens"),
        ([], {}, ApiError, "expected a text, a list of token ids"),
        ([10**6], {}, ApiError, "not in the vocabulary"),
        (MESSAGES, {"structured_outputs": {"regex": "("}}, ApiError, "regex: missing"),
        ("Tom", {"diffusion": {"cache": {"kind": "exact"}}}, ApiError, "bidirectional"),
        ("Tom", {"max_token": 3}, TypeError, "no 'max_token', did you mean"),
        ("Tom", {"sampling_params": SLOW, "max_tokens": 3}, ValueError, "both sampling_params and"),
        (["a", "b"], {}, ValueError, "takes one prompt"),
        ("Tom", {"structured_outputs": {"json": deep}}, ValueError, "at most 100 nested"),
    ]
    async with AsyncDiffusionLLM("demo", **OPTIONS) as llm:
        for prompt, options, error, message in wrong:
            with pytest.raises(error, match=message) as refused:
                await llm.submit(prompt, **options)
            assert not isinstance(refused.value, ApiError) or refused.value.status == 400
    with pytest.raises(ValueError, match="unknown option 'max_num_seq'"):
        AsyncDiffusionLLM("demo", max_num_seq=3)  # type: ignore[call-arg]
    misfit = AsyncDiffusionLLM("demo", diffusion={"cache": "exact"}, **OPTIONS)
    with pytest.raises(ValueError, match="the default does not fit: cache 'exact'"):
        await misfit.start()
    handle: Any = object()
    with pytest.raises(ValueError, match="own options; leave out max_num_seqs, diffusion"):
        AsyncDiffusionLLM(handle, max_num_seqs=3, diffusion={"block_length": 8})


async def test_closing_fails_what_is_open_and_refuses_more() -> None:
    llm = AsyncDiffusionLLM("demo", diffusion={"block_length": 8}, **OPTIONS)
    handle = await llm.submit("Tom", max_tokens=400, ignore_eos=True)
    assert await handle.get() is not None
    assert handle.status.num_blocks == 50, "the model's own default"
    await llm.close()
    with pytest.raises(ApiError, match="closed"):
        await handle.result()
    assert handle.status.phase == Phase.FAILED
    with pytest.raises(ValueError, match="has been closed; make a new one"):
        await llm.submit("Tom")


async def test_priority_comes_first() -> None:
    async with AsyncDiffusionLLM("demo", **OPTIONS) as llm:
        busy = [await llm.submit("Tom", SLOW) for _ in range(4)]
        urgent = await llm.submit("Tom", SLOW, priority=-1)
        await urgent.result()
        assert [each.status.phase for each in busy].count(Phase.FINISHED) < 4
