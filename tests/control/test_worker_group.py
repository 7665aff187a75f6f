"""A coordinator and its ranks on a real Ray: the tokens of one process, alive after losses."""

import asyncio
import os
import signal
from typing import Any

import pytest

from diffray import SamplingParams
from diffray.cluster.control.engine_client import EngineFailed
from tests.helpers.worker_groups import (
    LONG,
    answers,
    automaton_of,
    engine,
    in_process,
    prompts,
    under_way,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_ray")]


@pytest.mark.parametrize(
    ("part", "ranks", "hangs"),
    [
        pytest.param("rank", 2, False, marks=pytest.mark.core),
        pytest.param("coordinator", 1, False, marks=pytest.mark.core),
        pytest.param("rank", 1, True, marks=pytest.mark.long),
        pytest.param("coordinator", 1, True, marks=pytest.mark.long),
    ],
)
@pytest.mark.rotate(1)
async def test_what_is_killed_or_hangs_costs_a_pause_and_no_token(
    part: str, ranks: int, hangs: bool
) -> None:
    """Nor do answers with structured outputs lose one, greedy or drawn."""
    automaton = automaton_of("demo", "(?:[a-z]{1,8} ){30}[a-z]+")
    guided = LONG | {"ignore_eos": False}
    wishes = [LONG, LONG, guided, guided | {"temperature": 0.8, "seed": 2}]
    params = [SamplingParams(**wish) for wish in wishes]
    grammars = [b"", b"", *[automaton.to_bytes()] * 2]
    asked = prompts("demo", 4)
    expected = in_process("demo", asked, params, grammars)
    options: dict[str, Any] = {"heartbeat_timeout_s": 3, "round_timeout_s": 600} if hangs else {}
    async with engine(ranks=ranks, rounds_in_flight=2, **options) as running:
        asking = answers(running, asked, params, grammars)
        await under_way(running)
        assert not any(task.done() for task in asking)
        pid = (await running.pids())[-1 if part == "rank" else 0]
        if hangs:  # a part that is stopped for a moment does not
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(1.0)
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGSTOP if hangs else signal.SIGKILL)
        found = await asyncio.gather(*asking)
        assert not os.path.exists(f"/proc/{pid}"), "it hangs for ever"
        load = await running.load()
        assert (load.coordinator_restarts if part == "coordinator" else load.restarts) == 1
    assert found == expected
    assert all(automaton.follow(0, ids) == automaton.end for ids in found[2:])


async def test_a_missing_checkpoint_is_reported_in_one_sentence() -> None:
    with pytest.raises(EngineFailed, match="/no/such/model"):
        async with engine("/no/such/model"):
            pass
