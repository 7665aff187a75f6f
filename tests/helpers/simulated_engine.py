"""The real scheduler over a simulated engine: in which step each request ends.

Time is counted in denoising steps. The engine writes `rate` tokens of each sequence per step,
prefills long prompts in chunks beside them, and takes pages as answers grow. When pages run out, it
preempts the latest sequence, which repeats its current block later. Short requests arrive at
random, the same ones in every run.
"""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from diffray.cluster.control.scheduler import Scheduler
from diffray.workers.messages import Footprint, Reply, Round, Update, WireRequest
from diffray.workers.stats import Stats

PAGE, CHUNK, BLOCK = 16, 512, 32


@dataclass(slots=True)
class Running:
    """A request on the simulated ranks."""

    uid: int
    prompt: int
    most: int
    reported: int
    written: float
    filled: int = 0

    @property
    def pages(self) -> int:
        return -(-(self.prompt + int(self.written) + 32) // PAGE)


@dataclass(slots=True)
class Engine:
    """Slots, pages and preemption as the real one has them, without a model."""

    pages: int
    rate: float
    running: list[Running] = field(default_factory=list)
    waiting: deque[Running] = field(default_factory=deque)

    def step(self, order: Round[Any]) -> Reply:
        for uid in order.cancel:
            self.running = [each for each in self.running if each.uid != uid]
            self.waiting = deque(each for each in self.waiting if each.uid != uid)
        for request in order.add:
            reported = len(request.resume.ids) if request.resume else 0
            prompt, most = len(request.prompt), request.max_tokens
            written = reported // BLOCK * BLOCK
            self.waiting.append(Running(request.uid, prompt, most, reported, written))
        while self.waiting and self.waiting[0].pages <= self.free:
            self.running.append(self.waiting.popleft())
        updates = []
        for each in list(self.running):
            if each not in self.running:
                continue  # preempted by one before it
            if (known := each.prompt + int(each.written)) - each.filled > CHUNK:
                each.filled += CHUNK
                continue
            each.filled = known
            each.written = min(each.written + self.rate, each.most)
            done = each.written >= each.most
            new = [0] * max(int(each.written) - each.reported, 0)
            each.reported += len(new)
            reason = "length" if done else None
            updates.append(Update(each.uid, new, finish_reason=reason, forwards=1))
            if done:
                self.running.remove(each)
            while self.free < 0:
                latest = self.running.pop()
                latest.filled, latest.written = 0, latest.reported // BLOCK * BLOCK
                self.waiting.appendleft(latest)
        stats = Stats(free_pages=self.free, waiting=len(self.waiting))
        return Reply(order.number, 1, updates, [], stats)

    @property
    def free(self) -> int:
        return self.pages - sum(each.pages for each in self.running)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the step in which it arrives."""

    at: int
    uid: int
    prompt: int
    tokens: int


def arrivals(steps: int, gap: float, longs: int, tokens: int, seed: int) -> list[Arrival]:
    """Return the long requests, all at once, and short ones after them at random."""
    draw = random.Random(seed)
    found = [Arrival(0, uid, tokens // 15, tokens) for uid in range(longs)]
    at = 0.0
    while (at := at + draw.expovariate(1 / gap)) < steps:
        found.append(Arrival(int(at), len(found), draw.randint(20, 400), draw.randint(16, 128)))
    return found


def simulate(
    coming: Iterable[Arrival], slots: int, pages: int, rate: float, time_slice: int
) -> dict[int, int]:
    """Return the step in which each request ended."""
    scheduler = Scheduler(slots, pages, max_waiting=100_000, time_slice=time_slice)
    engine, queue = Engine(pages, rate), deque(coming)
    ended: dict[int, int] = {}
    step = 0
    while queue or scheduler.running or scheduler.waiting:
        while queue and queue[0].at <= step:
            each = queue.popleft()
            request = WireRequest(each.uid, (0,) * each.prompt, {"max_tokens": each.tokens})
            first, last = (-(-(each.prompt + n) // PAGE) for n in (32, each.tokens))
            scheduler.submit(request, Footprint(first, last))
        step += 1
        if (order := scheduler.plan(steps=1)) is not None:
            for event in scheduler.settle(engine.step(order)):
                if event.ends:
                    ended[event.uid] = step
    return ended
