"""The scheduler against a simple engine: nobody is lost, starved or run twice, whatever happens."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffray.cluster.client import Overloaded
from diffray.cluster.scheduler import FAILED, LATE, UPDATE, Scheduler


def packed(uid: int, max_tokens: int = 3) -> dict[str, Any]:
    return {"uid": uid, "prompt": [1, 2], "params": {"max_tokens": max_tokens}, "resume": None}


@dataclass
class FakeRanks:
    """Runs what it is told, one token a round each; holds pages as an engine would."""

    slots: int
    pages: int
    running: dict[int, dict[str, Any]] = field(default_factory=dict)
    need: dict[int, int] = field(default_factory=dict)

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        for uid in message["cancel"]:
            self.running.pop(uid, None)
        for request in message["add"]:
            assert request["uid"] not in self.running, "admitted twice"
            resume = request["resume"]
            self.running[request["uid"]] = {
                "written": len(resume[0]) if resume else 0,
                "max": request["params"]["max_tokens"],
            }
        assert len(self.running) <= self.slots
        updates = []
        for uid, state in list(self.running.items()):
            state["written"] += 1
            done = state["written"] == state["max"]
            updates.append(
                [uid, [state["written"]], [], [], "length" if done else None, None, 1, [0, 0]]
            )
            if done:
                del self.running[uid]
        free = self.pages - sum(self.need[uid] for uid in self.running)
        assert free >= 0
        return {"updates": updates, "refused": [], "stats": {"free_pages": free, "waiting": 0}}


def drain(scheduler: Scheduler, ranks: FakeRanks) -> Iterator[list[Any]]:
    for _ in range(1000):
        message = scheduler.plan(steps=1)
        if message is None:
            return
        yield from scheduler.settle(ranks.step(message))
    raise AssertionError("it does not end")


def started(scheduler: Scheduler) -> list[int]:
    message = scheduler.plan(steps=1)
    assert message is not None
    return [request["uid"] for request in message["add"]]


def test_the_coordinator_and_whoever_creates_workers_need_no_torch() -> None:
    code = (
        "import sys, diffray.cluster.coordinator, diffray.workers.worker;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_queue_is_first_come_first_served_within_a_priority() -> None:
    scheduler = Scheduler(slots=4, pages=100, max_waiting=10)
    for uid, priority in enumerate([1, 0, 1, 0]):
        scheduler.submit(packed(uid), pages=1, priority=priority)
    assert started(scheduler) == [1, 3, 0, 2]


def test_a_large_request_is_not_passed_over_by_small_ones() -> None:
    scheduler = Scheduler(slots=4, pages=10, max_waiting=10)
    for uid, pages in enumerate([6, 8, 1]):
        scheduler.submit(packed(uid), pages=pages)
    assert started(scheduler) == [0]


def test_a_full_queue_refuses_and_says_how_full_it_is() -> None:
    scheduler = Scheduler(slots=1, pages=10, max_waiting=2)
    for uid in range(3):
        scheduler.submit(packed(uid), pages=1)
    with pytest.raises(Overloaded, match="3 requests are waiting"):
        scheduler.submit(packed(3), pages=1)


def test_a_request_that_is_handed_over_twice_runs_once() -> None:
    scheduler = Scheduler(slots=2, pages=10, max_waiting=2)
    scheduler.submit(packed(0), pages=1)
    assert started(scheduler) == [0]
    scheduler.submit(packed(0), pages=1)
    assert started(scheduler) == []
    assert scheduler.waiting == 0


def test_a_late_request_is_cancelled_and_told() -> None:
    scheduler = Scheduler(slots=1, pages=10, max_waiting=2)
    scheduler.submit(packed(0), pages=1, deadline=5.0)
    scheduler.submit(packed(1), pages=1, deadline=6.0)
    assert started(scheduler) == [0]
    assert scheduler.expire(4.9) == []
    assert scheduler.expire(6.0) == [[LATE, 0], [LATE, 1]]
    message = scheduler.plan(steps=1)
    assert message is not None and message["cancel"] == [0] and message["add"] == []


def test_what_ranks_refuse_fails_alone() -> None:
    scheduler = Scheduler(slots=2, pages=10, max_waiting=2)
    scheduler.submit(packed(0), pages=1)
    scheduler.submit(packed(1), pages=1)
    scheduler.plan(steps=1)
    news = scheduler.settle(
        {"updates": [], "refused": [[0, "no"]], "stats": {"free_pages": 9, "waiting": 0}}
    )
    assert news == [[FAILED, 0, "no"]]
    assert list(scheduler.running) == [1]


def test_requests_that_are_cancelled_while_they_wait_take_no_room() -> None:
    scheduler = Scheduler(slots=1, pages=10, max_waiting=5)
    scheduler.submit(packed(0), pages=1)
    scheduler.plan(steps=1)
    for uid in range(1, 5000):
        scheduler.submit(packed(uid), pages=1)
        scheduler.cancel(uid)
    assert scheduler.waiting == 0
    assert len(scheduler._waiting) < 100


def test_giving_up_tells_everybody() -> None:
    scheduler = Scheduler(slots=1, pages=10, max_waiting=5)
    for uid in range(3):
        scheduler.submit(packed(uid), pages=1)
    scheduler.plan(steps=1)
    assert scheduler.fail_all("gone") == [[FAILED, uid, "gone"] for uid in range(3)]
    assert scheduler.plan(steps=1) is None


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.just(("round",)),
        st.just(("fly",)),
        st.just(("lose",)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.integers(1, 3), st.integers(4, 8))
def test_every_interleaving_answers_everybody_who_did_not_leave(
    actions: list[tuple[Any, ...]], slots: int, pages: int
) -> None:
    scheduler = Scheduler(slots=slots, pages=pages, max_waiting=1000)
    # An admission looks at the pages of the last reply, so cancelled ones may still be held.
    ranks = FakeRanks(slots=2 * slots + 3, pages=3 * pages)
    wanted: dict[int, int] = {}
    heard: dict[int, list[int]] = {}
    replies: list[dict[str, Any]] = []

    def note(news: list[list[Any]]) -> None:
        for kind, uid, update in news:
            assert kind == UPDATE
            heard[uid] += update[1]

    for action in actions:
        match action:
            case "submit", size, max_tokens, priority:
                uid = len(heard)
                heard[uid], wanted[uid], ranks.need[uid] = [], max_tokens, size
                scheduler.submit(packed(uid, max_tokens), size, priority)
            case "cancel", uid:
                scheduler.cancel(uid)
                if uid in wanted and len(heard[uid]) < wanted[uid]:
                    del wanted[uid]
            case ("round",):
                if (message := scheduler.plan(steps=1)) is not None:
                    replies.append(ranks.step(message))
                if replies:
                    note(scheduler.settle(replies.pop(0)))
            case ("fly",):
                if len(replies) < 2 and (message := scheduler.plan(steps=1)) is not None:
                    replies.append(ranks.step(message))
            case ("lose",):
                replies.clear()
                ranks.running.clear()
                scheduler.restart()
    while replies:
        note(scheduler.settle(replies.pop(0)))
    note(list(drain(scheduler, ranks)))
    for uid, max_tokens in wanted.items():
        assert heard[uid] == list(range(1, max_tokens + 1))
    assert scheduler.waiting == 0 and not scheduler.running and not ranks.running
