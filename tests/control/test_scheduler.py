"""The scheduler against a simple engine: no request is lost, starved or run twice."""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffray.cluster.control.driver import Driver
from diffray.cluster.control.engine_client import Overloaded, Poisonous
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.events import Event, Kind
from diffray.cluster.control.request_queue import CRASHES, LONG, CrashQuarantine, QueuedRequest
from diffray.cluster.control.scheduler import FIRST_COME, PASSES, Scheduler
from diffray.workers.messages import Footprint, Reply, Round, Update
from diffray.workers.stats import Stats
from tests.helpers.fake_ranks import FakeRanks, Lost, asked, ids_of
from tests.helpers.living import living
from tests.helpers.simulated_engine import arrivals, simulate

ONE = Footprint(1)


def drain(scheduler: Scheduler, ranks: FakeRanks, rounds: int = 2000) -> Iterator[Event]:
    for _ in range(rounds):
        message = scheduler.plan(steps=1)
        if message is None:
            return
        try:
            yield from scheduler.settle(ranks.step(message))
        except Lost:
            ranks.running.clear()
            yield from scheduler.restart()
    raise AssertionError("it does not end")


def scheduled(
    slots: int, *lengths: int, pages: int = 100, most: int = 1000, time_slice: int = 0
) -> tuple[Scheduler, FakeRanks]:
    """Return a queue of requests of these lengths and a page each, and the ranks for it."""
    scheduler = Scheduler(slots, pages, max_waiting=most, time_slice=time_slice)
    for uid, length in enumerate(lengths):
        scheduler.submit(asked(uid, length), ONE)
    return scheduler, FakeRanks(slots, pages)


def turn(scheduler: Scheduler, ranks: FakeRanks) -> tuple[list[int], list[Event]]:
    """Run one round; return whom it admits, and its news."""
    message = scheduler.plan(steps=1)
    assert message is not None
    return [request.uid for request in message.add], scheduler.settle(ranks.step(message))


def started(scheduler: Scheduler) -> list[int]:
    """Plan a round; return whom it admits."""
    message = scheduler.plan(steps=1)
    assert message is not None
    return [request.uid for request in message.add]


def test_the_queue_is_first_come_first_served_within_a_priority() -> None:
    scheduler, _ = scheduled(4)
    for uid, priority in enumerate([1, 0, 1, 0]):
        scheduler.submit(asked(uid), ONE, priority=priority)
    assert started(scheduler) == [1, 3, 0, 2]


def test_a_request_without_pages_is_passed_by_some_but_does_not_starve() -> None:
    scheduler, ranks = scheduled(4, pages=10)
    ranks.need = {0: 6, 1: 8}
    scheduler.submit(asked(0, 50), Footprint(6))
    turn(scheduler, ranks)
    scheduler.submit(asked(1), Footprint(8))
    order: list[int] = []
    for uid in range(2, 100):
        scheduler.submit(asked(uid), ONE)
        order += turn(scheduler, ranks)[0]
        if 1 in order:
            break
    assert order[: PASSES + 1] == [*range(2, PASSES + 2), 1]


def test_a_long_request_lets_a_few_later_ones_begin_first() -> None:
    scheduler, _ = scheduled(1, 3 * LONG, 3 * LONG, *[4] * 6)
    order: list[int] = []
    for _ in range(8):
        order += started(scheduler)
        scheduler.cancel(order[-1])
    assert order == [2, 0, 3, 1, 4, 5, 6, 7]


def test_a_request_that_has_run_long_is_preempted_for_waiting_ones_and_resumed() -> None:
    scheduler, ranks = scheduled(1, 30, 3, time_slice=4)
    news = list(drain(scheduler, ranks))
    order = [event.uid for event in news]
    assert order == [0] * 4 + [1] * 3 + [0] * 26
    assert ids_of(0, news) == list(range(1, 31))
    assert scheduler.preemptions == 1


def test_preemptions_of_the_scheduler_and_of_all_its_engines_are_counted() -> None:
    driver = Driver(scheduled(1, 30, 3, time_slice=2)[0], steps=1)

    def turn(preemptions: int) -> int:
        order = driver.next()
        assert order is not None
        uids = [request.uid for request in order.add] or [*driver.scheduler.running]
        updates = [Update(uid, [1], forwards=1) for uid in uids]
        stats = Stats(free_pages=9, preemptions=preemptions)
        driver.take(Reply(order.number, 1, updates, [], stats))
        return driver.load().preemptions

    assert [turn(2) for _ in range(4)][-1] == 3  # the first request gives way for the second
    assert driver.scheduler.preemptions == 1
    driver.lost()
    assert driver.load().preemptions == 3
    assert turn(1) == 4


def test_what_arrives_while_a_request_is_being_preempted_is_not_run_again() -> None:
    scheduler, ranks = scheduled(1, 100, 100, time_slice=1)
    driver = Driver(scheduler, steps=1, in_flight=3)
    sent, news = deque[Round[Any]](), list[Event]()
    while scheduler.open:
        while (order := driver.next()) is not None:
            sent.append(order)
        news += driver.take(ranks.step(sent.popleft()))
    assert scheduler.preemptions > 2
    for uid in range(2):
        assert ids_of(uid, news) == list(range(1, 101)) and len(ranks.wrote[uid]) == 100


@pytest.mark.parametrize("iteration", [None, "soft"])
def test_turns_become_longer_so_that_what_must_begin_anew_ends(iteration: str | None) -> None:
    """A soft generation loses what it had: turns that double make that twice its length at most."""
    scheduler, ranks = scheduled(1, time_slice=2)
    scheduler.submit(asked(0, 100, iteration), ONE)
    turns, length = [0], 0
    for uid in count(1):
        scheduler.submit(asked(uid, 1), ONE)  # some request always waits
        if any(event.uid == 0 for event in turn(scheduler, ranks)[1]):
            length += 1
        elif length:
            turns, length = [*turns, length], 0
        if sum(turns) + length == 100:
            break
        assert uid < 1000
    grown = [2 << n if iteration else 2 * (n + 1) for n in range(len(turns) - 1)]
    assert turns[1:] == grown


def test_a_request_soon_gives_way_to_one_of_better_priority_and_still_ends() -> None:
    """The requests of batches run behind all others, whose tokens none of them delays for long."""
    scheduler, ranks = scheduled(2, time_slice=16)
    for uid in range(2):
        scheduler.submit(asked(uid, 100), ONE, priority=2**20)
    news = [event for _ in range(50) for event in turn(scheduler, ranks)[1]]
    scheduler.submit(asked(2, 3), ONE)
    more = [event for _ in range(6) for event in turn(scheduler, ranks)[1]]
    assert ids_of(2, more) == [1, 2, 3]
    news += [*more, *drain(scheduler, ranks)]
    for uid in range(2):
        assert ids_of(uid, news) == list(range(1, 101))


@pytest.mark.parametrize("iteration", [None, "soft"])
@pytest.mark.parametrize("time_slice", [1, 16])
def test_what_begins_anew_ends_behind_better_priorities_too(
    iteration: str | None, time_slice: int
) -> None:
    """Its turns grow from an eighth of a slice, also where what it wrote in a turn is lost."""
    scheduler, ranks = scheduled(1, time_slice=time_slice)
    scheduler.submit(asked(0, 64, iteration), ONE, priority=2**20)
    ended, uid = False, 0
    while not ended:
        uid += 1
        scheduler.submit(asked(uid, 1), ONE)  # some better one always waits
        ended = any(event.uid == 0 and event.ends for event in turn(scheduler, ranks)[1])
        assert uid < 20_000


def test_requests_of_worse_priority_take_no_room_in_the_queue() -> None:
    scheduler, _ = scheduled(1, most=2)
    for uid in range(3):
        scheduler.submit(asked(uid), ONE, priority=2**20)
    with pytest.raises(Overloaded):
        scheduler.submit(asked(3), ONE, priority=2**20)
    for uid in range(4, 7):
        scheduler.submit(asked(uid), ONE)
    with pytest.raises(Overloaded):
        scheduler.submit(asked(7), ONE)


def test_of_equal_requests_none_gives_way() -> None:
    """All would end later: the first ones as late as the last."""
    scheduler, ranks = scheduled(2, *[100] * 6, time_slice=8)
    list(drain(scheduler, ranks))
    assert scheduler.preemptions == 0


def test_a_short_request_behind_waiting_long_ones_hardly_waits_either() -> None:
    """Long ones that have waited for a while come first; their turns end for it nevertheless."""
    scheduler, ranks = scheduled(4, *[400] * 12, time_slice=8)
    for uid in range(100, 100 + 60):  # each ends within a turn; the long ones' order comes up
        scheduler.submit(asked(uid, 4), ONE)
        rounds, ended = 0, False
        while not ended:
            rounds += 1
            news = turn(scheduler, ranks)[1]
            ended = any(event.ends for event in news if event.uid == uid)
        assert rounds <= 60, (uid, rounds)


@pytest.mark.parametrize(
    ("longs", "tokens", "rate"), [(16, 900, 2), (40, 900, 2), (16, 2500, 2), (56, 9000, 20)]
)
def test_short_requests_hardly_wait_whatever_the_context(
    longs: int, tokens: int, rate: int
) -> None:
    """The default turn suits a context of 1024 too, and gives way at next to no cost.

    It does so whether a step gives few tokens or many.
    """
    coming = arrivals(steps=800, gap=20, longs=longs, tokens=tokens, seed=7)

    def times(time_slice: int) -> tuple[list[int], int]:
        ended = simulate(coming, slots=16, pages=16_384, rate=rate, time_slice=time_slice)
        waits = [ended[each.uid] - each.at - each.tokens // rate for each in coming[longs:]]
        return sorted(waits), max(ended.values())

    time_slice = EngineConfig().time_slice
    (waits, steps), (starved, least) = times(time_slice), times(0)
    assert waits[-1] <= 4 * time_slice // rate and waits[len(waits) // 2] <= 16, waits
    assert starved[len(starved) // 2] > 100
    assert steps <= 1.1 * least


def test_no_priority_starves_a_request() -> None:
    """One of every few admissions is the oldest request, whatever its priority."""
    scheduler, ranks = scheduled(2)
    for uid in range(4):
        scheduler.submit(asked(uid), ONE, priority=2**31 - 1)
    began: list[int] = []
    for uid in range(10, 400, 2):  # two more important ones come each round
        scheduler.submit(asked(uid), ONE, priority=-1)
        scheduler.submit(asked(uid + 1), ONE, priority=-1)
        began += turn(scheduler, ranks)[0]
        for late in list(scheduler.open)[100:]:
            scheduler.cancel(late)
    assert [began.index(uid) + 1 for uid in range(4)] == [FIRST_COME * n for n in range(1, 5)]
    assert [uid for uid in began if uid >= 10] == sorted(uid for uid in began if uid >= 10)


@pytest.mark.parametrize("borne", [0, 1, 5, 20])
def test_a_request_that_ends_the_ranks_at_once_or_later_fails_alone(borne: int) -> None:
    scheduler, ranks = scheduled(8, *[300] * 6)
    ranks.poison = {3: borne}
    news = list(drain(scheduler, ranks))
    assert [event.uid for event in news if event.kind == Kind.POISON] == [3]
    for uid in {0, 1, 2, 4, 5}:
        assert ids_of(uid, news) == list(range(1, 301))
    with pytest.raises(Poisonous, match="quarantined"):
        scheduler.submit(asked(7, 300, like=3), ONE)
    scheduler.submit(asked(6, 300), ONE)
    assert started(scheduler) == [6]


def test_a_quarantined_request_is_tried_again_after_many_arrivals() -> None:
    quarantine = CrashQuarantine()
    queued = QueuedRequest(asked(3), ONE, 0, None, number=0)
    for _ in range(CRASHES):
        guilty, _ = quarantine.judge([queued], arrivals=5)
    assert guilty == [queued]
    assert quarantine.is_known(asked(7, like=3), 1004)
    assert not quarantine.is_known(asked(7, like=3), 1005)


def test_losses_that_no_request_causes_fail_no_request() -> None:
    scheduler, ranks = scheduled(4, *[40] * 4)
    losses = 0
    while scheduler.waiting + len(scheduler.running):
        for _ in range(6):
            if (message := scheduler.plan(steps=1)) is not None:
                events = scheduler.settle(ranks.step(message))
                assert Kind.UPDATE in [event.kind for event in events]
        ranks.running.clear()
        assert scheduler.restart() == []
        losses += 1
    assert losses > 5


def test_a_full_queue_refuses_but_not_what_it_has_already() -> None:
    scheduler, _ = scheduled(1, 3, 3, 3, most=2)
    with pytest.raises(Overloaded, match="3 requests are waiting"):
        scheduler.submit(asked(3), ONE)
    assert started(scheduler) == [0]
    for uid in range(3):
        scheduler.submit(asked(uid), ONE)
    assert started(scheduler) == [] and scheduler.waiting == 2


def test_a_late_request_is_cancelled_and_reported() -> None:
    scheduler, _ = scheduled(1)
    scheduler.submit(asked(0), ONE, deadline=5.0)
    scheduler.submit(asked(1), ONE, deadline=6.0)
    assert started(scheduler) == [0]
    assert scheduler.expire(4.9) == []
    assert scheduler.expire(6.0) == [Event(Kind.LATE, 0), Event(Kind.LATE, 1)]
    message = scheduler.plan(steps=1)
    assert message is not None and message.cancel == [0] and message.add == []


def test_pages_of_a_round_in_flight_are_not_given_twice() -> None:
    scheduler, _ = scheduled(2, pages=10)
    for uid, admitted in ((0, [0]), (1, [])):
        scheduler.submit(asked(uid), Footprint(6))
        assert started(scheduler) == admitted


def test_none_is_admitted_while_the_ranks_hold_some_back() -> None:
    scheduler, ranks = scheduled(4, 9)
    ranks.waiting = 1
    turn(scheduler, ranks)
    scheduler.submit(asked(1), ONE)
    assert turn(scheduler, ranks)[0] == []
    ranks.waiting = 0
    turn(scheduler, ranks)
    assert turn(scheduler, ranks)[0] == [1]


def test_what_ranks_refuse_fails_alone_until_all_is_given_up() -> None:
    scheduler, _ = scheduled(2, 3, 3, 3)
    scheduler.plan(steps=1)
    news = scheduler.settle(Reply(1, 1, [], [(0, "no")], Stats(free_pages=9)))
    assert news == [Event(Kind.FAILED, 0, reason="no")]
    assert list(scheduler.running) == [1]
    assert scheduler.fail_all("gone") == [Event(Kind.FAILED, uid, reason="gone") for uid in (1, 2)]
    assert scheduler.plan(steps=1) is None


def test_requests_that_are_cancelled_while_they_wait_take_no_room() -> None:
    scheduler, _ = scheduled(1, 3)
    scheduler.plan(steps=1)
    for uid in range(1, 5000):
        scheduler.submit(asked(uid), ONE)
        scheduler.cancel(uid)
    assert scheduler.waiting == 0
    assert 0 < living(QueuedRequest) < 100


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2)),
        st.tuples(st.just("poison"), st.integers(1, 4), st.integers(0, 3), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.just(("round",)),
        st.just(("fly",)),
        st.just(("lose",)),
        st.tuples(st.just("hold"), st.integers(0, 1)),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(ACTIONS, st.integers(1, 3), st.integers(4, 8), st.sampled_from([0, 1, 2]))
def test_every_interleaving_answers_all_requests_that_were_not_cancelled(
    actions: list[tuple[Any, ...]], slots: int, pages: int, time_slice: int
) -> None:
    """Pages and slots never run out, no request starves, and only those that crash ranks fail."""
    scheduler, ranks = scheduled(slots, pages=pages, time_slice=time_slice)
    wanted: dict[int, int] = {}
    heard: dict[int, list[int]] = {}
    failed: set[int] = set()
    unlucky: Counter[int] = Counter()  # losses that no request caused
    replies: list[Reply] = []

    def note(news: list[Event]) -> None:
        for event in news:
            if event.kind == Kind.POISON:
                failed.add(event.uid)
            else:
                assert event.update is not None
                heard[event.uid] += event.update.ids

    def lose() -> None:
        replies.clear()
        ranks.running.clear()
        note(scheduler.restart())

    def fly() -> None:
        if (message := scheduler.plan(steps=1)) is not None:
            try:
                replies.append(ranks.step(message))
            except Lost:
                lose()

    for action in actions:
        match action:
            case "submit" | "poison" as kind, size, number, priority:
                uid = len(heard)
                heard[uid], ranks.need[uid] = [], size
                (ranks.poison if kind == "poison" else wanted)[uid] = number
                length = 9 if kind == "poison" else number
                scheduler.submit(asked(uid, length), Footprint(size), priority)
            case "cancel", uid:
                scheduler.cancel(uid)
                if uid not in failed:
                    ranks.poison.pop(uid, None)
                if uid in wanted and len(heard[uid]) < wanted[uid]:
                    del wanted[uid]
            case ("round",):
                fly()
                if replies:
                    note(scheduler.settle(replies.pop(0)))
            case ("fly",):
                if len(replies) < 2:
                    fly()
            case ("lose",):
                unlucky.update(list(scheduler.running))
                lose()
            case "hold", waiting:
                ranks.waiting = waiting
    ranks.waiting = 0
    while replies:
        note(scheduler.settle(replies.pop(0)))
    note(list(drain(scheduler, ranks)))
    innocent = failed - ranks.poison.keys()
    assert all(unlucky[uid] for uid in innocent), "the ranks were killed while it was on trial"
    assert failed >= ranks.poison.keys()
    for uid in wanted.keys() - innocent:
        assert heard[uid] == list(range(1, wanted[uid] + 1))
    assert scheduler.waiting == 0 and not scheduler.running and not ranks.running
    assert not scheduler.quarantine and not scheduler.open and scheduler.plan(steps=1) is None
