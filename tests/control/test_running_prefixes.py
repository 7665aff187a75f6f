"""What a request shares with running ones: as many pages as the plain definition says."""

from collections import Counter
from math import lcm

from hypothesis import given
from hypothesis import strategies as st

from diffray.cluster.control.request_queue import QueuedRequest, RunningPrefixes
from diffray.cluster.control.scheduler import Scheduler
from diffray.workers.messages import Footprint, WireRequest
from tests.helpers.fake_ranks import FakeRanks

PAGE = 2
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
shapes = st.tuples(prompts, st.sampled_from(["", "a"]), st.sampled_from([0, 2, 3, 4]))
Shape = tuple[tuple[int, ...], str, int]


def queued_of(held: RunningPrefixes, uid: int, shape: Shape) -> QueuedRequest:
    prompt, salt, block = shape
    request = WireRequest(uid, prompt, {"max_tokens": 4}, cache_salt=salt)
    footprint = Footprint(1, 2, block)
    return QueuedRequest(request, footprint, 0, None, uid, held.hashes(request, footprint))


def shared_pages(mine: Shape, running: list[Shape]) -> int:
    """Return the pages of the longest common beginning, in whole blocks and whole pages."""
    prompt, salt, block = mine
    most = 0
    for other, its_salt, its_block in running:
        if not block or (salt, block) != (its_salt, its_block):
            continue
        unit = lcm(block, PAGE)
        for stop in range(unit, min(len(prompt), len(other)) + 1, unit):
            if prompt[:stop] == other[:stop]:
                most = max(most, stop // PAGE)
    return most


@given(st.lists(shapes, min_size=1, max_size=8), st.sets(st.integers(0, 7)), shapes)
def test_shared_pages_are_those_of_the_longest_common_beginning(
    runs: list[Shape], ended: set[int], new: Shape
) -> None:
    held = RunningPrefixes(PAGE)
    queued = [queued_of(held, uid, shape) for uid, shape in enumerate(runs)]
    for each in queued:
        held.add(each)
    for each in queued:
        if each.uid in ended:
            held.remove(each)
    left = [shape for uid, shape in enumerate(runs) if uid not in ended]
    assert held.shared_pages(queued_of(held, 99, new)) == shared_pages(new, left)


@given(
    st.lists(shapes, min_size=1, max_size=10),
    st.lists(st.tuples(st.sampled_from(["round", "cancel", "restart"]), st.integers(0, 9))),
)
def test_only_the_prefixes_of_running_requests_are_held(
    runs: list[Shape], then: list[tuple[str, int]]
) -> None:
    scheduler = Scheduler(slots=3, pages=9, max_waiting=99, time_slice=1, page_size=PAGE)
    ranks = FakeRanks(slots=3, pages=9)

    def check() -> None:
        running = [each for queued in scheduler.running.values() for each in queued.prefixes]
        assert scheduler._prefixes._counts == Counter(running)

    for uid, (prompt, salt, block) in enumerate(runs):
        request = WireRequest(uid, prompt, {"max_tokens": 4}, cache_salt=salt)
        scheduler.submit(request, Footprint(1, 2, block))
    for what, uid in then:
        if what == "round" and (order := scheduler.plan(steps=1)) is not None:
            check()
            scheduler.settle(ranks.step(order))
        elif what == "cancel":
            scheduler.cancel(uid)
        elif what == "restart":
            ranks.running.clear()
            scheduler.restart()
        check()
    while (order := scheduler.plan(steps=1)) is not None:
        scheduler.settle(ranks.step(order))
    assert not scheduler.running
    check()
