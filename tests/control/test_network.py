"""A workers over two nodes whose network is cut: silently, as a switch does it, for a while."""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.remote import RemoteEngine
from tests.helpers.worker_groups import LONG, answer, in_process, prompts, under_way, wish
from tools.chaos.cable import Cable, two_nodes
from tools.chaos.cuts import questions, schedule, storm
from tools.chaos.report import as_text, sound

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
def test_a_cut_costs_a_pause_and_no_token(cable: Cable, seconds: float, restarts: int) -> None:
    asked, params = prompts("demo", 3), wish(LONG)
    expected = in_process("demo", asked, [params] * 3)
    config = EngineConfig(
        tensor_parallel_size=2, dtype="float64", cpu_threads=1, heartbeat_timeout_s=HANG_S
    )

    async def run() -> tuple[Any, int, float]:
        running = await RemoteEngine.start("demo", config, [{"CPU": 1}] * 3)
        try:
            tasks = [
                asyncio.create_task(answer(running, uid, prompt, params))
                for uid, prompt in enumerate(asked)
            ]
            await under_way(running)
            cable.cut()
            await asyncio.sleep(seconds)
            cable.mend()
            mended = time.monotonic()
            answers = await asyncio.gather(*tasks)
            return answers, (await running.load()).restarts, time.monotonic() - mended
        finally:
            await running.close()

    answers, counted, took = asyncio.run(run())
    print(f"cut for {seconds:g} s: all answers {took:.1f} s after the end of it")
    assert [a.ids for a in answers] == [a.ids for a in expected]
    assert counted >= restarts and (restarts or counted == 0)


def test_cuts_and_kills_lose_no_token(cable: Cable) -> None:
    """Each kind of fault once, seeded: `python -m tools.chaos.cuts` is the long one."""
    assert schedule(20, seed=3) == schedule(20, seed=3) != schedule(20, seed=4)
    asked = questions("demo", number=4, tokens=48, seed=3)
    outcome = asyncio.run(storm(cable, "demo", asked, 6, schedule(5, seed=3), print))
    print(as_text(outcome, "cuts"))
    assert len(outcome.hits) == 5
    assert outcome.tally.counts["right"] == outcome.tally.counts["asked"] > 6
    assert sound(outcome)
