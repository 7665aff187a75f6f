"""The host's time is split into parts, and watching leaves no trace."""

import pytest

from benchmarks.host_time import host_seconds
from diffray.workers.batch_plan import BatchPlan
from diffray.workers.engine import Engine
from tests.helpers.replays import replays


@pytest.mark.parametrize("recorded", [False, True])
def test_every_part_is_counted(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    methods, seen = ({**vars(Engine)}, {**vars(BatchPlan)}), replays(monkeypatch)
    rounds, seconds = host_seconds(2, "exact", recorded, 32)
    assert (len(seen) > 5) == recorded
    assert rounds == 6  # of the two requests one takes 5 steps, the other 6
    assert all(0 < seconds[part] < 1 for part in ("before", "beside", "after"))
    assert ({**vars(Engine)}, {**vars(BatchPlan)}) == methods
