"""Runs a scheduler's rounds: fetches each round, hands back its reply, and counts."""

import time
from typing import Any

from diffray.cluster.control.engine_client import NO_ROUNDS, Load, round_bucket
from diffray.cluster.control.events import Event
from diffray.cluster.control.scheduler import Scheduler
from diffray.workers.messages import Reply, Round
from diffray.workers.stats import Stats


class Driver:
    """The loop around a scheduler, without its transport.

    The user calls `next` until it returns None, and `take` with each reply, in order. At most
    `in_flight` rounds wait for a reply; each runs up to `steps` denoising steps.
    """

    def __init__(self, scheduler: Scheduler, steps: int, in_flight: int = 1) -> None:
        self.scheduler, self.steps, self.in_flight = scheduler, steps, in_flight
        self.unanswered = 0  # rounds without a reply
        self.rounds = self.tokens = 0
        self.in_round = False  # for `WaitingEngine`; stays set if a round is interrupted
        self._fresh = True  # whether the engine is idle before the next round
        self._round_tokens = list(NO_ROUNDS)
        self._reply: Reply | None = None  # the latest
        self._preemptions = 0  # of lost engines

    def next(self, steps: int | None = None) -> Round[Any] | None:
        """Return the next round, or None if nothing can be sent now."""
        if self.unanswered == self.in_flight:
            return None
        order = self.scheduler.plan(steps or self.steps)
        if order is None:
            self._fresh = self._fresh or not self.unanswered
            return None
        order.fresh, self._fresh = self._fresh, False
        order.now = time.time()  # wall clock: a coordinator on another node can continue it
        self.unanswered += 1
        now = time.monotonic()
        for request in order.add:
            self.scheduler.running[request.uid].admitted = now
        return order

    def take(self, reply: Reply) -> list[Event]:
        """Take the reply to the oldest round in flight; return its events."""
        self.unanswered -= 1
        self.rounds += 1
        self._reply = reply
        tokens = sum(len(update.ids) for update in reply.updates)
        self.tokens += tokens
        self._round_tokens[round_bucket(tokens)] += 1
        for update in reply.updates:
            queued = self.scheduler.running.get(update.uid)
            if queued is not None and queued.admitted is not None:
                update.ran = time.monotonic() - queued.admitted
                queued.admitted = None
        return self.scheduler.settle(reply)

    def lost(self) -> list[Event]:
        """Resume all requests on a new engine; return the events of those that fail."""
        self.unanswered, self._fresh = 0, True
        if self._reply:
            self._preemptions += self._reply.stats.preemptions
            self._reply = None
        return self.scheduler.restart()

    def start_over(self) -> None:
        """Resume all requests on the same engine, which has forgotten them."""
        self.unanswered, self._fresh = 0, True
        self.scheduler.start_over()

    def load(self, restarts: int = 0) -> Load:
        scheduler, reply = self.scheduler, self._reply
        stats = reply.stats if reply else Stats(free_pages=scheduler.pages)
        return Load(
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            slots=scheduler.slots,
            engine=stats,
            num_pages=scheduler.pages,
            preemptions=self._preemptions + scheduler.preemptions + stats.preemptions,
            worked=reply.worked if reply else 0.0,
            waited=reply.waited if reply else 0.0,
            rounds=self.rounds,
            tokens=self.tokens,
            round_tokens=tuple(self._round_tokens),
            restarts=restarts,
            weight_updates=scheduler.weights.made,
            weights_version=scheduler.weights.current.version,
            sleep_level=scheduler.weights.level,
        )
