"""Ranks that write one token a round, for tests of what schedules them."""

from dataclasses import dataclass, field
from typing import Any

from diffray.cluster.control.events import Event
from diffray.workers.messages import Change, Reply, Round, Update, WireRequest
from diffray.workers.stats import Stats


def asked(
    uid: int, max_tokens: int = 3, iteration: str | None = None, like: int | None = None
) -> WireRequest:
    """Return a request; one that is `like` another asks the same."""
    kind = None if iteration is None else {"kind": iteration}
    params = {"max_tokens": max_tokens, "diffusion": {"iteration": kind}}
    return WireRequest(uid, (1, 2, uid if like is None else like), params)


class Lost(Exception):
    """The fake ranks have died."""


@dataclass
class FakeRanks:
    """Runs what a round adds, one token a round each; holds pages as an engine would."""

    slots: int
    pages: int
    running: dict[int, dict[str, Any]] = field(default_factory=dict)
    need: dict[int, int] = field(default_factory=dict)  # pages, where not 1
    poison: dict[int, int] = field(default_factory=dict)  # rounds that each is borne for
    waiting: int = 0
    version: str = "0"
    level: int = 0  # of sleep
    refusals: list[str] = field(default_factory=list)  # of the next changes of weights
    wrote: dict[int, list[str]] = field(default_factory=dict)  # on which weights, by request

    def step(self, order: Round[Any]) -> Reply:
        for uid in order.cancel:
            self.running.pop(uid, None)
        unchanged = ""
        if order.change is not None:
            assert not self.running, "new weights while requests run"
            unchanged = self.refusals.pop(0) if self.refusals else ""
            self._make(order.change if not unchanged else None)
        for request in order.add:
            assert not self.level, "admitted while asleep"
            assert request.uid not in self.running, "admitted twice"
            self.running[request.uid] = {
                "written": len(request.resume.ids) if request.resume else 0,
                "max": request.max_tokens,
                "borne": self.poison.get(request.uid, -1),
            }
        assert len(self.running) <= self.slots
        if any(state["borne"] == 0 for state in self.running.values()):
            raise Lost
        updates = []
        for uid, state in list(self.running.items()):
            state["borne"] -= 1
            if uid in self.poison:
                continue  # it reports nothing: its first block is not done
            state["written"] += 1
            self.wrote.setdefault(uid, []).append(self.version)
            done = state["written"] == state["max"]
            reason = "length" if done else None
            updates.append(Update(uid, [state["written"]], finish_reason=reason, forwards=1))
            if done:
                del self.running[uid]
        free = self.pages - sum(self.need.get(uid, 1) for uid in self.running)
        assert free >= 0
        stats = Stats(free_pages=free, waiting=self.waiting)
        return Reply(order.number, 1, updates, [], stats, unchanged=unchanged)

    def _make(self, change: Change | None) -> None:
        if change is not None and (change.level is None or change.restores):
            self.version = change.version
        if change is not None and change.level is not None:
            self.level = change.level


def ids_of(uid: int, news: list[Event]) -> list[int]:
    mine = [event.update for event in news if event.update and event.uid == uid]
    return [token for update in mine for token in update.ids]
