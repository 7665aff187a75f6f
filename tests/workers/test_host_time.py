"""The host's time is split into parts, and watching leaves no trace."""

import time
from typing import Any

import pytest

from benchmarks.host_time import host_seconds
from diffray.components.caches.exact import Exact
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.engine import Engine
from tests.helpers.replays import replays


@pytest.mark.parametrize("recorded", [False, True])
def test_every_part_is_counted(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow step before the forward adds to the idle time alone."""
    methods, seen = ({**vars(Engine)}, {**vars(BatchPlan)}), replays(monkeypatch)
    rounds, seconds = host_seconds(2, "exact", recorded, 32)
    assert (len(seen) > 5) == recorded
    assert rounds == 6  # of the two requests one takes 5 steps, the other 6
    assert all(0 < seconds[part] < 1 for part in ("before", "beside", "after"))
    assert ({**vars(Engine)}, {**vars(BatchPlan)}) == methods

    window = Exact.window

    def slow(*args: Any) -> tuple[int, int]:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return window(*args)

    monkeypatch.setattr(Exact, "window", slow)
    _, slowed = host_seconds(2, "exact", recorded, 32)
    assert slowed["before"] - seconds["before"] > 6 * 0.015
    assert slowed["beside"] < 6 * 0.015
