"""AsyncDiffusionLLM against a running Ray application, and on ranks of its own."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from ray import serve
from ray.exceptions import RayError

from diffray import AsyncDiffusionLLM, DiffusionLLM, SamplingParams
from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.request_handle import Phase, RequestCancelled
from diffray.cluster.serve.deployment import ONGOING_TOKENS
from diffray.cluster.serve.server import remove
from tests.helpers.nodes import alive, application, serving, start
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.long

DEPLOY = ROOT / "docs/deploy.md"
MESSAGES = [{"role": "user", "content": "Al buys 3 pens for 4 dollars each. How much does he pay?"}]
ENGINE = {"dtype": "float64", "max_num_seqs": 2}
LONG = SamplingParams(
    max_tokens=256,
    ignore_eos=True,
    diffusion={"block_length": 16, "decoder": {"kind": "fixed", "steps": 16}},
)


@pytest.fixture(scope="module")
def url(shared_ray: None) -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def application_name(url: str) -> Iterator[str]:
    wanted = application("handled", engine_kwargs=ENGINE)
    start(wanted)
    yield "handled"
    remove(wanted)


@pytest.fixture(scope="module")
def plain() -> Iterator[DiffusionLLM]:
    with DiffusionLLM("demo", dtype="float64") as llm:
        yield llm


async def test_an_application_is_a_model(application_name: str, plain: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=64, n=2, temperature=0.8, seed=2, logprobs=True)

    llm = AsyncDiffusionLLM(serve.get_app_handle(application_name))
    handle = await llm.submit(MESSAGES, params)
    text = ["", ""]
    async for delta in handle:
        text[delta.index] += delta.text
    (expected,) = plain.chat(MESSAGES, params)
    assert await handle.result() == expected
    assert text == [choice.text for choice in expected.outputs]
    assert handle.status.phase == Phase.FINISHED
    ids = expected.prompt_token_ids
    assert (await (await llm.submit(ids, params)).result()).outputs == expected.outputs
    with pytest.raises(ApiError, match="bidirectional") as error:
        await llm.submit("Tom", diffusion={"cache": {"kind": "exact"}})
    assert error.value.status == 400
    await llm.close()


async def ongoing(name: str) -> float:
    stats = await serve.get_app_handle(name).record_autoscaling_stats.remote()
    return float(stats[ONGOING_TOKENS])


async def test_blocks_are_followed_and_cancelling_frees_places(application_name: str) -> None:
    llm = AsyncDiffusionLLM(serve.get_app_handle(application_name))
    handles = [await llm.submit("Tom", LONG) for _ in range(3)]
    seen = set()
    async for _ in handles[0]:
        seen.add(handles[0].status.block)
    assert len(seen) > 4 and max(seen) == 16 == handles[0].status.num_blocks
    again = [await llm.submit("Tom", LONG) for _ in range(12)]
    while not await ongoing(application_name):
        await asyncio.sleep(0.01)
    for handle in (*handles, *again):
        await handle.cancel()
    with pytest.raises(RequestCancelled):
        await again[0].result()
    assert {each.status.phase for each in again} == {Phase.CANCELLED}
    # Two at a time, they would have taken six times as long as the first.
    end = time.monotonic() + 3 * handles[0].stats().seconds
    while await ongoing(application_name):
        assert time.monotonic() < end, "they go on"
        await asyncio.sleep(0.01)


@pytest.mark.skipif(not DEPLOY.exists(), reason="the documents are not there")
def test_the_documented_deployments_compose_a_model(application_name: str, url: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DEPLOY.read_text(), re.DOTALL)
    own_ingress, composed = (each for each in blocks if "import serve" in each)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(own_ingress, space)
    serve.run(space["application"], name="boxes", route_prefix="/boxes")
    numbers = {"boxes": 7, "each": 4, "sold": 9}
    answer = httpx2.get(f"{url}/boxes/left", params=numbers, timeout=120)
    serve.delete("boxes")
    assert (answer.status_code, answer.json()[-17:]) == (200, "The answer is 19.")
    with pytest.raises(ValueError, match="api is for the endpoint"):
        space["deployment"](space["config"] | {"api": {"docs": False}})
    exec(composed, space)
    app: Any = serve.run(space["shortest"], name="shortest", route_prefix=None)
    question = MESSAGES[0]["content"]
    answers = app.answers.remote(question).result(timeout_s=120)
    shortest = app.shortest.remote(question).result(timeout_s=120)
    serve.delete("shortest")
    assert len(answers) == 3 and all(answers) and shortest == min(answers, key=len)


async def test_ranks_of_ones_own(application_name: str, plain: DiffusionLLM) -> None:
    del application_name  # its Ray is used

    asking = AsyncDiffusionLLM("demo", dtype="float64", tensor_parallel_size=2)
    async with asking as llm:
        handles = [await llm.submit(MESSAGES, max_tokens=64) for _ in range(3)]
        outputs = [await handle.result() for handle in handles]
    (expected,) = plain.chat(MESSAGES, max_tokens=64)
    assert outputs == [expected] * 3


async def test_a_request_fails_with_its_replica(application_name: str) -> None:
    """The last one here: it ends the application's only replica."""
    llm = AsyncDiffusionLLM(serve.get_app_handle(application_name))
    handle = await llm.submit("Tom", LONG)
    assert await handle.get(timeout=60) is not None
    for pid in alive("ServeReplica:handled"):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RayError):
        await handle.result()
    assert handle.status.phase == Phase.FAILED
    with pytest.raises(RayError):
        while await handle.get(timeout=60) is not None:
            pass
    with pytest.raises(RayError):
        handle.get_nowait()
