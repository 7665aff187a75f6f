"""A workers over two nodes whose network is cut: silently, as a switch does it, for a while."""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator

import pytest

from diffray import SamplingParams
from tests.helpers.worker_groups import LONG, answers, engine, in_process, prompts, under_way
from tools.chaos.cable import Cable, two_nodes

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and the command ip"
    ),
]

HANG_S = 5.0


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    """Start a cluster of two nodes, with room for one rank on each."""
    with two_nodes() as found:
        yield found


@pytest.mark.parametrize(("seconds", "restarts"), [(1.5, 0), (10.0, 1)])
async def test_a_cut_costs_a_pause_and_no_token(
    cable: Cable, seconds: float, restarts: int
) -> None:
    asked, params = prompts("demo", 3), [SamplingParams(**LONG)] * 3
    expected = in_process("demo", asked, params)
    async with engine(ranks=2, heartbeat_timeout_s=HANG_S) as running:
        asking = answers(running, asked, params)
        await under_way(running)
        cable.cut()
        await asyncio.sleep(seconds)
        cable.mend()
        mended = time.monotonic()
        found = await asyncio.gather(*asking)
        counted, took = (await running.load()).restarts, time.monotonic() - mended
    print(f"cut for {seconds:g} s: all answers {took:.1f} s after the end of it")
    assert found == expected
    assert counted >= restarts and (restarts or counted == 0)
