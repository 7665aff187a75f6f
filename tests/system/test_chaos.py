"""A short run of the chaos test, and its parts. `python -m tools.chaos` is the long one."""

import re
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tools.chaos import system, terminal
from tools.chaos.__main__ import chaos
from tools.chaos.faults import KINDS, schedule
from tools.chaos.report import as_text, sound
from tools.chaos.soak import Soak
from tools.chaos.system import Layout


def test_make_chaos_has_every_fault() -> None:
    """Those that a server survives, and those that end it, among them a full disk."""
    count = re.search(r"tools.chaos --faults (\d+)", (ROOT / "Makefile").read_text())
    assert count is not None and {fault.kind for fault in schedule(int(count[1]), 7)} == set(KINDS)
    parts = "rank coordinator replica proxy controller raylet gcs parent".split()
    assert {f"kill {part}" for part in parts} <= {*KINDS, *terminal.KINDS}
    assert {"fill disk", "hang up"} <= set(terminal.KINDS)


def test_memory_in_use_is_not_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor are semaphores, which Python's resource tracker removes."""
    monkeypatch.setattr(system, "SHARED", tmp_path)
    for name in ("before", "used", "unused", "sem.mp-killed"):
        (tmp_path / name).write_bytes(b"1")
    with (tmp_path / "used").open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ):
        assert system.shared_left({"before"}) == {"unused"}
    assert system.shared_left({"before"}) == {"unused", "used"}


@pytest.mark.parametrize(("part", "most"), [("rank", 0.02), ("proxy", 0.1)])
def test_memory_may_grow_by_so_much(part: str, most: float) -> None:
    for grown, count in ((most - 0.001, 0), (most + 0.001, 1)):
        sizes = [*[1000.0] * 60, *[1000.0 * (1 + grown)] * 20]
        found = Soak(memory={part: [(float(at), int(size)) for at, size in enumerate(sizes)]})
        assert len(found.complaints()) == count


@pytest.mark.long
def test_no_fault_costs_an_answer_but_where_it_cuts_the_connection() -> None:
    layout = Layout(replicas=2, slots=6, queue=6)
    outcome = chaos(layout, faults=6, streams=12, tokens=48, seed=2, alone=True)
    text = as_text(outcome, "the short run")
    print(text)
    assert sound(outcome), text
    assert len(outcome.hits) == 6 and outcome.tally.counts["right"] >= 12
