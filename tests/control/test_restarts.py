"""Restarts: at once after a loss out of the blue, slower and slower where nothing works."""

import asyncio
import subprocess
import sys
from unittest.mock import AsyncMock, call

import pytest

from diffray.cluster.control.actors import WITHIN_S, Restarts
from diffray.cluster.control.engine_client import EngineFailed


def test_what_has_worked_is_started_again_at_once_and_what_never_works_ever_more_rarely() -> None:
    restarts = Restarts("it", most=58)
    assert [restarts.pause(0.0, useful=True) for _ in range(50)] == [0.0] * 50
    pauses = [restarts.pause(0.0, useful=n == 0) for n in range(9)]
    assert pauses == [0.0, 1.0, 3.0, 7.0, 15.0, 30.0, 30.0, 30.0, None]
    assert restarts.total == 58


def test_a_restart_is_overdue_that_takes_longer_than_the_first_start() -> None:
    restarts = Restarts("it", most=3)
    restarts.started(took=20.0)
    assert restarts.overdue(1000.0) is None
    restarts.pause(1000.0, useful=True)
    restarts.pause(1015.0, useful=False)
    assert restarts.overdue(1020.0) is None
    assert "it failed 21 s ago" in (restarts.overdue(1021.0) or "")
    restarts.started(took=100.0)
    assert restarts.overdue(2000.0) is None
    restarts.pause(2000.0, useful=True)
    assert "it failed 21 s ago" in (restarts.overdue(2021.0) or "")


def test_between_starts_that_fail_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts, failure = Restarts("it", most=7), EngineFailed("no device")
    start, wait = AsyncMock(side_effect=[failure, failure, None]), AsyncMock()
    monkeypatch.setattr(asyncio, "sleep", wait)
    assert asyncio.run(restarts.restart(start, "it died", useful=True)) is None
    assert wait.await_args_list == [call(0.0), call(1.0), call(3.0)] and restarts.total == 3


def test_old_restarts_are_forgotten() -> None:
    restarts = Restarts("it", most=1)
    assert restarts.pause(0.0, useful=True) == 0.0
    assert restarts.pause(WITHIN_S - 1, useful=True) is None
    assert restarts.pause(WITHIN_S + 1, useful=True) == 0.0
    assert restarts.total == 2


LOADS = """
import sys
from diffray.components.mesh import Mesh
from diffray.workers.rank import Rank
from diffray.workers.engine_options import EngineOptions
from diffray.workers.setup import build_rank

build_rank("demo", EngineOptions(device="cpu"), Mesh())
print(*{"ray", "sympy", "transformers"} & set(sys.modules))
"""


@pytest.mark.slow
def test_a_rank_imports_nothing_that_takes_long() -> None:
    """Each restart waits for it: sympy took half a second, transformers more."""
    told = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == ""
