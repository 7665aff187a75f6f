"""The host's time is split into parts, and watching leaves no trace."""

import time
from typing import Any

import pytest

from benchmarks import host_time
from benchmarks.host_time import PARTS, host_seconds
from diffray.components.caches.exact import Exact
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.engine import Engine
from tests.helpers.paths import GOLDEN
from tests.helpers.replays import replays


@pytest.mark.parametrize("recorded", [False, True])
def test_every_part_is_counted(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow step before the forward adds to the idle time alone."""
    methods = {**vars(Engine)}, {**vars(BatchPlan)}
    rounds, seconds = host_seconds(2, "exact", recorded, 32)
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


def test_recordings_are_used_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = replays(monkeypatch)
    host_seconds(1, "exact", False, 32)
    assert not seen
    host_seconds(1, "exact", True, 32)
    assert len(seen) > 5


def test_the_table_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["host_time", "--rows", "1", "2", "--max-tokens", "32"])
    host_time.main()
    head, one, two = capsys.readouterr().out.splitlines()
    assert head.split()[:7] == ["rows", "rounds", *PARTS, "idle", "forward"]
    numbers = [float(x) for x in one.split()]
    assert numbers[0] == 1 and two.split()[0] == "2"
    assert numbers[5] == pytest.approx(numbers[2] + numbers[4], abs=2e-3)
    assert numbers[7] == pytest.approx(numbers[1] / 32, abs=1e-3)
    assert numbers[8] == pytest.approx(sum(numbers[2:5]) * 1e3 * numbers[7], rel=0.02)


def test_a_checkpoint_decides_as_sdar_does() -> None:
    """With a threshold of 1 a block takes all its steps; a low one leaves some out."""
    rounds = [
        host_seconds(1, "exact", False, 16, 4, 4, threshold, str(GOLDEN / "sdar"))[0]
        for threshold in (1.0, 0.01)
    ]
    assert rounds == [16, 4]
