"""A short run of the chaos test, and its parts. `python -m tests.chaos` is the long one."""

import os

import pytest

from tests.chaos.__main__ import chaos
from tests.chaos.faults import KINDS, schedule
from tests.chaos.report import as_text, sound
from tests.chaos.soak import as_text as soak_text
from tests.chaos.soak import run
from tests.chaos.system import Layout

SOAK = "DIFFRAY_SOAK_MINUTES"


def test_a_schedule_can_be_had_again_and_has_every_kind() -> None:
    assert schedule(30, seed=4) == schedule(30, seed=4) != schedule(30, seed=5)
    assert {fault.kind for fault in schedule(len(KINDS), seed=1)} == set(KINDS)


@pytest.mark.long
def test_no_fault_costs_an_answer_but_where_it_cuts_the_connection() -> None:
    layout = Layout(replicas=2, slots=6, queue=6)
    outcome = chaos(layout, faults=6, streams=12, tokens=48, seed=2, alone=True)
    text = as_text(outcome, "the short run")
    print(text)
    assert sound(outcome), text
    assert len(outcome.hits) == 6 and outcome.tally.counts["right"] >= 12


@pytest.mark.long
@pytest.mark.skipif(SOAK not in os.environ, reason=f"takes the minutes that {SOAK} says, as 20")
def test_memory_is_flat_and_latency_does_not_drift() -> None:
    layout = Layout(replicas=1, slots=12, queue=12)
    found = run(layout, streams=12, tokens=64, minutes=float(os.environ[SOAK]), seed=7)
    print(soak_text(found))
    assert not found.complaints()
